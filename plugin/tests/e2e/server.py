"""A real server as a user would start it, for tests: on a free port, in a process group of its own,
stopped for sure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import yaml

REPO = Path(__file__).resolve().parents[3]
PROFILE = REPO / "docker" / "profiles" / "miniature-cpu.yaml"
CHECKPOINT = Path(
    os.environ.get("ASSAY_TEST_CHECKPOINT", REPO / "models" / "miniature" / "checkpoint")
)
START_TIMEOUT_S = 500.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def served_name(profile: Path = PROFILE, checkpoint: Path = CHECKPOINT) -> str:
    """The model's name as clients must give it."""
    settings = yaml.safe_load(profile.read_text()) or {}
    name = settings.get("served-model-name", str(checkpoint))
    return str(name[0] if isinstance(name, list) else name)


class Server:
    """`with Server(folder) as server:` answers on `server.url` inside the block, started as `make
    serve` does."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        checkpoint: Path = CHECKPOINT,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable, "-m", "assay_kernels.cli", "serve", str(checkpoint),
            "--config", str(PROFILE), "--host", "127.0.0.1", "--port", str(self.port),
            "--state-dir", str(folder / "state"), "--", *arguments,
        ]  # fmt: skip
        # As on a newcomer's machine: nothing may need a C++ compiler while serving.
        self.environment = os.environ | {"CXX": "/nonexistent/c++"} | (environment or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with (self.folder / "launcher.log").open("wb") as sink:
            self.process = subprocess.Popen(
                self.command, stdout=sink, stderr=subprocess.STDOUT, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def stop(self) -> int:
        """Stop as Ctrl-C does; the exit status. The launcher leaves nothing running, or this kills
        it and fails."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    def logs(self, lines: int = 30) -> str:
        """The ends of what the launcher and vLLM wrote."""
        paths = [self.folder / "launcher.log", self.folder / "state" / "serve.log"]
        return "\n".join(
            f"--- {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-lines:])
            for p in paths
            if p.is_file()
        )

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited {self.process.returncode}:\n{self.logs()}")
            try:
                self.get("/v1/models")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise RuntimeError(f"no answer after {START_TIMEOUT_S:.0f} s:\n{self.logs()}")
