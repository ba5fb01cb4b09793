"""Which of the checkpoint's matrices make up a vLLM module, and what kind of layer it is.

vLLM fuses matrices that read the same input; the checkpoint keeps them apart. Names on the
checkpoint's side are DeepSeek's (``assay_kernels.checkpoint.names``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from assay_kernels.checkpoint import Checkpoint

Kind = Literal["routed", "shared", "attention", "wo_a", "compressor", "indexer"]

# vLLM's fused module -> the matrices it stacks, in row order.
_PARTITIONS = {
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "fused_wkv_wgate": ("wkv", "wgate"),
    "gate_up_proj": ("w1", "w3"),
    "down_proj": ("w2",),
}


def partitions(prefix: str) -> list[str]:
    """Checkpoint modules behind a vLLM prefix, e.g. ``model.layers.0.attn.fused_wqa_wkv``."""
    name = prefix.removeprefix("model.")
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" for part in _PARTITIONS.get(leaf, (leaf,))]


def expert_matrices(prefix: str, num_experts: int) -> list[str]:
    """Checkpoint entries behind a layer's routed experts; prefix ``model.layers.0.ffn.experts``."""
    layer = prefix.removeprefix("model.").partition(".ffn.")[0]
    return [
        f"{layer}.ffn.experts.{expert}.{matrix}"
        for expert in range(num_experts)
        for matrix in ("w1", "w2", "w3")
    ]


def kind(prefix: str) -> Kind:
    """Kind of layer, as the summary and the metrics count them."""
    if ".ffn.experts" in prefix:
        return "routed"
    if ".shared_experts." in prefix:
        return "shared"
    if ".compressor." in prefix:
        return "compressor"
    if ".indexer." in prefix:
        return "indexer"
    if prefix.endswith(".wo_a"):
        return "wo_a"
    return "attention"


def is_draft(prefix: str, checkpoint: Checkpoint) -> bool:
    """Whether a vLLM prefix stands in a draft (MTP) layer: vLLM counts those after the others."""
    parts = prefix.split(".")
    if "layers" not in parts[:-1]:
        return False
    number = parts[parts.index("layers") + 1]
    return number.isdecimal() and int(number) >= checkpoint.config.num_hidden_layers
