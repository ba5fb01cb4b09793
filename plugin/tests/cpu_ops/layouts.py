"""The published cache layouts, written out byte by byte: what every cache test decodes with.

Plain, and shares nothing with `v4_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)


def attention_keys(cache: Tensor, block_size: int, slots: Sequence[int]) -> Tensor:
    """Keys at slots of a paged attention cache (pages, bytes) uint8 -> (N, 512) fp64."""
    rows = cache[:, : block_size * 576].reshape(-1, 576)[slots]
    scales = cache[:, block_size * 576 : block_size * 584].reshape(-1, 8)[slots, :7]
    powers = torch.exp2(scales.to(torch.float64) - 127)
    nope = E4M3[rows[:, :448].long()].view(-1, 7, 64) * powers.unsqueeze(-1)
    rope = rows[:, 448:].contiguous().view(torch.bfloat16).to(torch.float64)
    return torch.cat([nope.flatten(1), rope], 1)


def index_keys(cache: Tensor, block_size: int, slots: Sequence[int]) -> Tensor:
    """Keys at slots of a paged indexer cache (pages, bytes) uint8 -> (N, 128) fp64."""
    codes = cache[:, : block_size * 128].reshape(-1, 128)[slots]
    scales = cache[:, block_size * 128 : block_size * 132].reshape(-1, 4)[slots]
    return E4M3[codes.long()] * scales.view(torch.float32).to(torch.float64)


def pooled_cache(pages: int, page_bytes: int, generator: torch.Generator, gap: int = 320) -> Tensor:
    """(pages, page_bytes) uint8 whose rows are further apart than they are long, as vLLM's are."""
    pool = torch.randint(0, 256, (pages, page_bytes + gap), dtype=torch.uint8, generator=generator)
    return pool[:, :page_bytes]


def cos_sin(positions: int, generator: torch.Generator) -> Tensor:
    """(positions, 64) fp32: cosines, then sines."""
    angles = torch.rand(positions, 32, generator=generator) * 6.28
    return torch.cat([angles.cos(), angles.sin()], 1)


def quantised(keys: Tensor, block: int) -> Tensor:
    """fp64 keys (N, D) rounded as a cache with one power-of-two scale per `block` stores them."""
    tiles = keys.to(torch.bfloat16).to(torch.float64).unflatten(-1, (-1, block))
    scale = torch.exp2(
        torch.ceil(torch.log2((tiles.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-4)))
    )
    return ((tiles / scale).float().to(torch.float8_e4m3fn).to(torch.float64) * scale).flatten(-2)
