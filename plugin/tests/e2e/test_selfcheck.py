"""The self-check in a real server: it has run before the door opened, tells what it found where it
promised to, and a kernel that is wrong costs speed or the start, never coherence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .server import CHECKPOINT, PROFILE, Server, free_port

FAULTY = Path(__file__).with_name("faulty_kernel")
CHECKED = re.compile(r"self-check on cpu: (\d+) layers, (\d+) matrices, ([\d.]+) s")


def log(server: Server) -> str:
    return (server.folder / "state" / "serve.log").read_text(errors="replace")


def test_every_layer_was_checked_before_the_door_opened(server: Server) -> None:
    found = CHECKED.search(log(server))
    assert found is not None
    assert (int(found[1]), int(found[2])) == (35, 812)
    page = server.get("/metrics")
    ratios = re.findall(
        r'^assay_kernel_selfcheck\{[^}]*arch="cpu"[^}]*\} (\S+)$', page, re.MULTILINE
    )
    assert len(ratios) == 11
    assert all(0 < float(ratio) <= 1 for ratio in ratios)
    layers = re.findall(
        r'^assay_kernel_active_layers\{impl="([^"]*)".*\} (\S+)$', page, re.MULTILINE
    )
    assert {impl for impl, _ in layers} == {"cpu w4a16"}
    assert sum(float(count) for _, count in layers) == 35


def faulty(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "ASSAY_CACHE_DIR": str(folder / "cache"), **more}


@pytest.mark.slow
@pytest.mark.serve
def test_a_faulty_kernel_is_replaced_and_the_server_is_coherent(tmp_path: Path) -> None:
    """The ready tier has passed, or the block would not be entered."""
    with Server(tmp_path, environment=faulty(tmp_path)) as server:
        assert "FAILED model.layers.0.ffn.shared_experts.gate_up_proj by cpu w4a16" in log(server)
        page = server.get("/metrics")
        assert 'assay_kernel_active_layers{impl="reference",kind="shared"} 4.0' in page
        fell_back = r'^assay_layers\{how="nvfp4 by reference",kind="shared".*\} 4.0$'
        assert re.search(fell_back, page, re.MULTILINE)
        report = json.loads((tmp_path / "cache" / "assay" / "selfcheck-rank0.json").read_text())
        assert len(report["replaced"]) == 4
        assert {row["impl"] for row in report["rows"]} == {"cpu w4a16", "reference"}


@pytest.mark.slow
@pytest.mark.serve
def test_abort_ends_the_start_and_names_the_layer(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "assay_kernels.cli", "serve", str(CHECKPOINT),
            "--config", str(PROFILE), "--port", str(free_port()),
            "--state-dir", str(tmp_path / "state"),
        ],
        env=os.environ | faulty(tmp_path, ASSAY_ON_MISMATCH="abort"),
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 1
    assert "SelfCheckError: model.layers.0.ffn.shared_experts.gate_up_proj by" in done.stderr
    assert "ASSAY_ON_MISMATCH=abort" in done.stderr
