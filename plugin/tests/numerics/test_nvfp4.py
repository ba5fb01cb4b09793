"""NVFP4 against oracles that share no code with it: exact rationals over the formats' definitions,
and the torch emulations of compressed-tensors and vLLM where they are installed."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from assay_kernels.numerics import nvfp4

E2M1 = [Fraction(0)] + [
    Fraction(2) ** (e - 1) * (1 + Fraction(m, 2)) if e else Fraction(m, 2)
    for e, m in [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
]
E4M3 = [
    Fraction(2) ** (max(e, 1) - 7) * (Fraction(m, 8) + (1 if e else 0))
    for e in range(16)
    for m in range(8)
][:-1]  # the last pattern is NaN


def nearest_even(value: Fraction, grid: list[Fraction]) -> int:
    """Index of the nearest grid value; ties to the even index; saturating."""
    distances = [abs(value - point) for point in grid]
    best = min(distances)
    candidates = [i for i, distance in enumerate(distances) if distance == best]
    return min(candidates, key=lambda i: i % 2)


def oracle(row: np.ndarray, scale: np.float32) -> tuple[list[int], list[int]]:
    """(codes, e4m3 bytes) of one row: fp32 arithmetic by numpy, rounding by exact rationals."""
    codes: list[int] = []
    scales: list[int] = []
    for block in row.reshape(-1, 16):
        with np.errstate(over="ignore"):
            ideal = np.abs(block).max() / np.float32(6) / scale
            capped = Fraction(448) if ideal > 448 else Fraction(float(ideal))
            byte = nearest_even(capped, E4M3)
            step = np.float32(float(E4M3[byte])) * scale
            for value in block:
                sign = 8 if np.signbit(value) else 0
                if step == 0:
                    codes.append(sign)
                    continue
                quotient = np.abs(value / step)
                exact = Fraction(6) if quotient > 6 else Fraction(float(quotient))
                codes.append(sign | nearest_even(exact, E2M1))
        scales.append(byte)
    return codes, scales


def rows(low: float = -1e4, high: float = 1e4) -> st.SearchStrategy[np.ndarray]:
    magnitudes = st.floats(low, high, width=32) | st.sampled_from([0.0, -0.0, 0.25, 2.5, 6.0, -5.0])
    return hnp.arrays(np.float32, st.sampled_from([16, 32, 48]), elements=magnitudes)


SCALES = st.floats(2.0**-30, 2.0**10, width=32)


@given(rows(), SCALES)
def test_codes_and_block_scales_equal_the_exact_oracle(row: np.ndarray, scale: float) -> None:
    quantized = nvfp4.quantize(torch.from_numpy(row)[None], torch.tensor(scale))
    codes, scales = oracle(row, np.float32(scale))
    assert nvfp4.unpack(quantized.codes)[0].tolist() == codes
    assert quantized.block_scale.view(torch.uint8)[0].tolist() == scales


def test_e2m1_values_and_table_follow_the_format_definition() -> None:
    assert [Fraction(v) for v in nvfp4.E2M1_VALUES] == E2M1
    unit = torch.ones(1, 1, dtype=torch.float8_e4m3fn)
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8)[None])
    expected = [float(v) for v in E2M1] + [-float(v) for v in E2M1]
    assert nvfp4.decode_fp32(codes, unit)[0].tolist() == expected


@pytest.mark.parametrize("index", range(7))
def test_midpoints_round_to_the_even_code_and_their_neighbours_to_the_nearest(index: int) -> None:
    middle = torch.tensor(float((E2M1[index] + E2M1[index + 1]) / 2))
    below = torch.nextafter(middle, torch.tensor(0.0))
    above = torch.nextafter(middle, torch.tensor(9.0))
    even = index if index % 2 == 0 else index + 1
    got = nvfp4.encode_e2m1(torch.stack([below, middle, above, -below, -middle, -above]))
    assert got.tolist() == [index, even, index + 1, index | 8, even | 8, (index + 1) | 8]


def test_e4m3_rounding_equals_the_exact_oracle_at_every_midpoint() -> None:
    middles = [float((a + b) / 2) for a, b in itertools.pairwise(E4M3)]
    grid = torch.tensor([*(float(v) for v in E4M3), *middles, 449.0, 1e30])
    expected = [nearest_even(min(Fraction(float(v)), Fraction(448)), E4M3) for v in grid]
    assert nvfp4.to_e4m3(grid).view(torch.uint8).tolist() == expected


@given(hnp.arrays(np.float32, (3, 32), elements=st.floats(width=32)), SCALES)
@example(np.full((3, 32), np.nan, np.float32), 1.0)
@example(np.full((3, 32), np.inf, np.float32), 1.0)
def test_no_input_ever_yields_a_nan(x: np.ndarray, scale: float) -> None:
    tensor = torch.from_numpy(x)
    for quantized in (nvfp4.quantize(tensor), nvfp4.quantize(tensor, torch.tensor(scale))):
        assert torch.isfinite(quantized.global_scale).all()
        assert (quantized.global_scale > 0).all()
        assert torch.isfinite(quantized.block_scale.float()).all()
        assert not torch.isnan(nvfp4.dequantize(quantized)).any()


@given(rows(-6.0, 6.0))
def test_larger_values_never_get_smaller_results(row: np.ndarray) -> None:
    block = torch.from_numpy(np.sort(row[:16]))[None]
    values = nvfp4.fake_quantize(block, torch.tensor(0.01))
    assert (values.diff() >= 0).all()


@given(st.integers(0, 2**32 - 1), st.integers(-20, 20))
def test_quantising_twice_changes_nothing(seed: int, exponent: int) -> None:
    """With scales in E4M3's normal range; a subnormal scale may round away on the second pass."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = nvfp4.quantize(x)
    twice = nvfp4.quantize(nvfp4.dequantize(once), once.global_scale)
    assert (once.block_scale.float() >= 2.0**-6).all()
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.block_scale.view(torch.uint8), twice.block_scale.view(torch.uint8))


@given(hnp.arrays(np.uint8, (3, 32), elements=st.integers(0, 15)))
def test_pack_puts_even_k_in_the_low_nibble_and_unpack_inverts_it(codes: np.ndarray) -> None:
    packed = nvfp4.pack(torch.from_numpy(codes))
    assert packed.tolist() == (codes[:, 0::2] + 16 * codes[:, 1::2]).tolist()
    assert nvfp4.unpack(packed).tolist() == codes.tolist()


def test_every_product_of_code_and_block_scale_is_exact_in_bf16() -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(-1)
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8)).expand(127, 8)
    signed = E2M1 + [-v for v in E2M1]
    expected = [[float(s * v) for v in signed] for s in E4M3]
    assert nvfp4.decode_bf16(codes, scales).double().tolist() == expected


def test_zero_matrix_gets_a_usable_global_scale_and_zero_codes() -> None:
    quantized = nvfp4.quantize(torch.zeros(2, 32))
    assert quantized.global_scale == 1
    assert not quantized.codes.any()
    assert not quantized.block_scale.float().any()


def test_block_too_small_for_a_subnormal_scale_becomes_zeros() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 6 * 448, 6 * 2.0**-11  # the second block wants 2^-11; 2^-9 is the smallest
    quantized = nvfp4.quantize(x, torch.tensor(1.0))
    assert quantized.block_scale.float().tolist() == [[448.0, 0.0]]
    assert nvfp4.dequantize(quantized)[0, 16:].tolist() == [0.0] * 16


def test_subnormal_block_scales_decode_right() -> None:
    x = torch.full((1, 16), 6 * 2.0**-9)
    quantized = nvfp4.quantize(x, torch.tensor(1.0))
    assert quantized.block_scale.view(torch.uint8).item() == 1
    assert torch.equal(nvfp4.dequantize(quantized), x)


def test_values_beyond_the_global_scale_saturate() -> None:
    x = torch.tensor([[1e6] + [-1e6] * 15])
    values = nvfp4.fake_quantize(x, torch.tensor(1.0))
    assert values.tolist() == [[2688.0] + [-2688.0] * 15]


def test_a_stack_quantises_like_its_matrices() -> None:
    x = torch.randn(3, 8, 64) * torch.tensor([1.0, 10.0, 0.0])[:, None, None]
    stack = nvfp4.quantize(x)
    assert stack.global_scale.shape == (3,)
    assert stack.shape == (3, 8, 64)
    for matrix, codes, scale, values in zip(
        x, stack.codes, stack.global_scale, nvfp4.dequantize(stack), strict=True
    ):
        alone = nvfp4.quantize(matrix)
        assert torch.equal(alone.codes, codes)
        assert torch.equal(alone.global_scale, scale)
        assert torch.equal(nvfp4.dequantize(alone), values)


def test_gaussian_error_is_the_known_nine_and_a_half_percent() -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = (nvfp4.fake_quantize(x) - x).norm() / x.norm()
    assert 0.093 < error < 0.097


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), None])
def test_unusable_input_scale_is_replaced_by_one_scale_a_row(bad: float | None) -> None:
    x = torch.randn(5, 64) * torch.tensor([[1e-3], [1.0], [0.0], [1e3], [7.0]])
    scale = None if bad is None else torch.tensor(bad)
    activation = nvfp4.quantize_activation(x, scale)
    assert activation.row_scale is not None
    for row in range(5):
        alone = nvfp4.quantize(x[row : row + 1])
        assert torch.equal(activation.row_scale[row], alone.global_scale)
        assert torch.equal(activation.codes[row], alone.codes[0])


def test_usable_input_scale_is_used_for_every_row() -> None:
    x = torch.randn(5, 64)
    activation = nvfp4.quantize_activation(x, torch.tensor([0.01]))
    assert activation.row_scale is None
    assert torch.equal(activation.codes, nvfp4.quantize(x, torch.tensor(0.01)).codes)


def test_per_channel_keeps_each_partitions_own_scale() -> None:
    alpha = nvfp4.per_channel([torch.tensor(2.0), torch.tensor([3.0])], [1, 3])
    assert alpha.tolist() == [2.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("codes", "block_scale", "global_scale"),
    [
        ((4, 8), (4, 2), ()),  # one scale per 8
        ((4, 8), (4, 1), (4,)),  # a global scale per row
        ((4, 7), (4, 1), ()),  # K is not a multiple of 16
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    codes: tuple[int, ...], block_scale: tuple[int, ...], global_scale: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"need block_scale|global_scale must be"):
        nvfp4.NVFP4(
            torch.zeros(codes, dtype=torch.uint8),
            torch.zeros(block_scale).to(torch.float8_e4m3fn),
            torch.ones(global_scale),
        )


def test_compressed_tensors_decodes_our_codes_to_the_same_values() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    quantized = nvfp4.quantize(torch.randn(16, 64))
    theirs = helpers.unpack_fp4_from_uint8(quantized.codes, 16, 64, dtype=torch.float32)
    scaled = theirs.reshape(16, 4, 16) * quantized.block_scale.float().unsqueeze(-1)
    assert torch.equal(scaled.reshape(16, 64) * quantized.global_scale, nvfp4.dequantize(quantized))


def test_vllms_emulation_agrees_on_codes_scales_and_values() -> None:
    """It multiplies by reciprocals where we divide, so a code at a rounding boundary may differ."""
    emulation = pytest.importorskip(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    )
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    quantized = nvfp4.quantize(x)
    values, scales = emulation.ref_nvfp4_quant(x.clone(), 1 / quantized.global_scale, 16)
    assert torch.equal(scales, quantized.block_scale.float())
    ours = emulation.break_fp4_bytes(quantized.codes, torch.float32)
    assert (ours != values).float().mean() < 1e-3
    scaled = ours.reshape(64, 16, 16) * quantized.block_scale.float().unsqueeze(-1)
    assert torch.equal(
        scaled.reshape(64, 256) * quantized.global_scale, nvfp4.dequantize(quantized)
    )
