"""The canary as it runs: against a fault server, with a door of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Watching:
    """`assay-smoke watch`, quick and on a free port."""

    def __init__(self, folder: Path, url: str, *arguments: str, **variables: str) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(exist_ok=True)
        self.log = folder / "watch.log"
        command = [
            sys.executable, "-m", "assay_smoke", "watch", "--url", url, "--door", str(self.run_dir),
            "--listen", "127.0.0.1:0", "--interval", "0.3", "--retry", "0.2",
            "--stalled-after", "5",
            "--tokens-per-hour", "1000000", *arguments,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=os.environ | variables)
        self.url = self._address()

    def _address(self) -> str:
        for _ in range(200):
            if found := re.search(r"on (http://[\d.:]+)", self.log.read_text()):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError("it never listened")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert found, name
        return float(found[1])

    @property
    def open(self) -> bool:
        return (self.run_dir / "open").exists()

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 150) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"{what} never came:\n{self.log.read_text()}"
            time.sleep(0.05)


@pytest.fixture
def watch(tmp_path: Path, recorded: Path) -> Iterator[Callable[..., Watching]]:
    started: list[Watching] = []

    def start(url: str, *arguments: str, **variables: str) -> Watching:
        arguments = ("--reference", str(recorded), *arguments)
        started.append(Watching(tmp_path, url, *arguments, **variables))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_a_sound_server_s_door_is_opened_and_told_of(broken: Any, watch: Any) -> None:
    canary = watch(broken().url)
    canary.until(lambda: canary.open, "the door")
    canary.until(lambda: canary.get("/readyz")[0] == 200, "readiness")
    assert canary.get("/healthz")[0] == 200
    canary.until(lambda: canary.metric('assay_smoke_state{state="ready"}') == 1, "the state")
    canary.until(
        lambda: 'tier="probe",verdict="pass"' in canary.get("/metrics")[1], "a probe that passed"
    )
    assert canary.metric("assay_smoke_door_open") == 1
    assert canary.metric('assay_smoke_check_success{check="known-answers"}') == 1
    assert canary.metric("assay_smoke_last_good_age_seconds") < 30
    assert 0 <= canary.metric("assay_smoke_kl_mean_nats") < 0.02
    assert canary.metric('assay_smoke_tokens_total{kind="generated"}') > 0


def test_an_incoherent_server_s_door_stays_shut(broken: Any, watch: Any) -> None:
    canary = watch(broken("garbage", rate=1.0).url)
    canary.until(lambda: "incoherent" in canary.get("/readyz")[1], "the verdict")
    time.sleep(1)
    assert not canary.open
    assert canary.get("/readyz")[0] == 503
    assert canary.get("/healthz")[0] == 200, "the canary itself is well"


def test_a_server_that_goes_bad_is_shut_off_and_let_in_again(broken: Any, watch: Any) -> None:
    server = broken()
    canary = watch(server.url)
    canary.until(lambda: canary.open, "the door")
    good, server.server.mode = server.server.mode, broken("garbage", rate=1.0).mode
    canary.until(lambda: not canary.open, "a shut door")
    assert canary.get("/readyz")[0] == 503
    server.server.mode = good
    canary.until(lambda: canary.open and canary.get("/readyz")[0] == 200, "recovery")


def test_what_only_a_probe_sees_keeps_the_door_shut_too(broken: Any, watch: Any) -> None:
    """The ready tier has no reference to compare with: alone it would open and shut for ever."""
    canary = watch(broken("drift", nats=3.0).url)
    canary.until(lambda: canary.metric('assay_smoke_state{state="incoherent"}') == 1, "the verdict")
    opened = 0
    for _ in range(40):
        opened += canary.open
        time.sleep(0.1)
    assert opened == 0


def test_by_choice_it_never_shuts(broken: Any, watch: Any) -> None:
    server = broken()
    canary = watch(server.url, "--never-close")
    canary.until(lambda: canary.open, "the door")
    server.server.mode = broken("garbage", rate=1.0).mode
    canary.until(lambda: canary.get("/readyz")[0] == 503, "the verdict")
    assert canary.open


def test_an_outage_is_no_incoherence_and_leaves_the_door_alone(broken: Any, watch: Any) -> None:
    server = broken()
    canary = watch(server.url)
    canary.until(lambda: canary.open and canary.get("/readyz")[0] == 200, "the door")
    server.__exit__()
    canary.until(lambda: "unreachable" in canary.get("/readyz")[1], "the outage")
    assert canary.open
    assert canary.metric("assay_smoke_server_up") == 0
    server.__exit__ = lambda *_: None


def test_a_new_server_process_has_to_prove_itself(broken: Any, watch: Any) -> None:
    server = broken()
    canary = watch(server.url)
    canary.until(lambda: canary.open and canary.get("/readyz")[0] == 200, "the door")
    # What the launcher does at its start, and a start time as of another process.
    (canary.run_dir / "open").unlink()
    server.server.started += 100
    server.server.mode = broken("empty", rate=1.0).mode
    canary.until(lambda: "incoherent" in canary.get("/readyz")[1], "the verdict")
    assert not canary.open


def test_a_stalled_engine_is_told_from_a_busy_one(broken: Any, watch: Any) -> None:
    server = broken("slow", seconds=1000)
    server.server.flying = 3
    canary = watch(server.url, "--stalled-after", "1")
    canary.until(lambda: canary.metric('assay_smoke_engine{pulse="busy"}') == 1, "busy")
    canary.until(lambda: canary.metric('assay_smoke_engine{pulse="stalled"}') == 1, "stalled")


@pytest.mark.parametrize("mode", ["good", "hanging"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_within_two_seconds(broken: Any, watch: Any, mode: str, number: int) -> None:
    params = {} if mode == "good" else {"rate": 1.0}
    canary = watch(broken(mode, **params).url)
    time.sleep(1.0)
    canary.process.send_signal(number)
    assert canary.process.wait(2.0) == 0
    assert "Traceback" not in canary.log.read_text()


def test_a_killed_canary_leaves_the_door_as_it_is(broken: Any, watch: Any) -> None:
    canary = watch(broken().url)
    canary.until(lambda: canary.open, "the door")
    canary.process.kill()
    canary.process.wait()
    assert canary.open


def test_without_tokens_it_probes_no_more(broken: Any, watch: Any) -> None:
    canary = watch(broken().url, "--tokens-per-hour", "400")
    canary.until(lambda: canary.metric("assay_smoke_probes_skipped_total") > 3, "a skipped probe")
    assert canary.get("/readyz")[0] == 200


def test_keys_stay_out_of_its_log_and_arguments(broken: Any, watch: Any) -> None:
    canary = watch(broken().url, ASSAY_BYPASS_KEY="door-secret", ASSAY_API_KEY="sk-secret")
    canary.until(lambda: canary.open, "the door")
    arguments = Path(f"/proc/{canary.process.pid}/cmdline").read_bytes().decode()
    assert "secret" not in canary.log.read_text() + arguments + json.dumps(canary.get("/metrics"))


def test_a_taken_address_is_one_line(broken: Any, watch: Any, smoke: Any) -> None:
    canary = watch(broken().url)
    address = canary.url.removeprefix("http://")
    done = smoke("watch", "--url", broken().url, "--listen", address)
    assert done.returncode == 2
    assert done.stderr.startswith(f"assay-smoke: --listen {address}: Address already in use")
