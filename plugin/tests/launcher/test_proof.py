"""Proofs, and the metrics made from them."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay_kernels import __version__
from assay_kernels.vllm_plugin import proof

SUMMARY = proof.Summary(
    "cpu",
    "w4a16",
    "torch",
    {("routed", "nvfp4 by cpu w4a16"): 4, ("wo_a", "bf16 by cpu w4a16"): 1},
    expected_nvfp4=4,
)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_RUN_DIR", str(tmp_path))
    return tmp_path


def test_a_record_says_who_and_what(run_dir: Path) -> None:
    proof.record_registered()
    (record,) = proof.read_all(run_dir)
    assert (record.pid, record.stage, record.summary) == (os.getpid(), "registered", None)
    assert record.version == __version__
    assert "pytest" in record.title
    proof.record_loaded(SUMMARY)
    (record,) = proof.read_all(run_dir)
    assert (record.stage, record.summary) == ("loaded", SUMMARY)


def test_registering_again_does_not_take_back_what_was_loaded() -> None:
    proof.record_loaded(SUMMARY)
    proof.record_registered()
    assert proof.read_all()[0].stage == "loaded"


def test_a_record_of_an_earlier_process_with_this_pid_proves_nothing(run_dir: Path) -> None:
    proof.record_registered()
    path = run_dir / "proof" / f"{os.getpid()}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"start": record["start"] - 1}))
    assert proof.read_all() == []


def test_records_of_ended_processes_and_broken_files_are_ignored(run_dir: Path) -> None:
    code = "from assay_kernels.vllm_plugin import proof; proof.record_registered()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list((run_dir / "proof").iterdir())) == 1
    (run_dir / "proof" / "7.json").write_text('{"pid": 7}')
    (run_dir / "proof" / "8.json").write_text("{")
    assert proof.read_all() == []


def test_a_forked_worker_has_a_record_of_its_own() -> None:
    proof.record_registered()
    seen = multiprocessing.get_context("fork").Pool(1).apply(_pids_with_proof)
    assert seen[0] in seen[1]


def _pids_with_proof() -> tuple[int, list[int]]:
    return os.getpid(), [record.pid for record in proof.read_all()]


def test_without_a_run_folder_one_is_made_handed_on_and_removed() -> None:
    code = """
import os, subprocess, sys
from assay_kernels.vllm_plugin import proof
proof.record_registered()
ask = "from assay_kernels.vllm_plugin import proof; print(len(proof.read_all()))"
print(proof.run_dir(), oct(proof.run_dir().stat().st_mode)[-3:])
print(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout)
"""
    env = {name: value for name, value in os.environ.items() if name != "ASSAY_RUN_DIR"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    folder, mode, seen_by_child = answer.stdout.split()
    assert (mode, seen_by_child) == ("700", "1")
    assert not Path(folder).exists()


def test_the_table_counts_what_was_taken_and_what_was_left() -> None:
    header, *rows = SUMMARY.table().splitlines()
    assert "5 layers, 4 in NVFP4" in header
    assert rows == ["  routed      4  nvfp4 by cpu w4a16", "  wo_a        1  bf16 by cpu w4a16"]


SCRAPE = """
import os, sys, urllib.request
from assay_kernels.vllm_plugin import metrics, proof
from assay_kernels.selfcheck import Row
checks = (
    Row("routed", "64 x 256 x 256", "cpu w4a16", 3, 0.5, 0.75),
    Row("routed", "64 x 256 x 256", "reference", 1, 0.25, 0.125),
)
layers = {("routed", "nvfp4 by cpu w4a16"): 3, ("routed", "nvfp4 by reference"): 1}
proof.record_loaded(proof.Summary("cpu", "w4a16", "torch", layers, 4, checks))
metrics.register()
metrics.register()
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
app = FastAPI()
attach_router(app)
print(TestClient(app).get("/metrics").text)
"""


@pytest.mark.parametrize("several_api_servers", [False, True])
def test_vllm_s_metrics_show_the_plugin_s(run_dir: Path, several_api_servers: bool) -> None:
    env = dict(os.environ)
    if several_api_servers:
        env["PROMETHEUS_MULTIPROC_DIR"] = str(run_dir)
    answer = subprocess.run([sys.executable, "-c", SCRAPE], capture_output=True, text=True, env=env)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    info = f'arch="cpu",mode="w4a16",operators="torch",version="{__version__}"'
    assert f"assay_info{{{info}}} 1.0" in lines
    assert any(
        line.startswith('assay_layers{how="nvfp4 by cpu w4a16",kind="routed"')
        and line.endswith(" 3.0")
        for line in lines
    )
    shape = 'kind="routed",shape="64 x 256 x 256"'
    assert f'assay_kernel_selfcheck{{arch="cpu",impl="cpu w4a16",{shape}}} 0.75' in lines
    assert f'assay_kernel_selfcheck{{arch="cpu",impl="reference",{shape}}} 0.25' in lines
    assert 'assay_kernel_active_layers{impl="cpu w4a16",kind="routed"} 3.0' in lines
    assert 'assay_kernel_active_layers{impl="reference",kind="routed"} 1.0' in lines
    assert "assay_processes_active 1.0" in lines
