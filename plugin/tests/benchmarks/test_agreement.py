"""The agreement verdict must not pass on garbage, not even when the control is garbage too."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import agreement

HEALTHY = agreement.Score("bf16", 6000, 5e-5, 4e-5, 3e-4, 0.03, 0.947, 96, 6e-5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


@pytest.fixture
def reference() -> np.ndarray:
    return log_softmax(np.random.default_rng(0).normal(size=(5, 64)))


def test_the_same_distribution_has_no_divergence(reference: np.ndarray) -> None:
    kl, same = agreement.kl_and_top1(reference, reference)
    assert kl.max() < 1e-9
    assert same.all()


def test_divergence_is_the_published_formula() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    kl, same = agreement.kl_and_top1(np.log(p).astype("f4"), np.log(q).astype("f4"))
    assert kl[0] == pytest.approx(0.25 * np.log(2), rel=1e-5)
    assert not same[0]


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_position_that_is_not_finite_disagrees(reference: np.ndarray, bad: float) -> None:
    served = reference.copy()
    served[2] = bad
    kl, same = agreement.kl_and_top1(reference, served)
    assert np.isinf(kl[2])
    assert not same[2]
    assert same[[0, 1, 3, 4]].all()


def test_a_healthy_score_passes_against_a_healthy_control() -> None:
    assert dataclasses.replace(HEALTHY, mean_kl=5.9e-5, top1=0.943).passes(HEALTHY)


@pytest.mark.parametrize(
    "change",
    [{"mean_kl": 6.1e-5}, {"top1": 0.941}, {"mean_kl": float("nan")}, {"mean_kl": float("inf")}],
)
def test_a_worse_score_fails(change: dict[str, float]) -> None:
    assert not dataclasses.replace(HEALTHY, **change).passes(HEALTHY)


@pytest.mark.parametrize("change", [{"mean_kl": float("inf")}, {"mean_kl": 9.0}, {"top1": 0.01}])
def test_garbage_on_both_sides_fails(change: dict[str, float]) -> None:
    garbage = dataclasses.replace(HEALTHY, **change)
    assert not garbage.passes(garbage)
