"""The scale-factor layout that tcgen05 reads: tiles of 128 rows by 4 columns.

    offset(m, s) = ((m // 128) * ceil(S / 4) + s // 4) * 512
                   + (m % 32) * 16 + ((m % 128) // 32) * 4 + s % 4

with S = K / 16 columns, rows padded to a multiple of 128 and columns to a multiple of 4 (PTX ISA,
"Scale factor A/B layout"; cuBLAS, "1D block scaling factors layout"). Padding is always written
as zero: stale padding rows gave upstream users garbage.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 128
TILE_COLS = 4


def padded(rows: int, cols: int) -> tuple[int, int]:
    """(rows, cols) rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-cols // TILE_COLS) * TILE_COLS


def swizzle_128x4(scale: Tensor) -> Tensor:
    """[..., M, S] of any one-byte dtype -> [..., padded M * padded S], the bytes in tile order."""
    if scale.element_size() != 1:
        raise ValueError(f"scales must be one byte each, got {scale.dtype}")
    *batch, rows, cols = scale.shape
    full_rows, full_cols = padded(rows, cols)
    grid = torch.zeros(*batch, full_rows, full_cols, dtype=torch.uint8, device=scale.device)
    grid[..., :rows, :cols] = scale.view(torch.uint8)
    tiles = grid.reshape(*batch, full_rows // TILE_ROWS, 4, 32, full_cols // TILE_COLS, TILE_COLS)
    return tiles.transpose(-4, -2).flatten(len(batch)).view(scale.dtype)


def unswizzle_128x4(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle_128x4`: [..., padded M * padded S] -> [..., rows, cols]."""
    full_rows, full_cols = padded(rows, cols)
    if swizzled.shape[-1] != full_rows * full_cols:
        raise ValueError(
            f"{rows} x {cols} scales take {full_rows * full_cols} bytes, got {swizzled.shape[-1]}"
        )
    batch = swizzled.shape[:-1]
    tiles = swizzled.view(torch.uint8).reshape(
        *batch, full_rows // TILE_ROWS, full_cols // TILE_COLS, 32, 4, TILE_COLS
    )
    grid = tiles.transpose(-4, -2).reshape(*batch, full_rows, full_cols)
    return grid[..., :rows, :cols].contiguous().view(swizzled.dtype)
