"""To and from transformers' DeepseekV4ForCausalLM. Only `load_transformers_model` imports it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from assay_kernels.checkpoint.names import Scheme, convert_name
from assay_kernels.checkpoint.reader import Checkpoint, dequantized_state_dict, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERTS = ".mlp.experts."
_GATE_UP = f"{_EXPERTS}gate_up_proj"
_DOWN = f"{_EXPERTS}down_proj"


def to_transformers_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical plain tensors -> the state dict of DeepseekV4ForCausalLM.

    transformers stacks a layer's experts: gate_up_proj [E, 2I, H] (gate rows first) and down_proj
    [E, H, I]. MTP tensors, which it has no module for, are left out.
    """
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in state.items():
        if name.startswith("mtp."):
            continue
        converted = convert_name(name, Scheme.TRANSFORMERS)
        if _EXPERTS not in converted:
            result[converted] = tensor
            continue
        layer, _, rest = converted.partition(_EXPERTS)
        number, projection, _ = rest.split(".")
        experts.setdefault(layer, {}).setdefault(int(number), {})[projection] = tensor
    for layer, by_number in experts.items():
        ordered = [by_number[number] for number in range(len(by_number))]
        gate_up = [torch.cat([expert["gate_proj"], expert["up_proj"]]) for expert in ordered]
        result[layer + _GATE_UP] = torch.stack(gate_up)
        result[layer + _DOWN] = torch.stack([expert["down_proj"] for expert in ordered])
    return result


def from_transformers_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_transformers_state_dict`; expert tensors are views of the stacks."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, stacked, _ = name.partition(_EXPERTS)
        projections: dict[str, Tensor] = {}
        if stacked and name.endswith(_GATE_UP):
            gate, up = tensor.chunk(2, dim=1)
            projections = {"gate_proj": gate, "up_proj": up}
        elif stacked and name.endswith(_DOWN):
            projections = {"down_proj": tensor}
        if not projections:
            result[convert_name(name, Scheme.DEEPSEEK)] = tensor
        for projection, stack in projections.items():
            for number, matrix in enumerate(stack.unbind(0)):
                single = f"{layer}{_EXPERTS}{number}.{projection}.weight"
                result[convert_name(single, Scheme.DEEPSEEK)] = matrix
    return result


def load_transformers_model(
    source: str | os.PathLike[str] | Checkpoint, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """DeepseekV4ForCausalLM in `dtype` on the checkpoint's dequantised weights, in eval mode.

    Every parameter and buffer must be in the checkpoint and the reverse. Raises CheckpointError
    for a bad checkpoint, RuntimeError naming keys that are missing or unexpected.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    config: Any = DeepseekV4Config.from_pretrained(checkpoint.directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: PreTrainedModel = DeepseekV4ForCausalLM(config).to(dtype)
    state = to_transformers_state_dict(dequantized_state_dict(checkpoint, dtype))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()
