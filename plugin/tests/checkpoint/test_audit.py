"""The audit: every rule finds its own fault and nothing else, and clean checkpoints are clean.

Each fault below is one damage to a clean checkpoint. The audit must name its rule and no other,
and must be silent about it once the rule is switched off: a rule that another one covers, or that
never fires, fails here.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay_kernels.audit import Report, Severity, all_rules, audit, render
from assay_kernels.checkpoint import Dialect
from assay_kernels.checkpoint.export import derive, export_checkpoint
from assay_kernels.checkpoint.manifest import MANIFEST_FILE

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Damage = Callable[[Path], None]

B = "model.layers.0.self_attn"
EXPERT = "model.layers.1.mlp.experts.2"
INDEXER = "model.layers.1.self_attn.compressor.indexer"
A = "layers.1.ffn.experts.2"
SHARDED = "sharded"
CALIBRATED = "calibrated"
MTP_NATIVE, MTP_A = "mtp native", "mtp A"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def clean(
    exported: dict[Dialect, Path],
    with_mtp: dict[Dialect, Path],
    state: Tensors,
    config: Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("clean")
    derive(exported[Dialect.B], root / SHARDED, Dialect.B, shard_bytes=60_000)
    amax = {name.removesuffix(".weight"): 4.0 for name in state}
    export_checkpoint(root / CALIBRATED, Dialect.B, state, config, activation_amax=amax)
    return {
        **{str(dialect): path for dialect, path in exported.items()},
        SHARDED: root / SHARDED,
        CALIBRATED: root / CALIBRATED,
        MTP_NATIVE: with_mtp[Dialect.NATIVE],
        MTP_A: with_mtp[Dialect.A],
    }


# ---- kinds of damage


def change(edit: Callable[[Tensors], object]) -> Damage:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / SINGLE)
        edit(tensors)
        (directory / MANIFEST_FILE).unlink(missing_ok=True)
        save_file(tensors, directory / SINGLE)

    return damage


def put(name: str, value: Tensor | float) -> Damage:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    return change(lambda tensors: tensors.__setitem__(name, tensor))


def drop(*names: str) -> Damage:
    return change(lambda tensors: [tensors.pop(name) for name in names])


def copy(source: str, target: str) -> Damage:
    return change(lambda tensors: tensors.__setitem__(target, tensors[source].clone()))


def fill(name: str, value: int, where: slice = slice(None)) -> Damage:
    """Bytes of a one-byte tensor."""

    def edit(tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.uint8).view(-1)[where] = value

    return change(edit)


def reconfigure(edit: Callable[[Config], object]) -> Damage:
    def damage(directory: Path) -> None:
        raw = json.loads((directory / "config.json").read_text())
        edit(raw)
        (directory / "config.json").write_text(json.dumps(raw))

    return damage


def both(*damages: Damage) -> Damage:
    def damage(directory: Path) -> None:
        for one in damages:
            one(directory)

    return damage


def without_manifest(edit: Damage) -> Damage:
    def damage(directory: Path) -> None:
        (directory / MANIFEST_FILE).unlink()
        edit(directory)

    return damage


def edit_index(edit: Callable[[dict[str, str]], object]) -> Damage:
    def damage(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        edit(index["weight_map"])
        (directory / INDEX).write_text(json.dumps(index))

    return without_manifest(damage)


def edit_header(edit: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / SINGLE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        (directory / SINGLE).write_bytes(
            len(text).to_bytes(8, "little") + text + data[8 + length :]
        )

    return damage


def overlap(header: dict[str, Any]) -> None:
    """Two tensors of one size at one place: the other's bytes belong to nobody."""
    one, other = f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"
    header[one]["data_offsets"] = header[other]["data_offsets"]


def truncate(directory: Path) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-100])


def second_shard(name: str) -> Damage:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / SINGLE)
        save_file({name: tensors[name]}, directory / "other.safetensors")

    return damage


def flip_last_byte(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def scaled(name: str, factor: Callable[[Tensor], Tensor]) -> Damage:
    return change(lambda tensors: tensors.__setitem__(name, factor(tensors[name])))


def plain_wq_a(tensors: Tensors) -> None:
    for parameter in ("weight_scale", "weight_scale_2", "input_scale"):
        tensors.pop(f"{B}.q_a_proj.{parameter}", None)
    tensors[f"{B}.q_a_proj.weight"] = torch.randn(48, 64).bfloat16()


def padded(stale: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        scale = tensors[f"{B}.q_a_proj.weight_scale"].view(torch.uint8)
        full = torch.full((128, 4), stale, dtype=torch.uint8)
        full[:48] = scale
        tensors[f"{B}.q_a_proj.weight_scale"] = full.view(torch.float8_e4m3fn)

    return edit


def swap_names(tensors: Tensors) -> None:
    """The main compressor's tensors under the indexer's name, cut to its shape."""
    for parameter in ("weight", "weight_scale"):
        main = tensors[f"model.layers.1.self_attn.compressor.kv_proj.{parameter}"]
        tensors[f"{INDEXER}.kv_proj.{parameter}"] = main[:64].clone()


def e8m0(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True)
class Case:
    rule: str
    of: str
    damage: Damage
    tensor: str
    also: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.rule}-{self.of}"


def case(rule: str, of: str, damage: Damage, tensor: str, *also: str) -> Case:
    return Case(rule, of, damage, tensor, frozenset(also))


NAN, INF = float("nan"), float("inf")

CASES = [
    # config.json
    case("config-value", "B", reconfigure(lambda c: c.update(o_groups=3)), "config.json"),
    case(
        "config-mark",
        "B",
        reconfigure(lambda c: c["quantization_config"].update(quant_algo="FP8")),
        "config.json",
    ),
    case("config-mark", "B", reconfigure(lambda c: c.pop("quantization_config")), "model.layers.0"),
    case("config-shape", "B", reconfigure(lambda c: c.update(vocab_size=256)), "tid2eid"),
    case("config-shape", "A", reconfigure(lambda c: c.update(hidden_size=128)), "embed"),
    case(
        "config-shape", "B", reconfigure(lambda c: c.update(num_hidden_layers=3)), "model.layers.3"
    ),
    case(
        "config-shape",
        "B",
        reconfigure(lambda c: c.update(num_hidden_layers=5)),
        "model.layers.3",
        "weight-missing",
        "expert-missing",
    ),
    case("config-shape", "C", reconfigure(lambda c: c.update(n_routed_experts=8)), "mlp.gate"),
    case(
        "config-shape",
        "native",
        reconfigure(lambda c: c.update(compress_ratios=[0, 128, 128, 4])),
        "layers.1",
    ),
    # files
    case(
        "index-file",
        SHARDED,
        without_manifest(lambda d: sorted(d.glob("*.safetensors"))[1].unlink()),
        "",
    ),
    case("index-tensor", SHARDED, edit_index(lambda m: m.pop("model.norm.weight")), "model.norm"),
    case(
        "index-tensor",
        SHARDED,
        edit_index(lambda m: m.update(ghost=next(iter(m.values())))),
        "ghost",
    ),
    case("shard-truncated", "B", truncate, ""),
    case("shard-overlap", "B", edit_header(overlap), ""),
    case(
        "shard-header",
        "B",
        edit_header(lambda h: h["model.norm.weight"].update(dtype="Q4")),
        "model.norm",
    ),
    case(
        "tensor-unexpected",
        "B",
        put("model.layers.0.self_attn.k_proj.weight", torch.zeros(4)),
        "k_proj",
    ),
    case(
        "tensor-unexpected",
        "A",
        put("layers.0.attn.compressor.wkv.weight", torch.zeros(64, 64)),
        "compressor",
    ),
    case("tensor-duplicate", "B", copy("model.norm.weight", "norm.weight"), "norm"),
    case("tensor-duplicate", "A", second_shard("norm.weight"), "norm"),
    case(
        "manifest-file",
        SHARDED,
        lambda d: (d / MANIFEST_FILE).write_text(
            (d / MANIFEST_FILE).read_text().replace("model-00001-of", "model-00000-of")
        ),
        "model-00000",
    ),
    case("manifest-checksum", SHARDED, flip_last_byte, "model-00001"),
    # what is missing, and what is there twice
    case(
        "expert-missing",
        "B",
        drop(*(f"{EXPERT}.down_proj.{p}" for p in ("weight", "weight_scale", "weight_scale_2"))),
        "experts.2.down_proj",
    ),
    case(
        "expert-duplicate",
        "A",
        copy(f"{A}.w1.weight", "model.layers.1.mlp.experts.2.gate_proj.weight"),
        "experts.2",
    ),
    case(
        "experts-equal",
        "B",
        change(
            lambda t: [
                t.__setitem__(
                    f"{EXPERT}.up_proj.{p}", t[f"model.layers.1.mlp.experts.0.up_proj.{p}"].clone()
                )
                for p in ("weight", "weight_scale")
            ]
        ),
        "experts.2.up_proj",
    ),
    case(
        "experts-equal",
        "native",
        change(
            lambda t: [
                t.__setitem__(f"{A}.w2.{p}", t[f"layers.1.ffn.experts.3.w2.{p}"].clone())
                for p in ("weight", "scale")
            ]
        ),
        "experts.3.w2",
    ),
    case(
        "indexer-compressor-missing",
        "bf16",
        drop("layers.1.attn.indexer.compressor.wkv.weight"),
        "indexer.compressor.wkv",
    ),
    case(
        "indexer-compressor-missing", "B", drop(f"{INDEXER}.position_bias"), "indexer.position_bias"
    ),
    case(
        "indexer-compressor-shape",
        "bf16",
        copy("layers.1.attn.compressor.wkv.weight", "layers.1.attn.indexer.compressor.wkv.weight"),
        "indexer.compressor.wkv",
    ),
    case(
        "indexer-compressor-shape",
        "B",
        change(
            lambda t: [
                t.__setitem__(
                    f"{INDEXER}.kv_proj.{p}",
                    t[f"model.layers.1.self_attn.compressor.kv_proj.{p}"].clone(),
                )
                for p in ("weight", "weight_scale")
            ]
        ),
        "indexer.kv_proj",
    ),
    case("indexer-equals-main", "B", change(swap_names), "indexer.kv_proj"),
    case(
        "indexer-equals-main",
        "A",
        change(
            lambda t: t.__setitem__(
                "layers.1.attn.indexer.compressor.wgate.weight",
                t["layers.1.attn.compressor.wgate.weight"][:64].clone(),
            )
        ),
        "indexer.compressor.wgate",
    ),
    case("head-missing", "B", drop("lm_head.weight"), "lm_head"),
    case("head-missing", "native", drop("head.weight"), "head"),
    case("weight-missing", "C", drop("model.norm.weight"), "model.norm"),
    case("scale-missing", "B", drop(f"{B}.q_a_proj.weight_scale"), "q_a_proj.weight_scale"),
    case("scale-missing", "native", drop("layers.0.attn.wq_b.scale"), "wq_b.scale"),
    case("global-scale-missing", "A", drop(f"{A}.w1.weight_scale_2"), "w1.weight_scale_2"),
    case(
        "global-scale-missing",
        "C",
        drop(f"{EXPERT}.up_proj.weight_global_scale"),
        "weight_global_scale",
    ),
    # format
    case(
        "mxfp4-label",
        "B",
        put(f"{B}.q_a_proj.weight_scale", e8m0((48, 4))),
        "q_a_proj.weight_scale",
    ),
    case(
        "mxfp4-label",
        "A",
        put(f"{A}.w1.weight_scale", torch.ones(32, 2).to(torch.float8_e4m3fn)),
        "w1.weight_scale",
    ),
    case(
        "mxfp4-label",
        "A",
        change(
            lambda t: (
                t.pop(f"{A}.w1.weight_scale"),
                t.pop(f"{A}.w1.weight_scale_2"),
                t.__setitem__(f"{A}.w1.scale", e8m0((32, 2))),
            )
        ),
        "experts.2.w1",
    ),
    case(
        "scale-shape",
        "C",
        put(f"{B}.q_a_proj.weight_scale", torch.ones(48, 8).to(torch.float8_e4m3fn)),
        "weight_scale",
    ),
    case("scale-shape", "A", put("layers.0.attn.wq_b.scale", e8m0((1, 1))), "wq_b.scale"),
    case("scale-shape", "B", change(padded(0)), "q_a_proj.weight_scale"),
    case("padding-nonzero", "B", change(padded(77)), "q_a_proj.weight_scale", "scale-shape"),
    case(
        "scale-dtype",
        "B",
        put(f"{B}.q_a_proj.weight_scale", torch.ones(48, 4)),
        "q_a_proj.weight_scale",
    ),
    case(
        "weight-shape",
        "B",
        put("model.embed_tokens.weight", torch.zeros(127, 64).bfloat16()),
        "embed",
    ),
    case(
        "weight-dtype", "B", put("model.layers.0.mlp.gate.tid2eid", torch.zeros(128, 2)), "tid2eid"
    ),
    case(
        "weight-format",
        "B",
        put(f"{B}.q_a_proj.weight", torch.zeros(48, 64).to(torch.float8_e4m3fn)),
        "q_a_proj",
    ),
    # config.json against what is stored
    case("quantised-by-config-only", "B", change(plain_wq_a), "q_a_proj"),
    case(
        "quantised-by-config-only",
        "A",
        change(
            lambda t: (
                t.pop("layers.0.attn.wq_b.scale"),
                t.__setitem__("layers.0.attn.wq_b.weight", torch.randn(256, 48).bfloat16()),
            )
        ),
        "wq_b",
    ),
    case(
        "quantised-unlisted",
        "B",
        reconfigure(lambda c: c["quantization_config"]["ignore"].append("*.q_a_proj")),
        "q_a_proj",
    ),
    case(
        "quantised-unlisted",
        "C",
        reconfigure(lambda c: c["quantization_config"]["ignore"].append("re:.*experts.2.up_proj$")),
        "experts.2.up_proj",
    ),
    case(
        "mtp-precision",
        MTP_A,
        reconfigure(lambda c: c["quantization_config"].pop("ignore")),
        "mtp.0.ffn.experts",
    ),
    case(
        "mtp-precision",
        MTP_NATIVE,
        reconfigure(lambda c: c.update(expert_dtype="fp8")),
        "mtp.0.ffn.experts",
        "quantised-unlisted",
    ),
    case(
        "input-scale-missing",
        CALIBRATED,
        drop(f"{EXPERT}.up_proj.input_scale"),
        "experts.2.up_proj.input_scale",
    ),
    # scales
    case(
        "scale-nonfinite",
        "B",
        fill(f"{EXPERT}.up_proj.weight_scale", 0x7F, slice(3, 5)),
        "experts.2.up_proj",
    ),
    case("scale-nonfinite", "native", fill(f"{A}.w1.scale", 255, slice(0, 1)), "experts.2.w1"),
    case("scale-nonfinite", "A", fill("layers.0.attn.wq_b.scale", 255, slice(0, 1)), "wq_b"),
    case(
        "scale-nonfinite",
        "A",
        put("layers.0.attn.wq_b.scale", torch.tensor([[INF], [1.0]])),
        "wq_b",
    ),
    case(
        "scale-negative",
        "C",
        scaled(f"{EXPERT}.up_proj.weight_scale", lambda s: (-s.float()).to(torch.float8_e4m3fn)),
        "experts.2.up_proj",
    ),
    case(
        "scale-negative",
        "A",
        put("layers.0.attn.wq_b.scale", torch.tensor([[-0.01], [0.01]])),
        "wq_b",
    ),
    case("scale-zero", "B", fill(f"{EXPERT}.up_proj.weight_scale", 0), "experts.2.up_proj"),
    case(
        "scale-zero",
        "B",
        fill(f"{EXPERT}.up_proj.weight_scale", 0, slice(0, 64)),
        "experts.2.up_proj",
    ),
    case("scale-zero", "A", put("layers.0.attn.wq_b.scale", torch.zeros(2, 1)), "wq_b"),
    case("scale-constant", "B", fill(f"{EXPERT}.up_proj.weight_scale", 0x38), "experts.2.up_proj"),
    case("scale-constant", "A", fill(f"{A}.w1.weight_scale", 0x55), "experts.2.w1"),
    case("scale-constant", "native", fill(f"{A}.w1.scale", 127), "experts.2.w1"),
    case("scale-constant", "A", put("layers.0.attn.wq_b.scale", torch.ones(2, 1)), "wq_b"),
    case("global-scale-value", "B", put(f"{EXPERT}.up_proj.weight_scale_2", 0.0), "weight_scale_2"),
    case("global-scale-value", "A", put(f"{A}.w1.weight_scale_2", NAN), "w1.weight_scale_2"),
    case(
        "global-scale-value",
        "C",
        put(f"{EXPERT}.up_proj.weight_global_scale", torch.tensor([INF])),
        "weight_global_scale",
    ),
    case(
        "global-scale-reciprocal",
        "B",
        scaled(f"{EXPERT}.up_proj.weight_scale_2", torch.reciprocal),
        "weight_scale_2",
    ),
    case(
        "global-scale-reciprocal",
        "A",
        scaled(f"{A}.w1.weight_scale_2", torch.reciprocal),
        "weight_scale_2",
    ),
    case(
        "global-scale-reciprocal",
        "C",
        scaled(f"{EXPERT}.up_proj.weight_global_scale", torch.reciprocal),
        "weight_global_scale",
    ),
    case("input-scale-value", "B", put(f"{B}.q_a_proj.input_scale", 0.0), "input_scale"),
    case(
        "input-scale-value",
        "C",
        put(f"{B}.q_a_proj.input_global_scale", torch.tensor([INF])),
        "input_global_scale",
    ),
    case(
        "input-scale-reciprocal",
        "B",
        scaled(f"{B}.q_a_proj.input_scale", torch.reciprocal),
        "input_scale",
    ),
    case("input-scale-reciprocal", "B", put(f"{B}.q_a_proj.input_scale", 1.0), "input_scale"),
    case(
        "input-scale-reciprocal",
        "C",
        scaled(f"{B}.q_a_proj.input_global_scale", torch.reciprocal),
        "input_global_scale",
    ),
    # data
    case(
        "weight-nonfinite",
        "B",
        change(lambda t: t["model.norm.weight"].__setitem__(3, NAN)),
        "model.norm",
    ),
    case("weight-nonfinite", "A", fill("layers.0.attn.wq_b.weight", 0x7F, slice(9, 10)), "wq_b"),
    case(
        "hash-table",
        "B",
        change(lambda t: t["model.layers.0.mlp.gate.tid2eid"].__setitem__((5, 1), 4)),
        "tid2eid",
    ),
    case(
        "hash-table",
        "native",
        change(lambda t: t["layers.0.ffn.gate.tid2eid"].__setitem__((0, 0), -1)),
        "tid2eid",
    ),
]

WARNINGS = [
    case("partition-scales", "B", lambda d: None, "mlp"),
    case("dynamic-input", "B", lambda d: None, "model.layers"),
    case("dynamic-input", "A", lambda d: None, "w"),
    case(
        "mtp-absent",
        "B",
        reconfigure(lambda c: c.update(num_nextn_predict_layers=1)),
        "config.json",
    ),
    case("scale-constant", "B", fill(f"{EXPERT}.up_proj.weight_scale", 0x40), "experts.2.up_proj"),
]

STATISTICAL = {"nibble-order", "scale-swizzled"}
"""These have test_audit_statistics.py."""


def damaged(clean: dict[str, Path], tmp_path: Path, one: Case) -> Path:
    directory = tmp_path / "damaged"
    shutil.copytree(clean[one.of], directory)
    one.damage(directory)
    return directory


def found(report: Report, severity: Severity) -> set[str]:
    return {finding.rule for finding in report.findings if finding.severity is severity}


@pytest.mark.parametrize("one", CASES, ids=str)
def test_a_fault_is_found_by_its_rule_and_by_no_other(
    clean: dict[str, Path], tmp_path: Path, one: Case
) -> None:
    directory = damaged(clean, tmp_path, one)
    report = audit(directory, deep=True, jobs=1)
    assert found(report, Severity.FAULT) - one.also == {one.rule}
    assert report.exit_code == 1
    named = [f for f in report.findings if f.rule == one.rule]
    assert any(one.tensor in finding.tensor for finding in named), [f.tensor for f in named]
    assert all("\n" not in str(finding) for finding in named)

    others = [rule for rule in all_rules().values() if rule.id != one.rule]
    left = audit(directory, deep=True, rules=others, jobs=1)
    assert one.rule not in found(left, Severity.FAULT)


@pytest.mark.parametrize("one", WARNINGS, ids=str)
def test_a_warning_is_no_fault(clean: dict[str, Path], tmp_path: Path, one: Case) -> None:
    report = audit(damaged(clean, tmp_path, one), deep=True, jobs=1)
    assert one.rule in found(report, Severity.WARNING)
    assert any(one.tensor in f.tensor for f in report.findings if f.rule == one.rule)
    assert report.exit_code == 0
    others = [rule for rule in all_rules().values() if rule.id != one.rule]
    left = audit(tmp_path / "damaged", deep=True, rules=others, jobs=1)
    assert one.rule not in found(left, Severity.WARNING)


def test_every_rule_has_a_fault_of_its_own() -> None:
    covered = {one.rule for one in CASES + WARNINGS} | STATISTICAL
    assert covered == set(all_rules())


def test_clean_checkpoints_are_clean(clean: dict[str, Path]) -> None:
    for name, directory in clean.items():
        report = audit(directory, deep=True)
        assert not found(report, Severity.FAULT), (name, render.text(report))
        assert report.exit_code == 0


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_other_random_models_are_clean_in_every_dialect(
    config: Config, tmp_path: Path, seed: int, random_state: Any
) -> None:
    state = random_state(config, seed)
    for dialect in Dialect:
        export_checkpoint(tmp_path / dialect, dialect, state, config)
        report = audit(tmp_path / dialect, deep=True)
        assert not found(report, Severity.FAULT), render.text(report)


def test_a_wrong_config_value_is_one_finding_not_one_for_every_tensor(
    clean: dict[str, Path], tmp_path: Path
) -> None:
    one = case("", "B", reconfigure(lambda c: c.update(moe_intermediate_size=64)), "")
    report = audit(damaged(clean, tmp_path, one))
    assert [finding.rule for finding in report.findings if finding.severity == "fault"] == [
        "config-shape"
    ]
    assert "moe_intermediate_size is 64, by the tensors it is 32" in report.findings[0].found


def test_a_lost_shard_is_one_finding_not_one_for_every_tensor_it_held(
    clean: dict[str, Path], tmp_path: Path
) -> None:
    one = next(one for one in CASES if one.rule == "index-file")
    faults = [f for f in audit(damaged(clean, tmp_path, one)).findings if f.severity == "fault"]
    assert len(faults) == 1


def test_a_huge_tensor_is_read_in_bounded_memory(
    clean: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read is larger than a chunk, a scale tensor or a sample, whatever the tensor's size."""
    from assay_kernels.checkpoint.data import TensorReader

    directory = Path(shutil.copytree(clean["bf16"], tmp_path / "large"))
    rows = 400_000
    tensors = load_file(directory / SINGLE)
    for name in ("embed.weight", "head.weight"):
        tensors[name] = torch.zeros(rows, 64).bfloat16()
    tensors["layers.0.ffn.gate.tid2eid"] = torch.zeros(rows, 2, dtype=torch.int64)
    save_file(tensors, directory / SINGLE)
    reconfigure(lambda c: c.update(vocab_size=rows))(directory)
    sizes = []
    fill_ = TensorReader.fill
    monkeypatch.setattr(
        TensorReader, "fill", lambda s, i, b, t: (sizes.append(t.nbytes), fill_(s, i, b, t))[1]
    )
    assert audit(directory, deep=True).exit_code == 0
    assert tensors["embed.weight"].nbytes == 51_200_000
    assert max(sizes) < 8_000_000


def test_text_has_one_line_a_finding_and_counts_what_is_alike(
    clean: dict[str, Path], tmp_path: Path
) -> None:
    names = [n for n in load_file(clean["B"] / SINGLE) if n.endswith("gate_proj.weight_scale")]
    one = case("", "B", drop(*names), "")
    report = audit(damaged(clean, tmp_path, one))
    count = sum(1 for finding in report.findings if finding.rule == "scale-missing")
    assert count > 15
    shown = [line for line in render.text(report).splitlines() if "scale-missing" in line]
    assert len(shown) < count
    assert sum(" more of " in line for line in shown) >= 1
    assert render.text(report, everything=True).count("scale-missing:") == count


def test_json_is_stable(clean: dict[str, Path]) -> None:
    value = audit(clean["B"], deep=True).as_json()
    assert set(value) == {
        "version", "directory", "dialect", "passes", "tensors", "bytes", "faults", "warnings",
        "findings", "undecided",
    }  # fmt: skip
    assert set(value["findings"][0]) == {
        "severity", "rule", "tensor", "file", "found", "effect", "action", "confidence",
    }  # fmt: skip
    assert json.loads(json.dumps(value)) == value
    assert audit(clean["B"], deep=True, jobs=3).as_json() == value


def test_the_documented_table_is_the_registry() -> None:
    path = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"
    assert render.rule_table(all_rules().values()) in path.read_text()


# ---- random damage


HARMFUL: dict[str, tuple[str, Callable[[Tensors, str], None]]] = {
    "zero scales": (
        "scale-zero",
        lambda t, n: t.__setitem__(
            f"{n}.weight_scale",
            torch.zeros_like(t[f"{n}.weight_scale"].float()).to(torch.float8_e4m3fn),
        ),
    ),
    "ones": (
        "scale-constant",
        lambda t, n: t.__setitem__(
            f"{n}.weight_scale",
            torch.ones_like(t[f"{n}.weight_scale"].float()).to(torch.float8_e4m3fn),
        ),
    ),
    "nan scale": (
        "scale-nonfinite",
        lambda t, n: t[f"{n}.weight_scale"].view(torch.uint8).view(-1).__setitem__(-1, 0xFF),
    ),
    "negative": (
        "scale-negative",
        lambda t, n: t[f"{n}.weight_scale"].view(torch.uint8).bitwise_or_(0x80),
    ),
    "no scale": ("scale-missing", lambda t, n: t.__delitem__(f"{n}.weight_scale")),
    "no global": ("global-scale-missing", lambda t, n: t.__delitem__(f"{n}.weight_scale_2")),
    "reciprocal": ("global-scale-reciprocal", lambda t, n: t[f"{n}.weight_scale_2"].reciprocal_()),
    "infinite": ("global-scale-value", lambda t, n: t[f"{n}.weight_scale_2"].fill_(INF)),
    "no input scale": ("input-scale-missing", lambda t, n: t.__delitem__(f"{n}.input_scale")),
    "zero input": ("input-scale-value", lambda t, n: t[f"{n}.input_scale"].zero_()),
    "reciprocal input": (
        "input-scale-reciprocal",
        lambda t, n: t[f"{n}.input_scale"].reciprocal_(),
    ),
    "blocks of 32": (
        "mxfp4-label",
        lambda t, n: t.__setitem__(
            f"{n}.weight_scale", t[f"{n}.weight_scale"][:, ::2].contiguous()
        ),
    ),
}


@settings(max_examples=25)
@given(data=st.data())
def test_every_harmful_mutation_of_any_weight_is_named(
    clean: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors = load_file(clean[CALIBRATED] / SINGLE)
    names = sorted(n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale"))
    name = data.draw(st.sampled_from(names))
    rule, edit = HARMFUL[data.draw(st.sampled_from(sorted(HARMFUL)))]
    directory = tmp_path_factory.mktemp("mutant")
    shutil.copy(clean[CALIBRATED] / "config.json", directory)
    edit(tensors, name)
    save_file(tensors, directory / SINGLE)
    faults = [f for f in audit(directory, deep=True, jobs=1).findings if f.severity == "fault"]
    assert (rule, name) in {(f.rule, f.tensor.rpartition(".")[0]) for f in faults}
    assert {f.rule for f in faults} == {rule}
    shutil.rmtree(directory)


@settings(max_examples=40)
@given(data=st.data())
def test_no_damaged_bytes_crash_the_audit(
    clean: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of any file are overwritten, cut or inserted: a report, or a refusal in one line."""
    from assay_kernels.checkpoint import CheckpointError

    directory = tmp_path_factory.mktemp("mutant")
    shutil.copytree(clean[SHARDED], directory, dirs_exist_ok=True)
    for _ in range(data.draw(st.integers(1, 3))):
        file = data.draw(st.sampled_from(sorted(p.name for p in directory.iterdir())))
        content = bytearray((directory / file).read_bytes())
        header = min(len(content), 4096)
        place = data.draw(st.integers(0, header))
        junk = data.draw(st.binary(max_size=9))
        cut = data.draw(st.sampled_from([0, len(junk), 1000]))
        content[place : place + cut] = junk
        (directory / file).write_bytes(bytes(content))
    said = ""
    try:
        json.dumps(audit(directory, deep=True, jobs=1).as_json())
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
    shutil.rmtree(directory)
