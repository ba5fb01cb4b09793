"""The packed order of the Hopper kernels, checked by doing in torch what their decoder does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay_kernels.kernels.sm90.layout import (
    ALPHA_FACTOR,
    e5m3,
    interleave_gate_up,
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
)
from assay_kernels.numerics import decode_fp32


def random_weight(rows: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every code, and every scale but NaN: both ends of E4M3, subnormals and zero among them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8, generator=generator)
    bits = torch.randint(0, 0x7F, (rows, inputs // 16), dtype=torch.uint8, generator=generator)
    return codes, bits.view(torch.float8_e4m3fn)


def bf16_value(bits: Tensor) -> Tensor:
    return (bits.int() << 16).view(torch.float32)


def decode_packed(words: Tensor, scales: Tensor, rows: int, inputs: int) -> Tensor:
    """The kernels' arithmetic, instruction by instruction, placed by wgmma's fragment layout."""
    code = (words.long() & 0xFFFFFFFF).view(rows // 64, inputs // 64, 4, 8, 4, 4)
    scale = (scales.long() & 0xFFFFFFFF).view(rows // 64, inputs // 64, 4, 8, 2)
    out = torch.full((rows // 64, 4, 8, 2, inputs // 64, 4, 2, 4, 2), torch.nan)
    for step in range(4):
        pair = scale[..., step // 2]
        if step % 2:
            pair = (pair & 0x00FF00FF) << 8 | (pair & 0xFF00FF00) >> 8
        pair = pair & 0x0FF00FF0 | 0x70007000
        q = code[..., step]
        registers = [
            q & 0x81C081C0,
            q << 3 & 0x81C081C0,
            q >> 3 & 0x01C001C0 | q << 1 & 0x80008000,
            (q & 0x20072007) * 68 & 0x81C081C0,
        ]
        for r, value in enumerate(registers):
            channel, half_k = r % 2, r // 2
            factor = bf16_value(pair >> 16 * channel & 0xFFFF).unsqueeze(-1)
            for odd in range(2):
                product = bf16_value(value >> 16 * odd & 0xFFFF) * factor
                # (block, k block, warp, g, c) -> (block, warp, g, k block, c)
                out[:, :, :, channel, :, step, half_k, :, odd] = product.permute(0, 2, 3, 1, 4)
    return out.reshape(rows, inputs) * ALPHA_FACTOR


@pytest.mark.parametrize(("rows", "inputs"), [(64, 64), (128, 192), (192, 128)])
def test_decoding_the_packed_order_gives_the_reference_bit_for_bit(rows: int, inputs: int) -> None:
    codes, scale = random_weight(rows, inputs)
    got = decode_packed(pack_codes(codes, scale), pack_scales(scale), rows, inputs)
    assert torch.equal(got, decode_fp32(codes, scale))


def test_decoded_weights_are_bf16_values() -> None:
    """What the tensor cores get is exact: no code times scale needs more than bf16 holds."""
    codes, scale = random_weight(128, 512, seed=1)
    values = decode_fp32(codes, scale) / ALPHA_FACTOR
    assert torch.equal(values.bfloat16().float(), values)


@settings(max_examples=30, deadline=None)
@given(blocks=st.integers(1, 3), k_blocks=st.integers(1, 4), seed=st.integers(0, 1 << 16))
def test_packing_loses_nothing_but_the_codes_under_zero_scales(
    blocks: int, k_blocks: int, seed: int
) -> None:
    rows, inputs = 64 * blocks, 64 * k_blocks
    codes, scale = random_weight(rows, inputs, seed)
    bits = scale.view(torch.uint8)
    zero = (bits == 0).repeat_interleave(8, dim=1)
    assert torch.equal(
        unpack_codes(pack_codes(codes, scale), rows, inputs), codes.masked_fill(zero, 0)
    )
    assert torch.equal(unpack_scales(pack_scales(scale), rows, inputs), e5m3(scale))


def test_every_scale_keeps_its_value() -> None:
    bits = torch.arange(1, 0x7F, dtype=torch.uint8)
    scale = bits.view(torch.float8_e4m3fn)
    code = e5m3(scale).int()
    value = (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 9)
    assert torch.equal(value, scale.float())


@pytest.mark.parametrize("bad", [0x7F, 0x81, 0xFE, 0xFF])
def test_a_scale_that_nvfp4_does_not_have_is_refused(bad: int) -> None:
    bits = torch.full((64, 4), 0x38, dtype=torch.uint8)
    bits[5, 2] = bad
    with pytest.raises(ValueError, match="non-negative"):
        pack_scales(bits.view(torch.float8_e4m3fn))


@pytest.mark.parametrize(("rows", "inputs"), [(32, 64), (64, 32), (96, 128)])
def test_odd_shapes_are_refused(rows: int, inputs: int) -> None:
    codes, scale = random_weight(rows, inputs)
    with pytest.raises(ValueError, match="multiple of 64"):
        pack_codes(codes, scale)


def test_gate_and_up_rows_end_side_by_side() -> None:
    matrix = torch.arange(8).view(8, 1)
    assert interleave_gate_up(matrix)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_output_groups_packed_one_by_one_lie_as_the_whole_matrix() -> None:
    codes, scales = random_weight(3 * 128, 192)
    bits = scales.view(torch.uint8)
    parts = [
        (pack_codes(code, scale.view(scales.dtype)), pack_scales(scale.view(scales.dtype)))
        for code, scale in zip(codes.split(128), bits.split(128), strict=True)
    ]
    for packed, whole in zip(
        zip(*parts, strict=True), (pack_codes(codes, scales), pack_scales(scales)), strict=True
    ):
        assert torch.equal(torch.cat([words.flatten() for words in packed]), whole.flatten())
