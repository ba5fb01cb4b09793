"""Histograms keep their stated error and merge exactly."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_load.measure.histogram import RELATIVE_ERROR, Histogram, bounds, bucket

SECONDS = st.lists(st.floats(0, 10_000), min_size=1, max_size=200)


def made(values: list[float]) -> Histogram:
    histogram = Histogram()
    histogram.add_many(values)
    return histogram


@given(st.integers(0, 10**12))
def test_a_bucket_holds_its_value_and_is_narrow(value: int) -> None:
    low, high = bounds(bucket(value))
    assert low <= value <= high
    assert (high - low) / 2 <= max(0.5, RELATIVE_ERROR * low)


def test_buckets_leave_no_gap() -> None:
    edges = [bounds(index) for index in range(2000)]
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(edges))


@given(SECONDS, st.sampled_from([1, 50, 90, 99, 99.9, 100]))
def test_percentiles_are_near_a_measured_value(values: list[float], percent: float) -> None:
    true = float(np.percentile(np.array(values) * 1000, percent, method="inverted_cdf"))
    found = made(values).percentile(percent)
    assert found == pytest.approx(true, rel=RELATIVE_ERROR, abs=0.0006)


@given(SECONDS, st.integers(1, 5))
def test_merging_parts_gives_the_whole_whatever_the_split(values: list[float], parts: int) -> None:
    merged = Histogram()
    for part in range(parts):
        wire = json.loads(json.dumps(made(values[part::parts]).to_wire()))
        merged.merge(Histogram.from_wire(wire))
    assert merged.to_wire() == made(values).to_wire()


@given(SECONDS)
def test_one_by_one_and_all_at_once_are_the_same(values: list[float]) -> None:
    single = Histogram()
    for value in values:
        single.add(value)
    assert single.to_wire() == made(values).to_wire()


def test_an_empty_one_has_no_percentiles() -> None:
    assert Histogram().percentile(50) is None
    assert Histogram.from_wire(Histogram().to_wire()).count == 0
