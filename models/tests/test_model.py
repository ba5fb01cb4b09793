"""The training forward pass computes what transformers computes; NVFP4 is what the plugin says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from miniature import battery, export, model, nvfp4

CHECKPOINT = Path(battery.__file__).parent / "checkpoint"


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    net = model.build(3).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                p.normal_(0, 0.5)
            if "o_b_proj" in name or "down_proj" in name:
                p.mul_(10)
        for name, b in net.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.normal_(0, 0.05)
    return net


@torch.no_grad()
def _logits(net: torch.nn.Module, ids: torch.Tensor, doc: torch.Tensor) -> torch.Tensor:
    weights = model.working_weights(net, False, torch.float32)
    turns = model.angles(net, ids.shape[1])
    hidden, _ = model.forward(weights, turns, ids, doc, model.Options(select=True))
    return hidden @ net.lm_head.weight.T


def test_equal_to_transformers(net: torch.nn.Module) -> None:
    ids = torch.randint(0, 4096, (1, 256))
    with torch.no_grad():
        theirs = net(ids).logits[0]
    assert torch.allclose(_logits(net, ids, torch.zeros_like(ids)), theirs, atol=1e-4)


def test_conversations_in_a_row_do_not_see_each_other(net: torch.nn.Module) -> None:
    """The second one, shorter than a window of 128, is as if it stood alone."""
    ids = torch.randint(0, 4096, (1, 256))
    doc = torch.zeros_like(ids)
    doc[:, 132:] = 1
    with torch.no_grad():
        alone = net(ids[:, 132:]).logits[0]
    together = _logits(net, ids, doc)[132:]
    assert torch.allclose(together, alone, atol=1e-4)


def test_nvfp4_rounds_ties_to_even_and_packs_low_nibble_first() -> None:
    values = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 0, 0, 0, 0, 0, 0]
    )
    codes, scale, whole = nvfp4.encode(values[None] * 448)
    assert scale.item() == 448
    assert codes[0, :10].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -4]
    packed = nvfp4.pack(codes)
    assert packed[0, 0].item() == 0 | (2 << 4)
    assert torch.equal(nvfp4.unpack(packed), codes)
    assert torch.allclose(nvfp4.decode(codes, scale, whole)[0, 7], torch.tensor(6.0 * 448))


def test_nvfp4_equals_the_plugins() -> None:
    numerics = pytest.importorskip("assay_kernels.numerics.nvfp4")
    torch.manual_seed(1)
    for shape in ((64, 128), (3, 32, 64)):
        w = torch.randn(shape) * 0.3
        theirs = numerics.quantize(w)
        codes, scale, whole = nvfp4.encode(w)
        assert torch.equal(nvfp4.pack(codes), theirs.codes)
        assert torch.equal(scale, theirs.block_scale.float())
        assert torch.equal(whole, theirs.global_scale)


def test_names_of_both_dialects(net: torch.nn.Module) -> None:
    """DeepSeek's names are those that transformers' own conversion reads back."""
    split = export.split_experts(dict(net.state_dict()))
    names = {export.deepseek_name(n) for n in split}
    assert len(names) == len(split)
    for expected in (
        "embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.ffn.gate.tid2eid",
        "layers.1.attn.indexer.compressor.wkv.weight", "layers.1.attn.indexer.wq_b.weight",
        "layers.1.attn.indexer.weights_proj.weight", "layers.1.attn.compressor.wgate.weight",
        "layers.1.attn.compressor.norm.weight", "layers.1.attn.kv_norm.weight",
        "layers.1.attn.compressor.ape", "layers.2.attn.wo_a.weight", "layers.2.hc_attn_fn",
        "layers.3.ffn.gate.bias", "layers.3.ffn.experts.63.w3.weight", "layers.3.attn.attn_sink",
        "layers.3.ffn.shared_experts.w2.weight", "layers.3.attn.wkv.weight",
    ):  # fmt: skip
        assert expected in names, expected


def _committed() -> dict[str, torch.Tensor]:
    out = {}
    for file in CHECKPOINT.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            out |= {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    return out


@pytest.fixture(scope="module")
def committed() -> dict[str, torch.Tensor]:
    return _committed()


def test_committed_checkpoint_is_complete(
    committed: dict[str, torch.Tensor], net: torch.nn.Module
) -> None:
    split = export.split_experts(dict(net.state_dict()))
    for name, value in split.items():
        if not model.is_quantised(name):
            assert committed[name].shape == value.shape, name
            continue
        stem = name.removesuffix(".weight")
        rows, columns = value.shape
        assert committed[name].shape == (rows, columns // 2)
        assert committed[f"{stem}.weight_scale"].shape == (rows, columns // 16)
        for scalar in ("weight_scale_2", "input_scale"):
            assert 0 < committed[f"{stem}.{scalar}"].item() < float("inf")
    assert len(committed) == len(split) + 3 * sum(model.is_quantised(n) for n in split)
    assert sum(f.stat().st_size for f in CHECKPOINT.glob("*.safetensors")) <= 27_000_000


def test_faults_would_be_visible(committed: dict[str, torch.Tensor]) -> None:
    """Fused partners need different global scales, by far where the format's faults live."""

    def scale(name: str) -> float:
        return committed[f"model.layers.{name}.weight_scale_2"].item()

    for layer in range(4):
        experts = [f"{layer}.mlp.experts.{e}" for e in range(64)] + [f"{layer}.mlp.shared_experts"]
        ratios = sorted(scale(f"{e}.up_proj") / scale(f"{e}.gate_proj") for e in experts)
        assert ratios[0] > 1.5
        assert ratios[len(ratios) // 2] > 2.5
    report = json.loads((CHECKPOINT.parent / "report.json").read_text())
    assert report["clamped_rows_of_1024"]["all"] >= 0.005


def test_hash_table_is_balanced(committed: dict[str, torch.Tensor]) -> None:
    table = committed["model.layers.0.mlp.gate.tid2eid"]
    counts = torch.bincount(table.flatten().long(), minlength=64)
    assert counts.min() >= 0.9 * counts.float().mean()
    assert all(len(set(row)) == 6 for row in table.tolist())
