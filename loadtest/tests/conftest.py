"""Servers and workloads for the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("assay", deadline=None)
hypothesis.settings.load_profile("assay")

LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"


@dataclass
class Tool:
    """A running test tool of the package."""

    process: subprocess.Popen[str]
    url: str

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(90)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[str], seconds: float = 60) -> None:
    import urllib.request

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended {process.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Tool]]:
    """`start_server(lambda port: [command, ..])` -> the server, once it answers `/v1/models`."""
    tools: list[Tool] = []

    def start(command: Callable[[int], list[str]], seconds: float = 60) -> Tool:
        port = free_port()
        process = subprocess.Popen(
            command(port), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        tool = Tool(process, f"http://127.0.0.1:{port}")
        tools.append(tool)
        wait_for(f"{tool.url}/v1/models", process, seconds)
        return tool

    yield start
    for tool in reversed(tools):
        tool.stop()


@pytest.fixture(scope="session")
def start_tool(start_server: Callable[..., Tool]) -> Callable[..., Tool]:
    """`start_tool("paced", "--rate", "100")` -> a running server; `module` for another program."""

    def start(command: str, *arguments: str, module: str = "assay_load.cli") -> Tool:
        begin = [sys.executable, "-m", module, command]
        return start_server(lambda port: [*begin, "--port", str(port), *arguments])

    return start


@pytest.fixture(scope="session")
def paced(start_tool: Callable[..., Tool]) -> str:
    """URL of a quick server with a steady pace."""
    return start_tool("paced", "--ttft", "0.02", "--rate", "500").url


@pytest.fixture
def workload(tmp_path: Path) -> Callable[..., str]:
    """`workload(arrival=.., stop=..)` -> path of a workload with short requests."""

    def write(
        arrival: str = "{kind: closed-loop, concurrency: 4}",
        stop: str | None = "{sessions: 24}",
        output: str = "{kind: uniform, min: 4, max: 20}",
        more: str = "",
    ) -> str:
        path = tmp_path / "short.yaml"
        path.write_text(
            textwrap.dedent(f"""\
            name: short
            about: Short requests for a test.
            arrival: {arrival}
            {f"stop: {stop}" if stop else ""}
            warmup: {{sessions: 4}}
            classes:
              - name: short
                input: {{kind: uniform, min: 8, max: 64}}
                output: {output}
            """)
            + textwrap.dedent(more)
        )
        return str(path)

    return write


@dataclass
class Locust:
    """`locust` on the locustfile, in a process group of its own."""

    process: subprocess.Popen[str]

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal: every process of the group gets it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def workers(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def finish(self, seconds: float = 120) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            output, _ = self.process.communicate()
            raise AssertionError(f"locust did not end:\n{output[-3000:]}") from None
        return self.process.returncode, re.sub(r"\x1b\[[0-9;]*m", "", output)


@pytest.fixture
def locust() -> Iterator[Callable[..., Locust]]:
    """`locust("--headless", ..)` -> a running Locust."""
    running: list[Locust] = []

    def start(*arguments: str) -> Locust:
        process = subprocess.Popen(
            [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
            # A job in the background of a shell script ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        running.append(Locust(process))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.communicate()
