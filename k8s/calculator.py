"""What a server on several nodes needs: memory of a GPU, tokens of KV cache, bytes between GPUs.

    python k8s/calculator.py [--model pro|flash] [--gpu-memory GB] [--tokens N] [--json]

For data parallel attention with expert parallel experts (`parallelism.nodes`), 8 GPUs a node,
dialect A (experts NVFP4, the rest FP8 and bf16). Formulas and sources are beside the numbers;
nothing here was measured. Not counted: norms, hyper-connections and the MTP layer (together under
2 % of the weights).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

GPUS = 8
NVFP4 = 0.5 + 1 / 16
"""Bytes of a weight: four bits, and an FP8 scale for each 16."""
FP8, BF16 = 1, 2
VOCABULARY = 129280
HEAD, ROPE, WINDOW, O_RANK = 512, 64, 128, 1024
INDEX_HEADS, INDEX_HEAD = 64, 128
BLOCK = 256
"""Tokens of a KV block: --block-size of the recipes."""
STATE, INDEX_STATE, ALIGNMENT = 584, 132, 576
"""Bytes of a compressed state (448 fp8, 64 bf16, 8 scales), of the indexer's (128 fp8 and a
scale), and what a page is rounded up to: vLLM 0.33, models/deepseek_v4/attention.py,
get_kv_cache_spec."""


@dataclass(frozen=True)
class Model:
    """Sizes as the checkpoints' config.json has them."""

    name: str
    hidden: int
    layers: int
    ratio_4: int
    """Layers that keep a state for each 4 tokens and have an indexer; the rest keep one for each
    128."""
    heads: int
    q_rank: int
    o_groups: int
    experts: int
    inter: int
    top_k: int = 6

    @property
    def ratio_128(self) -> int:
        return self.layers - self.ratio_4


PRO = Model("V4-Pro", 7168, 61, 30, 128, 1536, 16, 384, 3072)
FLASH = Model("V4-Flash", 4096, 43, 21, 64, 1024, 8, 256, 2048)
MODELS = {"pro": PRO, "flash": FLASH}


def expert_bytes(m: Model) -> float:
    """All routed experts: gate, up and down of each."""
    return m.layers * m.experts * 3 * m.hidden * m.inter * NVFP4


def replicated_bytes(m: Model) -> float:
    """What every data parallel rank holds whole: attention, shared expert, router, embeddings."""
    attention = (
        (m.q_rank + HEAD) * m.hidden  # fused_wqa_wkv
        + m.heads * HEAD * m.q_rank  # wq_b
        + O_RANK * m.heads * HEAD  # wo_a, all groups
        + m.hidden * m.o_groups * O_RANK  # wo_b
    )
    shared = 3 * m.hidden * m.inter
    router = m.experts * m.hidden * BF16
    compressor_4 = (2048 + 512) * m.hidden * BF16 + INDEX_HEADS * m.hidden * BF16
    indexer = INDEX_HEADS * INDEX_HEAD * m.q_rank * FP8
    compressor_128 = 1024 * m.hidden * BF16
    return (
        m.layers * ((attention + shared) * FP8 + router)
        + m.ratio_4 * (compressor_4 + indexer)
        + m.ratio_128 * compressor_128
        + 2 * VOCABULARY * m.hidden * BF16
    )


def page(states: int, state_bytes: int) -> int:
    return math.ceil(states * state_bytes / ALIGNMENT) * ALIGNMENT


def kv_bytes_per_token(m: Model) -> float:
    """Of a long context; windows do not grow with it."""
    four = page(BLOCK // 4, STATE) + page(BLOCK // 4, INDEX_STATE)
    long = page(BLOCK // 128, STATE)
    return (m.ratio_4 * four + m.ratio_128 * long) / BLOCK


def window_bytes(m: Model) -> int:
    """Of each running request, at least: the last 128 tokens of every layer."""
    return m.layers * WINDOW * STATE


def distinct_ranks(m: Model, ranks: int) -> float:
    """Ranks that hold one of a token's experts, on average, if the router chooses evenly:
    each rank is missed with probability C(E - E/R, k) / C(E, k)."""
    here = m.experts // ranks
    missed = math.comb(m.experts - here, m.top_k) / math.comb(m.experts, m.top_k)
    return ranks * (1 - missed)


@dataclass(frozen=True)
class Row:
    """Of one GPU; GB are 10^9 bytes."""

    nodes: int
    ranks: int
    weights_gb: float
    kv_gb: float
    kv_tokens: int
    """Tokens of KV cache of one GPU; a request's KV lives on one."""
    gather_mb: float
    """allgather_reducescatter: what a GPU receives and sends in one decode step, all layers."""
    gather_between_nodes_mb: float
    point_to_point_mb: float
    """The same, if each token went only where its experts are (DeepEP)."""


def row(
    m: Model, nodes: int, gpu_memory_gb: float, share: float, spare_gb: float, tokens: int
) -> Row:
    """`tokens`: of one GPU in a step. Raises ValueError where experts cannot be spread evenly."""
    ranks = GPUS * nodes
    if m.experts % ranks:
        raise ValueError(f"{m.experts} experts cannot be spread evenly over {ranks} GPUs")
    weights = replicated_bytes(m) + expert_bytes(m) / ranks
    kv = gpu_memory_gb * 1e9 * share - spare_gb * 1e9 - weights
    # Out to the experts and back, bf16 both ways.
    gather = 2 * (ranks - 1) * tokens * m.hidden * BF16 * m.layers
    away = distinct_ranks(m, ranks) * (ranks - 1) / ranks
    direct = 2 * away * tokens * m.hidden * BF16 * m.layers
    return Row(
        nodes,
        ranks,
        weights / 1e9,
        kv / 1e9,
        max(0, int(kv / kv_bytes_per_token(m))),
        gather / 1e6,
        gather * (ranks - GPUS) / (ranks - 1) / 1e6,
        direct / 1e6,
    )


def rows(m: Model, gpu_memory_gb: float, share: float, spare_gb: float, tokens: int) -> list[Row]:
    counts = [n for n in (1, 2, 4, 8) if m.experts % (GPUS * n) == 0]
    return [row(m, n, gpu_memory_gb, share, spare_gb, tokens) for n in counts]


def table(m: Model, found: Sequence[Row]) -> str:
    lines = [
        f"| {m.name}: nodes | weights, GB | KV, GB | KV tokens | all-gather, MB a step |"
        " of it between nodes | point to point, MB a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        room = [f"{r.kv_gb:.1f}", f"{r.kv_tokens:,}"] if r.kv_gb > 0 else ["does not fit", "-"]
        cells = [
            str(r.nodes),
            f"{r.weights_gb:.1f}",
            *room,
            f"{r.gather_mb:,.0f}",
            f"{r.gather_between_nodes_mb:,.0f}",
            f"{r.point_to_point_mb:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    found.add_argument("--model", choices=MODELS, default="pro")
    found.add_argument(
        "--gpu-memory", type=float, default=180, metavar="GB", help="B200: 180, H200: 141"
    )
    found.add_argument(
        "--utilization", type=float, default=0.9, help="vLLM's --gpu-memory-utilization"
    )
    found.add_argument(
        "--spare", type=float, default=8, metavar="GB", help="activations, graphs, NCCL"
    )
    found.add_argument("--tokens", type=int, default=64, help="of one GPU in a decode step")
    found.add_argument("--json", action="store_true")
    return found


def main() -> int:
    args = parser().parse_args()
    model = MODELS[args.model]
    found = rows(model, args.gpu_memory, args.utilization, args.spare, args.tokens)
    if args.json:
        print(json.dumps([asdict(r) for r in found], indent=1))
    else:
        print(table(model, found))
        print(
            f"\n{kv_bytes_per_token(model):.0f} bytes of KV a token, and at least"
            f" {window_bytes(model) / 1e6:.1f} MB for each running request"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
