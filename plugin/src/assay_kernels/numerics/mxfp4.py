"""MXFP4 (E2M1 codes, one UE8M0 scale per 32), the format of the original V4 experts, and its exact
conversion to NVFP4.

E4M3 holds the powers of two 2^-9 .. 2^8, so a tensor whose block exponents span at most 18 octaves
converts without loss: each scale is repeated for its two blocks of 16 and the common offset goes
into the global scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from assay_kernels.numerics.nvfp4 import NVFP4, decode_fp32, encode_e2m1, pack

MX_BLOCK = 32
"""Consecutive k that share one scale (OCP Microscaling Formats v1.0, section 5.2)."""

UE8M0_BIAS = 127
UE8M0_NAN = 255

LOSSLESS_OCTAVES = 18
_TOP_EXPONENT = 8  # 2^8 is the largest power of two in E4M3
_BOTTOM_EXPONENT = _TOP_EXPONENT - LOSSLESS_OCTAVES + 1


@dataclass(frozen=True, eq=False)
class MXFP4:
    """codes: uint8 [..., N, K/2], low nibble = even k; scale: uint8 [..., N, K/32], UE8M0 bytes."""

    codes: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.scale.dtype != torch.uint8:
            raise ValueError(
                f"codes and scale must be uint8, got {self.codes.dtype} and {self.scale.dtype}"
            )
        expected = (*self.codes.shape[:-1], self.codes.shape[-1] * 2 // MX_BLOCK)
        if self.codes.shape[-1] * 2 % MX_BLOCK or tuple(self.scale.shape) != expected:
            raise ValueError(
                f"codes {tuple(self.codes.shape)} need scale {expected}, "
                f"got {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)


class NotLosslessError(ValueError):
    """The tensor cannot become NVFP4 exactly; the message says by how many octaves it misses."""


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, which holds every UE8M0 scale and every offset."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


def dequantize_mxfp4(weight: MXFP4) -> Tensor:
    """fp32 [..., N, K]; exact down to fp32's own range. Scale byte 255 decodes to NaN."""
    unit = torch.ones((), dtype=torch.float8_e4m3fn, device=weight.codes.device)
    values = decode_fp32(
        weight.codes, unit.expand(*weight.codes.shape[:-1], weight.shape[-1] // 16)
    )
    exponent = weight.scale.int() - UE8M0_BIAS
    scale = _power_of_two(exponent)
    scale = torch.where(weight.scale == UE8M0_NAN, torch.nan, scale)
    blocks = torch.unflatten(values.double(), -1, (-1, MX_BLOCK)) * scale.unsqueeze(-1)
    return blocks.flatten(-2).float()


def _exponent_range(weight: MXFP4) -> tuple[Tensor, Tensor]:
    """Smallest and largest exponent of each matrix's non-zero blocks, int [...]; (1, 0) if none."""
    pairs = torch.unflatten(weight.codes, -1, (-1, MX_BLOCK // 2))
    used = ((pairs & 0x77) != 0).any(dim=-1)
    exponent = weight.scale.int() - UE8M0_BIAS
    lowest = torch.where(used, exponent, UE8M0_BIAS).amin(dim=(-2, -1))
    highest = torch.where(used, exponent, -UE8M0_BIAS).amax(dim=(-2, -1))
    empty = ~used.any(dim=-1).any(dim=-1)
    return lowest.masked_fill(empty, 1), highest.masked_fill(empty, 0)


def octaves(weight: MXFP4) -> Tensor:
    """How many octaves the exponents of each matrix's non-zero blocks span, int [...]."""
    lowest, highest = _exponent_range(weight)
    return highest - lowest + 1


def quantize_mxfp4(x: Tensor) -> MXFP4:
    """float [..., N, K], K a multiple of 32 -> MXFP4.

    Scale 2^(floor(log2(amax)) - 2), codes nearest even and saturating at 6 (OCP Microscaling
    Formats v1.0, section 6.3). A block of zeros has the smallest scale.
    """
    blocks = torch.unflatten(x.double(), -1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(dim=-1)
    _, exponent = torch.frexp(amax)
    exponent = torch.where(amax == 0, -UE8M0_BIAS, (exponent - 3).clamp(-UE8M0_BIAS, UE8M0_BIAS))
    quotient = (blocks / _power_of_two(exponent).unsqueeze(-1)).float()
    return MXFP4(pack(encode_e2m1(quotient).flatten(-2)), (exponent + UE8M0_BIAS).to(torch.uint8))


def _scale_range(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest exponent of each matrix's blocks, zeros included, int [...]."""
    return scale.amin(dim=(-2, -1)).int() - UE8M0_BIAS, scale.amax(dim=(-2, -1)).int() - UE8M0_BIAS


def _check_scales(weight: MXFP4) -> None:
    if bool((weight.scale == UE8M0_NAN).any()):
        raise NotLosslessError("a UE8M0 scale is NaN (byte 255)")


def _offset(weight: MXFP4) -> tuple[Tensor, int]:
    """(exponent of the global scale, octaves spanned by the worst matrix).

    Zeros count only where the span is too wide with them: to find them, every code must be read.
    """
    lowest, highest = _scale_range(weight.scale)
    if int((highest - lowest).max()) + 1 > LOSSLESS_OCTAVES:
        lowest, highest = _exponent_range(weight)
    return highest - _TOP_EXPONENT, int((highest - lowest).max()) + 1


def _assemble(codes: Tensor, exponent: Tensor, offset: Tensor) -> NVFP4:
    clamped = (exponent - offset[..., None, None]).clamp(_BOTTOM_EXPONENT, _TOP_EXPONENT)
    block_scale = _power_of_two(clamped).to(torch.float8_e4m3fn)
    return NVFP4(codes, block_scale.repeat_interleave(2, dim=-1), _power_of_two(offset).float())


def to_nvfp4(weight: MXFP4) -> NVFP4:
    """The same values as NVFP4, codes unchanged.

    Raises NotLosslessError where a matrix spans more than 18 octaves or a scale is NaN. Blocks of
    zeros do not count, whatever their scale.
    """
    _check_scales(weight)
    offset, span = _offset(weight)
    if span > LOSSLESS_OCTAVES:
        raise NotLosslessError(
            f"block exponents span {span} octaves, at most {LOSSLESS_OCTAVES} fit"
        )
    return _assemble(weight.codes, weight.scale.int() - UE8M0_BIAS, offset)


def to_nearest_nvfp4(weight: MXFP4) -> NVFP4:
    """`to_nvfp4` for any span: blocks too small for E4M3 are rounded onto its smallest scale.

    Raises NotLosslessError where a scale is NaN.
    """
    _check_scales(weight)
    offset, span = _offset(weight)
    exponent = weight.scale.int() - UE8M0_BIAS
    if span <= LOSSLESS_OCTAVES:
        return _assemble(weight.codes, exponent, offset)
    short = (_BOTTOM_EXPONENT - (exponent - offset[..., None, None])).clamp(min=0)
    unit = torch.ones((), dtype=torch.float8_e4m3fn, device=weight.codes.device)
    values = decode_fp32(
        weight.codes, unit.expand(*weight.codes.shape[:-1], weight.shape[-1] // 16)
    )
    shifted = torch.unflatten(values, -1, (-1, MX_BLOCK)) * _power_of_two(-short).float()[..., None]
    codes = torch.where(
        (short > 0).repeat_interleave(MX_BLOCK // 2, dim=-1),
        pack(encode_e2m1(shifted.flatten(-2))),
        weight.codes,
    )
    return _assemble(codes, exponent, offset)


def is_exact(source: MXFP4, result: NVFP4) -> bool:
    """Whether `result` has the values of `source`, decided on the bits and not by rounding.

    Codes must be equal, and each block's E4M3 byte times the global scale must be the UE8M0 scale
    in float64, which holds both exactly; blocks of zeros may have any scale.
    """
    if not torch.equal(source.codes, result.codes):
        return False
    stored = result.block_scale.double() * result.global_scale.double()[..., None, None]
    wanted = _power_of_two(source.scale.int() - UE8M0_BIAS).repeat_interleave(2, dim=-1)
    wrong = stored != wanted
    if not bool(wrong.any()):
        return True
    pairs = torch.unflatten(source.codes, -1, (-1, 8))
    return not bool((wrong & ((pairs & 0x77) != 0).any(dim=-1)).any())
