"""NVFP4 on a CPU, in three arithmetic modes.

- ``w4a16``: what Hopper computes. Weights decode to bf16 exactly, activations stay bf16,
  sums are fp32, ``alpha[n]`` multiplies the fp32 sum, one rounding to bf16 at the end.
- ``w4a4``: what Blackwell computes, emulated. Activations are quantised to NVFP4 too.
- ``reference``: weights dequantised to fp32 with their global scale, nothing clever.

A CPU gains nothing from decoding the codes at every call, so operands are decoded once, after
loading, to fp16: code times block scale has at most 6 significant bits and lies in 2^-10 .. 2688,
so fp16 holds it exactly. Its products (FBGEMM's) multiply and sum in fp32 and give fp32, the one
product of 2-byte weights in torch that does: a bf16 result would be rounded before alpha and again
after it. Nobody serves the full model from a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from assay_kernels import reference
from assay_kernels.kernels.interface import Groups, KernelSet, PackedWeight
from assay_kernels.numerics import decode_fp32, quantize_activation
from assay_kernels.settings import Arithmetic

_PRODUCT: Any = torch.ops.quantized.linear_dynamic_fp16.op


class HalfMatrix:
    """fp16 weights [N, K] that multiply fp32 inputs [M, K] into fp32 [M, N]."""

    def __init__(self, weight: Tensor) -> None:
        """Pack fp32 [N, K], every value of which fp16 must hold exactly."""
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        # Otherwise torch looks for __torch_function__ on the packed weights, whose attributes are
        # answered by a C++ exception: 50 of 72 us for 256 x 256 (Skylake, 2 GHz).
        with torch._C.DisableTorchFunctionSubclass():
            out: Tensor = _PRODUCT(x, self._packed)
        return out


@dataclass(frozen=True)
class Nvfp4Operand:
    """Weights that were NVFP4: one matrix, or a stack of experts or output groups."""

    matrices: tuple[HalfMatrix, ...]  # of code times block scale
    alpha: Tensor  # fp32 [len(matrices), N], the static input scale in it
    input_scale: Tensor | None  # fp32 []: static scale of the activation, W4A4 only
    quantize_input: bool


@dataclass(frozen=True)
class PlainOperand:
    """Weights whose scale, if there was one, is in them."""

    wide: Tensor  # fp32 [..., N, K]
    narrow: Tensor | None  # bf16 [N, K], where the CPU multiplies bf16 natively


CpuOperand = Nvfp4Operand | PlainOperand


class CpuKernels(KernelSet):
    """NVFP4 kernels in torch."""

    def __init__(self, arithmetic: Arithmetic = "w4a16") -> None:
        self.arithmetic = arithmetic
        self.name = f"cpu {arithmetic}"
        self.quantizes_activations = arithmetic == "w4a4"
        self._native_bf16 = torch.cpu._is_avx512_bf16_supported()

    def prepare(self, weight: PackedWeight) -> CpuOperand:
        """Decode codes [..., N, K/2], exactly."""
        values = decode_fp32(weight.codes, weight.block_scale)
        if self.arithmetic == "reference":
            return PlainOperand(values.mul_(weight.alpha.unsqueeze(-1)), None)
        quantize_input = self.arithmetic == "w4a4"
        input_scale = weight.input_scale if quantize_input else None
        alpha = weight.alpha if input_scale is None else weight.alpha * input_scale
        stack = values.view(-1, *values.shape[-2:])
        return Nvfp4Operand(
            tuple(HalfMatrix(matrix) for matrix in stack),
            alpha.reshape(len(stack), -1).contiguous(),
            input_scale,
            quantize_input,
        )

    def prepare_plain(self, weight: Tensor) -> CpuOperand:
        """Weights that were never NVFP4, bf16 [..., N, K]."""
        narrow = weight if self._native_bf16 and weight.dim() == 2 else None
        return PlainOperand(weight.float(), narrow)

    def _quantized(self, x: Tensor, operand: CpuOperand) -> tuple[Tensor, Tensor | None]:
        """The activation as its codes say, without static scale, and its row scales if any."""
        if isinstance(operand, PlainOperand) or not operand.quantize_input:
            return x.float(), None
        q = quantize_activation(x, operand.input_scale)
        return decode_fp32(q.codes, q.block_scale), q.row_scale

    def _dense(self, x: Tensor, operand: CpuOperand, out_dtype: torch.dtype) -> Tensor:
        """The product and its epilogue, rounded once, to `out_dtype`."""
        values, row_scale = self._quantized(x, operand)
        if isinstance(operand, PlainOperand):
            return functional.linear(values, operand.wide).to(out_dtype)
        (matrix,) = operand.matrices
        out = matrix(values)
        if row_scale is not None:
            out.mul_(row_scale.unsqueeze(-1))
        return torch.mul(out, operand.alpha[0], out=torch.empty_like(out, dtype=out_dtype))

    def dense(
        self, x: Tensor, operand: CpuOperand, out_dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """x [M, K] bf16 -> [M, N]."""
        if (
            isinstance(operand, PlainOperand)
            and operand.narrow is not None
            and out_dtype == x.dtype == torch.bfloat16
        ):
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
        if isinstance(operand, PlainOperand):
            return functional.grouped_mm(x, operand.wide.transpose(1, 2), offs=groups.ends)
        out = x.new_empty(len(x), operand.alpha.shape[-1])
        begin = 0
        for expert, end in enumerate(groups.ends.tolist()):
            if end > begin:
                rows = operand.matrices[expert](x[begin:end])
                torch.mul(rows, operand.alpha[expert], out=out[begin:end])
            begin = end
        if row_scale is not None:
            out.mul_(row_scale.unsqueeze(-1))
        return out

    def grouped_l1(self, x: Tensor, operand: CpuOperand, groups: Groups, limit: float) -> Tensor:
        """x [M, H] bf16 -> [R, I] bf16. An input is quantised once a token, then gathered."""
        values, row_scale = self._quantized(x, operand)
        if row_scale is not None:
            row_scale = row_scale[groups.tokens]
        rows = values[groups.tokens]
        gate, up = self._grouped_fp32(rows, row_scale, operand, groups).chunk(2, dim=-1)
        return reference.swiglu(gate, up, limit).to(torch.bfloat16)

    def grouped_l2(self, h: Tensor, operand: CpuOperand, groups: Groups) -> Tensor:
        """h [R, I] bf16 -> [M, H] bf16: weighted by the router, summed over top-k in fp32."""
        values, row_scale = self._quantized(h, operand)
        out = self._grouped_fp32(values, row_scale, operand, groups)
        out.mul_(groups.weights.unsqueeze(-1))
        total = out.new_zeros(groups.num_tokens, out.shape[-1])
        return total.index_add_(0, groups.tokens, out).to(torch.bfloat16)

    def wo_a(self, x: Tensor, operand: CpuOperand) -> Tensor:
        """x [M, G, K] -> [M, G, R] bf16, each group with its own [R, K] weight."""
        values, row_scale = self._quantized(x, operand)
        if isinstance(operand, PlainOperand):
            out = torch.bmm(values.transpose(0, 1), operand.wide.transpose(1, 2)).transpose(0, 1)
            return out.to(torch.bfloat16)
        parts = zip(values.unbind(1), operand.matrices, strict=True)
        out = torch.stack([matrix(part) for part, matrix in parts], dim=1)
        if row_scale is not None:
            out.mul_(row_scale.unsqueeze(-1))
        return torch.mul(out, operand.alpha, out=torch.empty_like(out, dtype=torch.bfloat16))
