"""What was measured: histograms and tallies that merge exactly, the server's own metrics, statistics."""
