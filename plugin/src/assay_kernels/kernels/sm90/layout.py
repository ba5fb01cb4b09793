"""The order of NVFP4 weights on Hopper: same bytes, each thread's share of a wgmma tile together.

A block is 64 output channels by 64 inputs: one m64 tile of four k16 steps. wgmma's register operand
gives thread 32 w + 4 g + c of a warpgroup four bf16 pairs a step: rows g and g + 8 of warp w's
sixteen, inputs 2c, 2c + 1 and 2c + 8, 2c + 9. Rows g and g + 8 hold the neighbouring channels
16 w + 2 g and 16 w + 2 g + 1, so that a thread ends with channel pairs: one 32-bit store of bf16,
or a gate and its up.

Codes, int32 [N / 64, K / 64, 128 threads, 4 steps]: one word is one thread's step. Its low half
holds the even inputs, its high half the odd ones; in each half, where the decoder wants them:

    bit      15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    of code  s0 s2 s3 s1 m2 m2 m2 m0 m0 m0 m1 m1 m1 m3 m3 m3

Code 0 is in bf16's place for a value times 2^-126 (sign on top, magnitude across exponent and
mantissa), code 1 three bits lower; the others need their sign and magnitude shifted apart.

Scales, int32 [N / 64, K / 64, 4 warps, 8 g, 2 step pairs], as E5M3: E4M3 without its sign, whose
free bit lets subnormals have an exponent of their own. A bf16 whose exponent ends with the byte's
high bits and whose mantissa begins with its low ones is the scale times a power of two, whatever
the scale. Each half of a word is one channel (g, g + 8); bits 11..4 of a half are the first step's
scale, already in bf16's place, and the second step's is there after the half's bytes swap. Zero has
no code: the codes of a block with a zero scale become zero instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from assay_kernels.kernels.sm90.config import K_BLOCK, ROW_BLOCK

ALPHA_FACTOR = 2.0**20
"""Decoded weights are w * 2^-20: codes at 2^-126 times scales at 2^106. Alpha makes up for it."""

_SIGN_BIT = (15, 12, 14, 13)
_MAGNITUDE_BIT = (6, 3, 9, 0)


def e5m3(scale: Tensor) -> Tensor:
    """float8_e4m3fn block scales -> uint8 E5M3 with bias 9; zero gives the code of 2^-9.

    Raises ValueError on negative scales and NaN, which NVFP4 does not have.
    """
    bits = scale.view(torch.uint8)
    if bool(((bits > 0x80) | (bits == 0x7F)).any()):
        raise ValueError("block scales must be non-negative numbers; found a negative one or NaN")
    table = torch.arange(256, dtype=torch.int32) + 16
    table[0] = table[128] = 0
    for m in range(1, 8):
        exponent = m.bit_length() - 1
        table[m] = exponent << 3 | (m << (3 - exponent)) & 7
    return table.to(torch.uint8).to(scale.device)[bits.int()]


def _check(rows: int, inputs: int) -> None:
    if rows % ROW_BLOCK or inputs % K_BLOCK:
        raise ValueError(
            f"weights of {rows} x {inputs}: channels must be a multiple of {ROW_BLOCK} "
            f"and inputs of {K_BLOCK}"
        )


def pack_codes(codes: Tensor, block_scale: Tensor) -> Tensor:
    """uint8 [N, K / 2] with float8_e4m3fn [N, K / 16] -> int32 [N * K / 8] in kernel order."""
    rows, half = codes.shape
    _check(rows, 2 * half)
    zero = (block_scale.view(torch.uint8) & 0x7F) == 0
    codes = codes.masked_fill(zero.repeat_interleave(8, dim=1), 0)
    parts = codes.view(rows // 64, 4, 8, 2, half // 32, 4, 2, 4)
    # block, warp, g, row, k block, step, k half, c -> the four codes of a thread's step last
    parts = parts.permute(0, 4, 1, 2, 7, 5, 6, 3).reshape(-1, 4)
    word = torch.zeros(parts.shape[0], dtype=torch.int64, device=codes.device)
    for i in range(4):
        byte = parts[:, i].long()
        for code, shift in ((byte & 15, 0), (byte >> 4, 16)):
            word |= (code >> 3) << (_SIGN_BIT[i] + shift)
            word |= (code & 7) << (_MAGNITUDE_BIT[i] + shift)
    return word.to(torch.int32)


def unpack_codes(words: Tensor, rows: int, inputs: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 [N, K / 2]."""
    word = words.long() & 0xFFFFFFFF
    parts = torch.zeros(word.shape[0], 4, dtype=torch.int64, device=words.device)
    for i in range(4):
        for nibble, shift in ((0, 0), (4, 16)):
            sign = word >> (_SIGN_BIT[i] + shift) & 1
            magnitude = word >> (_MAGNITUDE_BIT[i] + shift) & 7
            parts[:, i] |= (sign << 3 | magnitude) << nibble
    grid = parts.to(torch.uint8).view(rows // 64, inputs // 64, 4, 8, 4, 4, 2, 2)
    return grid.permute(0, 2, 3, 7, 1, 5, 6, 4).reshape(rows, inputs // 2)


def pack_scales(block_scale: Tensor) -> Tensor:
    """float8_e4m3fn [N, K / 16] -> int32 [N * K / 64] in kernel order."""
    rows, columns = block_scale.shape
    _check(rows, 16 * columns)
    parts = e5m3(block_scale).view(rows // 64, 4, 8, 2, columns // 4, 2, 2)
    # block, warp, g, row, k block, step pair, step -> .., step pair, row, step
    parts = parts.permute(0, 4, 1, 2, 5, 3, 6).int()
    first, second = parts[..., 0], parts[..., 1]
    half = first << 4 | second >> 4 | (second & 15) << 12
    return (half[..., 0] | half[..., 1] << 16).flatten()


def unpack_scales(words: Tensor, rows: int, inputs: int) -> Tensor:
    """The inverse of `pack_scales`, up to zero scales: uint8 E5M3 [N, K / 16]."""
    word = words.long() & 0xFFFFFFFF
    half = torch.stack([word & 0xFFFF, word >> 16], dim=-1)
    parts = torch.stack([half >> 4 & 255, (half & 15) << 4 | half >> 12], dim=-1)
    grid = parts.to(torch.uint8).view(rows // 64, inputs // 64, 4, 8, 2, 2, 2)
    return grid.permute(0, 2, 3, 5, 1, 4, 6).reshape(rows, inputs // 16)


def interleave_gate_up(matrix: Tensor) -> Tensor:
    """Rows gate | up of a [.., 2I, X] matrix -> gate 0, up 0, gate 1, .., as SwiGLU wants them."""
    gate, up = matrix.chunk(2, dim=-2)
    return torch.stack([gate, up], dim=-2).flatten(-3, -2)
