"""The canary's parts: what a row of probes means, and whether the engine is dead or busy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_smoke import suite
from assay_smoke.battery import Plan, Report, Result
from assay_smoke.checks import Outcome
from assay_smoke.client import Metrics
from assay_smoke.watch.canary import Budget, Canary, Settings
from assay_smoke.watch.heartbeat import Heartbeat
from assay_smoke.watch.policy import Hysteresis, Policy

VERDICTS = {"p": "pass", "f": "fail", "e": "error"}


def states(row: str, **policy: Any) -> str:
    """First letters of the states after each verdict of a row like 'ppfe'."""
    hysteresis = Hysteresis(Policy(**policy))
    return "".join(hysteresis.note(VERDICTS[v])[0] for v in row)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("p", "r"),
        ("eee", "sss"),  # never opened: still starting, whatever does not answer
        ("fpp", "iir"),  # incoherent at the start: two passes open it
        ("pffp", "rrrr"),  # two bad probes are a blip
        ("pfffpp", "rrriir"),
        ("pffeeef", "rrrrrui"),  # an outage neither adds to a row of failures nor breaks it
        ("peeepp", "rrruur"),
        ("peep", "rrrr"),
        ("pfffpfpp", "rrriiiir"),
        ("pfffeeepp", "rrriiiiir"),  # an outage does not forgive
    ],
)
def test_one_blip_changes_nothing(row: str, expected: str) -> None:
    assert states(row) == expected


@given(st.text("pfe", max_size=40))
def test_ready_needs_a_pass_and_outages_never_make_incoherent(row: str) -> None:
    hysteresis = Hysteresis(Policy())
    for index, verdict in enumerate(row):
        before = hysteresis.state
        after = hysteresis.note(VERDICTS[verdict])  # type: ignore[arg-type]
        if after == "ready" and before != "ready":
            assert verdict == "p"
        if after == "incoherent" and before != "incoherent":
            assert verdict == "f", row[: index + 1]


def test_another_server_proves_itself_anew() -> None:
    hysteresis = Hysteresis(Policy())
    hysteresis.note("pass")
    hysteresis.restart()
    assert not hysteresis.ready
    assert hysteresis.needs_ready_tier


def engine(iterations: float, running: float, started: float = 1.0) -> Metrics:
    return Metrics(
        {
            "vllm:iteration_tokens_total_count": iterations,
            "vllm:num_requests_running": running,
            "process_start_time_seconds": started,
        }
    )


def test_busy_and_dead_are_told_apart() -> None:
    heart = Heartbeat(stalled_after=60)
    assert heart.note(None, 0) == "unknown"
    assert heart.note(engine(5, 0), 0) == "idle"
    assert heart.note(engine(5, 0), 1000) == "idle", "nothing runs, so nothing need move"
    assert heart.note(engine(5, 2), 1010) == "busy", "the request may have come a moment ago"
    assert heart.note(engine(5, 2), 1060) == "busy", "a long prefill is one step"
    assert heart.note(engine(5, 2), 1071) == "stalled"
    assert heart.note(engine(6, 2), 1080) == "busy"
    assert heart.note(engine(0, 1, started=9.0), 1081) == "busy", "another process"
    assert heart.note(Metrics({}), 1082) == "unknown"


def test_probes_keep_to_their_tokens() -> None:
    budget, now, spent = Budget(3600, 0.0), 0.0, 0
    while now < 8 * 3600:
        if budget.allows(now):
            budget.spend(200)
            spent += 200
        now += 7
    assert spent / 8 <= 3600 * 1.1
    assert spent / 8 >= 3600 * 0.9


@pytest.mark.parametrize("field", ["fail_after", "recover_after", "outage_after"])
def test_a_policy_of_no_probes_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Policy(**{field: 0})


def test_a_server_that_keeps_failing_is_asked_less_and_less_often() -> None:
    canary = Canary(Settings(Plan(suite.load("miniature"), "probe", "http://127.0.0.1:9")))

    def pauses(verdict: str, count: int) -> list[float]:
        report = Report("s", "ready", "u", 1)
        outcome = Outcome(verdict, "")  # type: ignore[arg-type]
        report.results = [Result("c", outcome, 0.0)]
        found = []
        for _ in range(count):
            canary.hysteresis.note(report.verdict)
            found.append(canary.pause(report))
        return found

    assert pauses("pass", 2) == [60, 60]
    assert pauses("fail", 8) == [10, 10, 10, 20, 40, 60, 60, 60]
    assert pauses("error", 2) == [10, 10], "nobody answers: looking costs nothing"
    assert pauses("pass", 2) == [10, 60]
