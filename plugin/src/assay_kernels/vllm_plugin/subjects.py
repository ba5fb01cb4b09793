"""What vLLM's modules hold, as subjects of the self-check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from assay_kernels.checkpoint import Checkpoint
from assay_kernels.selfcheck import ExpertsSubject, LinearSubject, Part, Subject
from assay_kernels.selfcheck.subject import LinearOp
from assay_kernels.vllm_plugin import modules
from assay_kernels.vllm_plugin.layers import (
    AssayExpertsMethod,
    AssayLinearMethod,
    require_limit,
)


def subjects(model: nn.Module, checkpoint: Checkpoint, device: torch.device) -> Iterator[Subject]:
    """Every layer that our methods serve on this rank, in the model's order."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, AssayLinearMethod) and hasattr(module, "operand"):
            yield linear_subject(module, method, checkpoint, device)
        elif isinstance(method, AssayExpertsMethod) and hasattr(module, "operand13"):
            yield experts_subject(module, method, checkpoint, device)


def linear_subject(
    layer: Any, method: AssayLinearMethod, checkpoint: Checkpoint, device: torch.device
) -> LinearSubject:
    """The matrices behind a linear layer, cut as tensor parallelism cut them."""
    rank: int = layer.tp_rank
    parts = []
    for entry, rows in zip(modules.partitions(method.name), method.rows, strict=True):
        all_rows, all_columns = checkpoint.modules()[entry].shape
        row = rank * rows if rows < all_rows else 0
        column = rank * method.columns if method.columns < all_columns else 0
        parts.append(Part(entry, row, rows, column, method.columns))
    kind = modules.kind(method.name)
    op: LinearOp = "dense"
    if kind in ("compressor", "wo_a"):
        op = "compressor" if kind == "compressor" else "wo_a"
    elif method.is_gate_up:
        op = "dense_swiglu"
    limit = 0.0
    if op == "dense_swiglu":
        limit = require_limit(checkpoint.config.raw.get("swiglu_limit"), method.name)
    return LinearSubject(
        name=method.name,
        kind=kind,
        method=method,
        layer=layer,
        device=device,
        op=op,
        parts=tuple(parts),
        input_scale=method.input_scale,
        limit=limit,
        groups=layer.bmm_batch_size if op == "wo_a" else 1,
    )


def experts_subject(
    layer: Any, method: AssayExpertsMethod, checkpoint: Checkpoint, device: torch.device
) -> ExpertsSubject:
    """The experts of this rank: whole ones under expert parallelism, else a share of each."""
    logical = checkpoint.config.n_routed_experts
    if layer.expert_map is None:
        global_ids = list(range(layer.local_num_experts))
    else:
        global_ids = [0] * layer.local_num_experts
        for global_id, local in enumerate(layer.expert_map.tolist()):
            if local >= 0:
                global_ids[local] = global_id
    base = method.name.removeprefix("model.").partition(".ffn.")[0] + ".ffn.experts"
    rank: int = layer.moe_config.tp_rank
    stored_width = checkpoint.modules()[f"{base}.0.w1"].shape[0]
    offset = rank * method.width if method.width < stored_width else 0

    def parts(global_id: int) -> tuple[Part, Part, Part]:
        # Beyond the last expert come copies of the first ones (vLLM's redundant experts).
        entry = f"{base}.{global_id % logical}"
        return (
            Part(f"{entry}.w1", offset, method.width, 0, method.hidden),
            Part(f"{entry}.w3", offset, method.width, 0, method.hidden),
            Part(f"{entry}.w2", 0, method.hidden, offset, method.width),
        )

    return ExpertsSubject(
        name=method.name,
        kind=modules.kind(method.name),
        method=method,
        layer=layer,
        device=device,
        experts=tuple(parts(global_id) for global_id in global_ids),
        global_ids=tuple(global_ids),
        num_global=layer.global_num_experts,
        expert_map=layer.expert_map,
        top_k=layer.top_k,
        limit=method.limit,
        input_scale13=method.input_scale13,
        input_scale2=method.input_scale2,
    )
