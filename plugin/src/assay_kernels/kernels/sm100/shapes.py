"""The products of DeepSeek V4 on one GPU, and the kernels that serve them."""

from __future__ import annotations

from dataclasses import dataclass

from assay_kernels.kernels.sm100.compiler import Epilogue, KernelKey
from assay_kernels.kernels.sm100.config import GemmConfig

TOKENS = (1, 7, 16, 64, 129, 1024, 4096)
ROUTED_TOKENS = (1, 64, 1024, 8192)


@dataclass(frozen=True)
class Shape:
    """One linear layer: n channels by k inputs; experts: local ones, 0 for a plain layer."""

    layer: str
    model: str
    n: int
    k: int
    kernel: str  # of design contract 3
    epilogue: Epilogue = "bf16"
    experts: int = 0
    share: float = 1.0  # of all experts that are local


def _model(
    name: str,
    hidden: int,
    q_lora: int,
    heads_dim: int,
    wo_b: int,
    groups: int,
    shared: int,
    inter: int,
    experts: int,
) -> list[Shape]:
    return [
        Shape("fused_wqa_wkv", name, q_lora + 512, hidden, "dense"),
        Shape("wq_b", name, heads_dim, q_lora, "dense"),
        Shape("wo_a", name, groups * 1024, 4096, "wo_a"),
        Shape("wo_b", name, hidden, wo_b, "dense"),
        Shape("shared gate_up", name, 2 * shared, hidden, "dense_swiglu", "requantise"),
        Shape("shared down", name, hidden, shared, "dense"),
        Shape("routed w13", name, 2 * inter, hidden, "grouped_l1", "requantise", experts, 1 / 8),
        Shape("routed w2", name, hidden, inter, "grouped_l2", "fp32", experts, 1 / 8),
        Shape("compressor, ratio 4", name, 2048, hidden, "compressor", "fp32"),
        Shape("compressor, ratio 128", name, 1024, hidden, "compressor", "fp32"),
        Shape("indexer compressor", name, 512, hidden, "compressor", "fp32"),
        Shape("indexer.wq_b", name, 8192, q_lora, "dense"),
    ]


# Per rank, tensor and expert parallel over eight GPUs; then the layers that differ when attention
# and the shared expert are not divided.
SHAPES = [
    *_model("V4-Pro TP8", 7168, 1536, 8192, 2048, 2, 384, 3072, 48),
    *_model("V4-Flash TP8", 4096, 1024, 4096, 1024, 1, 256, 2048, 32),
    Shape("wq_b", "V4-Pro DP8", 65536, 1536, "dense"),
    Shape("wo_a", "V4-Pro DP8", 16384, 4096, "wo_a"),
    Shape("wo_b", "V4-Pro DP8", 7168, 16384, "dense"),
    Shape("shared gate_up", "V4-Pro DP8", 6144, 7168, "dense_swiglu", "requantise"),
    Shape("shared down", "V4-Pro DP8", 7168, 3072, "dense"),
]


def key_for(shape: Shape, m: int, *, row_scaled: bool = False) -> KernelKey:
    """The kernel that computes `shape` for m tokens."""
    if shape.experts:
        scaled = row_scaled or shape.kernel == "grouped_l2"
        return KernelKey("gemm", GemmConfig.for_grouped(), shape.epilogue, scaled, True)
    swiglu = shape.epilogue in ("swiglu", "requantise")
    config = GemmConfig.for_dense(shape.n, shape.k, m, swiglu=swiglu)
    return KernelKey("gemm", config, shape.epilogue, row_scaled)


def all_keys() -> list[KernelKey]:
    """Every kernel that the shape table needs, static and per-token scales, in a fixed order."""
    keys = {
        KernelKey("quantize", dynamic=dynamic, grouped=grouped)
        for dynamic in (False, True)
        for grouped in (False, True)
    } | {KernelKey("finalise")}
    for shape in SHAPES:
        for m in TOKENS:
            for row_scaled in (False, True):
                keys.add(key_for(shape, m, row_scaled=row_scaled))
                if shape.epilogue == "requantise":
                    # A per-token scale of the next layer needs the whole row: bf16 in between.
                    key = key_for(shape, m, row_scaled=row_scaled)
                    keys.add(KernelKey("gemm", key.config, "swiglu", key.row_scaled, key.grouped))
    return sorted(keys, key=lambda key: key.name)
