"""Everything stays on its input's device: the meta device refuses any constant left on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from assay_kernels import numerics, reference

M, N, K = 64, 256, 128


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_formats_stay_on_their_device() -> None:
    weight = numerics.quantize(empty(N, K))
    swizzled = numerics.swizzle_128x4(weight.block_scale)
    mx = numerics.MXFP4(empty(N, K // 2, dtype=torch.uint8), empty(N, K // 32, dtype=torch.uint8))
    results = [
        numerics.dequantize(weight),
        numerics.decode_bf16(weight.codes, weight.block_scale),
        numerics.unswizzle_128x4(swizzled, N, K // 16),
        numerics.dequantize_fp8(numerics.quantize_fp8(empty(N, K))),
        numerics.dequantize_mxfp4(mx),
        numerics.octaves(mx),
        numerics.unpack(weight.codes),
    ]
    assert {result.device.type for result in results} == {"meta"}


def test_dense_kernels_stay_on_their_device() -> None:
    weight, alpha = numerics.quantize(empty(N, K)), empty(N)
    activation = numerics.quantize_activation(empty(M, K), None)
    results = [
        reference.dense(activation, weight.codes, weight.block_scale, alpha),
        reference.dense_swiglu(empty(M, K), weight.codes, weight.block_scale, alpha, 10.0),
        reference.wo_a(empty(M, 2, K), weight.codes, weight.block_scale, alpha),
        reference.inverse_rope(empty(M, 4, 64), empty(M, 8), empty(M, 8)),
    ]
    assert {result.device.type for result in results} == {"meta"}
