"""What the plugin took over in this process, counted after loading."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from vllm.logger import init_logger

from assay_kernels.checkpoint import Checkpoint, Precision
from assay_kernels.selfcheck import Report
from assay_kernels.vllm_plugin import modules, proof
from assay_kernels.vllm_plugin.layers import AssayExpertsMethod, AssayLinearMethod

logger = init_logger("vllm.assay")


def count_layers(model: nn.Module) -> Counter[tuple[str, str]]:
    """(kind, how) -> number of vLLM modules that our methods serve: those that hold an operand."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, AssayLinearMethod):
            served = hasattr(module, "operand")
        elif isinstance(method, AssayExpertsMethod):
            served = hasattr(module, "operand13") and hasattr(module, "operand2")
        else:
            continue
        counts[modules.kind(method.name), method.how] += served
    return +counts


def expected_nvfp4(model: nn.Module, checkpoint: Checkpoint) -> int:
    """Number of this model's vLLM modules whose matrices the headers store as NVFP4.

    Methods and classes are not asked, only where a module stands. An NVFP4 matrix of a layer in
    this process for which there is no module at all counts too: nothing can serve it.
    """
    names = [name for name, _ in model.named_modules()]
    held = {layer for name in names if (layer := _decoder_layer(name)) is not None}
    unmatched = {
        entry
        for entry, module in checkpoint.modules().items()
        if module.precision == Precision.NVFP4 and _decoder_layer(f"model.{entry}") in held
    }
    expected = 0
    for name in names:
        if name.endswith(".ffn.experts"):
            prefix = f"{name.removeprefix('model.')}."
            behind = {entry for entry in unmatched if entry.startswith(prefix)}
        else:
            behind = unmatched.intersection(modules.partitions(name))
        expected += bool(behind)
        unmatched -= behind
    return expected + len(unmatched)


def _decoder_layer(name: str) -> str | None:
    """`model.layers.3.attn.wo_a` -> `model.layers.3`; None for a name outside or above a layer."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["model", "layers"] and len(parts) > 3 else None


def record_loaded(
    model: Any, checkpoint: Checkpoint, arch: str, mode: str, operators: str, report: Report
) -> None:
    """Log the summary and leave it as this process's proof.

    mode: arithmetic, 'w4a16', 'w4a4' or 'reference'
    operators: where V4's own operators come from, 'native' or 'torch'
    """
    summary = proof.Summary(
        arch=arch,
        mode=mode,
        operators=operators,
        layers=dict(count_layers(model)),
        expected_nvfp4=expected_nvfp4(model, checkpoint),
        checks=report.rows,
    )
    logger.info("%s", summary.table())
    proof.record_loaded(summary)
