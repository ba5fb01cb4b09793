"""Write a model as a checkpoint: bf16 with DeepSeek's names, or dialect B (whole model in NVFP4,
Transformers' names).

usage: python -m miniature.export --weights STATE.pt --bf16 FOLDER --nvfp4 FOLDER [--tokenizer
FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from . import nvfp4
from .model import (
    CONFIG,
    EXPERTS,
    INNER,
    LAYERS,
    Options,
    angles,
    build,
    forward,
    is_quantised,
    working_weights,
)

SHARD_BYTES = 9_000_000
KEEP_FP32 = ("attn_hc", "ffn_hc", "hc_head", "sinks", "position_bias", "e_score_correction_bias")
IGNORE = [
    "lm_head",
    "*embed_tokens*",
    "*mlp.gate",
    "*norm*",
    "*attn_hc*",
    "*ffn_hc*",
    "*hc_head*",
    "*weights_proj",
]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def split_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' stacked experts -> one tensor per expert and matrix; everything else
    unchanged.
    """
    out = {}
    for name, value in state.items():
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for e in range(EXPERTS):
                out[f"{stem}.{e}.gate_proj.weight"] = value[e, :INNER]
                out[f"{stem}.{e}.up_proj.weight"] = value[e, INNER:]
        elif name.endswith("experts.down_proj"):
            for e in range(EXPERTS):
                out[f"{stem}.{e}.down_proj.weight"] = value[e]
        else:
            out[name] = value
    return out


_TO_DEEPSEEK = [
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.self_attn\.", ".attn."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"(experts\.(?:\d+\.)?|shared_experts\.)gate_proj\.", r"\1w1."),
    (r"(experts\.(?:\d+\.)?|shared_experts\.)down_proj\.", r"\1w2."),
    (r"(experts\.(?:\d+\.)?|shared_experts\.)up_proj\.", r"\1w3."),
]


def deepseek_name(name: str) -> str:
    """Transformers' parameter name (experts split) -> the name in DeepSeek's own checkpoints."""
    for pattern, replacement in _TO_DEEPSEEK:
        name = re.sub(pattern, replacement, name)
    return name


def _stored(name: str, value: Tensor) -> Tensor:
    """The dtype that a checkpoint keeps an unquantised tensor in."""
    if not value.is_floating_point():
        return value
    return value.float() if any(part in name for part in KEEP_FP32) else value.to(torch.bfloat16)


def bf16_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in bf16 (fp32 where V4 keeps fp32) under DeepSeek's names."""
    return {
        deepseek_name(n): _stored(n, v).cpu().contiguous() for n, v in split_experts(state).items()
    }


def nvfp4_tensors(state: dict[str, Tensor], amax: dict[str, float]) -> dict[str, Tensor]:
    """Dialect B. `amax`: largest |activation| that each matrix (module name, without `model.`) was
    seen to read.
    """
    out: dict[str, Tensor] = {}
    for name, value in split_experts(state).items():
        if not is_quantised(name):
            out[name] = _stored(name, value)
            continue
        module = name.removesuffix(".weight")
        codes, scale, whole = nvfp4.encode(value)
        out[name] = nvfp4.pack(codes)
        out[f"{module}.weight_scale"] = scale.to(torch.float8_e4m3fn)
        out[f"{module}.weight_scale_2"] = whole.float()
        largest = amax[module.removeprefix("model.")]
        out[f"{module}.input_scale"] = torch.tensor(
            largest / (nvfp4.FP4_MAX * nvfp4.FP8_MAX), dtype=torch.float32
        )
    return {n: v.cpu().contiguous() for n, v in out.items()}


# A module reads what another was observed to read: (pattern, the observed name).
_SHARED_INPUTS = [
    (
        r"self_attn\.(kv_proj|compressor\.(?:indexer\.)?(?:kv_proj|gate_proj))$",
        "self_attn.q_a_proj",
    ),
    (r"self_attn\.compressor\.indexer\.q_b_proj$", "self_attn.q_b_proj"),
    (r"mlp\.(?:shared_experts|experts\.\d+)\.(?:gate_proj|up_proj)$", "mlp"),
]


def observed_name(module: str) -> str:
    """Under which name `calibrate` recorded the input of this module."""
    for pattern, target in _SHARED_INPUTS:
        module = re.sub(pattern, target, module)
    return module


@torch.no_grad()
def calibrate(
    model: DeepseekV4ForCausalLM, ids: Tensor, doc: Tensor, rows: int = 4
) -> tuple[dict[str, float], dict[str, float]]:
    """Largest |input| of every quantised matrix over the given rows, and the share of clamped
    SwiGLU inputs per layer.

    An expert that no row reached gets the largest value among its layer's experts.
    """
    seen: dict[str, float] = {}
    clamped: dict[str, Tensor] = {}

    def observe(name: str, x: Tensor) -> None:
        if not x.numel():
            return
        if name.endswith("preactivation"):
            gate, up = x.float().chunk(2, dim=-1)
            kind = re.sub(r"\.experts\.\d+", ".experts", name.removesuffix(".preactivation"))
            hit = torch.stack(
                [
                    (gate > 10).sum(),
                    (up.abs() > 10).sum(),
                    torch.tensor(gate.numel(), device=x.device),
                ]
            )
            clamped[kind] = clamped.get(kind, 0) + hit
            return
        seen[name] = max(seen.get(name, 0.0), float(x.abs().max()))

    weights = working_weights(model, rounded=True)
    turns = angles(model, ids.shape[1])
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        forward(
            weights,
            turns,
            ids[part],
            doc[part],
            Options(fp8_cache=True, select=True, observe=observe),
        )
    amax = {}
    for name in split_experts(dict(model.named_parameters())):
        if is_quantised(name):
            module = name.removeprefix("model.").removesuffix(".weight")
            key = observed_name(module)
            if key not in seen:
                layer = key.split(".experts.")[0]
                seen[key] = max(v for k, v in seen.items() if k.startswith(f"{layer}.experts."))
            amax[module] = seen[key]
    share = {k: float((v[0] + v[1]) / (2 * v[2])) for k, v in clamped.items()}
    total = sum(clamped.values())
    share["all"] = float((total[0] + total[1]) / (2 * total[2]))
    share["gate"], share["up"] = float(total[0] / total[2]), float(total[1] / total[2])
    return amax, share


def write_shards(tensors: dict[str, Tensor], folder: Path, limit: int) -> None:
    """safetensors files of at most about `limit` bytes, with an index when there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size and size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(v.nbytes for v in tensors.values())},
        "weight_map": where,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")


def quantization_config() -> dict[str, Any]:
    """ModelOpt's mark in config.json."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": nvfp4.BLOCK,
        "kv_cache_quant_algo": None,
        "ignore": IGNORE,
        "producer": {"name": "assay-miniature", "version": "1"},
    }


def write_config(folder: Path, quantised: bool) -> None:
    """config.json, and hf_quant_config.json for the quantised one."""
    config = dict(CONFIG)
    if quantised:
        mark = quantization_config()
        config["quantization_config"] = mark
        legacy = {
            "producer": mark["producer"],
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": nvfp4.BLOCK,
                "exclude_modules": IGNORE,
            },
        }
        (folder / "hf_quant_config.json").write_text(json.dumps(legacy, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    quantised: bool,
    tokenizer: Path,
    limit: int = SHARD_BYTES,
) -> None:
    """A complete checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    write_shards(tensors, folder, limit)
    write_config(folder, quantised)
    for file in TOKENIZER_FILES:
        if (tokenizer / file).resolve() != (folder / file).resolve():
            shutil.copy(tokenizer / file, folder / file)


def model_state(model: DeepseekV4ForCausalLM) -> dict[str, Tensor]:
    """Parameters and the buffers that a checkpoint holds."""
    return dict(model.state_dict())


def main() -> None:
    from .data import rows_of  # training's packer; not needed by those who import this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", type=Path, help="state dict written by training; random weights without it"
    )
    parser.add_argument("--bf16", type=Path)
    parser.add_argument("--nvfp4", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument(
        "--rows", type=int, default=8, help="calibration rows of 1,024 (and one of 4,096)"
    )
    args = parser.parse_args()
    model = build().eval()
    if args.weights:
        model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    if args.bf16:
        write(args.bf16, bf16_tensors(model_state(model)), False, args.tokenizer, 10**12)
    if args.nvfp4:
        ids, _, doc = rows_of(args.tokenizer, random.Random("calibration"), args.rows, 1024)
        amax, share = calibrate(model, torch.from_numpy(ids).long(), torch.from_numpy(doc).long())
        write(args.nvfp4, nvfp4_tensors(model_state(model), amax), True, args.tokenizer)
        print("clamped share:", share)
    assert len(model.model.layers) == LAYERS


if __name__ == "__main__":
    main()
