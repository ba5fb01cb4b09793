"""The battery on the real server: it passes, within what its tiers promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .server import Server


def smoke(server: Server, tier: str, out: Path) -> dict[str, Any]:
    """Report of a run against the session's server."""
    command = [sys.executable, "-m", "assay_smoke", "run", "--url", server.url, "--tier", tier]
    done = subprocess.run(
        [*command, "--suite", "miniature", "--json", str(out)], capture_output=True, text=True
    )
    report: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == {"pass": 0, "fail": 1, "error": 2}[report["verdict"]]
    assert report["verdict"] == "pass", done.stdout
    return report


@pytest.mark.parametrize("tier", ["probe", "ready"])
def test_the_miniature_is_coherent(server: Server, tmp_path: Path, tier: str) -> None:
    smoke(server, tier, tmp_path / "report.json")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_miniature_is_coherent_in_every_check(server: Server, tmp_path: Path) -> None:
    report = smoke(server, "default", tmp_path / "report.json")
    assert report["tokens"]["generated"] <= 20_000
    skipped = {c["name"] for c in report["checks"] if c["verdict"] == "skip"}
    assert skipped == {"acceptance-length", "corrupted-requests"}, "vLLM on a CPU counts neither"
