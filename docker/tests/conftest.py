"""Real containers, from images that `docker/tests/run.sh` built from this commit.

Environment: DOCKER (the client), DOCKER_HOST, ASSAY_CPU_IMAGE, ASSAY_GATE_IMAGE, PROMETHEUS_IMAGE.
Without a daemon every test is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DOCKER = os.environ.get("DOCKER", "docker")
CPU_IMAGE = os.environ.get("ASSAY_CPU_IMAGE", "assay-cpu:local")
GATE_IMAGE = os.environ.get("ASSAY_GATE_IMAGE", "assay-gate:local")
PORT, PROMETHEUS_PORT = 18600, 18690
OPEN_SECONDS = 400
STALLED_SECONDS = 45


def docker(*arguments: str, check: bool = True, timeout: float = 300) -> str:
    """Standard output; with `check`, a failure is a failed test that shows what docker said."""
    answer = subprocess.run(
        [DOCKER, *arguments], capture_output=True, text=True, timeout=timeout, cwd=REPO
    )
    assert not check or answer.returncode == 0, f"docker {arguments}: {answer.stderr}"
    return answer.stdout


def run(*arguments: str, timeout: float = 300) -> tuple[int, str]:
    """(exit code, everything that it said) of `docker run --rm`."""
    answer = subprocess.run(
        [DOCKER, "run", "--rm", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    return answer.returncode, answer.stdout


def messages(log: str) -> list[str]:
    return [json.loads(line)["message"] for line in log.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def engine() -> None:
    try:
        answer = subprocess.run([DOCKER, "info"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"no docker client: {error}")
    if answer.returncode != 0:
        pytest.skip(f"no docker daemon: {answer.stderr.strip()[-200:]}")
    if subprocess.run([DOCKER, "image", "inspect", CPU_IMAGE], capture_output=True).returncode:
        pytest.skip(f"no image {CPU_IMAGE}: `make test-containers` builds it")


class Stack:
    """compose.cpu.yaml as a user brings it up, on ports of its own."""

    url = f"http://127.0.0.1:{PORT}"
    prometheus = f"http://127.0.0.1:{PROMETHEUS_PORT}"
    project = "assay-test"

    def __init__(self, folder: Path) -> None:
        self.env = folder / "env"
        self.files = ["compose.cpu.yaml", "docker/tests/small_cache.yaml"]
        self.key = ""
        """Of the API; empty: none is asked for."""
        variables = {
            "ASSAY_PORT": PORT,
            "PROMETHEUS_PORT": PROMETHEUS_PORT,
            "STARTUP_BUDGET": OPEN_SECONDS,
            "ASSAY_STALLED_AFTER": STALLED_SECONDS,
            "ASSAY_CPU_IMAGE": CPU_IMAGE,
            "ASSAY_GATE_IMAGE": GATE_IMAGE,
            "PROMETHEUS_IMAGE": os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0"),
        }
        self.env.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))

    def compose(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        files = [part for file in self.files for part in ("-f", file)]
        command = ["compose", "-p", self.project, "--env-file", str(self.env), *files, *arguments]
        return docker(*command, check=check, timeout=timeout)

    def up(self) -> float:
        """Seconds that `up --wait` took."""
        began = time.monotonic()
        self.compose("up", "-d", "--no-build", "--wait", timeout=OPEN_SECONDS + 100)
        return time.monotonic() - began

    def container(self, service: str = "server") -> str:
        return f"{self.project}-{service}-1"

    def inspect(self, service: str = "server") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", self.container(service)))[0]
        return found

    def restarts(self, service: str = "server") -> int:
        return int(self.inspect(service)["RestartCount"])

    def log(self, service: str = "server") -> str:
        answer = subprocess.run(
            [DOCKER, "logs", self.container(service)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return answer.stdout

    def python(self, code: str, service: str = "server") -> str:
        """Run Python inside, as the service's own user."""
        return docker("exec", self.container(service), "python", "-c", code)

    def signal(self, title: str, number: str) -> int:
        """Send a signal to vLLM's process of that title, from inside; its pid there."""
        return int(self.python(SIGNAL.format(title=title, number=number)))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def status(self, path: str = "/v1/models") -> int:
        """What a client gets; 0 when nobody listens."""
        try:
            return httpx.get(self.url + path, headers=self.headers, timeout=20).status_code
        except httpx.HTTPError:
            return 0

    def wait_until_open(self) -> float:
        began = time.monotonic()
        while self.status() != 200:
            assert time.monotonic() - began < OPEN_SECONDS, self.log()[-4000:]
            time.sleep(0.5)
        return time.monotonic() - began

    def scraped(self, jobs: set[str]) -> dict[str, str]:
        """job -> whether Prometheus reads it ("1"), once all of these are or 60 s have gone by."""
        deadline = time.monotonic() + 60
        while True:
            page = httpx.get(
                f"{self.prometheus}/api/v1/query", params={"query": "up"}, timeout=20
            ).json()
            up = {r["metric"]["job"]: r["value"][1] for r in page["data"]["result"]}
            if all(up.get(job) == "1" for job in jobs) or time.monotonic() > deadline:
                return {job: up.get(job, "unknown") for job in jobs}
            time.sleep(2)

    def ask(self, question: str = "What is the capital of France?") -> str:
        body = {
            "model": "assay-miniature",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0,
            "chat_template_kwargs": {"thinking": False},
        }
        answer = httpx.post(
            f"{self.url}/v1/chat/completions", json=body, headers=self.headers, timeout=60
        )
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


SIGNAL = """
import os, signal
from assay_kernels.launcher import procfs
pids = [p for p in procfs.descendants(1) if procfs.title(p).startswith({title!r})]
os.kill(pids[0], signal.{number})
print(pids[0])
"""


class Stream:
    """One streamed completion that would go on for long."""

    def __init__(self, stack: Stack, tokens: int) -> None:
        self.stack = stack
        self.tokens = tokens
        self.accepted = False
        self.chunks = 0
        self.finish = ""
        self.error = ""
        self.done = False

    def read(self) -> None:
        body = {
            "model": "assay-miniature", "prompt": "Once upon a time", "max_tokens": self.tokens,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        try:
            with httpx.stream(
                "POST", f"{self.stack.url}/v1/completions", json=body,
                headers=self.stack.headers, timeout=120,
            ) as answer:  # fmt: skip
                self.accepted = answer.status_code == 200
                if not self.accepted:
                    self.error = f"status {answer.status_code}"
                for line in answer.iter_lines():
                    self.take(line)
        except httpx.HTTPError as error:
            self.error = repr(error)

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = str(event["error"])
            return
        self.chunks += 1
        self.finish = event["choices"][0]["finish_reason"] or self.finish


@pytest.fixture(scope="session")
def stack(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        stack.seconds_to_open = stack.up()  # type: ignore[attr-defined]
        yield stack
    finally:
        stack.compose("--profile", "*", "down", "-v", "--timeout", "5", check=False)
