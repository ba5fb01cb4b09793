"""NVFP4 to the bit: encode, decode, pack.

One value is `e2m1(code) * e4m3(block_scale[n, k // 16]) * global_scale`, the two-level scheme of
NVIDIA's NVFP4 (PTX ISA, `mxf4nvf4` with `.block16`; ModelOpt names: `weight`, `weight_scale`,
`weight_scale_2`). Every arithmetic step is one IEEE fp32 operation in the order written here, so
that a kernel can reproduce the codes bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 16
"""Consecutive k that share one block scale (PTX ISA: `scale_vec::4X`, one scale per 16)."""

FP4_MAX = 6.0
"""Largest E2M1 magnitude (OCP Microscaling Formats v1.0, section 5.3.3)."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value (OCP 8-bit Floating Point Specification v1.0, table 1)."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0..7; bit 3 is the sign (OCP Microscaling Formats v1.0, table 5)."""

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


def _below(value: float) -> float:
    """Largest fp32 under `value`."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(0.0)))


# A magnitude takes the code of its upper neighbour when it exceeds the boundary. Ties go to the
# even code, so every other midpoint itself already belongs to the upper neighbour.
_BOUNDARIES = torch.tensor([0.25, _below(0.75), 1.25, _below(1.75), 2.5, _below(3.5), 5.0])

_SIGNED = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
_PAIRS = torch.stack([_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)], dim=-1)


def _check_packed(codes: Tensor, block_scale: Tensor) -> None:
    if codes.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"codes must be uint8 and block_scale float8_e4m3fn, "
            f"got {codes.dtype} and {block_scale.dtype}"
        )
    expected = (*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK)
    if codes.shape[-1] * 2 % BLOCK or tuple(block_scale.shape) != expected:
        raise ValueError(
            f"codes {tuple(codes.shape)} need block_scale {expected}, "
            f"got {tuple(block_scale.shape)}"
        )


@dataclass(frozen=True, eq=False)
class NVFP4:
    """A weight matrix (or a stack of them) in NVFP4.

    codes: uint8 [..., N, K/2], the low nibble is the even k
    block_scale: float8_e4m3fn [..., N, K/16], non-negative
    global_scale: float32 [] or [...], a multiplier, one per matrix
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor

    def __post_init__(self) -> None:
        _check_packed(self.codes, self.block_scale)
        if self.global_scale.dtype != torch.float32:
            raise ValueError(f"global_scale must be float32, got {self.global_scale.dtype}")
        if self.global_scale.dim() and self.global_scale.shape != self.codes.shape[:-2]:
            raise ValueError(
                f"global_scale must be a scalar or {tuple(self.codes.shape[:-2])}, "
                f"got {tuple(self.global_scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """An activation in NVFP4, without its global scale.

    codes: uint8 [..., K/2]
    block_scale: float8_e4m3fn [..., K/16]
    row_scale: float32 [...] to multiply into each output row, or None when the static
        `input_scale` was used, which is then a factor of `alpha[n]`
    """

    codes: Tensor
    block_scale: Tensor
    row_scale: Tensor | None

    def __post_init__(self) -> None:
        _check_packed(self.codes, self.block_scale)
        if self.row_scale is not None and self.row_scale.shape != self.codes.shape[:-1]:
            raise ValueError(
                f"row_scale must be {tuple(self.codes.shape[:-1])}, "
                f"got {tuple(self.row_scale.shape)}"
            )


def global_scale(amax: Tensor) -> Tensor:
    """Scale that brings a matrix of largest magnitude `amax` into NVFP4's range.

    amax: any float dtype, any shape. Returns float32 of that shape: amax / (6 * 448), always
    normal and finite. An all-zero matrix gets 1, because any scale encodes it and a zero one
    could not be inverted.
    """
    amax = torch.nan_to_num(amax.float(), nan=_LARGEST, posinf=_LARGEST)
    scale = (amax / (FP4_MAX * E4M3_MAX)).clamp(min=_SMALLEST_NORMAL)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def to_e4m3(value: Tensor) -> Tensor:
    """Round non-negative fp32 to float8_e4m3fn, nearest even, saturating at 448 (NaN too)."""
    return torch.nan_to_num(value, nan=E4M3_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(value: Tensor) -> Tensor:
    """Round fp32 to E2M1 codes, uint8 of the same shape, one code a byte.

    Nearest even, saturating at +-6, sign kept on zeros, NaN becomes +6: what
    `cvt.rn.satfinite.e2m1x2.f32` does (PTX ISA).
    """
    boundaries = _BOUNDARIES.to(value.device)
    magnitude = torch.bucketize(value.abs(), boundaries, out_int32=True).to(torch.uint8)
    negative = torch.signbit(value) & ~torch.isnan(value)
    return magnitude | (negative.to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """[..., K] one code a byte -> uint8 [..., K/2], the low nibble is the even k."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 [..., K], one code a byte; the inverse of `pack`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _encode(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] and a global scale that broadcasts to [..., 1] -> packed codes, block scales."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"K must be a multiple of {BLOCK}, got {x.shape[-1]}")
    blocks = torch.unflatten(x.float(), -1, (-1, BLOCK))
    block_scale = to_e4m3(blocks.abs().amax(dim=-1) / FP4_MAX / scale)
    step = (block_scale.float() * scale).unsqueeze(-1)
    quotient = torch.where(
        step > 0, blocks / step, torch.copysign(torch.zeros_like(blocks), blocks)
    )
    return pack(encode_e2m1(quotient).flatten(-2)), block_scale


def quantize(x: Tensor, global_scale_: Tensor | None = None) -> NVFP4:
    """Quantise a matrix or a stack of matrices.

    x: float [..., N, K], K a multiple of 16
    global_scale_: float32 [] or [...]; None takes `global_scale` of each matrix
    Finite values beyond the range saturate; the result never holds a NaN.
    """
    if global_scale_ is None:
        global_scale_ = global_scale(x.abs().amax(dim=(-2, -1)))
    scale = global_scale_.to(torch.float32)
    codes, block_scale = _encode(x, scale[..., None, None])
    return NVFP4(codes, block_scale, scale)


def _decode(codes: Tensor, block_scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = functional.embedding(codes.int(), _PAIRS.to(codes.device, dtype)).flatten(-2)
    blocks = torch.unflatten(values, -1, (-1, BLOCK)) * block_scale.to(dtype).unsqueeze(-1)
    return blocks.flatten(-2)


def decode_bf16(codes: Tensor, block_scale: Tensor) -> Tensor:
    """e2m1 * e4m3 without the global scale, bf16 [..., K].

    Exact: the product has at most 2 + 4 significant bits and bf16 has 8.
    """
    return _decode(codes, block_scale, torch.bfloat16)


def decode_fp32(codes: Tensor, block_scale: Tensor) -> Tensor:
    """e2m1 * e4m3 without the global scale, fp32 [..., K]; exact."""
    return _decode(codes, block_scale, torch.float32)


def dequantize(weight: NVFP4) -> Tensor:
    """fp32 [..., N, K]; the product with the global scale is rounded once."""
    return decode_fp32(weight.codes, weight.block_scale) * weight.global_scale[..., None, None]


def fake_quantize(x: Tensor, global_scale_: Tensor | None = None) -> Tensor:
    """x as NVFP4 sees it: fp32 of the same shape."""
    return dequantize(quantize(x, global_scale_))


def usable_scale(scale: Tensor | None) -> bool:
    """Whether a static `input_scale` may be used at all: present, finite and positive."""
    return scale is not None and bool(torch.isfinite(scale).all() & (scale > 0).all())


def quantize_activation(x: Tensor, input_scale: Tensor | None) -> QuantizedActivation:
    """Quantise activations for W4A4.

    x: float [..., K]
    input_scale: float32 scalar multiplier shared by all rows. Where it is None, zero, negative
        or not finite, each row gets a scale of its own (`row_scale`).
    """
    if input_scale is not None and usable_scale(input_scale):
        codes, block_scale = _encode(x, input_scale.to(torch.float32).reshape(()))
        return QuantizedActivation(codes, block_scale, None)
    row_scale = global_scale(x.abs().amax(dim=-1))
    codes, block_scale = _encode(x, row_scale.unsqueeze(-1))
    return QuantizedActivation(codes, block_scale, row_scale)


def per_channel(scales: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """One scalar scale per partition of a fused matrix -> float32 [sum(rows)], one per channel.

    This is how `alpha[n]` keeps each partition's own global scale.
    """
    if len(scales) != len(rows):
        raise ValueError(f"{len(scales)} scales for {len(rows)} partitions")
    stacked = torch.stack([scale.float().reshape(()) for scale in scales])
    return stacked.repeat_interleave(torch.tensor(rows, device=stacked.device))
