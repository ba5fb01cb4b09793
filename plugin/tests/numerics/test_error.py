"""The judge passes honest rounding and names the place of each planted fault."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from assay_kernels.numerics import judge_bf16, judge_fp32


def output(rows: int = 8, cols: int = 96) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def test_rounding_the_reference_passes_at_four_fifths_of_the_bound() -> None:
    reference = output()
    verdict = judge_bf16(reference.bfloat16(), reference)
    assert verdict.passed
    assert verdict.ratio == pytest.approx(0.8)


@pytest.mark.parametrize("rows", [1, 7, 64, 129])
def test_accumulation_noise_under_a_rounding_step_passes(rows: int) -> None:
    reference = output(rows, 256)
    noisy = reference * (1 + 1e-6 * torch.randn(rows, 256))
    assert judge_bf16(noisy.bfloat16(), reference, [128, 128]).passed


def test_a_wrong_small_partition_cannot_hide_behind_a_large_one() -> None:
    reference = output(4, 128)
    reference[:, :96] *= 1e5
    actual = reference.clone()
    actual[2, 96:] *= 1.02
    hidden = judge_bf16(actual.bfloat16(), reference)
    assert hidden.passed  # what a judge without partitions would say
    verdict = judge_bf16(actual.bfloat16(), reference, [96, 32])
    assert not verdict.passed
    assert (verdict.partition, verdict.row) == (1, 2)
    assert str(verdict).startswith("FAIL: partition 1, row 2: error 0.0")


def test_one_wrong_channel_is_named_from_sixty_four_rows_on() -> None:
    reference = output(64, 512)
    reference[:, 300] *= 1e-3
    actual = reference.clone()
    actual[:, 300] *= 1.05
    verdict = judge_bf16(actual.bfloat16(), reference, [256, 256])
    assert not verdict.passed
    assert (verdict.partition, verdict.row, verdict.channel) == (1, None, 300)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_value_that_is_not_finite_fails(value: float) -> None:
    reference = output()
    actual = reference.bfloat16()
    actual[5, 5] = value
    verdict = judge_bf16(actual, reference)
    assert not verdict.passed
    assert verdict.row == 5
    assert verdict.ratio == math.inf


def test_a_zero_row_must_stay_zero() -> None:
    reference = output()
    reference[3] = 0
    actual = reference.bfloat16()
    assert judge_bf16(actual, reference).passed
    actual[3, 0] = 1e-6
    verdict = judge_bf16(actual, reference)
    assert not verdict.passed
    assert verdict.row == 3


def test_fp32_outputs_are_held_to_five_in_a_hundred_thousand() -> None:
    reference = output().double()
    assert judge_fp32((reference * (1 + 4e-5)).float(), reference).passed
    verdict = judge_fp32((reference * (1 + 6e-5)).float(), reference)
    assert not verdict.passed
    assert verdict.bound == 5e-5


def test_a_reference_that_is_not_finite_fails_rather_than_passes() -> None:
    reference = output()
    reference[0, 0] = math.nan
    assert not judge_bf16(reference.bfloat16(), reference).passed


def test_shapes_and_partitions_must_fit() -> None:
    with pytest.raises(ValueError, match=r"\[M, N\]"):
        judge_bf16(output(2), output(3))
    with pytest.raises(ValueError, match="do not add up"):
        judge_bf16(output(), output(), [32, 32])
