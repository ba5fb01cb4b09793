"""DeepSeek V4 in NVFP4 on vLLM: numerics, checkpoints, kernels, and the vLLM plugin.

Importing this package is cheap on purpose: vLLM does so in every process it starts, and the
launcher's guard must come up in milliseconds. Neither torch nor vLLM is imported here.
"""

__version__ = "0.1.0"
