"""CPU implementation: NVFP4 arithmetic and V4's operators in torch."""
