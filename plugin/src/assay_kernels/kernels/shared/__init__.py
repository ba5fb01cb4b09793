"""Device code that every CUDA architecture compiles, so that one of them can prove it."""
