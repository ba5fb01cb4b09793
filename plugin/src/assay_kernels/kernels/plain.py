"""Weights that were never NVFP4: the library's own product is the fastest there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from assay_kernels import reference


@dataclass(frozen=True)
class PlainOperand:
    """bf16 weights as they are."""

    weight: Tensor  # bf16 [.., N, K]

    def dense(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """x [M, K] bf16 -> [M, N] in bf16, or from fp32 inputs in fp32."""
        if out_dtype == torch.float32:
            return functional.linear(x.float(), self.weight.float())
        return functional.linear(x, self.weight)

    def dense_swiglu(self, x: Tensor, limit: float) -> Tensor:
        """x [M, K] bf16, gate and up rows -> [M, N / 2] bf16, clamped at `limit`."""
        gate, up = functional.linear(x, self.weight).float().chunk(2, dim=-1)
        return reference.swiglu(gate, up, limit).to(torch.bfloat16)

    def wo_a(self, x: Tensor) -> Tensor:
        """x [M, G, K] bf16 -> [M, G, R] bf16, each group with its own [R, K] weights."""
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
