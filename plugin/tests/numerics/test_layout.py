"""The 128x4 layout against its published offset formula, byte by byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay_kernels.numerics import layout


def offset(m: int, s: int, cols: int) -> int:
    tile = (m // 128) * -(-cols // 4) + s // 4
    return tile * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + s % 4


@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 13), st.integers(0, 2**32 - 1))
def test_every_scale_sits_at_its_offset_and_all_padding_is_zero(
    rows: int, cols: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(1, 256, (rows, cols), dtype=torch.uint8, generator=generator)
    swizzled = layout.swizzle_128x4(scale)
    expected = [0] * swizzled.numel()
    for m in range(rows):
        for s in range(cols):
            expected[offset(m, s, cols)] = int(scale[m, s])
    assert swizzled.tolist() == expected
    assert torch.equal(layout.unswizzle_128x4(swizzled, rows, cols), scale)


def test_full_tiles_are_only_permuted() -> None:
    scale = torch.arange(256 * 8).to(torch.int32).remainder(251).to(torch.uint8).reshape(256, 8)
    swizzled = layout.swizzle_128x4(scale)
    assert torch.equal(swizzled.sort().values, scale.flatten().sort().values)


def test_batches_and_float8_are_kept() -> None:
    scale = torch.rand(3, 130, 5).to(torch.float8_e4m3fn)
    swizzled = layout.swizzle_128x4(scale)
    assert swizzled.dtype == torch.float8_e4m3fn
    assert swizzled.shape == (3, 256 * 8)
    alone = layout.swizzle_128x4(scale[1])
    assert torch.equal(swizzled[1].view(torch.uint8), alone.view(torch.uint8))
    back = layout.unswizzle_128x4(swizzled, 130, 5)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_wrong_width_and_size_are_refused() -> None:
    with pytest.raises(ValueError, match="one byte"):
        layout.swizzle_128x4(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="512 bytes"):
        layout.unswizzle_128x4(torch.zeros(511, dtype=torch.uint8), 4, 4)
