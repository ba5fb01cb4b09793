"""The real thing: the miniature V4 behind `make serve`. Every workload runs on it, and the gate
passes it, and fails it for the stated reason once a fault is put in front."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay_load.report.result import read
from assay_load.workload.schema import shipped

ROOT = Path(__file__).resolve().parents[2]
SERVE = Path(os.environ.get("ASSAY_TEST_SERVE", ROOT / ".venv" / "bin" / "assay-kernels"))
pytestmark = [pytest.mark.serve, pytest.mark.slow]

POLICY = """\
name: faults
about: The shipped policy, with a margin for machines that do other things too.
profile: docker/profiles/miniature-cpu.yaml
hardware: local-cpu
server: {model: assay-miniature, arch: cpu}
repetitions: 5
coherence:
  before: {suite: miniature, tier: ready}
  under_load:
    {suite: miniature, tier: ready, workload: decode-heavy-1k-8k, scale: miniature,
     concurrency: 8}
  after: {suite: miniature, tier: ready}
loads:
  - workload: gate-probe
    scale: miniature
    bounds:
      - {metric: output_tokens_per_second, margin: 3.0}
      - {metric: tpot.p50, margin: 3.0}
"""


def run(module: str, *arguments: str) -> tuple[int, str]:
    answer = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=900
    )
    return answer.returncode, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def served(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    if not SERVE.exists():
        pytest.skip(f"needs {SERVE} (make env)")
    folder = tmp_path_factory.mktemp("miniature")
    checkpoint = ROOT / "models" / "miniature" / "checkpoint"
    profile = ROOT / "docker" / "profiles" / "miniature-cpu.yaml"
    server = start_server(
        lambda port: [
            str(SERVE), "serve", str(checkpoint), "--config", str(profile), "--host", "127.0.0.1",
            "--port", str(port), "--state-dir", str(folder / "state"),
        ],
        seconds=300,
    )  # fmt: skip
    return str(server.url)


@pytest.mark.parametrize("name", shipped())
def test_every_workload_runs_on_the_miniature(name: str, served: str, tmp_path: Path) -> None:
    code, output = run(
        "assay_load.cli", "run", name, "--scale", "miniature", "--url", served,
        "--out", str(tmp_path), "--token-ids",
    )  # fmt: skip
    assert code == 0, output
    found = read(tmp_path / "result.json")
    assert found.complete
    assert found.failed == 0
    assert found.expected_requests in (None, found.figures.requests)
    assert found.server.missing is None
    # The server counted the same tokens: nothing was lost between it and the histogram.
    if found.warmup_requests == 0 and found.expected_requests:
        made = found.server.points[-1].values["generation_tokens"]
        assert made == found.figures.completion_tokens


@pytest.fixture(scope="module")
def policy(served: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(policy, baseline)"""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "faults.yaml").write_text(POLICY)
    baseline = str(folder / "baseline.json")
    code, output = run(
        "assay_load.gate.cli", "baseline", "--policy", str(folder / "faults.yaml"), "--url", served,
        "--write", baseline, "--out", str(folder / "out"), "--repetitions", "5",
    )  # fmt: skip
    assert code == 0, output
    return str(folder / "faults.yaml"), baseline


@pytest.mark.parametrize(
    ("fault", "code", "part", "reason"),
    [
        ((), 0, None, "PASS"),
        (("--slow", "6.0"), 1, "gate-probe@miniature", "slower"),
        (("--garble",), 1, "coherence, before", "known-answers"),
        (("--corrupt-above", "11"), 1, "coherence, under_load", "FAIL"),
        (("--restart-after", "90"), 2, "server, ran throughout", "the server restarted"),
        (("--drop-every", "100"), 1, None, "FAIL"),
        (("--model", "assay-other"), 2, "server, is the one meant", "wrong model"),
    ],
    ids=["good", "slow", "incoherent", "corrupt-under-load", "restart", "drops", "wrong-model"],
)
def test_the_gate_passes_the_miniature_and_bites_on_each_fault(
    start_tool: Callable[..., Any], served: str, policy: tuple[str, str], tmp_path: Path,
    fault: tuple[str, ...], code: int, part: str | None, reason: str,
) -> None:  # fmt: skip
    url = start_tool("faulty", "--upstream", served, *fault).url
    found, output = run(
        "assay_load.gate.cli", "run", "--policy", policy[0], "--baseline", policy[1], "--url", url,
        "--out", str(tmp_path),
    )  # fmt: skip
    assert found == code, output
    assert reason in output
    verdict = json.loads((tmp_path / "gate.json").read_text())
    wrong = [f"{c['part']}, {c['name']}" for c in verdict["checks"] if c["outcome"] != "pass"]
    assert bool(wrong) == bool(code)
    if part is not None:
        assert any(check.startswith(part) for check in wrong), output
    with urllib.request.urlopen(f"{served}/health", timeout=10) as answer:
        assert answer.status == 200
