"""Writers and derived dialects: what is written is what was meant, and only when complete."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from assay_kernels.checkpoint import (
    CheckpointError,
    Dialect,
    NVFP4Weight,
    Precision,
    dequantized_state_dict,
    open_checkpoint,
)
from assay_kernels.checkpoint.export import derive, export_checkpoint
from assay_kernels.checkpoint.header import read_header
from assay_kernels.checkpoint.hf import (
    from_transformers_state_dict,
    load_transformers_model,
    to_transformers_state_dict,
)
from assay_kernels.checkpoint.writer import atomic_file, write_checkpoint, write_safetensors

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits[0].log_softmax(-1)


# ---- transformers


def test_unquantised_export_gives_transformers_logits_exactly(
    exported: dict[Dialect, Path], model: Any
) -> None:
    assert torch.equal(logits(load_transformers_model(exported[Dialect.BF16])), logits(model))


@pytest.mark.parametrize("dialect", [Dialect.A, Dialect.B, Dialect.C])
def test_quantised_logits_stay_near_the_originals(
    exported: dict[Dialect, Path], model: Any, dialect: Dialect
) -> None:
    original, got = logits(model), logits(load_transformers_model(exported[dialect]))
    divergence = (original.exp() * (original - got)).sum(-1).mean()
    assert 0 < divergence < 0.02


def test_strict_load_refuses_a_weight_too_few(
    exported: dict[Dialect, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay_kernels.checkpoint import hf

    def lossy(*args: Any) -> dict[str, Tensor]:
        state = dequantized_state_dict(*args)
        del state["layers.1.attn.attn_sink"]
        return state

    monkeypatch.setattr(hf, "dequantized_state_dict", lossy)
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.sinks"):
        load_transformers_model(exported[Dialect.BF16])


def test_transformers_state_dicts_survive_the_way_there_and_back(model: Any) -> None:
    original = model.state_dict()
    back = to_transformers_state_dict(from_transformers_state_dict(original))
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], value) for name, value in original.items())


# ---- export


def test_activation_maxima_become_input_scales_and_others_stay_dynamic(
    exported: dict[Dialect, Path],
) -> None:
    checkpoint = open_checkpoint(exported[Dialect.B])
    calibrated = checkpoint.load("layers.0.attn.wq_a")
    assert isinstance(calibrated, NVFP4Weight)
    assert calibrated.input_scale is not None
    assert float(calibrated.input_scale) == pytest.approx(3.0 / (6 * 448))
    assert "input_scale" not in checkpoint.modules()["layers.0.attn.wkv"].tensors


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_written(
    state: dict[str, Tensor], config: dict[str, Any], tmp_path: Path, value: float
) -> None:
    name = "layers.2.ffn.experts.1.w2.weight"
    bad = state[name].clone()
    bad[3, 4] = value
    with pytest.raises(CheckpointError, match="NaN or an infinity") as caught:
        export_checkpoint(tmp_path, Dialect.B, {**state, name: bad}, config)
    assert caught.value.tensor == name
    assert not (tmp_path / "config.json").exists()


def test_missing_and_misshapen_weights_are_named(
    state: dict[str, Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    fewer = {name: value for name, value in state.items() if name != "head.weight"}
    with pytest.raises(CheckpointError, match=r"head\.weight: is missing"):
        export_checkpoint(tmp_path, Dialect.B, fewer, config)
    wrong = {**state, "head.weight": torch.zeros(1, 64)}
    with pytest.raises(CheckpointError, match=r"head\.weight: shape must be"):
        export_checkpoint(tmp_path, Dialect.B, wrong, config)


def test_dialect_configs_are_those_that_serving_stacks_recognise(
    exported: dict[Dialect, Path], config: dict[str, Any]
) -> None:
    raw = {d: json.loads((path / "config.json").read_text()) for d, path in exported.items()}
    assert raw[Dialect.BF16] == config
    assert raw[Dialect.A]["quantization_config"]["moe_quant_algo"] == "NVFP4"
    assert raw[Dialect.B]["quantization_config"]["quant_algo"] == "NVFP4"
    ignored = raw[Dialect.B]["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj" in ignored
    assert not any("kv_proj" in name or "experts" in name for name in ignored)


def test_compressed_tensors_itself_accepts_the_config_of_dialect_c(
    exported: dict[Dialect, Path],
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    raw = json.loads((exported[Dialect.C] / "config.json").read_text())
    parsed = quantization.QuantizationConfig.model_validate(raw["quantization_config"])
    weights = parsed.config_groups["group_0"].weights
    assert (weights.num_bits, weights.group_size, weights.strategy) == (4, 16, "tensor_group")


# ---- derive


def test_deriving_c_keeps_codes_and_scales_bit_for_bit(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    derive(exported[Dialect.B], tmp_path, Dialect.C)
    source, derived = open_checkpoint(exported[Dialect.B]), open_checkpoint(tmp_path)
    assert derived.dialect is Dialect.C
    for name, module in source.modules().items():
        one, other = source.load(name), derived.load(name)
        if module.precision is not Precision.NVFP4:
            assert isinstance(one, Tensor)
            assert torch.equal(one, other)
            continue
        assert isinstance(one, NVFP4Weight)
        assert isinstance(other, NVFP4Weight)
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.block_scale.view(torch.uint8), other.block_scale.view(torch.uint8))
        stored = derived.raw(derived.modules()[name].tensors["weight_global_scale"])
        assert torch.equal(stored, one.global_scale.reciprocal().reshape(1))


def test_deriving_a_keeps_the_experts_and_rounds_attention_once(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    derive(exported[Dialect.B], tmp_path, Dialect.A)
    source, derived = open_checkpoint(exported[Dialect.B]), open_checkpoint(tmp_path)
    assert derived.dialect is Dialect.A
    before = dequantized_state_dict(source, torch.float32)
    for name, value in dequantized_state_dict(derived, torch.float32).items():
        if ".experts." in name and "shared" not in name:
            assert torch.equal(value, before[name])
        error = (value - before[name]).double().norm() / before[name].double().norm()
        assert error < 0.04, name


def test_deriving_bf16_gives_a_plain_checkpoint_with_deepseek_names(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    derive(exported[Dialect.B], tmp_path, Dialect.BF16)
    stored = load_file(tmp_path / "model.safetensors")
    assert "layers.1.attn.indexer.compressor.wkv.weight" in stored
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    expected = dequantized_state_dict(exported[Dialect.B], torch.float32)
    for name, value in dequantized_state_dict(tmp_path, torch.float32).items():
        assert torch.equal(value, expected[name].to(stored[name].dtype).to(value.dtype))


def test_deriving_copies_the_tokenizer_and_nothing_that_describes_other_weights(
    exported: dict[Dialect, Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    derive(exported[Dialect.B], source, Dialect.B)
    for name in ("tokenizer.json", "generation_config.json"):
        (source / name).write_text(name)
    for name in ("hf_quant_config.json", ".left.tmp"):
        (source / name).write_text("{}")
    derive(source, tmp_path / "derived", Dialect.C)
    found = {path.name for path in (tmp_path / "derived").iterdir()}
    assert found == {
        "config.json",
        "assay-manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    }


def test_deriving_never_overwrites_a_checkpoint(exported: dict[Dialect, Path]) -> None:
    with pytest.raises(FileExistsError):
        derive(exported[Dialect.B], exported[Dialect.B], Dialect.C)
    open_checkpoint(exported[Dialect.B])


# ---- files


def test_the_safetensors_library_reads_every_dtype_back(tmp_path: Path) -> None:
    values = torch.arange(24).reshape(2, 3, 4)
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu,
    ]  # fmt: skip
    tensors = {str(dtype): values.to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).T
    write_safetensors(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name].double(), tensor.double())
    for info in read_header(tmp_path / "x.safetensors").values():
        width = max(1, info.nbytes // max(1, math.prod(info.shape)))
        assert info.begin % width == 0


def test_shards_split_at_the_limit_and_the_index_finds_every_tensor(
    state: dict[str, Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    export_checkpoint(tmp_path, Dialect.BF16, state, config, shard_bytes=50_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 120_000 for path in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    values = dequantized_state_dict(tmp_path, torch.float32)
    assert all(torch.equal(values[name], state[name].to(values[name].dtype)) for name in state)


def test_a_failing_write_leaves_neither_the_file_nor_a_temporary(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")

    def fail() -> None:
        with atomic_file(tmp_path / "x") as stream:
            stream.write(b"new, half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_killed_writer_leaves_whole_shards_and_no_checkpoint(tmp_path: Path) -> None:
    """SIGKILL when the third shard is complete under its temporary name only."""
    script = textwrap.dedent(
        """
        import sys, time, torch
        from assay_kernels.checkpoint import writer

        def tensors():
            for i in range(9):
                yield f"t{i}", torch.full((1000,), float(i))

        replace = writer.Path.replace
        def stall(self, target):
            if "00003" in str(target):
                print("writing", flush=True)
                time.sleep(60)
            return replace(self, target)
        writer.Path.replace = stall
        writer.write_checkpoint(sys.argv[1], tensors(), {}, shard_bytes=8000)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    visible = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert visible == ["model-00001.safetensors", "model-00002.safetensors"]
    for name in visible:
        assert len(read_header(tmp_path / name)) == 2
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path, iter([]), {})
