"""Weights and scales as the Blackwell kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from assay_kernels.numerics import BLOCK, swizzle_128x4

ROWS = 128
"""Channels of a tile of scales; an expert's or group's channels are whole tiles."""
INPUTS = 64
"""Inputs of one MMA step and of one tile of scales."""


def check_weight(shape: tuple[int, ...]) -> None:
    """Raise ValueError, naming the rule, for weights [.., N, K] that the kernels cannot read."""
    *lead, n, k = shape
    if len(lead) > 1 or n % ROWS or k % INPUTS:
        raise ValueError(
            f"weights {shape}: at most one leading dimension, channels a multiple of {ROWS}, "
            f"inputs a multiple of {INPUTS}"
        )


def gate_up_blocks(matrix: Tensor) -> Tensor:
    """Rows gate | up of [.., 2I, X] -> sixteen gates, their sixteen ups, the next sixteen gates, ..

    An epilogue thread reads 32 neighbouring channels, so it holds one whole block of 16 outputs.
    """
    gate, up = matrix.chunk(2, dim=-2)
    if gate.shape[-2] % BLOCK:
        raise ValueError(f"gate and up must have a multiple of {BLOCK} rows, got {gate.shape[-2]}")
    parts = (torch.unflatten(half, -2, (-1, BLOCK)) for half in (gate, up))
    return torch.stack(list(parts), dim=-3).flatten(-4, -2)


def scales_128x4(block_scale: Tensor) -> Tensor:
    """float8_e4m3fn [.., N, K / 16] -> uint8 [bytes], one matrix after another.

    Raises ValueError on negative scales and NaN, which NVFP4 does not have.
    """
    bits = block_scale.contiguous().view(torch.uint8)
    if bool(((bits > 0x80) | (bits == 0x7F)).any()):
        raise ValueError("block scales must be non-negative numbers; found a negative one or NaN")
    return swizzle_128x4(bits & 0x7F).reshape(-1)
