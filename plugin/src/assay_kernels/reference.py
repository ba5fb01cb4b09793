"""Every kernel of design contract 3, in plain torch, written to be believed by reading.

Shapes: M tokens, K inputs, N output channels, E local experts, T experts a token, H hidden,
I expert width, G output groups, R output rank.

A weight is `codes` uint8 [.., N, K/2] and `block_scale` float8_e4m3fn [.., N, K/16]; its global
scale is in `alpha` float32 [.., N], one value per output channel:

- W4A16: x is a bf16 tensor; alpha[n] = weight_scale_2[partition(n)]
- W4A4, static: x is a QuantizedActivation without row_scale;
  alpha[n] = input_scale * weight_scale_2[partition(n)]
- W4A4, dynamic: x carries row_scale[m]; alpha[n] = weight_scale_2[partition(n)]

Every function returns what its kernel computes before rounding, in `dtype`: float32, or float64 to
judge an fp32 kernel. W4A4 kernels that requantise their output are followed by
`quantize_activation` here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from assay_kernels.numerics.nvfp4 import (
    QuantizedActivation,
    decode_fp32,
    quantize_activation,
)

__all__ = [
    "compressor",
    "dense",
    "dense_swiglu",
    "grouped_l1",
    "grouped_l2",
    "inverse_rope",
    "quantize_activation",
    "swiglu",
    "wo_a",
]

Activation = Tensor | QuantizedActivation


def _input(x: Activation, dtype: torch.dtype) -> Tensor:
    """The activation's values in `dtype`; a static input_scale is left to alpha."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    values = decode_fp32(x.codes, x.block_scale).to(dtype)
    return values if x.row_scale is None else values * x.row_scale.to(dtype).unsqueeze(-1)


def _weight(codes: Tensor, block_scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """[.., N, K] dequantised, alpha folded in."""
    if alpha.shape != codes.shape[:-1]:
        raise ValueError(
            f"alpha must be {tuple(codes.shape[:-1])}, one value per output channel, "
            f"got {tuple(alpha.shape)}"
        )
    return decode_fp32(codes, block_scale).to(dtype) * alpha.to(dtype).unsqueeze(-1)


def dense(
    x: Activation,  # (M, K)
    codes: Tensor,  # (N, K/2)
    block_scale: Tensor,  # (N, K/16)
    alpha: Tensor,  # (N,)
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """y[m, n] = sum_k x[m, k] * w[n, k]. Returns (M, N)."""
    return _input(x, dtype) @ _weight(codes, block_scale, alpha, dtype).T


def compressor(
    x: Activation,  # (M, K)
    codes: Tensor,  # (N, K/2), rows wkv | wgate
    block_scale: Tensor,  # (N, K/16)
    alpha: Tensor,  # (N,)
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`dense` whose kernel keeps fp32: the softmax over gates that follows needs it. (M, N)."""
    return dense(x, codes, block_scale, alpha, dtype=dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), V4's clamp (`swiglu_limit`).

    Raises ValueError for a limit that would not clamp: an unclamped path is wrong for V4.
    """
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"swiglu_limit must be finite and positive, got {limit}")
    return functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def dense_swiglu(
    x: Activation,  # (M, K)
    codes: Tensor,  # (2I, K/2), rows gate (w1) | up (w3)
    block_scale: Tensor,  # (2I, K/16)
    alpha: Tensor,  # (2I,)
    limit: float,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The shared expert's first layer. Returns (M, I)."""
    gate, up = dense(x, codes, block_scale, alpha, dtype=dtype).chunk(2, dim=-1)
    return swiglu(gate, up, limit)


def _local(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Expert ids on this rank; -1 where another rank holds the expert or the slot is unused."""
    ids = topk_ids.long()
    if expert_map is None:
        return ids
    return torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)


def grouped_l1(
    x: Activation,  # (M, H)
    topk_ids: Tensor,  # (M, T) global expert ids, -1 for an unused slot
    codes: Tensor,  # (E, 2I, H/2), rows gate (w1) | up (w3)
    block_scale: Tensor,  # (E, 2I, H/16)
    alpha: Tensor,  # (E, 2I)
    limit: float,
    *,
    expert_map: Tensor | None = None,  # (all experts,) local id or -1
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Routed experts, first layer: gather, GEMM, clamped SwiGLU. Returns (M, T, I), zero where
    the expert is not on this rank."""
    inputs = _input(x, dtype)
    local = _local(topk_ids, expert_map)
    out = inputs.new_zeros(*topk_ids.shape, codes.shape[-2] // 2)
    for expert in torch.unique(local[local >= 0]).tolist():
        token, slot = torch.where(local == expert)
        weight = _weight(codes[expert], block_scale[expert], alpha[expert], dtype)
        gate, up = (inputs[token] @ weight.T).chunk(2, dim=-1)
        out[token, slot] = swiglu(gate, up, limit)
    return out


def grouped_l2(
    h: Activation,  # (M, T, I)
    topk_ids: Tensor,  # (M, T) global expert ids, -1 for an unused slot
    topk_weights: Tensor,  # (M, T) float32, router weights
    codes: Tensor,  # (E, H, I/2)
    block_scale: Tensor,  # (E, H, I/16)
    alpha: Tensor,  # (E, H)
    *,
    expert_map: Tensor | None = None,  # (all experts,) local id or -1
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Routed experts, second layer: GEMM, then the weighted sum over a token's local experts.
    Returns (M, H)."""
    inputs = _input(h, dtype)
    local = _local(topk_ids, expert_map)
    out = inputs.new_zeros(topk_ids.shape[0], codes.shape[-2])
    for expert in torch.unique(local[local >= 0]).tolist():
        token, slot = torch.where(local == expert)
        weight = _weight(codes[expert], block_scale[expert], alpha[expert], dtype)
        routed = topk_weights[token, slot].to(dtype).unsqueeze(-1)
        out.index_add_(0, token, inputs[token, slot] @ weight.T * routed)
    return out


def inverse_rope(
    x: Tensor,  # (M, heads, D)
    cos: Tensor,  # (M, rope/2)
    sin: Tensor,  # (M, rope/2)
) -> Tensor:
    """Rotate the trailing `rope` channels of each head back by the token's position.

    V4 rotates adjacent pairs (interleaved RoPE); the inverse is the rotation by the negative
    angle. Computed in fp32, returned in x's dtype, (M, heads, D).
    """
    rope = 2 * cos.shape[-1]
    even, odd = x[..., -rope::2].float(), x[..., -rope + 1 :: 2].float()
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    rotated = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :-rope], rotated.to(x.dtype)], dim=-1)


def wo_a(
    x: Activation,  # (M, G, K), after inverse_rope, heads of a group side by side
    codes: Tensor,  # (G * R, K/2), rows ordered by group
    block_scale: Tensor,  # (G * R, K/16)
    alpha: Tensor,  # (G * R,)
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The grouped output projection: every group has its own weight. Returns (M, G, R)."""
    inputs = _input(x, dtype)
    weight = _weight(codes, block_scale, alpha, dtype)
    per_group = torch.unflatten(weight, 0, (inputs.shape[1], -1))
    return torch.einsum("mgk,grk->mgr", inputs, per_group)
