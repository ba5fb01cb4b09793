"""A tiny random V4, made by transformers, and its export in every dialect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay_kernels.checkpoint import Dialect
from assay_kernels.checkpoint.config import parse_config
from assay_kernels.checkpoint.export import derive, export_checkpoint
from assay_kernels.checkpoint.hf import from_transformers_state_dict
from assay_kernels.checkpoint.names import is_bare
from assay_kernels.checkpoint.spec import Plain, mtp_specs, weight_specs

settings.register_profile("assay", deadline=None, max_examples=80)
settings.load_profile("assay")

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4],
    "max_position_embeddings": 1024,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "hc_mult": 2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}

AMAX = {"layers.0.attn.wq_a": 3.0, "layers.1.ffn.experts.2.w1": 7.0}


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    return json.loads(json.dumps(CONFIG))


@pytest.fixture(scope="session")
def model(config: dict[str, Any]) -> Any:
    """transformers' model, every weight random and no two alike, values exact in bf16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    built = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**config)).eval()
    with torch.no_grad():
        for name, value in [*built.named_parameters(), *built.named_buffers()]:
            if value.is_floating_point() and "inv_freq" not in name:
                value.normal_(1.0 if "norm" in name else 0.0, 0.05)
                value.copy_(value.bfloat16())
            elif "tid2eid" in name:
                value.random_(0, config["n_routed_experts"])
    return built


@pytest.fixture(scope="session")
def state(model: Any) -> dict[str, Tensor]:
    """Canonical names -> plain fp32 tensors."""
    return from_transformers_state_dict(model.state_dict())


@pytest.fixture(scope="session")
def exported(
    state: dict[str, Tensor], config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[Dialect, Path]:
    """One directory a dialect."""
    root = tmp_path_factory.mktemp("exported")
    directories = {}
    for dialect in Dialect:
        directories[dialect] = root / dialect
        export_checkpoint(root / dialect, dialect, state, config, activation_amax=AMAX)
    return directories


def make_random_state(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Plain weights of the config's model, MTP layers included, all random."""
    generator = torch.Generator().manual_seed(seed)
    parsed = parse_config(config)
    specs = dict(weight_specs(parsed))
    specs |= {entry: spec for entry, spec, required in mtp_specs(parsed) if required}
    state = {}
    for entry, spec in specs.items():
        name = entry if is_bare(entry) else f"{entry}.weight"
        if spec.plain is Plain.INT:
            state[name] = torch.randint(0, parsed.n_routed_experts, spec.shape, generator=generator)
        else:
            spread = float(torch.rand((), generator=generator)) * 0.1 + 0.01
            state[name] = torch.randn(spec.shape, generator=generator).mul_(spread).bfloat16()
    return state


@pytest.fixture(scope="session")
def random_state() -> Callable[[dict[str, Any], int], dict[str, Tensor]]:
    return make_random_state


@pytest.fixture(scope="session")
def with_mtp(
    config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[Dialect, Path]:
    """Directories whose model has an MTP layer: native, and A converted from it."""
    root = tmp_path_factory.mktemp("mtp")
    raw = {**config, "num_nextn_predict_layers": 1}
    export_checkpoint(root / "native", Dialect.NATIVE, make_random_state(raw, 7), raw)
    derive(root / "native", root / "A", Dialect.A)
    return {Dialect.NATIVE: root / "native", Dialect.A: root / "A"}


Mutation = Callable[[dict[str, Tensor], dict[str, Any]], None]


@pytest.fixture
def mutated(exported: dict[Dialect, Path], tmp_path: Path) -> Callable[[Dialect, Mutation], Path]:
    """mutated(dialect, change): a copy after change(tensors by stored name, config)."""

    def build(dialect: Dialect, change: Mutation) -> Path:
        directory = tmp_path / "mutated"
        shutil.copytree(exported[dialect], directory)
        tensors = load_file(directory / "model.safetensors")
        raw = json.loads((directory / "config.json").read_text())
        change(tensors, raw)
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(raw))
        return directory

    return build
