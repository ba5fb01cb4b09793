"""DeepSeek V4 on vLLM's CPU backend."""
