"""Which products a DeepSeek V4 asks of the NVFP4 kernels, on one GPU of a deployment.

Sizes of the models are those of their config.json. A GPU's share: heads and output groups are
divided among tensor parallel ranks, experts among all; down projections of the latent kind, the
indexer and the compressors are whole on each. The shared expert is whole on each GPU or divided,
as vLLM's flags say, so both are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["dense", "swiglu", "fp32"]
"""What follows the product: bf16 as it is, gate and up through SwiGLU, or fp32 as it is."""


@dataclass(frozen=True)
class Widths:
    """Of one model."""

    hidden: int
    q_rank: int
    heads: int
    head: int
    o_groups: int
    o_rank: int
    index_heads: int
    index_head: int
    experts: int
    inter: int
    top_k: int


PRO = Widths(7168, 1536, 128, 512, 16, 1024, 64, 128, 384, 3072, 6)
FLASH = Widths(4096, 1024, 64, 512, 8, 1024, 64, 128, 256, 2048, 6)


@dataclass(frozen=True)
class Share:
    """One GPU of a deployment: tensor parallel ranks, and GPUs that the experts are spread over."""

    widths: Widths
    tensor_parallel: int
    expert_parallel: int


SHARES = (
    Share(PRO, 8, 8),  # b200x8, h200x8
    Share(PRO, 1, 8),  # b200x8-dep, and 8 GPUs of each node of several
    Share(PRO, 1, 16),  # two nodes
    Share(FLASH, 1, 1),  # flash-b200x1
    Share(FLASH, 2, 2),  # flash-h200x2
    Share(FLASH, 1, 8),  # eight GPUs, data parallel
)
"""What the profiles in docker/profiles and the chart's values ask for."""


@dataclass(frozen=True, order=True)
class Dense:
    """out[M, n] = x[M, k] W^T."""

    kind: Kind
    n: int
    k: int
    group: int = 0  # channels that share k inputs, if not all do (wo_a)


@dataclass(frozen=True, order=True)
class Grouped:
    """Both products of `experts` local experts of `of` in all, `top_k` rows a token."""

    experts: int
    of: int
    top_k: int
    hidden: int
    inter: int


def dense(share: Share) -> set[Dense]:
    """Every product but the experts'."""
    w, ranks = share.widths, share.tensor_parallel
    found = {
        Dense("dense", w.q_rank + w.head, w.hidden),  # fused_wqa_wkv
        Dense("dense", w.heads * w.head // ranks, w.q_rank),  # wq_b
        Dense(
            "dense",
            w.o_groups // ranks * w.o_rank,
            w.heads * w.head // w.o_groups,
            w.o_rank if w.o_groups > ranks else 0,
        ),  # wo_a
        Dense("dense", w.hidden, w.o_groups * w.o_rank // ranks),  # wo_b
        Dense("dense", w.index_heads * w.index_head, w.q_rank),  # indexer.wq_b
        # kv | gate; windows of 4 tokens overlap, so each has a second half.
        Dense("fp32", 2 * 2 * w.head, w.hidden),
        Dense("fp32", 2 * w.head, w.hidden),
        Dense("fp32", 2 * 2 * w.index_head, w.hidden),
    }
    for parts in {1, ranks}:
        found.add(Dense("swiglu", 2 * w.inter // parts, w.hidden))
        found.add(Dense("dense", w.hidden, w.inter // parts))
    return found


def grouped(share: Share) -> Grouped:
    w = share.widths
    local = -(-w.experts // share.expert_parallel)
    return Grouped(local, w.experts, w.top_k, w.hidden, w.inter)
