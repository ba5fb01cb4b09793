"""NVFP4 on a CPU, in three arithmetic modes.

- ``w4a16``: what Hopper computes. Weights decode to bf16 exactly, activations stay bf16,
  sums are fp32, ``alpha[n]`` multiplies the fp32 sum, one rounding to bf16 at the end.
- ``w4a4``: what Blackwell computes, emulated. Activations are quantised to NVFP4 too.
- ``reference``: weights dequantised to fp32 with their global scale, nothing clever.

A CPU gains nothing from decoding the codes at every call, so operands are decoded once, after
loading. That costs memory (4 bytes a weight), which the miniature has; nobody serves the full model
from a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from assay_kernels import reference
from assay_kernels.kernels.interface import Groups, KernelSet, PackedWeight
from assay_kernels.numerics import decode_fp32, quantize_activation

Arithmetic = Literal["w4a16", "w4a4", "reference"]

# Up to this many rows an fp32 product is faster than a bf16 one: it needs no repacking.
_FEW_ROWS = 4


@dataclass(frozen=True)
class CpuOperand:
    """Weights decoded for a CPU."""

    wide: Tensor  # fp32 [..., N, K]
    narrow: Tensor | None  # bf16 [N, K], of plain weights where the CPU multiplies bf16 natively
    alpha: Tensor | None  # fp32 [..., N]; None: the weights already hold their scale
    input_scale: Tensor | None  # fp32 []: static scale of the activation, W4A4 only
    quantize_input: bool
    bf16_exact: bool  # every weight is a bf16 value


@contextmanager
def _bf16_multiplies() -> Iterator[None]:
    """Let oneDNN multiply fp32 matrices by its bf16 instructions, where the CPU has them.

    Sums stay fp32. Operands that are bf16 values lose nothing by it, and this is the only bf16
    product with an fp32 result that torch has on CPUs; a bf16 result would be rounded before alpha
    and again after it.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _product(x: Tensor, operand: CpuOperand) -> Tensor:
    """x [M, K] of bf16 values times the decoded weights, summed and returned in fp32 [M, N]."""
    if operand.bf16_exact and x.shape[0] > _FEW_ROWS:
        with _bf16_multiplies():
            return functional.linear(x.float(), operand.wide)
    return functional.linear(x.float(), operand.wide)


class CpuKernels(KernelSet):
    """NVFP4 kernels in torch."""

    def __init__(self, arithmetic: Arithmetic = "w4a16") -> None:
        self.arithmetic = arithmetic
        self.name = f"cpu {arithmetic}"
        self._native_bf16 = torch.cpu._is_avx512_bf16_supported()

    def prepare(self, weight: PackedWeight) -> CpuOperand:
        """Decode codes [..., N, K/2] to fp32 [..., N, K]: exactly, and every value fits bf16.

        A stack of experts takes alpha into its fp32 weights: one row of alpha per routed row would
        cost more than the products of so few rows.
        """
        wide = decode_fp32(weight.codes, weight.block_scale)
        if self.arithmetic == "reference":
            return CpuOperand(
                wide.mul_(weight.alpha.unsqueeze(-1)), None, None, None, False, bf16_exact=False
            )
        quantize_input = self.arithmetic == "w4a4"
        alpha = weight.alpha
        input_scale = weight.input_scale if quantize_input else None
        if input_scale is not None:
            alpha = alpha * input_scale
        if wide.dim() == 3:
            wide = wide.mul_(alpha.unsqueeze(-1))
            return CpuOperand(wide, None, None, input_scale, quantize_input, bf16_exact=False)
        return CpuOperand(wide, None, alpha, input_scale, quantize_input, bf16_exact=True)

    def prepare_plain(self, weight: Tensor) -> CpuOperand:
        """Weights that were never NVFP4, bf16 [..., N, K]."""
        narrow = weight if self._native_bf16 and weight.dim() == 2 else None
        return CpuOperand(
            weight.float(), narrow, None, None, quantize_input=False, bf16_exact=weight.dim() == 2
        )

    def _quantized(self, x: Tensor, operand: CpuOperand) -> tuple[Tensor, Tensor | None]:
        """The activation as its codes say, without static scale, and its row scales if any."""
        if not operand.quantize_input:
            return x, None
        q = quantize_activation(x, operand.input_scale)
        return decode_fp32(q.codes, q.block_scale), q.row_scale

    def _dense(self, x: Tensor, operand: CpuOperand, out_dtype: torch.dtype) -> Tensor:
        """The product and its epilogue, rounded once, to `out_dtype`."""
        values, row_scale = self._quantized(x, operand)
        out = _product(values, operand)
        if row_scale is not None:
            out.mul_(row_scale.unsqueeze(-1))
        if operand.alpha is None:
            return out.to(out_dtype)
        return torch.mul(out, operand.alpha, out=torch.empty_like(out, dtype=out_dtype))

    def dense(
        self, x: Tensor, operand: CpuOperand, out_dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """x [M, K] bf16 -> [M, N]."""
        no_epilogue = operand.alpha is None and out_dtype == x.dtype
        if no_epilogue and operand.narrow is not None and x.shape[0] > _FEW_ROWS:
            return functional.linear(x, operand.narrow)
        return self._dense(x, operand, out_dtype)

    def dense_swiglu(self, x: Tensor, operand: CpuOperand, limit: float) -> Tensor:
        """x [M, K] bf16, operand rows gate | up -> [M, I] bf16."""
        gate, up = self._dense(x, operand, torch.float32).chunk(2, dim=-1)
        return reference.swiglu(gate, up, limit).to(torch.bfloat16)

    def _grouped_fp32(
        self, x: Tensor, row_scale: Tensor | None, operand: CpuOperand, groups: Groups
    ) -> Tensor:
        """x fp32 [R, K], rows sorted by expert -> fp32 [R, N]."""
        out = functional.grouped_mm(x, operand.wide.transpose(1, 2), offs=groups.ends)
        if row_scale is not None:
            out.mul_(row_scale.unsqueeze(-1))
        return out

    def grouped_l1(self, x: Tensor, operand: CpuOperand, groups: Groups, limit: float) -> Tensor:
        """x [M, H] bf16 -> [R, I] bf16. An input is quantised once a token, then gathered."""
        values, row_scale = self._quantized(x, operand)
        rows = values.float()[groups.tokens]
        if row_scale is not None:
            row_scale = row_scale[groups.tokens]
        gate, up = self._grouped_fp32(rows, row_scale, operand, groups).chunk(2, dim=-1)
        return reference.swiglu(gate, up, limit).to(torch.bfloat16)

    def grouped_l2(self, h: Tensor, operand: CpuOperand, groups: Groups) -> Tensor:
        """h [R, I] bf16 -> [M, H] bf16: weighted by the router, summed over top-k in fp32."""
        values, row_scale = self._quantized(h, operand)
        out = self._grouped_fp32(values.float(), row_scale, operand, groups)
        out.mul_(groups.weights.unsqueeze(-1))
        total = out.new_zeros(groups.num_tokens, out.shape[-1])
        return total.index_add_(0, groups.tokens, out).to(torch.bfloat16)

    def wo_a(self, x: Tensor, operand: CpuOperand, groups: int) -> Tensor:
        """x [M, G, K] -> [M, G, R] bf16, each group with its own [R, K] weight."""
        values, row_scale = self._quantized(x, operand)
        weight = operand.wide.view(groups, -1, operand.wide.shape[-1])
        out = torch.bmm(values.float().transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        if operand.alpha is not None:
            out = out * operand.alpha.view(groups, -1)
        if row_scale is not None:
            out = out * row_scale.unsqueeze(-1)
        return out.to(torch.bfloat16)
