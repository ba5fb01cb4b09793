"""From a checkpoint in any dialect to vLLM's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay_kernels.checkpoint import Checkpoint, CheckpointError, FP8BlockWeight, weights_iterator
from assay_kernels.numerics import dequantize_fp8, usable_scale


def checkpoint_directory(model_config: Any) -> Path:
    """Folder that holds the weights; a hub name is resolved to its downloaded snapshot."""
    directory = Path(model_config.model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_config.model, revision=model_config.revision))


def vllm_weights(
    checkpoint: Checkpoint, fp8_as_stored: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the uniform form of ``weights_iterator``, under vLLM's names.

    FP8 weights arrive decoded to bf16, which holds them exactly: see ``_decoded_fp8``. With
    `fp8_as_stored` they stay E4M3 with UE8M0 scales in ``weight_scale_inv``, for vLLM's own
    FP8 layers.
    """
    fp8_weight: tuple[str, Tensor] | None = None
    for name, tensor in weights_iterator(checkpoint):
        if name.startswith("mtp."):  # vLLM's CPU model has no draft layers
            continue
        if tensor.dtype == torch.float8_e4m3fn and name.endswith(".weight"):
            fp8_weight = name, tensor
        elif fp8_weight is not None:
            weight_name, weight = fp8_weight
            fp8_weight = None
            entry = weight_name.removesuffix(".weight")
            file = checkpoint.modules()[entry].tensors["weight"].file
            if fp8_as_stored:
                yield vllm_name(weight_name), weight
                yield vllm_name(name), _ue8m0(file, entry, tensor)
            else:
                yield vllm_name(weight_name), _decoded_fp8(file, entry, weight, tensor)
        else:
            if name.endswith(".tid2eid"):
                _check_hash_table(checkpoint, name, tensor)
            yield vllm_name(name), tensor


def _check_hash_table(checkpoint: Checkpoint, name: str, table: Tensor) -> None:
    """A hash-routed layer's table names experts that exist."""
    experts = checkpoint.config.n_routed_experts
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < experts:
        info = next(iter(checkpoint.modules()[name].tensors.values()))
        rule = f"names experts {int(table.min())} to {int(table.max())}, but there are {experts}"
        raise CheckpointError(info.file, info.name, rule)


def _decoded_fp8(file: str, entry: str, weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 [N, K] with scales per 128x128 -> bf16 [N, K].

    Decoding before a rank takes its share keeps blocks whole where a shard cuts through one. An
    E4M3 value has 4 significant bits, so the product with a power of two is exact in bf16; any
    other scale would be rounded, and is refused.
    """
    _ue8m0(file, entry, scale)
    return dequantize_fp8(FP8BlockWeight(weight, scale)).to(torch.bfloat16)


def _ue8m0(file: str, entry: str, scale: Tensor) -> Tensor:
    """fp32 block scales as powers of two in a byte each; CheckpointError where one is none."""
    bytes_ = scale.to(torch.float8_e8m0fnu)
    if not torch.equal(bytes_.float(), scale):
        raise CheckpointError(file, entry, "FP8 block scales must be powers of two (UE8M0)")
    return bytes_


def vllm_name(name: str) -> str:
    """DeepSeek's name -> the one that vLLM's V4 loader expects."""
    if name == "head.weight":
        return "lm_head.weight"
    name = name.replace("embed.weight", "embed_tokens.weight")
    name = name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")
    name = name.replace(".shared_experts.w2.", ".shared_experts.down_proj.")
    return f"model.{name}"


def share_input_scales(model: nn.Module) -> list[str]:
    """Give consumers of one activation one input scale (contract 1), before operands are made.

    An activation is quantised once, so all that read it must use the same scale: the largest.
    Where one consumer has no usable scale, none is used, and the activation is scaled token by
    token. Returns the names of those layers, for a warning.
    """
    dynamic: list[str] = []
    for _, layer in _decoder_layers(model):
        attn, experts = layer.attn, layer.ffn.experts.routed_experts
        compressors = [m for m in (attn.compressor, getattr(attn.indexer, "compressor", None)) if m]
        shared = layer.ffn.shared_experts
        readers_of_one_input = [
            [attn.fused_wqa_wkv, *(m.fused_wkv_wgate for m in compressors)],
            [attn.wq_b, *([attn.indexer.wq_b] if attn.indexer is not None else [])],
            [attn.wo_a],
            [attn.wo_b],
            [(experts, "w13_input_scale"), *([shared.gate_up_proj] if shared else [])],
            [(experts, "w2_input_scale")],
            *([[shared.down_proj]] if shared else []),
        ]
        for readers in readers_of_one_input:
            dynamic += _share(readers)
    return dynamic


def _share(readers: list[Any]) -> list[str]:
    named = [r if isinstance(r, tuple) else (r, "input_scale") for r in readers]
    held = [(module, getattr(module, scale)) for module, scale in named if hasattr(module, scale)]
    if not held:
        return []
    if all(usable_scale(scale.data) for _, scale in held):
        common = torch.stack([scale.data.max() for _, scale in held]).max()
    else:
        common = torch.zeros(())
    names = []
    for module, scale in held:
        scale.data.fill_(common)
        if common == 0:
            names.append(module.quant_method.name)
    return names


def _decoder_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "attn") and hasattr(module, "ffn"):
            yield name, module
