"""Live progress and the table."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from assay_smoke.battery import Report
from assay_smoke.checks import Outcome
from assay_smoke.text import excerpt

WIDTH = 100
_MARKS = {"pass": "pass", "fail": "FAIL", "unsure": "unsure", "error": "error", "skip": "skip"}


def mark(verdict: str) -> str:
    return _MARKS[verdict]


class Terminal:
    """On a terminal one line that is rewritten; elsewhere a line per check that has ended."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.live = self.stream.isatty() and not quiet
        self.began = time.monotonic()
        self.running: list[str] = []

    def __call__(self, name: str, outcome: Outcome | None) -> None:
        if self.quiet:
            return
        if outcome is None:
            self.running.append(name)
        else:
            if name in self.running:
                self.running.remove(name)
            self.clear()
            line = f"{mark(outcome.verdict):<6} {name:<20} {outcome.reason}"
            print(shortened(line, WIDTH), file=self.stream, flush=True)
        self._show()

    def _show(self) -> None:
        if self.live and self.running:
            seconds = round(time.monotonic() - self.began)
            line = shortened(f"{seconds:>4} s  {', '.join(self.running)}", 79)
            print(f"\r\033[K{line}", end="", file=self.stream, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=self.stream, flush=True)


def shortened(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def table(report: Report) -> str:
    """Every check in a line; examples below the ones that did not pass."""
    lines = [
        f"{report.suite}, tier {report.tier}: {report.url}"
        + (f", model {excerpt(report.model, 60)}" if report.model else "")
    ]
    lines.append(f"{'check':<20} {'verdict':<7} {'seconds':>7}  what was seen")
    left = [r for r in report.results if report.error and r.outcome.reason == report.error]
    for result in (r for r in report.results if r not in left):
        outcome = result.outcome
        lines.append(
            f"{result.name:<20} {mark(outcome.verdict):<7} {result.seconds:>7.1f}  {outcome.reason}"
        )
        if outcome.verdict == "pass" and outcome.detects:
            lines.append(f"{'':<37} would have seen {outcome.detects}")
        if outcome.verdict != "pass":
            lines += [f"{'':<37} - {example}" for example in outcome.examples]
    if left:
        lines.append(f"not run to an end: {', '.join(r.name for r in left)}")
    lines.append(
        f"{report.verdict.upper()}: {report.generated_tokens} tokens generated,"
        f" {report.prompt_tokens} read, {report.seconds:.1f} s, seed {report.seed}"
    )
    if report.error:
        lines.append(f"no verdict on all of it: {report.error}")
    return "\n".join(lines)
