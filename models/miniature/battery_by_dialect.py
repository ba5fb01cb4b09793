"""The battery against the miniature in every form that is served: dialects A, B and C and bf16.

    make battery-dialects                      # about ten minutes on two cores
    make battery-dialects ARGS='--dialects A C'

Each form is made from the checkpoint here by `assay-kernels convert`, served by `assay-kernels
serve`, and asked the same questions. Exit code 0: every form has at least 97 % right, and none has
more than one point less than bf16 (where that was asked for); 1: not; 2: could not run.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import battery

REPO = Path(__file__).resolve().parents[2]
CHECKPOINT = Path(__file__).parent / "checkpoint"
PROFILE = REPO / "docker" / "profiles" / "miniature-cpu.yaml"
OWN_DIALECT = "B"
START_TIMEOUT_S = 240.0
MIN_SHARE = 0.97
MAX_LOSS = 0.01


class CannotRunError(Exception):
    """A conversion or a server failed; nothing was judged."""


@dataclass(frozen=True)
class Marks:
    """How one form did."""

    right: int
    asked: int
    wrong: list[str]
    seconds: float

    @property
    def share(self) -> float:
        return self.right / self.asked


def tool(*arguments: str) -> list[str]:
    """The command line of `assay-kernels ...`."""
    return [sys.executable, "-m", "assay_kernels.cli", *arguments]


def form(dialect: str, work: Path) -> Path:
    """The miniature's checkpoint in a dialect, converted into `work` unless it is stored so."""
    if dialect == OWN_DIALECT:
        return CHECKPOINT
    made = work / f"checkpoint-{dialect}"
    done = subprocess.run(
        tool("convert", str(CHECKPOINT), str(made), "--to", dialect),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotRunError(f"convert --to {dialect} exited {done.returncode}:\n{done.stdout}")
    return made


@contextmanager
def served(checkpoint: Path, work: Path) -> Iterator[str]:
    """The URL of a server on `checkpoint`, once it answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = work / "serve.log"
    command = tool("serve", str(checkpoint), "--config", str(PROFILE), "--port", str(port))
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [*command, "--state-dir", str(work / "state")], stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise CannotRunError(f"no server on {checkpoint}:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        server.wait(60)


def answers(url: str) -> bool:
    """Whether the door is open."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def examine(dialect: str) -> Marks:
    """Convert, serve, ask."""
    with tempfile.TemporaryDirectory(prefix=f"assay-battery-{dialect}-") as folder:
        work = Path(folder)
        with served(form(dialect, work), work) as url:
            start = time.monotonic()
            questions = [item for item in battery.load() if item["check"] != "story"]
            results = battery.ask_all(questions, url)
            wrong = [item["id"] for item, right, _ in results if not right]
            return Marks(len(results) - len(wrong), len(results), wrong, time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = ["bf16", "A", "B", "C"]
    parser.add_argument("--dialects", nargs="+", choices=choices, default=choices)
    dialects = parser.parse_args().dialects
    print(f"{'form':<5} {'right':>5} {'of':>4} {'share':>7} {'seconds':>8}  wrong", flush=True)
    marks: dict[str, Marks] = {}
    try:
        for dialect in dialects:
            m = marks[dialect] = examine(dialect)
            print(
                f"{dialect:<5} {m.right:>5} {m.asked:>4} {m.share:>7.1%} {m.seconds:>8.0f}  "
                f"{' '.join(m.wrong) or '-'}",
                flush=True,
            )
    except (CannotRunError, OSError, ValueError, KeyError) as error:
        print(f"battery-dialects: could not run: {error}", file=sys.stderr)
        return 2
    lowest = MIN_SHARE
    if "bf16" in marks:
        lowest = max(lowest, marks["bf16"].share - MAX_LOSS)
    return 0 if all(m.share >= lowest for m in marks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
