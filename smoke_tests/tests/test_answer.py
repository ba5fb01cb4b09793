"""Answers read without trust."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_smoke.client import answer as wire
from assay_smoke.client.answer import Answer
from assay_smoke.client.metrics import Metrics

from .test_sse import ANYTHING


@given(ANYTHING)
def test_any_json_is_survived(body: object) -> None:
    for read in (wire.read_chat, wire.read_completion):
        answer = Answer()
        read(answer, body)
        assert answer.problems or answer.finish_reason is not None


def chat(logprob: object, **more: object) -> Answer:
    answer = Answer()
    token = {"token": "Paris", "logprob": logprob, "top_logprobs": []}
    message = {"content": "Paris"} | more
    choice = {"finish_reason": "stop", "message": message, "logprobs": {"content": [token]}}
    wire.read_chat(answer, {"choices": [choice]})
    return answer


@pytest.mark.parametrize(
    "raw", ["null", "NaN", "-9999.0", "-9999", '"nan"', "Infinity", "-Infinity", "true", "[]",
            "1" + "0" * 400, "0.5"],
)  # fmt: skip
def test_every_form_of_nan_is_seen(raw: str) -> None:
    answer = chat(wire.parse_json(raw))
    assert math.isnan(answer.tokens[0].logprob)
    assert answer.unreal[0].startswith("token 0: ")


@pytest.mark.parametrize("value", [0, -0.0, -1.5, -9998.9, 1e-7])
def test_real_log_probabilities_are_not(value: float) -> None:
    answer = chat(value)
    assert answer.unreal == []
    assert answer.tokens[0].logprob == min(0, value)


def test_an_impossible_rival_is_no_nan() -> None:
    """A rival's -inf stands on the wire as -9999; what was chosen is real."""
    answer = Answer()
    top = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -9999.0}]
    entry = {"token": "a", "logprob": -0.1, "top_logprobs": top}
    wire.read_chat_logprobs(answer, {"content": [entry]})
    assert answer.unreal == []
    assert answer.tokens[0].gap == pytest.approx(9998.9)


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b"\xff", b'{"a": ' * 5000])
def test_what_is_no_json_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the message is Python's own
        wire.parse_json(raw)


@given(st.text())
def test_any_exposition_is_survived(text: str) -> None:
    Metrics.parse(text)


def test_metrics_are_summed_over_engines() -> None:
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 3.0
# TYPE vllm:corrupted_requests counter
vllm:corrupted_requests_total{engine="0"} 1.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{le="+Inf"} 7
vllm:iteration_tokens_total_count 7
vllm:iteration_tokens_total_sum 90
"""
    metrics = Metrics.parse(text)
    assert (metrics.running, metrics.corrupted, metrics.iterations) == (5, 1, 7)
    assert metrics.waiting is None
