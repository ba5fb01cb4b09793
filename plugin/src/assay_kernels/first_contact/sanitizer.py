"""The small checks once more under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 1800


def errors(output: str) -> int | None:
    """Errors that compute-sanitizer counted; None if it gave no summary."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    return int(found[-1]) if found else None


def sanitize() -> dict[str, Any]:
    """Per tool: errors, exit code; or why it did not run."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"why": "compute-sanitizer is not installed"}
    results: dict[str, Any] = {}
    for tool in TOOLS:
        command = [program, "--tool", tool, sys.executable, "-m", "assay_kernels.cli"]
        command += ["first-contact", "--quick", "--skip", "speed", "--skip", "sanitizer"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            results[tool] = {"why": f"more than {SECONDS} s"}
            continue
        count = errors(done.stdout + done.stderr)
        results[tool] = {"errors": count, "exit": done.returncode}
        if count or done.returncode:
            results[tool]["tail"] = (done.stdout + done.stderr)[-4000:]
    return results
