"""The coherence battery, asked as any user asks it: `assay-smoke run`, and its exit code."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from assay_load.drive import run as _patches_first  # noqa: F401  (gevent's patches)
from assay_load.gate.policy import Suite
from assay_load.gate.verdict import EXIT, Check, Outcome

SECONDS = 3600.0


def ask(url: str, model: str, suite: Suite, when: str, folder: Path) -> Check:
    """`when` names the moment, and the file that keeps the battery's own report."""
    import subprocess  # gevent's by now: other greenlets run on while the battery asks
    import sys

    report = folder / f"coherence-{when}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "assay_smoke", "run", "--url", url, "--model", model,
        "--suite", suite.suite, "--tier", suite.tier, "--json", str(report), "--quiet",
        *(part for check in suite.checks for part in ("--check", check)),
    ]  # fmt: skip
    started = time.monotonic()
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        code, said = answer.returncode, answer.stderr.strip()
    except subprocess.TimeoutExpired:
        code, said = 2, f"the battery took longer than {SECONDS:.0f} s"
    outcome: Outcome = next((o for o, c in EXIT.items() if c == code), "invalid")
    return Check(
        part="coherence",
        name=when,
        outcome=outcome,
        reason=_reason(outcome, report, said, suite),
        seconds=time.monotonic() - started,
    )


def _reason(outcome: Outcome, report: Path, said: str, suite: Suite) -> str:
    name = f"suite {suite.suite}, tier {suite.tier}"
    try:
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        checks = [(c["name"], c["verdict"], c["reason"]) for c in found["checks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{name}: {said or 'the battery left no report'}"[:2000]
    if outcome == "pass":
        return f"{name}: {len(checks)} checks passed"
    wanted = "fail" if outcome == "fail" else ("error", "unsure")
    wrong = [f"{n}: {r}" for n, v, r in checks if v in wanted]
    return f"{name}: {'; '.join(wrong) or said}"[:2000]
