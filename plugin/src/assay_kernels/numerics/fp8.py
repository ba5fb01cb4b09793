"""FP8 E4M3 weights with one scale per 128 x 128 block, as DeepSeek's checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from assay_kernels.numerics.nvfp4 import E4M3_MAX

FP8_BLOCK = 128
"""Side of a scale block (`weight_block_size` in DeepSeek's config.json)."""

_SMALLEST_EXPONENT = -126
"""Smallest power of two used as a scale: the smallest normal fp32."""


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)


@dataclass(frozen=True, eq=False)
class FP8Block:
    """weight: float8_e4m3fn [..., N, K]; scale: float32 [..., ceil(N/128), ceil(K/128)]."""

    weight: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if self.weight.dtype != torch.float8_e4m3fn or self.scale.dtype != torch.float32:
            raise ValueError(
                f"weight must be float8_e4m3fn and scale float32, "
                f"got {self.weight.dtype} and {self.scale.dtype}"
            )
        *batch, rows, cols = self.weight.shape
        expected = (*batch, _blocks(rows), _blocks(cols))
        if tuple(self.scale.shape) != expected:
            raise ValueError(f"scale must be {expected}, got {tuple(self.scale.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return tuple(self.weight.shape)


def _expand(scale: Tensor, rows: int, cols: int) -> Tensor:
    full = scale.repeat_interleave(FP8_BLOCK, dim=-2).repeat_interleave(FP8_BLOCK, dim=-1)
    return full[..., :rows, :cols]


def _power_of_two_at_least(value: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(value)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=_SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(value), exponent)


def quantize_fp8(weight: Tensor, *, ue8m0: bool = True) -> FP8Block:
    """float [..., N, K] -> FP8Block.

    Each block's scale is amax / 448, rounded up to a power of two under `ue8m0` so that nothing
    saturates. An all-zero block has scale 1. Ragged edges form smaller blocks.
    """
    *batch, rows, cols = weight.shape
    height, width = _blocks(rows) * FP8_BLOCK, _blocks(cols) * FP8_BLOCK
    full = torch.zeros(*batch, height, width, device=weight.device)
    full[..., :rows, :cols] = weight
    grid = full.reshape(*batch, _blocks(rows), FP8_BLOCK, _blocks(cols), FP8_BLOCK)
    amax = grid.abs().amax(dim=(-3, -1))
    scale = (amax / E4M3_MAX).clamp(min=2.0**_SMALLEST_EXPONENT)
    if ue8m0:
        scale = _power_of_two_at_least(scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    quotient = weight.float() / _expand(scale, rows, cols)
    return FP8Block(quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def dequantize_fp8(block: FP8Block) -> Tensor:
    """fp32 [..., N, K]."""
    *_, rows, cols = block.weight.shape
    return block.weight.float() * _expand(block.scale, rows, cols)
