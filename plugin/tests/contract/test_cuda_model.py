"""The CUDA model on vLLM 0.33.0's sources: built, loaded and checked as far as no GPU is needed.
What a GPU computes is shown by `make e2e-h200`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay_kernels.checkpoint import Dialect
from assay_kernels.checkpoint.export import derive
from assay_kernels.vllm_plugin.hooks import GPU_VERSION

from .test_hooks import sources

SCRIPT = Path(__file__).with_name("pretend_hopper.py")
MINIATURE = Path(__file__).resolve().parents[3] / "models" / "miniature" / "checkpoint"


def build(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The script's report."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(sources(GPU_VERSION).parent), str(checkpoint)],
        env=os.environ | {"ASSAY_RUN_DIR": str(folder), "ASSAY_CACHE_DIR": str(folder)},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    report: dict[str, Any] = json.loads(lines[0].removeprefix("REPORT "))
    return report


# The other dialects differ in what is loaded, and a build takes a minute or more.
@pytest.mark.parametrize(
    "dialect", ["B", *(pytest.param(name, marks=pytest.mark.slow) for name in "AC")]
)
def test_every_nvfp4_layer_is_ours_and_checked(dialect: str, tmp_path: Path) -> None:
    checkpoint = MINIATURE
    if dialect != "B":
        checkpoint = tmp_path / "checkpoint"
        derive(MINIATURE, checkpoint, Dialect(dialect))
    found = build(checkpoint, tmp_path)
    assert found["chosen"] == ["sm90"]
    assert found["arch"] == "sm_90"
    assert found["served"] == found["expected"] == found["checked"]
    assert found["attention"] == [
        "AssayDeepseekV4FlashMLAAttention",
        "AssayAttention",
        "DeepseekV4FlashMLAAttention",
    ]
    assert found["shared"] == "AssayMLP"
    methods = found["methods"]
    assert methods["AssayModelOptNvFp4ExpertsMethod"] == 4
    if dialect == "A":
        assert found["served"] == 4
        assert methods["Fp8LinearMethod"] == 4 * 6 + 2
        assert "NvFp4LinearMethod" not in methods
    else:
        assert found["served"] == 35
        assert methods["NvFp4LinearMethod"] == 31
        assert "Fp8LinearMethod" not in methods
