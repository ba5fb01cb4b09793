"""Servers to ask: the fault server in a process of its own, or whatever bytes a test wants sent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from assay_smoke import detection, reference, suite
from assay_smoke.faults import modes
from assay_smoke.faults.server import FaultServer, Running


class Background:
    """An event loop of its own in a thread, with a fault server in it."""

    def __init__(self, mode: str, seed: int = 7, **params: Any) -> None:
        self.mode = modes.build(mode, params, seed)
        self.server = FaultServer(suite.load("miniature"), self.mode)
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Running(self.server) as self.url:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture
def broken() -> Iterator[Callable[..., Background]]:
    """`broken("mode", param=value)` -> a running fault server."""
    running: list[Background] = []

    def start(mode: str = "good", **params: Any) -> Background:
        running.append(Background(mode, **params).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reference log-probabilities of the good fault server."""
    path = tmp_path_factory.mktemp("reference") / "good.json.gz"
    asyncio.run(detection.record_good("miniature", path))
    assert reference.read(path, suite.load("miniature")).texts
    return path


@pytest.fixture
def smoke() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`smoke("run", "--url", ...)` -> the finished command, as a user runs it."""

    def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "assay_smoke", *map(str, arguments)]
        values = {"capture_output": True, "text": True, "timeout": 300} | more
        return subprocess.run(command, **values)

    return run
