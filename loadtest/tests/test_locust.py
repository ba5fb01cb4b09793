"""Locust's own command line: distributed, interrupted, a worker killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay_load.measure.histogram import RELATIVE_ERROR
from assay_load.report.result import RunResult, read

QUIET = ("--headless", "--only-summary", "--loglevel", "WARNING")


def raw_lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("raw*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def result(folder: Path) -> RunResult:
    return read(folder / "out" / "result.json")


def test_merged_percentiles_of_two_workers_are_those_of_the_pooled_raw_data(
    locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    code, output = locust(
        *QUIET, "--processes", "2", "--host", paced, "--workload", workload(stop="{sessions: 120}"),
        "--out", str(tmp_path / "out"), "--raw", str(tmp_path / "raw.jsonl"),
    ).finish()  # fmt: skip
    assert code == 0, output
    found = result(tmp_path)
    assert found.complete
    assert found.client.workers == 2
    assert len(list(tmp_path.glob("raw*.jsonl"))) == 2
    lines = [line for line in raw_lines(tmp_path) if line["session"] >= 0]
    assert sorted(line["session"] for line in lines) == list(range(120))
    pooled = {
        "ttft": [line["first"] - line["due"] for line in lines],
        "e2e": [line["ended"] - line["due"] for line in lines],
        "itl": [gap for line in lines for gap in line["gaps"]],
        "tpot": [sum(line["gaps"]) / (line["completion_tokens"] - 1) for line in lines],
    }
    for metric, seconds in pooled.items():
        percentiles = found.figures.metrics[metric]
        milliseconds = np.array(seconds) * 1000
        assert percentiles.count == len(milliseconds)
        for p in (50, 90, 95, 99):
            true = float(np.percentile(milliseconds, p, method="inverted_cdf"))
            assert getattr(percentiles, f"p{p}") == pytest.approx(true, rel=RELATIVE_ERROR, abs=1e-3)
        assert percentiles.mean == pytest.approx(milliseconds.mean(), rel=1e-3, abs=1e-3)
    assert found.figures.completion_tokens == sum(line["completion_tokens"] for line in lines)


def wait_for_lines(folder: Path, count: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        files = list(folder.glob("raw*.jsonl"))
        if sum(len(f.read_text().splitlines()) for f in files) >= count:
            return
        time.sleep(0.1)
    raise AssertionError("nothing was measured")


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_keeps_what_was_measured_and_marks_it_incomplete(
    locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path, processes: int
) -> None:
    running = locust(
        *QUIET, "--host", paced, "--workload", workload(stop="{sessions: 100000}"),
        "--out", str(tmp_path / "out"), "--raw", str(tmp_path / "raw.jsonl"),
        *(["--processes", str(processes)] if processes > 1 else []),
    )  # fmt: skip
    # The raw log is buffered, so this many lines on disk are far fewer than were measured.
    wait_for_lines(tmp_path, 40 * processes)
    running.interrupt()
    code, output = running.finish()
    assert code == 2, output
    found = result(tmp_path)
    assert not found.complete
    assert found.incomplete_because == ["it was stopped before its plan was done"]
    assert "Incomplete" in output
    measured = [line for line in raw_lines(tmp_path) if line["session"] >= 0]
    assert found.figures.requests == len(measured) > 0
    assert found.failed == 0
    assert found.figures.interrupted <= 4


def test_a_killed_worker_costs_only_what_it_had_not_reported(
    locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    running = locust(
        *QUIET, "--processes", "2", "--host", paced,
        "--workload", workload(arrival="{kind: poisson, rate: 40.0, pool: 16}", stop="{seconds: 12.0}"),
        "--out", str(tmp_path / "out"), "--raw", str(tmp_path / "raw.jsonl"),
    )  # fmt: skip
    wait_for_lines(tmp_path, 60)
    os.kill(running.workers()[0], signal.SIGKILL)
    code, output = running.finish()
    assert code == 2, output
    found = result(tmp_path)
    assert not found.complete
    assert any("was lost" in reason for reason in found.incomplete_because)
    # The other worker's half of 12 s at 40/s, and something of the lost one's.
    assert found.figures.requests > 60


def test_failed_requests_make_exit_code_1(
    locust: Any, start_tool: Any, paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    proxy = start_tool("faulty", "--upstream", paced, "--drop-every", "10")
    code, output = locust(
        *QUIET, "--host", proxy.url, "--workload", workload(output="{kind: constant, tokens: 30}"),
        "--out", str(tmp_path / "out"),
    ).finish()  # fmt: skip
    assert code == 1, output
    found = result(tmp_path)
    assert found.complete
    assert set(found.errors) == {"connection_closed"}
    assert found.figures.requests + found.figures.failed == 24


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "no-such"], "no workload 'no-such'"),
        (["--workload", "chat", "--scale", "huge"], "no scale 'huge'"),
        (["--workload", "chat", "--model", "other"], "not other"),
    ],
)
def test_what_cannot_run_says_why_and_exits_2(
    locust: Any, paced: str, arguments: list[str], said: str
) -> None:
    code, output = locust(*QUIET, "--host", paced, *arguments).finish()
    assert code == 2, output
    assert said in output


def test_users_and_run_time_of_the_command_line_win(
    locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    code, output = locust(
        *QUIET, "--host", paced, "--workload", workload(), "-u", "2", "-t", "2s",
        "--out", str(tmp_path / "out"),
    ).finish()  # fmt: skip
    assert code == 0, output
    found = result(tmp_path)
    assert found.workload["arrival"]["concurrency"] == 2
    assert found.workload["stop"] == {"seconds": 2.0}
    assert found.complete
