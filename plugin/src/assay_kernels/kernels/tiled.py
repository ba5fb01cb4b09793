"""The reference as a kernel set: what serves a layer whose kernel failed its check.

Weights stay packed and are dequantised tile by tile, in fp32, at every call; the whole model never
is. So it fits wherever the packed weights fit, and takes many times as long. Everything here is
plain torch, on whatever device the operand is, and holds inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.kernels.interface import KernelSet, PackedWeight
from assay_kernels.numerics import decode_fp32

TILE_VALUES = 1 << 24
"""Weights dequantised at a time: 64 MiB of fp32."""


@dataclass(frozen=True)
class TiledOperand:
    """[B, N, K] weights: one matrix has B = 1, a stack of experts or output groups its own."""

    codes: Tensor | None  # uint8 [B, N, K/2]
    block_scale: Tensor | None  # float8_e4m3fn [B, N, K/16]
    alpha: Tensor | None  # fp32 [B, N]
    plain: Tensor | None  # [B, N, K] where the weights were never NVFP4

    @property
    def stack(self) -> int:
        held = self.plain if self.codes is None else self.codes
        assert held is not None
        return held.shape[0]

    @property
    def n(self) -> int:
        held = self.plain if self.codes is None else self.codes
        assert held is not None
        return held.shape[1]

    def tiles(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """(channels, their fp32 weights [n, K]) of one matrix of the stack."""
        if self.plain is not None:
            step = max(1, TILE_VALUES // self.plain.shape[2])
            for start in range(0, self.n, step):
                rows = slice(start, start + step)
                yield rows, self.plain[index, rows].float()
            return
        assert self.codes is not None
        assert self.block_scale is not None
        assert self.alpha is not None
        step = max(1, TILE_VALUES // (2 * self.codes.shape[2]))
        for start in range(0, self.n, step):
            rows = slice(start, start + step)
            values = decode_fp32(self.codes[index, rows], self.block_scale[index, rows])
            yield rows, values.mul_(self.alpha[index, rows].unsqueeze(-1))


def _product(x: Tensor, operand: TiledOperand, index: int) -> Tensor:
    """x fp32 [M, K] times matrix `index` -> fp32 [M, N]."""
    out = x.new_empty(x.shape[0], operand.n)
    for rows, weight in operand.tiles(index):
        out[:, rows] = x @ weight.T
    return out


class ReferenceKernels(KernelSet):
    """`assay_kernels.reference` behind the kernel interface; activations stay bf16."""

    name = "reference"

    def prepare(self, weight: PackedWeight) -> TiledOperand:
        """Keep codes [.., N, K/2], scales and alpha as they are."""
        *_, n, k = weight.shape
        return TiledOperand(
            weight.codes.reshape(-1, n, k // 2),
            weight.block_scale.reshape(-1, n, k // 16),
            weight.alpha.float().reshape(-1, n),
            None,
        )

    def prepare_plain(self, weight: Tensor) -> TiledOperand:
        """Keep [.., N, K] as it is."""
        return TiledOperand(None, None, None, weight.reshape(-1, *weight.shape[-2:]))

    def dense(
        self, x: Tensor, operand: TiledOperand, out_dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """x [M, K] bf16 -> [M, N]."""
        return _product(x.float(), operand, 0).to(out_dtype)

    def dense_swiglu(self, x: Tensor, operand: TiledOperand, limit: float) -> Tensor:
        """x [M, K] bf16, operand rows gate | up -> [M, I] bf16."""
        gate, up = _product(x.float(), operand, 0).chunk(2, dim=-1)
        return reference.swiglu(gate, up, limit).to(torch.bfloat16)

    def _by_expert(self, x: Tensor, operand: TiledOperand, groups: Any) -> Tensor:
        """x fp32 [R, K], rows in expert order -> fp32 [R, N]; rows without an expert stay zero."""
        out = x.new_zeros(x.shape[0], operand.n)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph holds for any routing: every expert multiplies every row, and keeps its own.
            place = torch.arange(x.shape[0], device=x.device)
            begin = torch.zeros_like(groups.ends[0])
            for expert in range(operand.stack):
                end = groups.ends[expert]
                own = (place >= begin) & (place < end)
                out = torch.where(own.unsqueeze(1), _product(x, operand, expert), out)
                begin = end
            return out
        first = 0
        for expert, last in enumerate(groups.ends.tolist()):
            if last > first:
                out[first:last] = _product(x[first:last], operand, expert)
            first = last
        return out

    def grouped_l1(self, x: Tensor, operand: TiledOperand, groups: Any, limit: float) -> Tensor:
        """x [M, H] bf16 -> [R, I] bf16, rows in expert order."""
        rows = x.float()[groups.tokens.long()]
        gate, up = self._by_expert(rows, operand, groups).chunk(2, dim=-1)
        return reference.swiglu(gate, up, limit).to(torch.bfloat16)

    def grouped_l2(self, h: Tensor, operand: TiledOperand, groups: Any) -> Tensor:
        """h [R, I] bf16 -> [M, H] bf16: weighted by the router, summed over top-k in fp32."""
        here = torch.arange(h.shape[0], device=h.device) < groups.ends[-1]
        # Rows without an expert on this rank were never written: they may hold anything.
        own = torch.where(here.unsqueeze(1), h.float(), 0.0)
        out = self._by_expert(own, operand, groups) * groups.weights.unsqueeze(-1)
        out = torch.where(here.unsqueeze(1), out, 0.0)
        tokens = groups.fan.shape[0] if hasattr(groups, "fan") else groups.num_tokens
        total = out.new_zeros(tokens, out.shape[-1])
        return total.index_add_(0, groups.tokens.long(), out).to(torch.bfloat16)

    def wo_a(self, x: Tensor, operand: TiledOperand) -> Tensor:
        """x [M, G, K] -> [M, G, R] bf16, each group with its own [R, K] weight."""
        parts = [_product(x[:, g].float(), operand, g) for g in range(operand.stack)]
        return torch.stack(parts, dim=1).to(torch.bfloat16)
