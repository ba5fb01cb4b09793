"""What the plugin took over in this process, counted after loading."""

from __future__ import annotations

from collections import Counter

from torch import nn
from vllm.logger import init_logger

from assay_kernels.vllm_plugin import modules, proof, standins
from assay_kernels.vllm_plugin.layers import AssayExpertsMethod, AssayLinearMethod
from assay_kernels.vllm_plugin.settings import arithmetic

logger = init_logger("vllm.assay")


def count_layers(model: nn.Module) -> Counter[tuple[str, str]]:
    """(kind, how) -> number of vLLM modules that our methods serve."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, AssayLinearMethod | AssayExpertsMethod):
            counts[modules.kind(method.name), method.how] += 1
    return counts


def record_loaded(model: nn.Module) -> None:
    """Log the summary and leave it as this process's proof."""
    operators = standins.install()
    summary = proof.Summary(
        arch="cpu",
        mode=arithmetic(),
        operators="torch" if "torch" in operators.operators.values() else "native",
        layers=dict(count_layers(model)),
    )
    logger.info("%s\n%s", operators.line, summary.table())
    proof.record_loaded(summary)
