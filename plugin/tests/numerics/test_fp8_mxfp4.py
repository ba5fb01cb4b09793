"""FP8 block weights and MXFP4, against loops over the formats' definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay_kernels.numerics import fp8, mxfp4, nvfp4


@pytest.mark.parametrize("ue8m0", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (1, 1), (257, 127)])
def test_every_fp8_block_has_its_own_scale(shape: tuple[int, int], ue8m0: bool) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    block = fp8.quantize_fp8(weight, ue8m0=ue8m0)
    values = fp8.dequantize_fp8(block)
    for i in range(block.scale.shape[0]):
        for j in range(block.scale.shape[1]):
            part = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            amax, scale = float(weight[part].abs().max()), float(block.scale[i, j])
            ideal = amax / 448
            if ue8m0:
                assert math.frexp(scale)[0] == 0.5  # a power of two
                assert ideal <= scale * (1 + 1e-6)
                assert scale < 2.001 * ideal
            else:
                assert scale == pytest.approx(ideal, rel=1e-6)
            assert torch.equal(values[part], block.weight[part].float() * scale)
            # Half a step of E4M3: 2^-4 of the value, or half of its smallest subnormal, 2^-10.
            allowed = (weight[part].abs() * 2.0**-4).clamp(min=scale * 2.0**-10)
            assert ((values[part] - weight[part]).abs() <= allowed * 1.0001).all()


def test_fp8_zero_block_decodes_to_zero_with_scale_one() -> None:
    block = fp8.quantize_fp8(torch.zeros(128, 128))
    assert block.scale.tolist() == [[1.0]]
    assert not fp8.dequantize_fp8(block).any()


def test_fp8_power_of_two_amax_needs_no_larger_scale() -> None:
    assert fp8.quantize_fp8(torch.full((1, 1), 448.0)).scale.item() == 1.0
    assert fp8.quantize_fp8(torch.full((1, 1), 448.1)).scale.item() == 2.0


def test_fp8_scale_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="scale must be"):
        fp8.FP8Block(torch.zeros(129, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))


def mx(seed: int, low: int, high: int, shape: tuple[int, int] = (4, 128)) -> mxfp4.MXFP4:
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=generator)
    codes[:, ::16] |= 0x11  # no block of zeros only
    scale = torch.randint(low, high + 1, (rows, cols // 32), generator=generator)
    return mxfp4.MXFP4(codes, scale.to(torch.uint8))


def slow_decode(weight: mxfp4.MXFP4) -> list[list[float]]:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows = []
    for codes, scales in zip(weight.codes.tolist(), weight.scale.tolist(), strict=True):
        row = []
        for k in range(len(codes) * 2):
            nibble = codes[k // 2] >> 4 if k % 2 else codes[k // 2] & 15
            sign = -1.0 if nibble & 8 else 1.0
            row.append(sign * magnitudes[nibble & 7] * 2.0 ** (scales[k // 32] - 127))
        rows.append(row)
    return rows


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 230))
def test_mxfp4_within_eighteen_octaves_becomes_nvfp4_without_loss(seed: int, low: int) -> None:
    weight = mx(seed, low, low + 17)
    converted = mxfp4.to_nvfp4(weight)
    assert torch.equal(converted.codes, weight.codes)
    assert nvfp4.dequantize(converted).double().tolist() == slow_decode(weight)
    assert mxfp4.dequantize_mxfp4(weight).double().tolist() == slow_decode(weight)


def test_all_eighteen_octaves_at_once_are_exact_and_nineteen_are_refused() -> None:
    weight = mx(0, 100, 100, (1, 32 * 19))
    scale = torch.arange(100, 119, dtype=torch.uint8)[None]
    eighteen = mxfp4.MXFP4(weight.codes[:, : 16 * 18], scale[:, :18])
    assert int(mxfp4.octaves(eighteen)) == 18
    assert nvfp4.dequantize(mxfp4.to_nvfp4(eighteen)).tolist() == slow_decode(eighteen)
    with pytest.raises(mxfp4.NotLosslessError, match="19 octaves"):
        mxfp4.to_nvfp4(mxfp4.MXFP4(weight.codes, scale))


def test_blocks_of_zeros_do_not_count_towards_the_span() -> None:
    weight = mx(0, 100, 100, (1, 64))
    weight.codes[0, 16:] = 0x80  # zeros, some of them negative
    weight.scale[0, 1] = 250
    assert int(mxfp4.octaves(weight)) == 1
    assert nvfp4.dequantize(mxfp4.to_nvfp4(weight)).tolist() == slow_decode(weight)


def test_matrices_of_a_stack_have_their_own_offsets() -> None:
    low, high = mx(1, 60, 70), mx(2, 150, 160)
    stack = mxfp4.MXFP4(torch.stack([low.codes, high.codes]), torch.stack([low.scale, high.scale]))
    values = nvfp4.dequantize(mxfp4.to_nvfp4(stack))
    assert values[0].tolist() == slow_decode(low)
    assert values[1].tolist() == slow_decode(high)


def test_an_all_zero_matrix_converts() -> None:
    zeros = mxfp4.MXFP4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    assert int(mxfp4.octaves(zeros)) == 0
    assert not nvfp4.dequantize(mxfp4.to_nvfp4(zeros)).any()


def test_a_nan_scale_is_refused_and_decodes_to_nan() -> None:
    weight = mx(0, 255, 255)
    assert torch.isnan(mxfp4.dequantize_mxfp4(weight)).all()
    with pytest.raises(mxfp4.NotLosslessError, match="NaN"):
        mxfp4.to_nvfp4(weight)


@given(st.integers(0, 2**32 - 1), st.floats(-30, 30))
@settings(max_examples=30, deadline=None)
def test_mxfp4_of_a_block_is_the_nearest_under_ocps_scale(seed: int, size: float) -> None:
    """Scale 2^(floor(log2(amax)) - 2), then the nearest of the sixteen values, saturating at 6."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=generator) * 2.0**size
    packed = mxfp4.quantize_mxfp4(x)
    values = mxfp4.dequantize_mxfp4(packed)
    grid = torch.tensor([*nvfp4.E2M1_VALUES, *(-v for v in nvfp4.E2M1_VALUES)]).double()
    for row in range(3):
        for block in range(2):
            part = slice(block * 32, block * 32 + 32)
            amax = float(x[row, part].abs().max())
            scale = 2.0 ** (math.floor(math.log2(amax)) - 2)
            assert int(packed.scale[row, block]) - 127 == math.log2(scale)
            near = (x[row, part].double()[:, None] - grid * scale).abs().min(dim=1).values
            assert torch.equal((values[row, part].double() - x[row, part].double()).abs(), near)


def test_mxfp4_blocks_of_zeros_have_the_smallest_scale() -> None:
    packed = mxfp4.quantize_mxfp4(torch.zeros(2, 32))
    assert not packed.scale.any()
    assert not mxfp4.dequantize_mxfp4(packed).any()


def test_a_scale_or_a_code_that_differs_is_not_exact() -> None:
    source = mxfp4.quantize_mxfp4(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)))
    result = mxfp4.to_nvfp4(source)
    assert mxfp4.is_exact(source, result)
    scale = result.block_scale.clone()
    scale.view(torch.uint8)[2, 1] += 1
    assert not mxfp4.is_exact(source, nvfp4.NVFP4(result.codes, scale, result.global_scale))
    codes = result.codes.clone()
    codes[3, 5] ^= 1
    assert not mxfp4.is_exact(source, nvfp4.NVFP4(codes, result.block_scale, result.global_scale))
    doubled = nvfp4.NVFP4(result.codes, result.block_scale, result.global_scale * 2)
    assert not mxfp4.is_exact(source, doubled)
