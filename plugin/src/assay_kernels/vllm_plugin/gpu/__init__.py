"""The plugin on NVIDIA GPUs: vLLM's own CUDA model, its NVFP4 layers computed by ours."""
