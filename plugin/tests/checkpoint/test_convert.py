"""Conversion: bit for bit where it can be, measured where it cannot, and whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay_kernels import convert as package
from assay_kernels.audit import audit
from assay_kernels.checkpoint import (
    CheckpointError,
    Dialect,
    FP8BlockWeight,
    MXFP4Weight,
    NVFP4Weight,
    Precision,
    dequantized_state_dict,
    open_checkpoint,
)
from assay_kernels.checkpoint.header import read_header
from assay_kernels.checkpoint.manifest import MANIFEST_FILE
from assay_kernels.checkpoint.weights import plain
from assay_kernels.convert import ConversionError, convert
from assay_kernels.convert import run as run_module
from assay_kernels.convert.calibrate import PromptsError, activation_maxima, read_prompts
from assay_kernels.convert.work import WORK_FOLDER
from assay_kernels.numerics import MXFP4, dequantize, dequantize_mxfp4, is_exact, to_nearest_nvfp4

SINGLE = "model.safetensors"
EXPERT = "layers.1.ffn.experts.2.w1"


def fingerprint(directory: Path) -> dict[str, str]:
    """Checksum of every file, hidden ones and folders included."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def same_weight(one: NVFP4Weight, other: NVFP4Weight) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(
        bits(one.block_scale), bits(other.block_scale)
    )


# ---- values


@pytest.fixture(scope="session")
def circle(
    exported: dict[Dialect, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """native -> B -> A -> C -> B."""
    root = tmp_path_factory.mktemp("circle")
    steps = [("B", Dialect.B), ("A", Dialect.A), ("C", Dialect.C), ("B again", Dialect.B)]
    places = {"native": exported[Dialect.NATIVE]}
    source = places["native"]
    for name, dialect in steps:
        convert(source, root / name, dialect, shard_bytes=200_000)
        source = places[name] = root / name
    return places


def test_experts_go_round_bit_for_bit(circle: dict[str, Path]) -> None:
    """Weights that are NVFP4 in all four: codes, block scales and global scales."""
    first = open_checkpoint(circle["B"])
    seen = 0
    for name in ("A", "C", "B again"):
        other = open_checkpoint(circle[name])
        for entry, module in first.modules().items():
            if ".ffn.experts." not in entry:
                continue
            one, two = first.load(entry), other.load(entry)
            assert isinstance(one, NVFP4Weight)
            assert isinstance(two, NVFP4Weight)
            assert same_weight(one, two), entry
            assert torch.equal(one.global_scale, two.global_scale)
            assert module.precision is Precision.NVFP4
            seen += 1
    assert seen == 3 * 4 * 4 * 3


def test_every_weight_keeps_codes_and_scales_from_b_to_c_and_back(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    """Global scales too, to the bit: the manifest of C keeps what the reciprocals were made of."""
    convert(exported[Dialect.B], tmp_path / "C", Dialect.C)
    convert(tmp_path / "C", tmp_path / "B", Dialect.B)
    before = load_file(exported[Dialect.B] / SINGLE)
    after = load_file(tmp_path / "B" / SINGLE)
    assert before.keys() == after.keys()
    assert all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
    scales = [v for n, v in before.items() if n.endswith("weight_scale_2")]
    assert any(float(s.reciprocal().reciprocal()) != float(s) for s in scales)


def test_without_the_manifest_global_scales_come_back_within_one_ulp(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    convert(exported[Dialect.B], tmp_path / "C", Dialect.C)
    (tmp_path / "C" / MANIFEST_FILE).unlink()
    convert(tmp_path / "C", tmp_path / "B", Dialect.B)
    before, after = load_file(exported[Dialect.B] / SINGLE), load_file(tmp_path / "B" / SINGLE)
    for name, value in before.items():
        if name.endswith(("weight_scale_2", "input_scale")):
            steps = value.view(torch.int32).sub(after[name].view(torch.int32)).abs()
            assert int(steps) <= 1
        else:
            assert torch.equal(bits(value), bits(after[name]))


def test_a_strangers_manifest_changes_no_scale(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    convert(exported[Dialect.B], tmp_path / "C", Dialect.C)
    name = "model.layers.1.mlp.experts.2.gate_proj.weight_global_scale"
    tensors = load_file(tmp_path / "C" / SINGLE)
    tensors[name] = tensors[name] * 3
    save_file(tensors, tmp_path / "C" / SINGLE)
    weight = open_checkpoint(tmp_path / "C").load(EXPERT)
    assert isinstance(weight, NVFP4Weight)
    assert float(weight.global_scale) == float(tensors[name].reciprocal())


def test_mxfp4_becomes_nvfp4_exactly_and_says_so_of_every_tensor(
    exported: dict[Dialect, Path], circle: dict[str, Path]
) -> None:
    native, result = open_checkpoint(exported[Dialect.NATIVE]), open_checkpoint(circle["B"])
    tensors = json.loads((circle["B"] / MANIFEST_FILE).read_text())["tensors"]
    for entry, module in native.modules().items():
        if module.precision is not Precision.MXFP4:
            continue
        before, after = native.load(entry), result.load(entry)
        assert isinstance(before, MXFP4Weight)
        assert isinstance(after, NVFP4Weight)
        assert torch.equal(dequantize_mxfp4(before), dequantize(after))
        assert torch.equal(before.codes, after.codes)
        report = tensors[entry]
        assert report["exact"] is True
        assert 1 <= report["octaves"] <= 18


def mxfp4(lowest: int, zeros: bool = False) -> MXFP4:
    """A 32 x 64 matrix whose exponents run from `lowest` to 127."""
    generator = torch.Generator().manual_seed(lowest)
    codes = torch.randint(0, 256, (32, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(max(lowest, 115), 128, (32, 2), generator=generator)
    scale[0, 0], scale[1, 0] = lowest, 127
    if zeros:
        codes[0, :16] = 0x80
    return MXFP4(codes, scale.to(torch.uint8))


@pytest.mark.parametrize(("lowest", "exact"), [(115, True), (110, True), (109, False), (90, False)])
def test_the_proof_knows_exact_from_nearly_exact(lowest: int, exact: bool) -> None:
    source = mxfp4(lowest)
    result = to_nearest_nvfp4(source)
    assert is_exact(source, result) is exact
    assert torch.equal(dequantize(result), dequantize_mxfp4(source)) is exact
    if not exact:
        error = (dequantize(result) - dequantize_mxfp4(source)).norm()
        assert 0 < error < 1e-4 * dequantize_mxfp4(source).norm()
        changed = NVFP4Weight(result.codes.clone(), result.block_scale, result.global_scale)
        assert not is_exact(source, changed)


def test_blocks_of_zeros_do_not_count_as_octaves() -> None:
    source = mxfp4(90, zeros=True)
    assert is_exact(source, to_nearest_nvfp4(source))


def with_expert(directory: Path, target: Path, weight: MXFP4) -> None:
    shutil.copytree(directory, target)
    tensors = load_file(target / SINGLE)
    tensors[f"{EXPERT}.weight"] = weight.codes.view(torch.int8)
    tensors[f"{EXPERT}.scale"] = weight.scale.view(torch.float8_e8m0fnu)
    save_file(tensors, target / SINGLE)


def test_a_tensor_beyond_18_octaves_is_named_with_its_error(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    with_expert(exported[Dialect.NATIVE], tmp_path / "wide", mxfp4(100))
    outcome = convert(tmp_path / "wide", tmp_path / "B", Dialect.B)
    report = outcome.manifest["tensors"][EXPERT]
    assert outcome.manifest["not_exact"] == [EXPERT]
    assert report["octaves"] == 28
    assert 0 < report["relative_error"] < 1e-4
    assert f"{EXPERT} is not exact: its exponents span 28 octaves" in package.render(outcome)
    assert audit(tmp_path / "B", deep=True).exit_code == 0


def test_a_nan_scale_is_refused_and_named(exported: dict[Dialect, Path], tmp_path: Path) -> None:
    weight = mxfp4(110)
    weight.scale[3, 1] = 255
    with_expert(exported[Dialect.NATIVE], tmp_path / "bad", weight)
    with pytest.raises(CheckpointError, match=r"experts\.2\.w1\.scale: a UE8M0 scale is NaN"):
        convert(tmp_path / "bad", tmp_path / "B", Dialect.B)
    assert not (tmp_path / "B" / "config.json").exists()


@pytest.mark.parametrize("source", list(Dialect))
@pytest.mark.parametrize("target", [Dialect.A, Dialect.B, Dialect.C, Dialect.BF16])
def test_every_dialect_becomes_every_other_with_errors_as_reported(
    exported: dict[Dialect, Path], tmp_path: Path, source: Dialect, target: Dialect
) -> None:
    outcome = convert(exported[source], tmp_path / "out", target)
    before, after = open_checkpoint(exported[source]), open_checkpoint(tmp_path / "out")
    assert after.dialect is target
    assert audit(tmp_path / "out", deep=True).exit_code == 0
    reports = outcome.manifest["tensors"]
    for entry, module in after.modules().items():
        wanted, got = plain(before.load(entry)).double(), plain(after.load(entry)).double()
        error = float((got - wanted).norm() / wanted.norm()) if wanted.any() else 0.0
        reported = reports.get(entry, {}).get("relative_error", 0.0)
        assert error == pytest.approx(reported, rel=2e-3, abs=1e-7), entry
        assert error < (0.12 if module.precision is Precision.NVFP4 else 0.04)


def test_fp8_of_the_source_stays_fp8_bit_for_bit(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    convert(exported[Dialect.NATIVE], tmp_path / "A", Dialect.A)
    before, after = open_checkpoint(exported[Dialect.NATIVE]), open_checkpoint(tmp_path / "A")
    for entry, module in before.modules().items():
        one, two = before.load(entry), after.load(entry)
        if isinstance(one, FP8BlockWeight):
            assert isinstance(two, FP8BlockWeight)
            assert torch.equal(bits(one.weight), bits(two.weight))
            assert torch.equal(one.scale, two.scale)
        assert (
            module.precision is Precision.MXFP4
            or entry not in json.loads((tmp_path / "A" / MANIFEST_FILE).read_text())["tensors"]
        )


def test_strips_give_what_the_whole_matrix_gives(
    exported: dict[Dialect, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay_kernels.convert import steps

    for target in (Dialect.A, Dialect.B):
        convert(exported[Dialect.BF16], tmp_path / f"{target}-whole", target)
        monkeypatch.setattr(steps, "STRIP_ELEMENTS", 1)
        convert(exported[Dialect.BF16], tmp_path / f"{target}-strips", target)
        monkeypatch.undo()
        one, other = (load_file(tmp_path / f"{target}-{n}" / SINGLE) for n in ("whole", "strips"))
        assert all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


# ---- MTP


def test_mtp_stays_native_in_a_and_is_said_to(with_mtp: dict[Dialect, Path]) -> None:
    native, a = open_checkpoint(with_mtp[Dialect.NATIVE]), open_checkpoint(with_mtp[Dialect.A])
    entries = [name for name in native.modules() if name.startswith("mtp.")]
    assert len(entries) > 30
    before, after = (load_file(with_mtp[d] / SINGLE) for d in (Dialect.NATIVE, Dialect.A))
    for name, value in before.items():
        if name.startswith("mtp."):
            assert torch.equal(bits(value), bits(after[name])), name
    assert a.modules()["mtp.0.ffn.experts.1.w2"].precision is Precision.MXFP4
    assert a.config.quantization is not None
    assert a.config.quantization["ignore"] == ["mtp.*"]


@pytest.mark.parametrize("target", [Dialect.B, Dialect.C])
def test_mtp_that_a_dialect_cannot_store_is_left_out_and_recorded(
    with_mtp: dict[Dialect, Path], tmp_path: Path, target: Dialect
) -> None:
    outcome = convert(with_mtp[Dialect.NATIVE], tmp_path / "out", target)
    assert outcome.manifest["mtp"].startswith("skipped: mtp.0.")
    assert "MTP: skipped" in package.render(outcome)
    result = open_checkpoint(tmp_path / "out")
    assert result.config.num_nextn_predict_layers == 0
    assert not any(name.startswith("mtp.") for name in result.modules())
    assert audit(tmp_path / "out", deep=True).exit_code == 0


# ---- what must never happen


def test_the_source_is_never_opened_for_writing(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(exported[Dialect.NATIVE], source)
    before = fingerprint(source)
    script = f"""
import os, sys
from pathlib import Path
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith({str(source)!r}):
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            print("WRITES", arguments)
    elif event in ("os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate", "os.utime"):
        if any(str(a).startswith({str(source)!r}) for a in arguments):
            print("WRITES", event, arguments)
sys.addaudithook(watch)
from assay_kernels.convert import convert
from assay_kernels.checkpoint import Dialect
convert({str(source)!r}, {str(tmp_path / "out")!r}, Dialect.B)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert fingerprint(source) == before


def test_a_full_disk_is_refused_before_anything_is_written(
    exported: dict[Dialect, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConversionError, match=r"GB free, the conversion needs .* nothing was"):
        convert(exported[Dialect.B], tmp_path / "out", Dialect.C)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inside", [".", "inner", ".."])
def test_a_destination_in_or_around_the_source_is_refused(
    exported: dict[Dialect, Path], tmp_path: Path, inside: str
) -> None:
    source = tmp_path / "around" / "source"
    shutil.copytree(exported[Dialect.B], source)
    before = fingerprint(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(source)
    for destination in (source / inside, link / inside):
        with pytest.raises((ConversionError, FileExistsError)):
            convert(source, destination, Dialect.C)
    link.unlink()
    assert fingerprint(tmp_path) == before


def test_another_conversion_in_the_same_place_is_refused(
    exported: dict[Dialect, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "_write_shards", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(exported[Dialect.B], tmp_path / "out", Dialect.C)
    monkeypatch.undo()
    with pytest.raises(ConversionError, match="a different conversion"):
        convert(exported[Dialect.B], tmp_path / "out", Dialect.A)
    convert(exported[Dialect.B], tmp_path / "out", Dialect.C)


def test_a_source_that_changed_under_a_conversion_is_refused(
    exported: dict[Dialect, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(exported[Dialect.B], tmp_path / "source"))
    monkeypatch.setattr(run_module, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", Dialect.C)
    monkeypatch.undo()
    os.utime(source / SINGLE, (1, 1))
    with pytest.raises(ConversionError, match="a different conversion"):
        convert(source, tmp_path / "out", Dialect.C)


def test_two_converters_do_not_write_to_one_place(
    exported: dict[Dialect, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()
    finish = run_module._finish

    def wait(*arguments: Any) -> Any:
        entered.set()
        assert leave.wait(30)
        return finish(*arguments)

    monkeypatch.setattr(run_module, "_finish", wait)
    first = threading.Thread(
        target=convert, args=(exported[Dialect.B], tmp_path / "out", Dialect.C)
    )
    first.start()
    assert entered.wait(30)
    with pytest.raises(ConversionError, match="another conversion is writing"):
        convert(exported[Dialect.B], tmp_path / "out", Dialect.C)
    leave.set()
    first.join()
    open_checkpoint(tmp_path / "out")


# ---- whole or resumable


KILLS = 10


def spawn(source: Path, destination: Path) -> subprocess.Popen[bytes]:
    script = "import sys; from assay_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["convert", str(source), str(destination), "--to", "B", "--shard-megabytes", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.DEVNULL, env=environment
    )


@pytest.fixture(scope="session")
def larger(
    config: dict[str, Any], random_state: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A native checkpoint of about 20 MB."""
    from assay_kernels.checkpoint.export import export_checkpoint

    raw = {**config, "hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 64}
    directory = tmp_path_factory.mktemp("larger")
    export_checkpoint(directory, Dialect.NATIVE, random_state(raw, 3), raw)
    return directory


@pytest.mark.slow
def test_ten_kills_at_random_moments_and_a_resume_change_nothing(
    larger: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    assert spawn(larger, tmp_path / "whole").wait() == 0
    whole = time.monotonic() - began
    wanted = fingerprint(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in wanted) > 8
    dice = random.Random(20261130)
    for round_ in range(KILLS):
        place = tmp_path / f"killed{round_}"
        process = spawn(larger, place)
        time.sleep(dice.uniform(0.3, 1.0) * whole)
        process.kill()
        process.wait()
        complete = (place / "config.json").exists()
        assert complete or not audit_ok(place)
        assert spawn(larger, place).wait() == 0
        assert fingerprint(place) == wanted, round_
        shutil.rmtree(place)


def audit_ok(directory: Path) -> bool:
    try:
        open_checkpoint(directory)
    except CheckpointError:
        return False
    return True


def test_a_death_at_every_durable_step_and_a_resume_change_nothing(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    """The process dies, without any clean-up, before its n-th fsync or rename, for every n."""
    script = f"""
import os, sys
from pathlib import Path
from assay_kernels.convert import convert
from assay_kernels.checkpoint import Dialect
for n in range(10_000):
    place = Path({str(tmp_path)!r}) / f"dead{{n}}"
    child = os.fork()
    if not child:
        left = [n]
        def deadly(original):
            def call(*arguments, **keywords):
                if not left[0]:
                    os._exit(9)
                left[0] -= 1
                return original(*arguments, **keywords)
            return call
        os.fsync, Path.replace = deadly(os.fsync), deadly(Path.replace)
        os.unlink = os.remove = deadly(os.unlink)
        convert({str(exported[Dialect.NATIVE])!r}, place, Dialect.B, shard_bytes=150_000, jobs=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    convert({str(exported[Dialect.NATIVE])!r}, place, Dialect.B, shard_bytes=150_000, jobs=1)
    if status == 0:
        print(n)
        break
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    count = int(done.stdout)
    assert count > 15
    wanted = fingerprint(tmp_path / f"dead{count}")
    assert not any(WORK_FOLDER in name for name in wanted)
    for n in range(count):
        assert fingerprint(tmp_path / f"dead{n}") == wanted, n


def test_a_resume_does_not_write_finished_shards_again(
    exported: dict[Dialect, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write = run_module._write_shard

    def counted(shard: Any, *rest: Any) -> None:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(shard.file)
        write(shard, *rest)

    monkeypatch.setattr(run_module, "_write_shard", counted)
    arguments = (exported[Dialect.NATIVE], tmp_path / "out", Dialect.B)
    with pytest.raises(KeyboardInterrupt):
        convert(*arguments, shard_bytes=40_000, jobs=1)
    monkeypatch.undo()
    outcome = convert(*arguments, shard_bytes=40_000, jobs=1)
    assert outcome.resumed == 3
    again = convert(*arguments, shard_bytes=40_000, jobs=1)
    assert again.resumed == again.shards == outcome.shards


def test_any_number_of_jobs_writes_the_same(exported: dict[Dialect, Path], tmp_path: Path) -> None:
    for jobs in (1, 4):
        source = exported[Dialect.NATIVE]
        convert(source, tmp_path / str(jobs), Dialect.B, shard_bytes=100_000, jobs=jobs)
    assert fingerprint(tmp_path / "1") == fingerprint(tmp_path / "4")


def test_the_manifest_lists_every_file_with_its_checksum(circle: dict[str, Path]) -> None:
    manifest = json.loads((circle["C"] / MANIFEST_FILE).read_text())
    present = fingerprint(circle["C"])
    assert {n: e["sha256"] for n, e in manifest["files"].items()} == {
        name: digest
        for name, digest in present.items()
        if name not in ("config.json", MANIFEST_FILE)
    }
    assert manifest["source"]["dialect"] == "A"
    assert manifest["tool"].startswith("assay-kernels ")


def test_shards_are_aligned_and_readable_by_the_library(circle: dict[str, Path]) -> None:
    for path in circle["B"].glob("*.safetensors"):
        library = load_file(path)
        header = read_header(path)
        assert library.keys() == header.keys()
        for info in header.values():
            width = library[info.name].element_size()
            assert info.begin % width == 0


# ---- calibration


def test_calibration_records_what_each_matrix_reads(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(exported[Dialect.BF16])
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 4, [7, 7, 7]]
    maxima = dict(activation_maxima(checkpoint, prompts, Dialect.B))
    outcome = convert(
        exported[Dialect.BF16], tmp_path / "out", Dialect.B, calibrate=lambda _: maxima
    )
    assert outcome.manifest["dynamic_inputs"] == 0
    result = open_checkpoint(tmp_path / "out")
    for entry, module in result.modules().items():
        if module.precision is Precision.NVFP4:
            weight = result.load(entry)
            assert isinstance(weight, NVFP4Weight)
            assert weight.input_scale is not None
            assert float(weight.input_scale) == pytest.approx(maxima[entry] / 2688, rel=1e-6)
    report = audit(tmp_path / "out", deep=True)
    assert "dynamic-input" not in {finding.rule for finding in report.findings}
    assert report.exit_code == 0


def test_calibrated_maxima_are_those_of_the_matrices_own_inputs(
    exported: dict[Dialect, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen a second time, by the arguments of the matrix products themselves."""
    from assay_kernels.checkpoint.hf import load_transformers_model

    checkpoint = open_checkpoint(exported[Dialect.BF16])
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 4]
    maxima = activation_maxima(checkpoint, prompts, Dialect.B)
    model: Any = load_transformers_model(checkpoint)
    model.set_experts_implementation("eager")
    layer = model.model.layers[1]
    products: dict[int, float] = {}
    linear = torch.nn.functional.linear

    def watched(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        if x.numel():
            key = weight.data_ptr()
            products[key] = max(products.get(key, 0.0), float(x.abs().max()))
        return linear(x, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    with torch.no_grad():
        model(torch.tensor(prompts))
    experts = layer.mlp.experts
    wanted = {
        "layers.1.attn.wq_a": layer.self_attn.q_a_proj.weight,
        "layers.1.attn.wq_b": layer.self_attn.q_b_proj.weight,
        "layers.1.attn.wo_b": layer.self_attn.o_b_proj.weight,
        "layers.1.ffn.shared_experts.w2": layer.mlp.shared_experts.down_proj.weight,
    }
    for number in range(4):
        wanted[f"layers.1.ffn.experts.{number}.w1"] = experts.gate_up_proj[number]
        wanted[f"layers.1.ffn.experts.{number}.w2"] = experts.down_proj[number]
    checked = 0
    for entry, weight in wanted.items():
        seen = products.get(weight.data_ptr())
        if seen is not None:
            assert maxima[entry] == pytest.approx(seen, rel=1e-5), entry
            checked += 1
    assert checked >= 6  # two of four experts at least


def test_prompts_are_text_or_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('[1, 2, 3]\n{"token_ids": [4]}\n\n')
    assert read_prompts(path, tmp_path, 10) == [[1, 2, 3], [4]]
    for text, message in [
        ("[1, 10]\n", "must be in 0..9"),
        ("\n", "holds no prompt"),
        ("What is this?\n", "has no tokenizer.json"),
        ("[]\n", "must be in"),
    ]:
        path.write_text(text)
        with pytest.raises(PromptsError, match=message):
            read_prompts(path, tmp_path, 10)
    with pytest.raises(PromptsError, match="cannot be read"):
        read_prompts(tmp_path / "nothing", tmp_path, 10)


def test_dequantised_bf16_is_what_the_source_holds(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    """MXFP4 and FP8 fit into bf16 without rounding."""
    outcome = convert(exported[Dialect.NATIVE], tmp_path / "out", Dialect.BF16)
    assert set(outcome.manifest["largest_relative_error"].values()) == {0.0}
    before = dequantized_state_dict(exported[Dialect.NATIVE], torch.float32)
    after = dequantized_state_dict(tmp_path / "out", torch.float32)
    assert all(torch.equal(before[name], after[name]) for name in before)
