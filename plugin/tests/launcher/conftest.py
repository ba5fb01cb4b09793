"""A launcher to try, and a way to see everything that it started."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay_kernels.launcher import procfs

DRIVE = Path(__file__).with_name("drive.py")
PROFILE = "served-model-name: fake\nshutdown-timeout: 0\n"
SUITE = """
name: fake
about: one question, for a fake
scripts: [Latin]
margin: 1
questions: questions.jsonl
passages: passages.jsonl
needle: {fact: "{name} has {code}.", question: "What has {name}?", names: [A], filler: [So it is.]}
long: {prompts: [Tell.]}
tiers:
  ready:
    tokens: 1000
    deadline: 90
    checks:
      known-answers: {unacceptable: 0.99}
      nan-logprobs: {unacceptable: 0.99}
      empty-content: {unacceptable: 0.99}
      well-formed: {unacceptable: 0.99}
"""
QUESTION = {
    "id": "one", "category": "fact", "kind": "word", "expected": "Paris",
    "messages": [{"role": "user", "content": "Which city?"}],
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Launch:
    """One run of the launcher as a person starts it; its processes are known by their folder."""

    def __init__(self, folder: Path, command: list[str], port: int, **variables: str) -> None:
        self.port = port
        self.folder = folder
        self.output = folder / f"output-{port}.txt"
        env = {**os.environ, **variables}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, f"ended early:\n{self.text}"
            assert time.monotonic() < deadline, f"{words!r} never came:\n{self.text}"
            time.sleep(0.05)

    def ends(self, seconds: float = 60) -> int:
        """Exit code, once it has ended."""
        return self.process.wait(seconds)

    def running(self) -> dict[int, str]:
        """pid -> title of everything alive that this run started, wherever it hangs now."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or procfs.start_ticks(int(entry)) is None:
                continue
            try:
                folder = os.readlink(f"/proc/{entry}/cwd")
            except OSError:
                continue
            if folder == str(self.folder):
                found[int(entry)] = procfs.title(int(entry))
        return found

    def pid_of(self, words: str) -> int:
        return next(
            pid
            for pid, title in self.running().items()
            if words in title and ("guard" in words or "launcher.guard" not in title)
        )

    def vanishes(self, seconds: float = 30) -> dict[int, str]:
        """What is still running after at most so many seconds: nothing, one hopes."""
        deadline = time.monotonic() + seconds
        while (left := self.running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def status(self, path: str) -> tuple[int, dict[str, str]]:
        """HTTP status and headers for a client without the key; 0 when nobody listens."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=10
            ) as answer:
                return answer.status, dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers)
        except OSError:
            return 0, {}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        procfs.signal_all(list(self.running()), signal.SIGKILL)


class Launches:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Launch] = []
        self.profile = folder / "profile.yaml"
        self.profile.write_text(PROFILE)
        self.suite = folder / "suite.yaml"
        self.suite.write_text(SUITE)
        (folder / "questions.jsonl").write_text(json.dumps(QUESTION))
        (folder / "passages.jsonl").write_text('{"name": "one", "text": "So it is."}')
        self.model = folder / "model"
        self.model.mkdir()
        config = {"quantization_config": {"quant_method": "modelopt"}}
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "tokenizer.json").write_text("{}")

    def __call__(self, *arguments: str, port: int | None = None, **variables: str) -> Launch:
        port = free_port() if port is None else port
        command = [sys.executable, str(DRIVE), "serve", str(self.model), "--config"]
        command += [str(self.profile), "--port", str(port), *arguments]
        variables = {"ASSAY_READY_SUITE": str(self.suite)} | variables
        launch = Launch(self.folder, command, port, **variables)
        self.all.append(launch)
        return launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launches]:
    launches = Launches(tmp_path)
    yield launches
    for each in launches.all:
        each.end()
