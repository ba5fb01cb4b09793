"""Hopper (sm_90a): W4A16 kernels in CuTeDSL.

`layout` fixes the order of the weights, `gemm` is the device code, `config` its launch knobs,
`compiler` the disk cache, `kernels` the interface of `assay_kernels.kernels`. `layout`, `config`
and `routing` need neither the DSL nor a GPU.
"""
