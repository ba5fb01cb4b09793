"""The command a first user runs: right kernels pass, wrong ones are named, peers may be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from assay_kernels import cli, first_contact
from assay_kernels.first_contact import correctness, environment, sanitizer
from assay_kernels.first_contact.correctness import Subject, judge
from assay_kernels.kernels.cpu.nvfp4 import CpuKernels

KERNELS = {"dense", "compressor", "dense_swiglu", "wo_a", "grouped_l1", "grouped_l2"}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "QUICK", (1, 17))


def test_the_command_judges_every_kernel_and_writes_one_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "report.json"
    assert cli.main(["first-contact", "--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["passed"]
    assert set(report["correctness"]["checked"]) == KERNELS
    assert report["speed"] == report["sanitizer"] == {"why": "no GPU"}
    assert report["environment"]["torch"] == torch.__version__
    assert capsys.readouterr().out.endswith("passed\n")


class Wrong(CpuKernels):
    """CPU kernels with one mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__("w4a4")
        self.mistake = mistake

    def prepare(self, weight: Any) -> Any:
        if self.mistake == "one scale for two partitions":
            weight.alpha[:] = weight.alpha.amax()
        return super().prepare(weight)

    def dense_swiglu(self, x: Any, operand: Any, limit: float) -> Any:
        limit = 1e9 if self.mistake == "no clamp" else limit
        return super().dense_swiglu(x, operand, limit)

    def grouped_l2(self, h: Any, operand: Any, groups: Any) -> Any:
        out = super().grouped_l2(h, operand, groups)
        if self.mistake == "stale last row":
            out[-1] = 7.0
        return out

    def wo_a(self, x: Any, operand: Any) -> Any:
        if self.mistake == "raises":
            raise RuntimeError("no such kernel image")
        return super().wo_a(x, operand)


@pytest.mark.parametrize(
    ("mistake", "kernels"),
    [
        ("one scale for two partitions", KERNELS),
        ("no clamp", {"dense_swiglu"}),
        ("stale last row", {"grouped_l2"}),
        ("raises", {"wo_a"}),
    ],
)
def test_a_wrong_kernel_is_named_and_the_others_are_judged(
    mistake: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "QUICK", (17,))
    found = judge(Subject(Wrong(mistake), "cpu", w4a4=True), quick=True)
    assert set(found["checked"]) == KERNELS
    named = {failure["kernel"] for failure in found["failures"]}
    assert named
    assert named <= kernels


def test_a_gpu_without_kernels_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B300")
    with pytest.raises(ValueError, match="sm_103"):
        environment.architecture()
    assert cli.main(["first-contact"]) == 2
    assert "NVIDIA B300 is sm_103" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 3),
        ("Segmentation fault", None),
    ],
)
def test_what_compute_sanitizer_counted(output: str, count: int | None) -> None:
    assert sanitizer.errors(output) == count


def test_a_report_without_a_folder_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_contact, "first_contact", lambda *_: pytest.fail("it ran"))
    assert cli.main(["first-contact", "--out", str(tmp_path / "none" / "report.json")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"architecture": "cpu", "environment": {}, "passed": True, "seconds": 1.5}
    monkeypatch.setattr(first_contact, "first_contact", lambda *_: report)
    # A folder stands where the file should: the same path as a full disk takes.
    assert cli.main(["first-contact", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"cannot write {tmp_path}: Is a directory" in error
    assert '"seconds": 1.5' in error
    assert list(tmp_path.parent.glob("*.tmp")) == []
