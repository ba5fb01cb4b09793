"""What was measured: histograms and tallies that merge exactly, and the server's own metrics."""
