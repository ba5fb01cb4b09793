"""Linear layers and routed experts on CPU, with per-channel fp32 scales and the SwiGLU clamp.

Weights are bf16, or fp32 copies of them made once by `prepare`. Products are taken in fp32 either
way: a bf16 product would round gate and up before the activation, and hosts without AVX512-BF16
have no fast bf16 product at all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

# Below this many (token, expert) pairs, a product per pair beats gathering the experts' weights.
PAIRS_ONE_BY_ONE = 12
# A batch of experts is padded to its busiest one; beyond this waste they are run one by one.
MAX_PADDING = 4


def prepare(weight: Tensor) -> Tensor:
    """bf16 -> fp32, exact: what `linear` and `routed_experts` run fastest on. Twice the memory."""
    return weight.to(torch.float32).contiguous()


def linear(
    x: Tensor, weight: Tensor, alpha: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x (..., K) @ weight (N, K)^T, times alpha (N,) fp32 in the epilogue -> (..., N) out_dtype.

    out_dtype defaults to x's dtype.
    """
    out = torch.nn.functional.linear(x.to(torch.float32), weight.to(torch.float32))
    if alpha is not None:
        out.mul_(alpha)
    return out.to(out_dtype or x.dtype)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """(..., 2 I) fp32, gate then up -> silu(gate) * up (..., I); changes its argument.

    The clamp bounds gate from above only and up on both sides, before the product.
    """
    gate, up = gate_up.chunk(2, -1)
    if limit is not None:
        gate.clamp_max_(limit)
        up.clamp_(-limit, limit)
    return silu(gate).mul_(up)


def routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    alpha13: Tensor | None = None,
    alpha2: Tensor | None = None,
    swiglu_limit: float | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Sum over a token's experts of topk_weight * w2 (swiglu (w13 x)).

    x: (M, H) bf16; topk_ids: (M, k) int; topk_weights: (M, k) fp32; w13: (E, 2 I, H), gate rows
    first; w2: (E, H, I), bf16 or fp32; alpha13: (E, 2 I), alpha2: (E, H) fp32 or None; expert_map:
    (global experts,) local index or -1, or None. Returns (M, H) bf16. The activation between the
    products is rounded to bf16, as on every other backend.
    """
    tokens, topk = topk_ids.shape
    ids = topk_ids.reshape(-1).to(torch.int64)
    weights = topk_weights.reshape(-1).to(torch.float32)
    if expert_map is not None:
        ids = expert_map.to(torch.int64).index_select(0, ids)
        weights = torch.where(ids < 0, 0.0, weights)
        ids = ids.clamp_min(0)
    inputs = x.to(torch.float32)
    if ids.numel() <= PAIRS_ONE_BY_ONE:
        outs = _one_by_one(inputs, ids, topk, w13, w2, alpha13, alpha2, swiglu_limit)
    else:
        outs = _grouped(inputs, ids, topk, w13, w2, alpha13, alpha2, swiglu_limit)
    # (M, 1, k) @ (M, k, H)
    combined = torch.bmm(weights.view(tokens, 1, topk), outs.view(tokens, topk, -1))
    return combined.squeeze(1).to(x.dtype)


def _one_by_one(
    x: Tensor,
    ids: Tensor,
    topk: int,
    w13: Tensor,
    w2: Tensor,
    alpha13: Tensor | None,
    alpha2: Tensor | None,
    limit: float | None,
) -> Tensor:
    experts = ids.tolist()
    gate_up = torch.empty(len(experts), w13.shape[1])
    for pair, expert in enumerate(experts):
        torch.mv(w13[expert].to(torch.float32), x[pair // topk], out=gate_up[pair])
    if alpha13 is not None:
        gate_up.mul_(alpha13.index_select(0, ids))
    hidden = swiglu(gate_up, limit).to(torch.bfloat16).to(torch.float32)
    outs = torch.empty(len(experts), w2.shape[1])
    for pair, expert in enumerate(experts):
        torch.mv(w2[expert].to(torch.float32), hidden[pair], out=outs[pair])
    if alpha2 is not None:
        outs.mul_(alpha2.index_select(0, ids))
    return outs


def _grouped(
    x: Tensor,
    ids: Tensor,
    topk: int,
    w13: Tensor,
    w2: Tensor,
    alpha13: Tensor | None,
    alpha2: Tensor | None,
    limit: float | None,
) -> Tensor:
    """Sort the pairs by expert, then one padded batch of products, or a product per expert."""
    experts = w13.shape[0]
    pairs = ids.numel()
    order = ids.argsort(stable=True)
    sorted_ids = ids.index_select(0, order)
    counts = torch.bincount(ids, minlength=experts)
    busiest = int(counts.max())
    active = counts.nonzero().squeeze(1)
    token = torch.div(order, topk, rounding_mode="floor")
    outs = torch.empty(pairs, w2.shape[1])
    if active.numel() * busiest > MAX_PADDING * pairs or w13.dtype != torch.float32:
        inputs = x.index_select(0, token)
        stop = 0
        for expert, count in zip(active.tolist(), counts[active].tolist(), strict=True):
            part = slice(stop, stop + count)
            stop += count
            gate_up = torch.mm(inputs[part], w13[expert].to(torch.float32).t())
            if alpha13 is not None:
                gate_up.mul_(alpha13[expert])
            hidden = swiglu(gate_up, limit).to(torch.bfloat16).to(torch.float32)
            out = torch.mm(hidden, w2[expert].to(torch.float32).t())
            outs[part] = out if alpha2 is None else out.mul_(alpha2[expert])
    else:
        # Row of each pair in a (experts, busiest) table.
        starts = counts.cumsum(0) - counts
        place = torch.arange(pairs) - starts.index_select(0, sorted_ids)
        row = sorted_ids * busiest + place
        table = torch.zeros(experts * busiest, dtype=torch.int64)
        table[row] = token
        inputs = x.index_select(0, table).view(experts, busiest, -1)
        gate_up = torch.bmm(inputs, w13.mT)
        if alpha13 is not None:
            gate_up.mul_(alpha13.unsqueeze(1))
        hidden = swiglu(gate_up, limit).to(torch.bfloat16).to(torch.float32)
        padded = torch.bmm(hidden, w2.mT)
        if alpha2 is not None:
            padded.mul_(alpha2.unsqueeze(1))
        outs = padded.view(experts * busiest, -1).index_select(0, row)
    result = torch.empty_like(outs)
    result[order] = outs
    return result
