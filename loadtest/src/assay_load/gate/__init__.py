"""The release gate: coherence, load, coherence under load, coherence after load; one verdict."""
