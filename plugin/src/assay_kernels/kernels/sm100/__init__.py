"""NVFP4 x NVFP4 on Blackwell (sm_100a): compiled and inspected, not run.

`config` chooses tiles, `gemm` and `quantize` are device code, `pipeline` is the model that is
searched for deadlocks and races, `performance` predicts times, `compiler` compiles anywhere.
"""
