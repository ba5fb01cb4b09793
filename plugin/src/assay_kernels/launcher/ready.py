"""What must pass before the door opens: the ready tier of a suite, asked by `assay-smoke`.

A program of its own asks, through HTTP as any client: what a canary beside the server does later,
and what a release gate does, is the same program.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = "assay_smoke"
DEFAULT_SUITE = "deepseek-v4"
CANARY = "canary"
"""In place of a suite: `assay-smoke watch` beside the server opens the door."""


def suite(variables: Mapping[str, str]) -> str:
    """As ASSAY_READY_SUITE says it."""
    return variables.get("ASSAY_READY_SUITE", "").strip() or DEFAULT_SUITE


def reference(variables: Mapping[str, str]) -> str:
    """File of log-probabilities to compare with, from ASSAY_READY_REFERENCE; empty: the suite's."""
    return variables.get("ASSAY_READY_REFERENCE", "").strip()


def obstacle(variables: Mapping[str, str]) -> str | None:
    """Why the suite cannot be asked from here."""
    if (file := reference(variables)) and not Path(file).is_file():
        return f"ASSAY_READY_REFERENCE {file}: no such file"
    if suite(variables) != CANARY and importlib.util.find_spec(PROGRAM) is None:
        return (
            "assay-smoke is not installed, so nobody can find the server sound: install"
            f" smoke_tests/, or set ASSAY_READY_SUITE={CANARY} where a canary beside the server"
            " opens the door"
        )
    return None


@dataclass(frozen=True)
class Report:
    """What `assay-smoke` found."""

    suite: str
    passed: bool
    ran: bool
    """False: it could not come to a verdict."""
    reasons: tuple[str, ...]
    model: str = ""
    question: str = ""
    answer: str = ""
    checks: int = 0
    seconds: float = 0.0

    def words(self) -> str:
        if self.passed:
            took = f"{self.checks} checks passed in {self.seconds:.1f} s"
            return f"suite {self.suite}, tier ready: {took}"
        found = "found the server incoherent" if self.ran else "could not find the server sound"
        return f"suite {self.suite} {found}: " + "; ".join(self.reasons)


class Asking:
    """`with Asking(...) as asking:` runs the program; leaving the block ends it."""

    def __init__(
        self, variables: Mapping[str, str], url: str, key_file: Path, folder: Path
    ) -> None:
        self.suite = suite(variables)
        self.path = folder / "ready.json"
        self.errors = folder / "ready.err"
        self.command = [
            sys.executable, "-m", PROGRAM, "run", "--quiet", "--url", url, "--suite", self.suite,
            "--tier", "ready", "--json", str(self.path), "--bypass-key-file", str(key_file),
        ]  # fmt: skip
        if file := reference(variables):
            self.command += ["--reference", file]

    def __enter__(self) -> "Asking":
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ended(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def report(self) -> Report:
        """Believes the exit code; the file only tells why."""
        code = self.process.returncode
        try:
            found: dict[str, Any] = json.loads(self.path.read_text())
        except (OSError, ValueError):
            lines = self.errors.read_text(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"it ended with {code}"
            return Report(self.suite, False, False, (reason,))
        bad = [c for c in found["checks"] if c["verdict"] not in ("pass", "skip")]
        # What failed says more than what could not be looked at any more.
        bad.sort(key=lambda check: check["verdict"] != "fail")
        reasons = [f"{c['name']}: {' '.join([c['reason'], *c['examples'][:1]])}" for c in bad]
        shown = found.get("sample") or {}
        return Report(
            self.suite,
            code == 0,
            code == 1,
            tuple(reasons[:4]) or (f"it ended with {code}",),
            found["model"],
            shown.get("question", ""),
            shown.get("answer", ""),
            sum(c["verdict"] == "pass" for c in found["checks"]),
            found["seconds"],
        )
