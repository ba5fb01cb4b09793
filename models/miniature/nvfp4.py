"""NVFP4 in a few lines of torch: what training rounds to, and what the export packs. One 16-block
along K, one e4m3 block scale, one fp32 scale per matrix (amax / (6 * 448)); codes are rounded to
nearest, ties to even, saturating at 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
FP4_MAX, FP8_MAX = 6.0, 448.0


def global_scale(w: Tensor) -> Tensor:
    """(..., N, K) -> (...): one fp32 scale per matrix."""
    return w.float().abs().amax(dim=(-2, -1)) / (FP4_MAX * FP8_MAX)


def encode(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., N, K) -> e2m1 values (..., N, K), e4m3 block scales as fp32 (..., N, K/16), global
    scales (...).
    """
    whole = global_scale(w)
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    shared = whole[..., None, None]
    safe = torch.where(shared > 0, shared, torch.ones_like(shared))
    scale = (
        (blocks.abs().amax(-1) / FP4_MAX / safe).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
    )
    step = (scale * safe)[..., None]
    value = torch.where(
        step > 0,
        blocks / torch.where(step > 0, step, torch.ones_like(step)),
        torch.zeros_like(blocks),
    )
    size = value.abs().clamp(max=FP4_MAX)
    grid = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    value = torch.copysign(torch.round(size / grid) * grid, value)
    return value.flatten(-2), scale, whole


def decode(value: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    """Inverse of `encode`, fp32."""
    blocks = value.unflatten(-1, (-1, BLOCK)) * (scale * whole[..., None, None])[..., None]
    return blocks.flatten(-2)


def round_trip(w: Tensor) -> Tensor:
    """The nearest NVFP4 matrix, fp32."""
    return decode(*encode(w))


def pack(value: Tensor) -> Tensor:
    """e2m1 values (N, K) -> uint8 (N, K/2); the low nibble is the even k."""
    size = value.abs()
    code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(
        torch.uint8
    )
    code |= torch.signbit(value).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`, fp32 values."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=packed.device)
    table = torch.cat([table, -table])
    return torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=-1).flatten(
        -2
    )


def fp8_cache(kv: Tensor, rope: int = 64) -> Tensor:
    """V4's KV cache: all but the last `rope` channels in e4m3, one power-of-two scale per 64;
    straight-through.
    """
    nope = kv[..., :-rope].float().unflatten(-1, (-1, 64))
    scale = torch.exp2(
        torch.ceil(torch.log2(nope.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX))
    )
    rounded = ((nope / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    rounded = torch.cat([rounded.to(kv.dtype), kv[..., -rope:]], dim=-1)
    return kv + (rounded - kv).detach()
