"""Weights that are judged together (one expert, one attention), and what is read of each.

All scales are read; of the codes a fixed sample of rows, so that memory and time do not grow with
the size of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from assay_kernels.audit.expect import stored_module
from assay_kernels.checkpoint.data import Bytes, TensorReader
from assay_kernels.checkpoint.header import TensorInfo
from assay_kernels.checkpoint.reader import Module
from assay_kernels.checkpoint.weights import COMPRESSED_NVFP4, Precision
from assay_kernels.numerics.nvfp4 import E2M1_VALUES

Floats = npt.NDArray[np.float32]

STRIPES = 4
STRIPE_ROWS = 16
_WHOLE_BYTES = 2**20
_PIECES, _PIECE_BYTES = 16, 2**16


def _e4m3_table() -> Floats:
    """Value of every E4M3 byte, NaN for 0x7f and 0xff (OCP 8-bit Floating Point, table 1)."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = np.where(byte & 0x7F == 0x7F, np.nan, value)
    signed: Floats = np.where(byte & 0x80, -value, value).astype(np.float32)
    return signed


def _e8m0_table() -> Floats:
    table = np.ldexp(np.ones(256), np.arange(256) - 127)
    table[255] = np.nan
    result: Floats = table.astype(np.float32)
    return result


E4M3 = _e4m3_table()
E8M0 = _e8m0_table()
_MAGNITUDES = np.array(E2M1_VALUES * 2, dtype=np.float32)
_PAIRS = np.stack([np.tile(_MAGNITUDES, 16), np.repeat(_MAGNITUDES, 16)], axis=-1)


def as_float32(raw: Bytes, dtype: str) -> Floats:
    """Any stored float dtype as fp32."""
    if dtype == "BF16":
        wide = raw.view(np.uint16).astype(np.uint32) << 16
        result: Floats = wide.view(np.float32)
        return result
    if dtype == "F8_E4M3":
        return E4M3[raw]
    if dtype == "F8_E8M0":
        return E8M0[raw]
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    assert dtype == "F32", dtype
    return raw.view(np.float32)


class Weight:
    """One weight of a block; everything is read when first asked for, and once."""

    def __init__(self, module: Module, data: TensorReader) -> None:
        self.module = module
        self._data = data

    @property
    def name(self) -> str:
        return stored_module(self.module)

    @property
    def precision(self) -> Precision:
        return self.module.precision

    def info(self, role: str) -> TensorInfo | None:
        encoding = self.module.encoding
        return self.module.tensor(role) if encoding and role in encoding.roles else None

    @cached_property
    def scale_info(self) -> TensorInfo | None:
        """The tensor of block scales."""
        role = "block_scale" if self.precision is Precision.NVFP4 else "scale"
        return self.info(role) if self.module.encoding is not None else None

    @cached_property
    def scales(self) -> Bytes:
        """Block scales as stored, uint8 [rows, bytes of a row]."""
        assert self.scale_info is not None
        return self._data.read(self.scale_info).reshape(self.scale_info.shape[0], -1)

    @cached_property
    def scale_bounds(self) -> tuple[int, int]:
        """Smallest and largest byte of one-byte block scales."""
        return int(self.scales.min(initial=255)), int(self.scales.max(initial=0))

    @cached_property
    def scale_values(self) -> Floats:
        """All block scales as fp32 [rows, columns]; for the few of an FP8 weight."""
        assert self.scale_info is not None
        return as_float32(self.scales, self.scale_info.dtype)

    @cached_property
    def sampled_scales(self) -> Floats:
        """Block scales of the sampled rows as fp32; 4-bit formats only."""
        assert self.scale_info is not None
        return as_float32(self.scales[self.sampled_rows], self.scale_info.dtype)

    def _scalar(self, role: str) -> float | None:
        info = self.info(role)
        return None if info is None else float(self._data.read(info).view(np.float32)[0])

    @cached_property
    def stored_global_scale(self) -> float | None:
        return self._scalar("global_scale") if self.precision is Precision.NVFP4 else None

    @cached_property
    def stored_input_scale(self) -> float | None:
        return self._scalar("input_scale") if self.precision is Precision.NVFP4 else None

    @property
    def reciprocal(self) -> bool:
        """Whether the stored global scales are reciprocals."""
        return self.module.encoding is COMPRESSED_NVFP4

    @cached_property
    def sampled_rows(self) -> npt.NDArray[np.intp]:
        """Row numbers of the sample: stripes of neighbours, spread evenly."""
        rows = self.module.shape[0]
        if rows <= STRIPES * STRIPE_ROWS:
            return np.arange(rows)
        starts = np.linspace(0, rows - STRIPE_ROWS, STRIPES).astype(np.intp)
        result: npt.NDArray[np.intp] = (starts[:, None] + np.arange(STRIPE_ROWS)).reshape(-1)
        return result

    @cached_property
    def codes(self) -> Bytes:
        """Sampled rows of the carrier (packed codes or FP8), uint8 [sample, bytes of a row]."""
        info = self.info("weight" if self.precision is Precision.FP8_BLOCK else "codes")
        assert info is not None
        width = info.nbytes // info.shape[0]
        rows = self.sampled_rows
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = np.split(rows, breaks)
        parts = [self._data.read(info, int(r[0]) * width, (int(r[-1]) + 1) * width) for r in runs]
        return np.concatenate(parts).reshape(len(rows), width)

    @cached_property
    def code_magnitudes(self) -> Floats:
        """|e2m1| of the sampled rows, [sample, K]; 4-bit formats only."""
        result: Floats = _PAIRS[self.codes].reshape(len(self.codes), -1)
        return result

    @cached_property
    def magnitudes(self) -> Floats:
        """|e2m1 * block scale| of the sampled rows, [sample, K], without the global scale."""
        scales: Floats = np.abs(self.sampled_scales)
        width = self.code_magnitudes.shape[1] // scales.shape[1]
        result: Floats = self.code_magnitudes * np.repeat(scales, width, axis=1)
        return result

    def sample(self) -> Iterable[tuple[str, Bytes]]:
        """(dtype, bytes) of a plain tensor or an FP8 carrier: all of a small one, evenly spread
        pieces of a large one."""
        info = self.info("weight") or next(iter(self.module.tensors.values()))
        if info.nbytes <= _WHOLE_BYTES:
            yield info.dtype, self._data.read(info)
            return
        for begin in np.linspace(0, info.nbytes - _PIECE_BYTES, _PIECES).astype(int):
            start = int(begin) // 8 * 8
            yield info.dtype, self._data.read(info, start, start + _PIECE_BYTES)

    def whole(self) -> Bytes:
        """All bytes of a plain tensor."""
        return self._data.read(next(iter(self.module.tensors.values())))


class Block:
    """The weights of one expert, one attention or one layer's rest, by the last part of their
    names."""

    def __init__(
        self, prefix: str, weights: Iterable[Weight], vocabulary: int, experts: int
    ) -> None:
        self.prefix = prefix
        self.weights = {weight.module.name.rpartition(".")[2]: weight for weight in weights}
        self.vocabulary = vocabulary
        self.experts = experts

    @property
    def nbytes(self) -> int:
        """Bytes of the block in the files, read or not."""
        return sum(weight.module.nbytes for weight in self.weights.values())
