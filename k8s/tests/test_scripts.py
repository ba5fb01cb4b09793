"""The scripts that the chart mounts, run for real with stand-ins for the programs that they
start."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chart import CHART

FILES = CHART / "files"


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def until(what: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder.parent)}


# --- wait_for_weights.sh
# -----------------------------------------------------------------------------


def test_a_server_waits_for_the_mark_and_no_longer_than_told(tmp_path: Path) -> None:
    command = ["sh", str(FILES / "wait_for_weights.sh"), str(tmp_path)]
    done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "is not complete after 0 s; see the weights Job" in done.stderr
    (tmp_path / "assay-download.json").touch()
    assert subprocess.run([*command, "0"], timeout=30).returncode == 0


def test_waiting_ends_at_once_when_the_pod_does(tmp_path: Path) -> None:
    waiting = subprocess.Popen(["sh", str(FILES / "wait_for_weights.sh"), str(tmp_path), "600"])
    time.sleep(0.5)
    waiting.terminate()
    assert waiting.wait(timeout=10) == 143


# --- canary.sh
# ---------------------------------------------------------------------------------------

# Writes what it was told, and ends at SIGTERM.
WATCH = """echo "$@" >> "$OUT/watch"
trap "echo ended >> $OUT/watch; exit 0" TERM
while :; do sleep 0.1; done"""


def started(tmp_path: Path) -> list[str]:
    file = tmp_path / "watch"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def canary(path: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    program(path, "assay-smoke", WATCH)
    key = tmp_path / "bypass.key"
    process = subprocess.Popen(
        ["sh", str(FILES / "canary.sh"), str(key), "--url=http://x", "--suite=miniature"],
        env=environment(path), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_canary_waits_for_the_key_and_is_told_where_it_is(
    canary: subprocess.Popen, tmp_path: Path
) -> None:
    time.sleep(1.5)
    assert started(tmp_path) == []
    (tmp_path / "bypass.key").write_text("one\n")
    until(lambda: len(started(tmp_path)) == 1)
    assert (
        started(tmp_path)[0]
        == f"watch --url=http://x --suite=miniature --bypass-key-file {tmp_path}/bypass.key"
    )


def test_a_new_key_of_a_restarted_server_makes_a_new_canary(
    canary: subprocess.Popen, tmp_path: Path
) -> None:
    (tmp_path / "bypass.key").write_text("one\n")
    until(lambda: len(started(tmp_path)) == 1)
    (tmp_path / "bypass.key").write_text("two\n")
    until(lambda: len([s for s in started(tmp_path) if s.startswith("watch")]) == 2)
    assert "ended" in started(tmp_path)
    assert canary.poll() is None


def test_a_canary_that_dies_comes_again_and_the_container_stays(
    path: Path, canary: subprocess.Popen, tmp_path: Path
) -> None:
    program(path, "assay-smoke", 'echo watch >> "$OUT/watch"; exit 7')
    (tmp_path / "bypass.key").write_text("one\n")
    until(lambda: len(started(tmp_path)) >= 2)
    assert canary.poll() is None


def test_sigterm_ends_canary_and_container(canary: subprocess.Popen, tmp_path: Path) -> None:
    (tmp_path / "bypass.key").write_text("one\n")
    until(lambda: len(started(tmp_path)) == 1)
    began = time.monotonic()
    canary.terminate()
    assert canary.wait(timeout=15) == 0
    assert "ended" in started(tmp_path)
    assert time.monotonic() - began < 15


# --- ready.py
# ----------------------------------------------------------------------------------------


def ready(sign: Path, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FILES / "ready.py"), str(sign), url],
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture
def readyz() -> Iterator[tuple[str, list[int]]]:
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"ready": false, "reason": "unreachable: nothing came"}'
            self.send_response(status[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/readyz", status
    server.shutdown()
    server.server_close()


def test_a_shut_door_is_not_ready_whatever_the_canary_says(
    tmp_path: Path, readyz: tuple[str, list[int]]
) -> None:
    done = ready(tmp_path / "open", readyz[0])
    assert done.returncode == 1
    assert "the door is shut" in done.stderr


def test_an_open_door_is_ready_unless_the_canary_says_no(
    tmp_path: Path, readyz: tuple[str, list[int]]
) -> None:
    (tmp_path / "open").touch()
    assert ready(tmp_path / "open", readyz[0]).returncode == 0
    readyz[1][0] = 503
    done = ready(tmp_path / "open", readyz[0])
    assert done.returncode == 1
    assert "unreachable: nothing came" in done.stderr


def test_a_dead_canary_has_no_say(tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    assert ready(tmp_path / "open", "http://127.0.0.1:9/readyz").returncode == 0
