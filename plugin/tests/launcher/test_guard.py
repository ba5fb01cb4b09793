"""The guard tells the launcher which process is vLLM's first."""

import os
import subprocess
import sys
import time
from pathlib import Path

from assay_kernels.launcher.server import Server
from assay_kernels.launcher.settings import Settings


def test_the_guard_reports_the_process_that_it_started(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    seen = tmp_path / "pid"
    # An orphan that the guard adopts is its child too.
    command = ["sh", "-c", f"(sleep 60 &); echo $$ > {seen}; exec sleep 60"]
    guard = subprocess.Popen(
        [sys.executable, "-m", "assay_kernels.launcher.guard", str(writing), "0", *command],
        stdin=subprocess.PIPE,
        pass_fds=[writing],
    )
    os.close(writing)
    with os.fdopen(reading) as report:
        line = report.readline()
        assert report.read() == "", "the guard keeps the pipe to itself, and closes it"
    while not seen.exists() or not seen.read_text():
        time.sleep(0.02)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(30)
    assert line == seen.read_text()


def test_the_launcher_believes_the_report_only(tmp_path: Path) -> None:
    server = Server(Settings("model", tmp_path / "profile.yaml", state=tmp_path))
    server.report, writing = os.pipe()
    assert server.root() is None
    os.write(writing, b"4711\n")
    os.close(writing)
    assert server.root() == server.root() == 4711
    os.close(server.report)


def test_vllm_is_asked_to_stop_even_when_nobody_is_left_to_ask(tmp_path: Path) -> None:
    started, asked = tmp_path / "started", tmp_path / "asked"
    script = f"trap 'touch {asked}; exit' TERM; touch {started}; while :; do sleep 0.1; done"
    reading, writing = os.pipe()
    command = ["sh", "-c", script]
    guard = subprocess.Popen(
        [sys.executable, "-m", "assay_kernels.launcher.guard", str(writing), "0", *command],
        stdin=subprocess.PIPE,
        pass_fds=[writing],
    )
    while not started.exists():
        time.sleep(0.02)
    guard.kill()  # what the launcher's own kill would tell it, it cannot hear
    guard.wait(30)
    deadline = time.monotonic() + 30
    while not asked.exists():
        assert time.monotonic() < deadline, "nothing asked it to stop"
        time.sleep(0.02)
    os.close(writing)
    os.close(reading)
