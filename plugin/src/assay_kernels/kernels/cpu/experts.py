"""Linear layers and routed experts on CPU, with per-channel fp32 scales and the SwiGLU clamp.

Weights are bf16, or fp32 copies of them made once by `prepare`. Products are taken in fp32 either
way: a bf16 product would round gate and up before the activation, and hosts without AVX512-BF16
have no fast bf16 product at all.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu


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
    weights = topk_weights.to(torch.float32)
    if expert_map is not None:
        ids = expert_map.to(torch.int64).index_select(0, ids)
        weights = torch.where((ids < 0).view(tokens, topk), 0.0, weights)
        ids = ids.clamp_min(0)
    inputs = x.to(torch.float32)
    order = None
    if tokens > 1:  # a lone token's experts need no sorting: each is a group of one
        order = ids.argsort(stable=True)
        ids = ids.index_select(0, order)
        inputs = inputs.index_select(0, torch.div(order, topk, rounding_mode="floor"))
    else:
        inputs = inputs.expand(topk, -1)

    product = _each_product if tokens == 1 or w13.dtype != torch.float32 else _grouped_product
    gate_up = product(inputs, w13, ids)
    if alpha13 is not None:
        gate_up.mul_(alpha13.index_select(0, ids))
    hidden = swiglu(gate_up, swiglu_limit).to(torch.bfloat16).to(torch.float32)
    outs = product(hidden, w2, ids)
    if alpha2 is not None:
        outs.mul_(alpha2.index_select(0, ids))

    if order is not None:
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        outs = outs.index_select(0, place)
    # (M, 1, k) @ (M, k, H)
    combined = torch.bmm(weights.unsqueeze(1), outs.view(tokens, topk, -1))
    return combined.squeeze(1).to(x.dtype)


def _grouped_product(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """x (R, K) fp32, rows sorted by expert; weight (E, N, K) fp32; ids (R,) -> (R, N)."""
    ends = torch.bincount(ids, minlength=weight.shape[0]).cumsum(0).to(torch.int32)
    return grouped_mm(x, weight.mT, offs=ends)


def _each_product(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The same with a call per run of equal ids: less overhead for one token, and converts bf16
    weights one expert at a time."""
    out = torch.empty(ids.numel(), weight.shape[1])
    begin = 0
    for expert, run in itertools.groupby(ids.tolist()):
        end = begin + len(list(run))
        torch.mm(x[begin:end], weight[expert].to(torch.float32).t(), out=out[begin:end])
        begin = end
    return out
