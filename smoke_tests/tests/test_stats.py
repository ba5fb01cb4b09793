"""Intervals and what they decide."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_smoke.stats import RateRule, wilson


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (Wilson's score, no correction).
@pytest.mark.parametrize(
    ("events", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(events: int, n: int, low: float, high: float) -> None:
    found = wilson(events, n)
    assert found == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 3000), st.data())
def test_an_interval_holds_its_rate_and_is_mirrored(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    mirrored = wilson(n - k, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_nothing_seen_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert RateRule(0.0, 0.9).decide(0, 0) == "unsure"


def test_a_rule_fails_passes_or_wants_more() -> None:
    rule = RateRule(0.02, 0.1)
    assert rule.decide(0, 200) == "pass"
    assert rule.decide(20, 200) == "fail"
    assert rule.decide(0, 5) == "unsure"
    assert RateRule(0.0, 0.5).decide(1, 1000) == "fail"


@pytest.mark.parametrize("tolerated", [0.0, 0.01, 0.05])
def test_what_is_called_detectable_is_detected(tolerated: float) -> None:
    """Against a simulation that shares nothing with the formula."""
    rule, n, rng = RateRule(tolerated, 0.9), 150, random.Random(4)
    rate = rule.detectable(n)
    assert rate is not None
    seen = sum(
        rule.decide(sum(rng.random() < rate for _ in range(n)), n) == "fail" for _ in range(2000)
    )
    assert 0.93 <= seen / 2000 <= 1


@given(st.floats(0.001, 0.99))
def test_samples_to_pass_are_the_fewest(unacceptable: float) -> None:
    rule = RateRule(0.0, unacceptable)
    n = rule.samples_to_pass()
    assert rule.decide(0, n) == "pass"
    assert n == 1 or rule.decide(0, n - 1) == "unsure"


@pytest.mark.parametrize("rates", [(0.1, 0.1), (-0.1, 0.5), (0.2, 0.1), (0.0, 1.1)])
def test_a_rule_that_cannot_be_is_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="tolerated"):
        RateRule(*rates)
