"""The server's series, tallies that merge, and what noise allows to be seen."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from assay_load.gate.noise import detectable, slowdown
from assay_load.measure import server
from assay_load.measure.histogram import RELATIVE_ERROR
from assay_load.measure.tally import Tally, is_good
from assay_load.stream.chat import Answer
from assay_load.stream.client import Outcome
from assay_load.stream.errors import StreamError
from assay_load.workload.schema import Slo

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b{c}"} 3.0
vllm:num_requests_running{engine="1",model_name="a b{c}"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 1.5e+03
vllm:generation_tokens_created{engine="0"} 1.7e+09
process_start_time_seconds 1.79607777727e+09
"""


def test_series_are_those_that_prometheus_own_parser_finds() -> None:
    sample = server.parse(PAGE, 0.0)
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(PAGE):
        for s in family.samples:
            found.setdefault(s.name, []).append(s.value)
    for short, name in (server.GAUGES | server.COUNTERS).items():
        if name in found:
            wanted = max(found[name]) if short == "kv_cache" else sum(found[name])
            assert sample.values[short] == wanted
        else:
            assert short not in sample.values
    assert sample.started == found["process_start_time_seconds"][0]


@given(st.text(max_size=300))
def test_any_page_is_read(text: str) -> None:
    server.parse(text, 0.0)
    server.parse(PAGE + text, 0.0)


def test_a_restart_shows_in_the_start_time_or_else_in_falling_counters() -> None:
    before = server.parse(PAGE, 0.0)
    assert server.restarted(before, before) is None
    younger = PAGE.replace("1.79607777727e+09", "1.79607787727e+09")
    assert "later" in str(server.restarted(before, server.parse(younger, 1.0)))
    bare = PAGE.rpartition("process_start")[0]
    fallen = bare.replace("1.5e+03", "12")
    assert "fell" in str(server.restarted(server.parse(bare, 0.0), server.parse(fallen, 1.0)))


def outcome(rng: random.Random) -> Outcome:
    start = rng.uniform(0, 5)
    answer = Answer(prompt_tokens=5)
    at = start
    for _ in range(rng.randint(2, 30)):
        at += rng.uniform(0.001, 0.3)
        answer.arrivals.append(at)
    answer.first_content = answer.first
    answer.completion_tokens = len(answer.arrivals)
    error = StreamError("timeout") if rng.random() < 0.2 else None
    return Outcome(start, start + 0.01, at, answer, error)


def test_tallies_merge_to_the_tally_of_all() -> None:
    rng = random.Random(5)
    outcomes = [outcome(rng) for _ in range(60)]
    whole, parts = Tally(), [Tally() for _ in range(3)]
    for number, each in enumerate(outcomes):
        stage, name = rng.choice(["all", "other", None]), rng.choice("ab")
        for tally in (whole, parts[number % 3]):
            tally.record(each, stage, name, Slo(ttft_ms=100.0), 1000.0)
    merged = Tally()
    for part in parts:
        merged.merge(Tally.from_wire(json.loads(json.dumps(part.to_wire()))))
    assert merged.groups.keys() == whole.groups.keys()
    for key, group in whole.groups.items():
        assert merged.groups[key].to_wire()["histograms"] == {
            m: h.to_wire() for m, h in sorted(group.histograms.items(), key=lambda _: 0)
        }
        assert merged.groups[key].counts == group.counts
    assert merged.errors == whole.errors
    seconds = {s: dict(c) for s, c in whole.seconds.items()}
    for second, counts in seconds.items():
        assert dict(merged.seconds[second]) == pytest.approx(counts)
    busy = sum(c["busy"] for c in whole.seconds.values())
    assert busy == pytest.approx(sum(o.ended - o.sent for o in outcomes))


def test_a_good_request_keeps_every_objective() -> None:
    slo = Slo(ttft_ms=100.0, tpot_ms=20.0)
    assert is_good({"ttft": 0.1, "tpot": 0.02}, slo)
    assert not is_good({"ttft": 0.11, "tpot": 0.02}, slo)
    assert not is_good({"ttft": 0.1, "tpot": 0.021}, slo)
    assert is_good({"ttft": 0.1}, slo)


def test_slowdowns_of_rates_and_times_mean_the_same() -> None:
    assert slowdown(115.0, 100.0, larger_is_better=False) == pytest.approx(0.15)
    assert slowdown(100 / 1.15, 100.0, larger_is_better=True) == pytest.approx(0.15)
    assert slowdown(90.0, 100.0, larger_is_better=False) == pytest.approx(-0.1)


@pytest.mark.parametrize(("runs", "before", "noise"), [(5, 7, 0.02), (3, 5, 0.05), (9, 9, 0.01)])
def test_a_slow_down_of_the_detectable_size_is_found_four_times_in_five(
    runs: int, before: int, noise: float
) -> None:
    """By simulation: the size named for known noise, put into data of that noise, is found by the
    test that the size stands for in about 80 % of draws, and nothing is found in 5 % at most."""
    rng = np.random.default_rng(11)
    named = np.mean([
        detectable(np.exp(rng.normal(0, noise, runs)), np.exp(rng.normal(0, noise, before)))
        for _ in range(400)
    ])  # fmt: skip
    # The part of the size that is the threshold, the other part being the power.
    draws = 4000
    base = np.median(rng.normal(0, noise, (draws, before)), axis=1)
    same = np.median(rng.normal(0, noise, (draws, runs)), axis=1) - base
    threshold = np.quantile(same, 0.95)
    found = np.mean(same + np.log1p(named) > threshold)
    assert 0.75 <= found <= 0.95


def test_no_spread_can_be_told_from_nothing_or_from_one_value() -> None:
    assert detectable([1.0], [1.0]) == float("inf")
    assert detectable([0.0, 1.0, 1.0], [1.0, 1.0]) == float("inf")


def test_equal_repetitions_promise_no_more_than_a_histogram_resolves() -> None:
    assert RELATIVE_ERROR < detectable([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) < 3 * RELATIVE_ERROR


def test_one_wild_repetition_does_not_hide_what_the_medians_show() -> None:
    rng = np.random.default_rng(2)
    calm = np.exp(rng.normal(0, 0.02, 7))
    wild = calm.copy()
    wild[3] *= 1.5
    base = np.exp(rng.normal(0, 0.02, 9))
    assert detectable(wild, base) < 1.5 * detectable(calm, base)
