"""Workloads: strict files, distributions that are what they say, plans that any number of workers
share."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from assay_load.errors import InputError
from assay_load.workload import corpus
from assay_load.workload.plan import Calibration, Plan, draw, due_times
from assay_load.workload.schema import (
    Bursty,
    Choice,
    LogNormal,
    Poisson,
    Ramp,
    Uniform,
    Workload,
    load,
    shipped,
)

CALIBRATION = Calibration(4.0)
VALID: dict[str, Any] = {
    "name": "mine",
    "about": "x",
    "arrival": {"kind": "closed-loop", "concurrency": 2},
    "stop": {"sessions": 4},
    "classes": [
        {
            "name": "a",
            "input": {"kind": "constant", "tokens": 10},
            "output": {"kind": "constant", "tokens": 10},
        }
    ],
}


def write(folder: Path, change: dict[str, Any]) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(VALID | change))
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_workload_fits_both_scales(name: str) -> None:
    assert load(name).name == name
    small = load(name, "miniature")
    # The miniature was trained on 4,096 positions.
    assert small.context == 4096
    assert small.corpus == "miniature"


def test_the_shipped_ones_are_those_that_were_promised() -> None:
    assert set(shipped()) >= {
        "chat", "rag-8k-1k", "decode-heavy-1k-8k", "long-context", "agentic-tools",
        "shared-prefix", "mixed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "colour: unknown key"),
        ({"arrival": {"kind": "closed-loop", "concurrency": 0}}, "concurrency"),
        ({"arrival": {"kind": "closed-loop", "concurrency": "2"}}, "valid integer"),
        ({"arrival": {"kind": "trickle"}}, "trickle"),
        ({"stop": {"sessions": 1, "seconds": 1.0}}, "exactly one of sessions and seconds"),
        ({"stop": None}, "stop: is missing"),
        ({"stream": False}, "stream"),
        ({"context": 20}, "context is 20"),
        ({"classes": []}, "classes"),
        ({"classes": VALID["classes"] * 2}, "same name"),
        ({"arrival": {"kind": "ramp", "start_rate": 1.0, "end_rate": 2.0}}, "a ramp needs seconds"),
        ({"arrival": {"kind": "steps", "concurrency": [2, 1], "seconds": 2.0}}, "larger than"),
        ({"name": "other"}, "name: must be the file's"),
        ({"scales": {"small": {"lengths": 0}}}, "scales.small.lengths"),
        ({"scales": {"small": {"lengths": 1000.0, "context": 50}}}, "scaled by small"),
        ({"abort": {"failed_share": 2.0}}, "failed_share"),
    ],
)
def test_a_wrong_file_is_one_error_that_names_the_key(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(write(tmp_path, change))
    assert said in str(caught.value)
    assert "mine" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(VALID) + "seed: 1\nseed: 2\n")
    with pytest.raises(InputError, match="twice"):
        load(str(path))


@pytest.mark.parametrize("content", ["- a\n", "{", "a: [", "\x00", "name: !!python/none x"])
def test_what_is_no_workload_at_all_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(InputError):
        load(str(path))


def test_lengths_follow_their_distributions() -> None:
    rng = random.Random(1)
    uniform = [draw(Uniform(kind="uniform", min=5, max=9), rng) for _ in range(2000)]
    assert set(uniform) == {5, 6, 7, 8, 9}
    wide = LogNormal(kind="lognormal", median=1000, sigma=0.5, min=1, max=10**9)
    logs = np.log([draw(wide, rng) for _ in range(4000)])
    assert np.median(logs) == pytest.approx(math.log(1000), abs=0.04)
    assert logs.std() == pytest.approx(0.5, abs=0.03)
    clipped = LogNormal(kind="lognormal", median=100, sigma=2.0, min=50, max=200)
    assert {min(d, 200) for d in (draw(clipped, rng) for _ in range(500))} <= set(range(50, 201))
    choice = Choice(kind="choice", tokens=[1, 2], weights=[3.0, 1.0])
    share = sum(draw(choice, rng) == 1 for _ in range(4000)) / 4000
    assert share == pytest.approx(0.75, abs=0.03)


def gaps(arrival: Any, count: int = 4000) -> np.ndarray:
    due = due_times(arrival, 1, None)
    assert due is not None
    return np.diff([0.0, *itertools.islice(due, count)])


def test_open_arrivals_have_the_rate_and_burstiness_asked_for() -> None:
    poisson = gaps(Poisson(kind="poisson", rate=5.0))
    assert poisson.mean() == pytest.approx(0.2, rel=0.06)
    assert poisson.std() / poisson.mean() == pytest.approx(1.0, rel=0.08)
    # Gamma gaps of shape k vary by 1 / sqrt(k).
    bursty = gaps(Bursty(kind="bursty", rate=5.0, burstiness=0.25))
    assert bursty.mean() == pytest.approx(0.2, rel=0.12)
    assert bursty.std() / bursty.mean() == pytest.approx(2.0, rel=0.12)


def test_a_ramp_goes_up_in_a_straight_line() -> None:
    ramp = Ramp(kind="ramp", start_rate=10.0, end_rate=30.0)
    due = list(due_times(ramp, 1, 100.0) or [])
    assert max(due) < 100
    assert len(due) == pytest.approx(2000, rel=0.08)
    early = sum(t < 50 for t in due)
    assert early / len(due) == pytest.approx(1500 / 4000, abs=0.04)


@pytest.mark.parametrize("name", shipped())
def test_plans_depend_on_seeds_alone_and_fit_the_context(name: str) -> None:
    workload = load(name, "miniature")
    text = corpus.load(workload.corpus)
    plan, same = (Plan(workload, text, CALIBRATION, "n") for _ in range(2))
    other = Plan(workload, text, CALIBRATION, "m")
    for index in range(-1, 12):
        session = plan.session(index)
        assert session == same.session(index)
        again = other.session(index)
        assert [r.output_tokens for r in again.requests] == [
            r.output_tokens for r in session.requests
        ]
        # Another nonce, other text from the first characters on: no cache of an earlier run helps.
        assert again.requests[0].messages[0] != session.requests[0].messages[0]
        assert len(session.requests) == session.kind.turns
        for request in session.requests:
            characters = sum(len(str(m.get("content"))) for m in request.messages)
            assert characters / 4.0 + request.output_tokens <= workload.context


def test_a_turn_begins_with_all_that_went_before() -> None:
    workload = load("agentic-tools", "miniature")
    session = Plan(workload, corpus.load("miniature"), CALIBRATION, "n").session(0)
    for before, after in itertools.pairwise(session.requests):
        assert after.messages[: len(before.messages)] == before.messages
    assert session.requests[1].messages[-1]["role"] == "tool"
    assert session.requests[0].tools


def test_shared_prefixes_are_shared_by_group_and_nothing_else_is() -> None:
    workload = load("shared-prefix", "miniature")
    plan = Plan(workload, corpus.load("miniature"), CALIBRATION, "n")
    systems = [plan.session(i).requests[0].messages[0]["content"] for i in range(16)]
    assert systems[0] == systems[8]
    assert len(set(systems)) == 8
    assert len({s[:12] for s in systems}) == 8


def test_workers_share_a_plan_without_gap_or_overlap() -> None:
    workload = Workload.model_validate(VALID | {"warmup": {"sessions": 2}})
    plan = Plan(workload, corpus.load("miniature"), CALIBRATION, "n")
    shares = [list(itertools.islice(plan.indices(), k, None, 3)) for k in range(3)]
    assert sorted(itertools.chain(*shares)) == [-2, -1, 0, 1, 2, 3]


def test_the_corpora_are_text_and_a_users_own_file_will_do(tmp_path: Path) -> None:
    assert len(corpus.load("python-reference").text) > 300_000
    assert len(corpus.load("miniature").questions) > 100
    path = tmp_path / "mine.txt"
    path.write_text("Some words of text. " * 2000 + "\n\n? What is it?\n")
    own = corpus.load(str(path))
    assert own.questions == ["What is it?"]
    assert abs(len(own.cut(39_990, 1000)) - 1000) < 30
    path.write_text("short")
    corpus.load.cache_clear()
    with pytest.raises(InputError, match="at least"):
        corpus.load(str(path))
    with pytest.raises(InputError, match="no-such-file"):
        corpus.load("no-such-file")
