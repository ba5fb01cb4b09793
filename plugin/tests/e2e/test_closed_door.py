"""Each known fault, served as a user would serve it: the door stays shut, and the start ends with
the reason."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from .server import CHECKPOINT, Server

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.faulty import FAULTS, make_faulty

FAST = ("gate for up",)
"""The one whose answers are all still right: only the distribution is off."""


class Client:
    """Knocks at the door as long as the server is there."""

    def __init__(self, url: str) -> None:
        self.url, self.seen, self.stopped = url, set[int](), threading.Event()
        self.thread = threading.Thread(target=self._knock, daemon=True)
        self.thread.start()

    def _knock(self) -> None:
        while not self.stopped.is_set():
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
                    self.seen.add(answer.status)
            except urllib.error.HTTPError as error:
                self.seen.add(error.code)
            except OSError:
                pass
            time.sleep(0.05)

    def stop(self) -> set[int]:
        self.stopped.set()
        self.thread.join()
        return self.seen


@pytest.mark.serve
@pytest.mark.parametrize(
    "fault", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS]
)
def test_the_door_stays_shut_before_a_fault(fault: str, tmp_path: Path) -> None:
    faulty = make_faulty(CHECKPOINT, tmp_path / "checkpoint", fault)
    server = Server(tmp_path, checkpoint=faulty)
    client = Client(server.url)
    try:
        with pytest.raises(RuntimeError, match="the server exited 1") as ended, server:
            pass
    finally:
        statuses = client.stop()
    assert "suite miniature found the server incoherent" in str(ended.value)
    assert statuses == {503}, "somebody was let in, or the server never came up"
