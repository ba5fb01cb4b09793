"""Opening checkpoints: what each dialect means, and one error for each thing that can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay_kernels.checkpoint import (
    Checkpoint,
    CheckpointError,
    Dialect,
    FP8BlockWeight,
    Kind,
    NVFP4Weight,
    Precision,
    Scheme,
    convert_name,
    dequantized_state_dict,
    open_checkpoint,
    scan_checkpoint,
    weights_iterator,
)
from assay_kernels.checkpoint.config import parse_config
from assay_kernels.checkpoint.names import is_bare
from assay_kernels.checkpoint.spec import mtp_specs, weight_specs

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
Mutated = Callable[[Dialect, Change], Path]

WQ_A = "model.layers.0.self_attn.q_a_proj"
EXPERT = "model.layers.1.mlp.experts.2.gate_proj"


def decode(codes: Tensor, block_scale: Tensor, scale: float) -> np.ndarray:
    """NVFP4 by the definition, in float64."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = codes.numpy()
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    blocks = block_scale.double().numpy().repeat(16, axis=1)
    return table[nibbles] * blocks * scale


# ---- what the dialects mean


@pytest.mark.parametrize("dialect", [Dialect.A, Dialect.B, Dialect.C, Dialect.BF16])
def test_each_dialect_is_recognised_and_has_every_module(
    exported: dict[Dialect, Path], config: dict[str, Any], dialect: Dialect
) -> None:
    checkpoint = open_checkpoint(exported[dialect])
    assert checkpoint.dialect is dialect
    expected = {name: spec.shape for name, spec in weight_specs(parse_config(config))}
    assert {m.name: m.shape for m in checkpoint.modules().values()} == expected


def precisions(checkpoint: Checkpoint) -> dict[Kind, set[Precision]]:
    found: dict[Kind, set[Precision]] = {}
    for module in checkpoint.modules().values():
        found.setdefault(module.kind, set()).add(module.precision)
    return found


def test_dialect_a_quantises_experts_to_nvfp4_and_attention_to_fp8(
    exported: dict[Dialect, Path],
) -> None:
    assert precisions(open_checkpoint(exported[Dialect.A])) == {
        Kind.ROUTED: {Precision.NVFP4},
        Kind.SHARED: {Precision.FP8_BLOCK},
        Kind.ATTENTION: {Precision.FP8_BLOCK},
        Kind.WO_A: {Precision.FP8_BLOCK},
        Kind.INDEXER: {Precision.FP8_BLOCK},
        Kind.COMPRESSOR: {Precision.BF16},
        Kind.INDEXER_COMPRESSOR: {Precision.BF16},
        Kind.PLAIN: {Precision.BF16, Precision.FP32, Precision.INT},
    }


@pytest.mark.parametrize("dialect", [Dialect.B, Dialect.C])
def test_dialects_b_and_c_quantise_the_whole_model(
    exported: dict[Dialect, Path], dialect: Dialect
) -> None:
    found = precisions(open_checkpoint(exported[dialect]))
    found.pop(Kind.PLAIN)
    assert set(map(frozenset, found.values())) == {frozenset({Precision.NVFP4})}
    assert set(found) == set(Kind) - {Kind.PLAIN, Kind.MTP}


@pytest.mark.parametrize("dialect", [Dialect.A, Dialect.B, Dialect.C, Dialect.BF16])
def test_dequantised_weights_are_near_the_originals(
    exported: dict[Dialect, Path], state: dict[str, Tensor], dialect: Dialect
) -> None:
    checkpoint = open_checkpoint(exported[dialect])
    worst = {Precision.NVFP4: 0.12, Precision.FP8_BLOCK: 0.04}
    for name, value in dequantized_state_dict(checkpoint, torch.float32).items():
        entry = name if is_bare(name) else name.removesuffix(".weight")
        precision = checkpoint.modules()[entry].precision
        if precision in worst:
            error = (value - state[name]).norm() / state[name].norm()
            assert 0 < error < worst[precision], name
        else:
            assert torch.equal(value, state[name].to(value.dtype)), name


def test_dialect_b_decodes_by_the_definition(exported: dict[Dialect, Path]) -> None:
    stored = load_file(exported[Dialect.B] / "model.safetensors")
    values = dequantized_state_dict(exported[Dialect.B], torch.float32)
    for name in (WQ_A, EXPERT):
        scale = float(stored[f"{name}.weight_scale_2"])
        slow = decode(stored[f"{name}.weight"], stored[f"{name}.weight_scale"], scale)
        canonical = convert_name(f"{name}.weight", Scheme.DEEPSEEK)
        np.testing.assert_allclose(values[canonical].double().numpy(), slow, rtol=1e-7)


def test_dialect_c_decodes_as_compressed_tensors_itself_does(
    exported: dict[Dialect, Path],
) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    stored = load_file(exported[Dialect.C] / "model.safetensors")
    values = dequantized_state_dict(exported[Dialect.C], torch.float32)
    for name in (WQ_A, EXPERT):
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        module = {part: stored[f"{name}.{part}"] for part in parts}
        theirs = base.NVFP4PackedCompressor.decompress(module, None)["weight"]
        canonical = convert_name(f"{name}.weight", Scheme.DEEPSEEK)
        torch.testing.assert_close(values[canonical], theirs.float(), rtol=1e-2, atol=0)


def test_dialect_c_scales_are_multipliers_once_loaded(exported: dict[Dialect, Path]) -> None:
    of_b, of_c = open_checkpoint(exported[Dialect.B]), open_checkpoint(exported[Dialect.C])
    for name in ("layers.0.attn.wq_a", "layers.1.ffn.experts.2.w1"):
        b, c = of_b.load(name), of_c.load(name)
        assert isinstance(b, NVFP4Weight)
        assert isinstance(c, NVFP4Weight)
        assert torch.equal(b.codes, c.codes)
        assert torch.equal(b.block_scale.view(torch.uint8), c.block_scale.view(torch.uint8))
        torch.testing.assert_close(b.global_scale, c.global_scale, rtol=2e-7, atol=0)
        assert b.input_scale is not None
        assert c.input_scale is not None
        torch.testing.assert_close(b.input_scale, c.input_scale, rtol=2e-7, atol=0)


def test_every_partition_keeps_its_own_global_scale(mutated: Mutated) -> None:
    scales = {
        "layers.0.attn.wq_a": 0.5,
        "layers.0.attn.wkv": 0.25,
        "layers.1.ffn.experts.2.w1": 2.0,
        "layers.1.ffn.experts.2.w3": 4.0,
        "layers.1.attn.compressor.wkv": 8.0,
        "layers.1.attn.compressor.wgate": 16.0,
        "layers.1.attn.indexer.compressor.wkv": 32.0,
        "layers.1.attn.indexer.compressor.wgate": 64.0,
    }

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for entry, value in scales.items():
            name = convert_name(f"{entry}.weight_scale_2", Scheme.TRANSFORMERS)
            tensors[name] = torch.tensor(value)

    yielded = dict(weights_iterator(mutated(Dialect.B, change)))
    assert {entry: float(yielded[f"{entry}.weight_scale_2"]) for entry in scales} == scales


def test_indexer_and_main_compressor_are_told_apart(
    exported: dict[Dialect, Path], state: dict[str, Tensor]
) -> None:
    for dialect in (Dialect.BF16, Dialect.B):
        values = dequantized_state_dict(exported[dialect], torch.float32)
        main = values["layers.1.attn.compressor.wkv.weight"]
        index = values["layers.1.attn.indexer.compressor.wkv.weight"]
        assert main.shape == (128, 64)
        assert index.shape == (64, 64)
        for name, value in (("compressor", main), ("indexer.compressor", index)):
            original = state[f"layers.1.attn.{name}.wkv.weight"]
            assert (value - original).norm() < 0.12 * original.norm()


def test_the_main_compressors_weight_under_the_indexer_is_refused(mutated: Mutated) -> None:
    main, index = (
        f"model.layers.1.self_attn.compressor.{prefix}kv_proj.weight" for prefix in ("", "indexer.")
    )

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[index] = tensors[main].clone()

    with pytest.raises(CheckpointError, match="shape must be") as caught:
        open_checkpoint(mutated(Dialect.B, change))
    assert caught.value.tensor == index


# ---- the form that the vLLM integration gets


def test_iterator_yields_one_form_for_every_dialect(exported: dict[Dialect, Path]) -> None:
    forms = {}
    for dialect in (Dialect.A, Dialect.B, Dialect.C):
        yielded = list(weights_iterator(exported[dialect]))
        names = [name for name, _ in yielded]
        assert len(names) == len(set(names))
        forms[dialect] = {
            name: (value.dtype, tuple(value.shape))
            for name, value in yielded
            if ".ffn.experts." in name
        }
    assert forms[Dialect.A] == forms[Dialect.B] == forms[Dialect.C]
    routed = {
        k: v for k, v in forms[Dialect.B].items() if k.startswith("layers.0.ffn.experts.0.w1")
    }
    assert routed == {
        "layers.0.ffn.experts.0.w1.weight": (torch.uint8, (32, 32)),
        "layers.0.ffn.experts.0.w1.weight_scale": (torch.float8_e4m3fn, (32, 4)),
        "layers.0.ffn.experts.0.w1.weight_scale_2": (torch.float32, ()),
        "layers.0.ffn.experts.0.w1.input_scale": (torch.float32, ()),
    }


def test_iterator_yields_fp8_with_float32_scales(exported: dict[Dialect, Path]) -> None:
    yielded = dict(weights_iterator(exported[Dialect.A]))
    weight = yielded["layers.0.attn.wq_b.weight"]
    scale = yielded["layers.0.attn.wq_b.weight_scale_inv"]
    assert (weight.dtype, weight.shape) == (torch.float8_e4m3fn, (256, 48))
    assert (scale.dtype, scale.shape) == (torch.float32, (2, 1))
    loaded = open_checkpoint(exported[Dialect.A]).load("layers.0.attn.wq_b")
    assert isinstance(loaded, FP8BlockWeight)
    assert torch.equal(loaded.scale, scale)


@pytest.mark.parametrize("bad", [None, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dialect", [Dialect.B, Dialect.C])
def test_unusable_input_scale_means_dynamic_and_a_warning_that_names_the_layer(
    mutated: Mutated, dialect: Dialect, bad: float | None
) -> None:
    leaf = "input_scale" if dialect is Dialect.B else "input_global_scale"

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        if bad is None:
            del tensors[f"{WQ_A}.{leaf}"]
        else:
            tensors[f"{WQ_A}.{leaf}"] = torch.tensor(bad)

    checkpoint = open_checkpoint(mutated(dialect, change))
    good = checkpoint.load("layers.1.ffn.experts.2.w1")
    weight = checkpoint.load("layers.0.attn.wq_a")
    assert isinstance(good, NVFP4Weight)
    assert isinstance(weight, NVFP4Weight)
    assert good.input_scale is not None
    assert weight.input_scale is None
    assert [warning.layer for warning in checkpoint.warnings] == ["layers.0.attn.wq_a"]
    assert float(dict(weights_iterator(checkpoint))["layers.0.attn.wq_a.input_scale"]) == 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dialect", [Dialect.A, Dialect.B, Dialect.C])
def test_unusable_weight_global_scale_is_an_error(
    mutated: Mutated, dialect: Dialect, bad: float
) -> None:
    name = {
        Dialect.A: "layers.1.ffn.experts.2.w1.weight_scale_2",
        Dialect.B: f"{EXPERT}.weight_scale_2",
        Dialect.C: f"{EXPERT}.weight_global_scale",
    }[dialect]

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[name] = torch.tensor(bad)

    checkpoint = open_checkpoint(mutated(dialect, change))
    with pytest.raises(CheckpointError, match="finite and positive") as caught:
        checkpoint.load("layers.1.ffn.experts.2.w1")
    assert caught.value.tensor == name


def test_dialect_c_may_be_mixed_and_carry_deepseek_names(
    mutated: Mutated, exported: dict[Dialect, Path]
) -> None:
    """Dialect A's precisions in compressed-tensors' clothes: FP8 scales are `weight_scale`."""

    def change(tensors: dict[str, Tensor], raw: dict[str, Any]) -> None:
        for name in list(tensors):
            module, _, parameter = name.rpartition(".")
            if parameter == "scale":
                tensors[f"{module}.weight_scale"] = tensors.pop(name).float()
            elif parameter == "weight_scale_2":
                tensors[f"{module}.weight_packed"] = tensors.pop(f"{module}.weight")
                tensors[f"{module}.weight_global_scale"] = tensors.pop(name).reciprocal().reshape(1)
            elif parameter == "input_scale":
                tensors[f"{module}.input_global_scale"] = tensors.pop(name).reciprocal().reshape(1)
        groups = {"a": {"format": "nvfp4-pack-quantized"}, "b": {"format": "float-quantized"}}
        raw["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": groups,
        }

    mixed = open_checkpoint(mutated(Dialect.A, change))
    assert mixed.dialect is Dialect.C
    expected = dequantized_state_dict(exported[Dialect.A], torch.float32)
    for name, value in dequantized_state_dict(mixed, torch.float32).items():
        torch.testing.assert_close(value, expected[name], rtol=3e-7, atol=0)


# ---- native checkpoints and MTP


@pytest.fixture
def native(config: dict[str, Any], tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """(directory, stored tensors) as DeepSeek releases: MXFP4 experts, FP8, one MTP layer."""
    raw = {**config, "num_nextn_predict_layers": 1, "expert_dtype": "fp4"}
    raw["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    generator = torch.Generator().manual_seed(0)

    def octets(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    parsed = parse_config(raw)
    specs = dict(weight_specs(parsed)) | {n: s for n, s, required in mtp_specs(parsed) if required}
    tensors: dict[str, Tensor] = {}
    for entry, spec in specs.items():
        if spec.kind is Kind.ROUTED:
            rows, cols = spec.shape
            tensors[f"{entry}.weight"] = octets(rows, cols // 2).view(torch.int8)
            scale = octets(rows, cols // 32, low=110, high=127)
            tensors[f"{entry}.scale"] = scale.view(torch.float8_e8m0fnu)
        elif spec.kind in (Kind.PLAIN, Kind.COMPRESSOR, Kind.INDEXER_COMPRESSOR):
            is_int = entry.endswith("tid2eid")
            value = torch.zeros(spec.shape, dtype=torch.int64 if is_int else torch.bfloat16)
            tensors[entry if is_bare(entry) else f"{entry}.weight"] = value
        else:
            rows, cols = spec.shape
            values = torch.randn(rows, cols, generator=generator)
            tensors[f"{entry}.weight"] = values.to(torch.float8_e4m3fn)
            scale = octets(-(-rows // 128), -(-cols // 128), low=110, high=130)
            tensors[f"{entry}.scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path, tensors


def test_native_mxfp4_experts_are_yielded_as_exact_nvfp4(
    native: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, stored = native
    checkpoint = open_checkpoint(directory)
    assert checkpoint.dialect is Dialect.NATIVE
    yielded = dict(weights_iterator(checkpoint))
    for entry in ("layers.1.ffn.experts.2.w1", "mtp.0.ffn.experts.0.w2"):
        got = decode(
            yielded[f"{entry}.weight"],
            yielded[f"{entry}.weight_scale"],
            float(yielded[f"{entry}.weight_scale_2"]),
        )
        codes = stored[f"{entry}.weight"].view(torch.uint8)
        bytes_ = stored[f"{entry}.scale"].view(torch.uint8).double()
        per_sixteen = (2.0 ** (bytes_ - 127)).repeat_interleave(2, dim=1)
        np.testing.assert_array_equal(got, decode(codes, per_sixteen, 1.0))
        assert float(yielded[f"{entry}.input_scale"]) == 0.0


def test_native_fp8_scales_are_read_as_powers_of_two(
    native: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, stored = native
    yielded = dict(weights_iterator(directory))
    for entry in ("layers.0.attn.wq_b", "mtp.0.e_proj"):
        exponent = stored[f"{entry}.scale"].view(torch.uint8).double() - 127
        assert torch.equal(yielded[f"{entry}.weight_scale_inv"].double(), 2.0**exponent)


def test_mtp_may_be_left_out_as_a_whole_but_not_in_part(
    native: tuple[Path, dict[str, Tensor]], config: dict[str, Any]
) -> None:
    directory, tensors = native
    save_file(
        {
            k: v
            for k, v in tensors.items()
            if k != "mtp.0.h_proj.weight" and k != "mtp.0.h_proj.scale"
        },
        directory / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"mtp\.0\.h_proj\.weight: is missing"):
        open_checkpoint(directory)
    without = {k: v for k, v in tensors.items() if not k.startswith("mtp.")}
    save_file(without, directory / "model.safetensors")
    assert not any(name.startswith("mtp.") for name in open_checkpoint(directory).modules())


def test_a_native_tensor_that_nvfp4_cannot_hold_is_named(
    native: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, tensors = native
    name = "layers.1.ffn.experts.2.w1"
    scale = tensors[f"{name}.scale"].view(torch.uint8)
    scale[0, 0], scale[0, 1] = 100, 130
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="31 octaves") as caught:
        list(weights_iterator(directory))
    assert caught.value.tensor == f"{name}.weight"


# ---- what can be wrong: headers


def drop(name: str) -> Change:
    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        del tensors[name]

    return change


def put(name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[name] = make(tensors)

    return change


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Any], Tensor]:
    return lambda _: torch.zeros(shape, dtype=dtype)


LAYER = "model.layers.0"
FAULTS: list[tuple[str, Dialect, Change, str, str]] = [
    ("lost norm", Dialect.B, drop("model.norm.weight"), "model.norm.weight", "is missing"),
    ("lost head", Dialect.A, drop("head.weight"), "head.weight", "is missing"),
    ("lost block scale", Dialect.B, drop(f"{WQ_A}.weight_scale"), f"{WQ_A}.weight_scale",
     "layers.0.attn.wq_a cannot be decoded"),
    ("lost global scale", Dialect.B, drop(f"{WQ_A}.weight_scale_2"), f"{WQ_A}.weight_scale_2",
     "cannot be decoded"),
    ("lost global scale in C", Dialect.C, drop(f"{WQ_A}.weight_global_scale"),
     f"{WQ_A}.weight_global_scale", "cannot be decoded"),
    ("lost fp8 scale", Dialect.A, drop("layers.0.attn.wq_b.scale"), "layers.0.attn.wq_b.scale",
     "cannot be decoded"),
    ("lost codes", Dialect.B, drop(f"{WQ_A}.weight"), WQ_A, "has no weight beside it"),
    ("one scale per 32", Dialect.B,
     put(f"{WQ_A}.weight_scale", zeros(48, 2, dtype=torch.float8_e4m3fn)),
     f"{WQ_A}.weight_scale", "shape must be [48, 4], is [48, 2]"),
    ("UE8M0 under an NVFP4 label", Dialect.B,
     put(f"{WQ_A}.weight_scale", zeros(48, 4, dtype=torch.float8_e8m0fnu)),
     f"{WQ_A}.weight_scale", "dtype must be F8_E4M3, is F8_E8M0"),
    ("a global scale per row", Dialect.B,
     put(f"{WQ_A}.weight_scale_2", zeros(48, dtype=torch.float32)),
     f"{WQ_A}.weight_scale_2", "shape must be []"),
    ("unpacked codes", Dialect.B, put(f"{WQ_A}.weight", zeros(48, 64, dtype=torch.uint8)),
     f"{WQ_A}.weight", "shape must be [48, 32]"),
    ("fp8 in B", Dialect.B, put(f"{WQ_A}.weight", zeros(48, 64, dtype=torch.float8_e4m3fn)),
     WQ_A, "dialect B does not store this way"),
    ("scales beside a bf16 weight", Dialect.B, put(f"{WQ_A}.weight", zeros(48, 64)),
     WQ_A, "not quantised"),
    ("reciprocal's name in B", Dialect.B,
     put(f"{WQ_A}.weight_global_scale", zeros(1, dtype=torch.float32)),
     f"{WQ_A}.weight_global_scale", "has no place"),
    ("quantised embedding", Dialect.B,
     put("model.embed_tokens.weight", zeros(128, 32, dtype=torch.uint8)),
     "model.embed_tokens.weight", "must not be quantised"),
    ("wrong vocabulary", Dialect.B, put("model.embed_tokens.weight", zeros(127, 64)),
     "model.embed_tokens.weight", "shape must be [128, 64]"),
    ("float routing table", Dialect.B, put(f"{LAYER}.mlp.gate.tid2eid", zeros(128, 2)),
     f"{LAYER}.mlp.gate.tid2eid", "dtype must be I64 or I32"),
    ("one expert too many", Dialect.A, put("layers.0.ffn.experts.4.w1.weight", zeros(32, 64)),
     "layers.0.ffn.experts.4.w1.weight", "does not exist by config.json"),
    ("a compressor where the ratio is 0", Dialect.A,
     put("layers.0.attn.compressor.wkv.weight", zeros(64, 64)),
     "layers.0.attn.compressor.wkv.weight", "does not exist by config.json"),
    ("a stranger", Dialect.A, put("layers.0.attn.wq_c.weight", zeros(1)),
     "layers.0.attn.wq_c.weight", "is not the name of a DeepSeek V4 tensor"),
    ("one weight under both names", Dialect.B, put("layers.0.attn_norm.weight", zeros(64)),
     "input_layernorm", "is the same weight as"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "change", "tensor", "rule"),
    [fault[1:] for fault in FAULTS],
    ids=[fault[0] for fault in FAULTS],
)
def test_each_fault_is_one_error_that_names_tensor_and_rule(
    mutated: Mutated, dialect: Dialect, change: Change, tensor: str, rule: str
) -> None:
    directory = mutated(dialect, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    error = caught.value
    assert error.file == "model.safetensors"
    names = {error.tensor, *error.rule.split()}
    assert any(tensor in str(name) for name in names)
    assert rule in error.rule


def test_scan_reports_every_fault_and_keeps_the_rest(mutated: Mutated) -> None:
    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        del tensors["model.norm.weight"], tensors[f"{WQ_A}.weight_scale"]
        tensors["stranger"] = torch.zeros(1)

    checkpoint, faults = scan_checkpoint(mutated(Dialect.B, change))
    tensors = {fault.tensor for fault in faults}
    assert tensors == {"model.norm.weight", f"{WQ_A}.weight_scale", "stranger"}
    assert "layers.0.attn.wq_b" in checkpoint.modules()


# ---- what can be wrong: config.json


def reconfigure(**values: Any) -> Change:
    def change(_: dict[str, Tensor], raw: dict[str, Any]) -> None:
        raw.update(values)

    return change


def requantise(**values: Any) -> Change:
    def change(_: dict[str, Tensor], raw: dict[str, Any]) -> None:
        raw["quantization_config"].update(values)

    return change


CONFIG_FAULTS: list[tuple[Dialect, Change, str]] = [
    (Dialect.B, reconfigure(model_type="deepseek_v3"), "model_type must be deepseek_v4"),
    (Dialect.B, reconfigure(hidden_size="64"), "hidden_size must be an integer"),
    (Dialect.B, reconfigure(compress_ratios=[0, 4]), "must cover 4 layers"),
    (Dialect.B, reconfigure(compress_ratios=[0, 4, 64, 4]), "must be 0, 4 or 128, found 64"),
    (Dialect.B, reconfigure(o_groups=3), "multiple of o_groups"),
    (Dialect.B, reconfigure(quantization_config=[]), "must be an object"),
    (Dialect.B, requantise(quant_method="awq"), "quant_method must be one of"),
    (Dialect.B, requantise(quant_algo="FP8"), "must be NVFP4, is 'FP8'"),
    (Dialect.B, requantise(group_size=32), "group_size must be 16"),
    (Dialect.A, requantise(weight_block_size=[64, 64]), "weight_block_size"),
    (Dialect.A, requantise(moe_quant_algo="INT4"), "moe_quant_algo must be NVFP4"),
    (Dialect.C, requantise(format="pack-quantized", config_groups={}), "nvfp4-pack-quantized"),
    (Dialect.BF16, reconfigure(quantization_config={"quant_method": "modelopt",
     "quant_algo": "NVFP4"}), "no tensor name ends in .weight_scale_2"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "change", "rule"), CONFIG_FAULTS)
def test_a_config_that_is_not_supported_is_one_error(
    mutated: Mutated, dialect: Dialect, change: Change, rule: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(mutated(dialect, change))
    assert caught.value.file == "config.json"
    assert rule in caught.value.rule


def test_quantised_tensors_without_a_quantization_config_are_refused(mutated: Mutated) -> None:
    def change(_: dict[str, Tensor], raw: dict[str, Any]) -> None:
        del raw["quantization_config"]

    with pytest.raises(CheckpointError, match="has no quantization_config"):
        open_checkpoint(mutated(Dialect.B, change))


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff"])
def test_a_missing_or_broken_config_file_is_one_error(
    exported: dict[Dialect, Path], tmp_path: Path, content: bytes | None
) -> None:
    directory = Path(shutil.copytree(exported[Dialect.B], tmp_path / "copy"))
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert caught.value.file == "config.json"


def test_the_config_that_transformers_writes_describes_the_same_model(
    model: Any, config: dict[str, Any]
) -> None:
    """It lists layer types where DeepSeek lists ratios."""
    written = json.loads(model.config.to_json_string())
    assert "compress_ratios" not in written
    ours, theirs = parse_config(config), parse_config(written)
    assert dict(weight_specs(ours)) == dict(weight_specs(theirs))


def test_an_older_modelopt_export_keeps_its_mark_in_a_file_of_its_own(mutated: Mutated) -> None:
    def change(_: dict[str, Tensor], raw: dict[str, Any]) -> None:
        del raw["quantization_config"]

    directory = mutated(Dialect.B, change)
    mark = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(mark))
    assert open_checkpoint(directory).dialect is Dialect.B


# ---- what can be wrong: shards and index


@pytest.fixture
def sharded(exported: dict[Dialect, Path], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """(directory, index) of dialect B in two shards."""
    tensors = load_file(exported[Dialect.B] / "model.safetensors")
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    shutil.copy(exported[Dialect.B] / "config.json", tmp_path)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path, index


def test_shards_are_read_by_the_index_and_without_one(
    sharded: tuple[Path, dict[str, Any]], exported: dict[Dialect, Path]
) -> None:
    directory, _ = sharded
    single = dequantized_state_dict(exported[Dialect.B], torch.float32)
    for _ in range(2):
        several = dequantized_state_dict(directory, torch.float32)
        assert all(torch.equal(several[name], single[name]) for name in single)
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)


def index_fault(directory: Path, index: dict[str, Any]) -> CheckpointError:
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    return caught.value


def test_a_missing_shard_names_file_and_tensor(sharded: tuple[Path, dict[str, Any]]) -> None:
    directory, index = sharded
    (directory / "two.safetensors").unlink()
    error = index_fault(directory, index)
    assert index["weight_map"][error.tensor] == "two.safetensors"
    assert "two.safetensors does not exist" in error.rule


def test_a_truncated_shard_names_file_and_tensor(sharded: tuple[Path, dict[str, Any]]) -> None:
    directory, index = sharded
    path = directory / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    error = index_fault(directory, index)
    assert error.file == "two.safetensors"
    assert index["weight_map"][error.tensor] == "two.safetensors"
    assert "truncated" in error.rule


@pytest.mark.parametrize("escape", ["../one.safetensors", "/one.safetensors", "", 3])
def test_an_index_may_only_name_files_beside_it(
    sharded: tuple[Path, dict[str, Any]], escape: object
) -> None:
    directory, index = sharded
    index["weight_map"]["model.norm.weight"] = escape
    assert "a file beside it" in index_fault(directory, index).rule


def test_index_and_shards_must_list_the_same_tensors(
    sharded: tuple[Path, dict[str, Any]],
) -> None:
    directory, index = sharded
    extra = {"weight_map": {**index["weight_map"], "ghost": "one.safetensors"}}
    assert index_fault(directory, extra).rule == "is in the index but not in its shard"
    index["weight_map"].pop("model.norm.weight")
    assert index_fault(directory, index).tensor == "model.norm.weight"


def test_a_tensor_in_two_shards_is_an_error(sharded: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = sharded
    (directory / "model.safetensors.index.json").unlink()
    shutil.copy(directory / "one.safetensors", directory / "three.safetensors")
    with pytest.raises(CheckpointError, match=r"is stored in one\.safetensors too"):
        open_checkpoint(directory)


def test_a_directory_without_weights_is_an_error(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="nor a safetensors file"):
        open_checkpoint(tmp_path)
