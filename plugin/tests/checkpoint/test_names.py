"""Both naming schemes, checked against transformers' own modules and conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from assay_kernels.checkpoint import Scheme, convert_name, format_name, parse_name
from assay_kernels.checkpoint.config import parse_config
from assay_kernels.checkpoint.names import is_bare
from assay_kernels.checkpoint.spec import mtp_specs, weight_specs


def canonical_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    specs = dict(weight_specs(parse_config(config)))
    return {n if is_bare(n) else f"{n}.weight": spec.shape for n, spec in specs.items()}


def test_names_and_shapes_are_those_of_transformers_modules(
    model: Any, config: dict[str, Any]
) -> None:
    """Experts aside, which transformers stacks."""
    ours = {
        convert_name(name, Scheme.TRANSFORMERS): shape
        for name, shape in canonical_tensors(config).items()
        if ".ffn.experts." not in name
    }
    theirs = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if ".mlp.experts." not in name
    }
    assert ours == theirs


def test_what_transformers_saves_has_a_canonical_name_for_every_tensor(
    model: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    """`save_pretrained` writes a mix of both schemes; its mapping is an oracle for ours."""
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {convert_name(n, Scheme.DEEPSEEK): s for n, s in saved.items()} == canonical_tensors(
        config
    )


@pytest.mark.parametrize("scheme", list(Scheme))
def test_every_name_survives_the_way_there_and_back(config: dict[str, Any], scheme: Scheme) -> None:
    parsed = parse_config({**config, "num_nextn_predict_layers": 2})
    entries = [name for name, _ in weight_specs(parsed)] + [n for n, _, _ in mtp_specs(parsed)]
    for entry in entries:
        for parameter in (None,) if is_bare(entry) else ("weight", "weight_scale_2", "scale"):
            assert parse_name(format_name(entry, parameter, scheme)) == (entry, parameter)


@pytest.mark.parametrize(
    ("transformers_name", "canonical"),
    [
        ("self_attn.compressor.kv_proj.weight", "attn.compressor.wkv.weight"),
        ("self_attn.compressor.indexer.kv_proj.weight", "attn.indexer.compressor.wkv.weight"),
        ("self_attn.compressor.indexer.q_b_proj.weight", "attn.indexer.wq_b.weight"),
        ("self_attn.q_b_proj.weight_scale", "attn.wq_b.weight_scale"),
        ("mlp.experts.17.up_proj.input_scale", "ffn.experts.17.w3.input_scale"),
        ("attn_hc.scale", "hc_attn_scale"),
        ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ],
)
def test_names_that_are_easily_confused(transformers_name: str, canonical: str) -> None:
    stored = f"model.layers.12.{transformers_name}"
    assert convert_name(stored, Scheme.DEEPSEEK) == f"layers.12.{canonical}"
    assert convert_name(f"layers.12.{canonical}", Scheme.TRANSFORMERS) == stored


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_a",  # no parameter
        "layers.0.attn.attn_sink.weight",  # a bare tensor has none
        "layers.01.attn.wq_a.weight",
        "layers.0.ffn.experts.*.w1.weight",
        "layers.0.ffn.experts.007.w1.weight",
        "layers.0.attn.wq_c.weight",
        "layers.0.attn.indexer.wkv.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "lm_head.bias",
        "",
    ],
)
def test_anything_else_is_no_v4_tensor(name: str) -> None:
    assert parse_name(name) is None
    with pytest.raises(KeyError):
        convert_name(name, Scheme.DEEPSEEK)
