"""Locust's own command line: distributed, interrupted, a worker killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
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
            assert getattr(percentiles, f"p{p}") == pytest.approx(
                true, rel=RELATIVE_ERROR, abs=1e-3
            )
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
        "--workload", workload("{kind: poisson, rate: 40.0, pool: 16}", "{seconds: 8.0}"),
        "--out", str(tmp_path / "out"), "--raw", str(tmp_path / "raw.jsonl"),
    )  # fmt: skip
    wait_for_lines(tmp_path, 60)
    os.kill(running.workers()[0], signal.SIGKILL)
    code, output = running.finish()
    assert code == 2, output
    found = result(tmp_path)
    assert not found.complete
    assert any("was lost" in reason for reason in found.incomplete_because)
    # The other worker's half of 8 s at 40/s, and something of the lost one's.
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_assay_load_run_keeps_what_was_measured_too(
    paced: str, workload: Callable[..., str], tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "assay_load.cli", "run", workload(stop="{sessions: 100000}"),
         "--url", paced, "--out", str(tmp_path / "out"), "--raw", str(tmp_path / "raw.jsonl")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_for_lines(tmp_path, 40)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    found = result(tmp_path)
    assert not found.complete
    assert found.figures.requests == len([r for r in raw_lines(tmp_path) if r["session"] >= 0]) > 0


def test_the_web_ui_can_start_one_run_after_another(
    locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    running = locust(
        "--web-host", "127.0.0.1", "--web-port", str(port), "--host", paced,
        "--loglevel", "WARNING", "--workload", workload(), "--out", str(tmp_path / "out"),
    )  # fmt: skip
    written = tmp_path / "out" / "result.json"
    started = []
    for _ in range(2):
        form = b"user_count=3&spawn_rate=3"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/swarm", form, 10).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        while not written.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = result(tmp_path)
        assert found.complete
        assert found.figures.requests == 24
        assert found.workload["arrival"]["concurrency"] == 3
        started.append(found.started)
        written.unlink()
        time.sleep(1)  # for the rest of the report
    assert started[1] > started[0]
    running.interrupt()
    running.finish()


def test_steps_run_on_two_workers(
    locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    steps = "{kind: steps, concurrency: [1, 2], seconds: 2.0, settle_seconds: 0.5}"
    code, output = locust(
        *QUIET, "--processes", "2", "--host", paced, "--workload", workload(steps, stop=None),
        "--out", str(tmp_path / "out"),
    ).finish()  # fmt: skip
    assert code == 0, output
    figures = {f.load: f for f in result(tmp_path).stages if f.name == "*"}
    assert set(figures) == {1, 2}
    assert figures[2].output_tokens_per_second > 1.5 * figures[1].output_tokens_per_second
