"""The three commands as an operator meets them: exit codes, one line where something is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from assay_kernels import inspection
from assay_kernels.checkpoint import Dialect, open_checkpoint
from assay_kernels.checkpoint.config import parse_config
from assay_kernels.cli import main
from assay_kernels.progress import Progress


class Terminal:
    def __init__(self, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_audit_exits_0_clean_1_with_faults(
    exported: dict[Dialect, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "audit", exported[Dialect.B], "--deep")
    assert (code, err) == (0, "")
    assert "0 faults" in out
    broken = Path(shutil.copytree(exported[Dialect.B], tmp_path / "broken"))
    raw = json.loads((broken / "config.json").read_text())
    raw["num_hidden_layers"] = 3
    (broken / "config.json").write_text(json.dumps(raw))
    code, out, _ = run(capsys, "audit", broken)
    assert code == 1
    assert "num_hidden_layers is 3, by the tensors it is 4" in out
    code, out, _ = run(capsys, "audit", broken, "--json")
    assert code == 1
    assert json.loads(out)["faults"] == 1


@pytest.mark.parametrize("command", ["audit", "inspect", "convert"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{missing}"], "is not a directory"),
        (["{empty}"], "cannot be read"),
        (["{text}"], "must be JSON"),
        (["{empty}", "--bogus"], "unrecognized arguments: --bogus"),
        ([], "the following arguments are required"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("hello")
    places = {name: tmp_path / name for name in ("missing", "empty", "text")}
    given = [argument.format(**places) for argument in arguments]
    if command == "convert" and given:
        given[1:1] = [str(tmp_path / "out"), "--to", "B"]
    code, out, err = run(capsys, command, *given)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_convert_says_what_it_did_and_that_it_is_done(
    exported: dict[Dialect, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("convert", exported[Dialect.NATIVE], tmp_path / "out", "--to", "A")
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "48 MXFP4 weights became NVFP4 exactly" in out
    assert "marked dynamic" in out
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "1 of them found finished" in out
    code, _, err = run(capsys, "convert", exported[Dialect.B], tmp_path / "out", "--to", "C")
    assert code == 2
    assert "already holds a checkpoint" in err


def test_convert_refuses_a_source_with_faults(
    exported: dict[Dialect, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(exported[Dialect.B], tmp_path / "broken"))
    raw = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**raw, "vocab_size": 99}))
    code, _, err = run(capsys, "convert", broken, tmp_path / "out", "--to", "A")
    assert code == 1
    assert err.count("\n") == 1
    assert "shape must be" in err


def test_convert_calibrates(
    exported: dict[Dialect, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "prompts").write_text("[1, 2, 3, 4, 5, 6, 7, 8]\n")
    source, out = exported[Dialect.B], tmp_path / "out"
    code, _, _ = run(
        capsys, "convert", source, out, "--to", "B", "--calibrate", tmp_path / "prompts"
    )
    assert code == 0
    module = open_checkpoint(out).modules()["layers.1.ffn.experts.1.w2"]
    assert module.tensor("input_scale") is not None
    (tmp_path / "prompts").write_text("words\n")
    code, _, err = run(
        capsys, "convert", source, tmp_path / "two", "--to", "B", "--calibrate",
        tmp_path / "prompts",
    )  # fmt: skip
    assert code == 2
    assert "has no tokenizer.json" in err
    assert not (tmp_path / "two").exists()


def test_inspect_accounts_for_every_byte(
    exported: dict[Dialect, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for dialect, directory in exported.items():
        code, out, _ = run(capsys, "inspect", directory, "--json", "--gpus", 2)
        assert code == 0
        found = json.loads(out)
        checkpoint = open_checkpoint(directory)
        total = sum(module.nbytes for module in checkpoint.modules().values())
        assert found["nbytes"] == total == sum(c["nbytes"] for c in found["components"])
        assert found["dialect"] == dialect
        assert total / 2 <= found["fit"]["weights_per_gpu"] <= total


def test_inspect_names_the_kernel_of_each_component(exported: dict[Dialect, Path]) -> None:
    found = inspection.inspect(open_checkpoint(exported[Dialect.B]), architecture="sm_90")
    kernels = {row.component: row.kernel for row in found.components if row.dtype == "nvfp4"}
    assert kernels["routed"] == "assay grouped_l1 + grouped_l2 (sm_90, W4A16)"
    assert kernels["wo_a"] == "assay wo_a (sm_90, W4A16)"
    assert kernels["compressor"] == "assay compressor (sm_90, W4A16)"
    native = inspection.inspect(open_checkpoint(exported[Dialect.NATIVE]))
    assert any(row.kernel.startswith("not served") for row in native.components)


def test_inspect_says_whether_it_fits(
    exported: dict[Dialect, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "inspect", exported[Dialect.B], "--gpu-memory", 1)
    assert "fits: " in out
    _, out, _ = run(capsys, "inspect", exported[Dialect.B], "--gpu-memory", 0.0001)
    assert "does not fit" in out


def test_kv_bytes_follow_the_compress_ratios(config: dict[str, Any]) -> None:
    parsed = parse_config(config)  # ratios 0, 4, 128, 4
    assert inspection.kv_bytes_per_token(parsed) == 2 * (584 + 132) / 4 + 584 / 128


def test_the_bar_is_shown_to_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay_kernels import progress as module

    monkeypatch.setattr(module, "_INTERVAL", 0.0)
    for tty in (True, False):
        stream = Terminal(tty)
        bar = Progress("auditing", 100, stream)  # type: ignore[arg-type]
        bar.advance(25)
        assert ("25%" in stream.text) is tty
    bar = Progress("auditing", 4_000_000_000, Terminal(False))  # type: ignore[arg-type]
    bar.advance(1_000_000_000)
    assert bar.line(10.0).endswith("1.0 of 4.0 GB, 0.10 GB/s, 0:30 left")
