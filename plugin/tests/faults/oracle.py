"""NVFP4 decoded from its description alone, in numpy and fp64: what the product's own code is held
against.

Tables: OCP Microscaling Formats v1.0, table 5 (E2M1), and OCP 8-bit Floating Point v1.0, table 1
(E4M3). Nothing of `assay_kernels` is used here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Real = NDArray[np.float64]

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(code: Bytes) -> Real:
    """Four-bit codes, one a byte."""
    return np.where(code & 8, -1.0, 1.0) * MAGNITUDES[code & 7]


def e4m3(byte: Bytes) -> Real:
    """Bias 7, three bits of mantissa, 0x7f is NaN, no infinity."""
    exponent = ((byte >> 3) & 15).astype(np.int64)
    mantissa = (byte & 7).astype(np.float64) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    value[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -value, value)


def dequantise(codes: Bytes, block_scale: Bytes, global_scale: float) -> Real:
    """codes (N, K/2), the low nibble is the even k; block_scale (N, K/16) -> (N, K)."""
    values = np.empty((codes.shape[0], 2 * codes.shape[1]))
    values[:, 0::2] = e2m1(codes & 15)
    values[:, 1::2] = e2m1(codes >> 4)
    return values * np.repeat(e4m3(block_scale), 16, axis=1) * global_scale


def swiglu(gate: Real, up: Real, limit: float) -> Real:
    """DeepSeek V4's clamp: the gate from above, up on both sides, before the product."""
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit)
