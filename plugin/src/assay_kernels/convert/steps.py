"""How one weight of the source becomes one weight of the target, in pieces of bounded size.

A step knows its output tensors before it has read any data, so that a shard's header can be written
first. `prepare` then settles the scalars, which stand at the front of a shard, and `stream` yields
the bytes of one output tensor after the other, in the order of `outputs`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay_kernels.checkpoint.data import TORCH_DTYPES, Bytes, TensorReader
from assay_kernels.checkpoint.errors import CheckpointError
from assay_kernels.checkpoint.header import DTYPE_BYTES, TensorInfo
from assay_kernels.checkpoint.manifest import scale_bits
from assay_kernels.checkpoint.reader import Checkpoint, Module
from assay_kernels.checkpoint.weights import (
    COMPRESSED_NVFP4,
    Encoding,
    Precision,
    plain,
)
from assay_kernels.numerics.fp8 import FP8_BLOCK, FP8Block, quantize_fp8
from assay_kernels.numerics.mxfp4 import (
    LOSSLESS_OCTAVES,
    MXFP4,
    UE8M0_NAN,
    NotLosslessError,
    dequantize_mxfp4,
    is_exact,
    octaves,
    to_nearest_nvfp4,
)
from assay_kernels.numerics.nvfp4 import BLOCK, NVFP4, dequantize, global_scale, quantize

STRIP_ELEMENTS = 2**20
"""Elements of a weight that are in memory as fp32 at a time."""


@dataclass(frozen=True)
class Output:
    """One tensor that a step writes. parameter: None for a bare tensor."""

    parameter: str | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Source:
    """The checkpoint that is read."""

    checkpoint: Checkpoint
    data: TensorReader


def as_bytes(tensor: Tensor) -> Bytes:
    result: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return result


class Error:
    """Relative L2 error, accumulated strip by strip in float64."""

    def __init__(self) -> None:
        self._wrong = self._whole = 0.0

    def add(self, wanted: Tensor, got: Tensor) -> None:
        self._wrong += float((got - wanted).square().sum(dtype=torch.float64))
        self._whole += float(wanted.square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        """Four significant digits."""
        if not self._whole:
            return 0.0 if not self._wrong else math.inf
        return float(f"{math.sqrt(self._wrong / self._whole):.4g}")


class Step(ABC):
    """The conversion of one weight."""

    def __init__(self, module: Module) -> None:
        self.module = module

    @property
    def entry(self) -> str:
        return self.module.name

    @property
    @abstractmethod
    def outputs(self) -> list[Output]:
        """What the step writes, known from headers alone."""

    @abstractmethod
    def prepare(self, source: Source) -> None:
        """Settle what `stream` needs of the whole weight: scales, not data."""

    @abstractmethod
    def stream(self, source: Source, output: Output) -> Iterator[Bytes]:
        """The bytes of one output; outputs come in order, and a piece is used before the next."""

    def report(self) -> dict[str, Any] | None:
        """What the manifest says of this weight; None where it was copied."""
        return None

    def scales(self) -> dict[str, str] | None:
        """Bits of the fp32 multipliers that the target stores as reciprocals."""
        return None


class Copy(Step):
    """Every tensor of the weight as it is, under the target's names."""

    def __init__(self, module: Module, parameters: dict[str, TensorInfo]) -> None:
        super().__init__(module)
        self._infos = parameters

    @property
    def outputs(self) -> list[Output]:
        return [Output(p or None, info.dtype, info.shape) for p, info in self._infos.items()]

    def prepare(self, source: Source) -> None:
        pass

    def stream(self, source: Source, output: Output) -> Iterator[Bytes]:
        yield from source.data.chunks(self._infos[output.parameter or ""])


def _strips(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Row ranges whose starts are multiples of an FP8 block."""
    rows, cols = shape[0], math.prod(shape[1:])
    height = max(STRIP_ELEMENTS // cols // FP8_BLOCK, 1) * FP8_BLOCK
    for begin in range(0, rows, height):
        yield begin, min(begin + height, rows)


def read_strip(source: Source, module: Module, begin: int, end: int) -> Tensor:
    """Rows [begin, end) as fp32; for FP8 `begin` is a multiple of 128."""
    data, stored = source.data, module.tensor
    if module.encoding is None:
        return data.rows(next(iter(module.tensors.values())), begin, end).float()
    if module.precision is Precision.FP8_BLOCK:
        weight, scale = stored("weight"), stored("scale")
        assert weight is not None
        assert scale is not None
        blocks = data.rows(scale, begin // FP8_BLOCK, -(-end // FP8_BLOCK)).float()
        return plain(FP8Block(data.rows(weight, begin, end), blocks))
    codes = stored("codes")
    assert codes is not None
    packed = data.rows(codes, begin, end).view(torch.uint8)
    if module.precision is Precision.MXFP4:
        scale = stored("scale")
        assert scale is not None
        return plain(MXFP4(packed, data.rows(scale, begin, end).view(torch.uint8)))
    blocks_info, whole = stored("block_scale"), stored("global_scale")
    assert blocks_info is not None
    assert whole is not None
    multiplier = source.checkpoint.global_scale(module, data.scalar(whole))
    return dequantize(NVFP4(packed, data.rows(blocks_info, begin, end), multiplier))


class _ToNVFP4(Step):
    """What every way to NVFP4 shares: the four tensors and their names."""

    def __init__(self, module: Module, encoding: Encoding, input_scale: float | None) -> None:
        super().__init__(module)
        self.encoding = encoding
        self._input_scale = None if input_scale is None else torch.tensor(input_scale)
        self._global_scale = torch.ones(())

    @property
    def outputs(self) -> list[Output]:
        scalar = (1,) if self.encoding is COMPRESSED_NVFP4 else ()
        rows, cols = self.module.shape
        names = {role: value.names[0] for role, value in self.encoding.roles.items()}
        result = [Output(names["global_scale"], "F32", scalar)]
        if self._input_scale is not None:
            result.append(Output(names["input_scale"], "F32", scalar))
        return [
            *result,
            Output(names["codes"], "U8", (rows, cols // 2)),
            Output(names["block_scale"], "F8_E4M3", (rows, cols // BLOCK)),
        ]

    def stream(self, source: Source, output: Output) -> Iterator[Bytes]:
        role = next(r for r, v in self.encoding.roles.items() if output.parameter in v.names)
        if role in ("global_scale", "input_scale"):
            value = self._global_scale if role == "global_scale" else self._input_scale
            assert value is not None
            yield as_bytes(value.reciprocal() if self.encoding is COMPRESSED_NVFP4 else value)
        elif role == "codes":
            yield from self.codes(source)
        else:
            yield from self.block_scale(source)

    @abstractmethod
    def codes(self, source: Source) -> Iterator[Bytes]: ...

    @abstractmethod
    def block_scale(self, source: Source) -> Iterator[Bytes]: ...

    def scales(self) -> dict[str, str] | None:
        if self.encoding is not COMPRESSED_NVFP4:
            return None
        result = {"global_scale": scale_bits(self._global_scale)}
        if self._input_scale is not None:
            result["input_scale"] = scale_bits(self._input_scale)
        return result


class Relabel(_ToNVFP4):
    """NVFP4 to NVFP4: codes and block scales bit for bit, scalars in the target's sense."""

    def prepare(self, source: Source) -> None:
        info = self.module.tensor("global_scale")
        assert info is not None
        self._global_scale = source.checkpoint.global_scale(self.module, source.data.scalar(info))

    def _copy(self, source: Source, role: str) -> Iterator[Bytes]:
        info = self.module.tensor(role)
        assert info is not None
        yield from source.data.chunks(info)

    def codes(self, source: Source) -> Iterator[Bytes]:
        return self._copy(source, "codes")

    def block_scale(self, source: Source) -> Iterator[Bytes]:
        return self._copy(source, "block_scale")


class Rescale(_ToNVFP4):
    """MXFP4 to NVFP4: codes unchanged, each scale given to two blocks. Proven exact, or said not
    to be, on the bits."""

    def __init__(self, module: Module, encoding: Encoding, input_scale: float | None) -> None:
        super().__init__(module, encoding, input_scale)
        self._table: Bytes | None = None
        self._rounded: NVFP4 | None = None
        self._octaves = 0
        self._error = 0.0

    def prepare(self, source: Source) -> None:
        scale = self._read(source, "scale")
        lowest, highest = int(scale.min()), int(scale.max())
        self._octaves = highest - lowest + 1
        if self._octaves <= LOSSLESS_OCTAVES and highest != UE8M0_NAN:
            # The usual case needs no code: any code has the same value under the new scale.
            self._global_scale = self._prepare_table(lowest, highest)
        else:
            self._rounded = self._prepare_wide(source, torch.from_numpy(scale))
            self._global_scale = self._rounded.global_scale

    def _read(self, source: Source, role: str) -> Bytes:
        info = self.module.tensor(role)
        assert info is not None
        return source.data.read(info).reshape(info.shape)

    def _prepare_table(self, lowest: int, highest: int) -> Tensor:
        """The E4M3 byte of every UE8M0 byte that the weight has, each proven equal under the global
        scale, which is returned; float64 holds both sides exactly."""
        used = torch.arange(lowest, highest + 1, dtype=torch.uint8).reshape(1, -1)
        codes = torch.zeros(1, 16 * used.shape[1], dtype=torch.uint8)
        result = to_nearest_nvfp4(MXFP4(codes, used))
        stored = result.block_scale[:, 0::2].contiguous()
        exact = stored.double() * result.global_scale.double()
        if not torch.equal(exact, used.view(torch.float8_e8m0fnu).double()):
            raise AssertionError(f"{self.entry}: the exact conversion is not exact")
        self._table = np.zeros(256, dtype=np.uint8)
        self._table[lowest : highest + 1] = as_bytes(stored)
        return result.global_scale

    def _prepare_wide(self, source: Source, scale: Tensor) -> NVFP4:
        original = MXFP4(torch.from_numpy(self._read(source, "codes")), scale)
        try:
            result = to_nearest_nvfp4(original)
        except NotLosslessError as error:
            info = self.module.tensor("scale")
            assert info is not None
            raise CheckpointError(info.file, info.name, str(error)) from None
        self._octaves = max(int(octaves(original)), 0)
        if not is_exact(original, result):
            distance = Error()
            distance.add(dequantize_mxfp4(original), dequantize(result))
            self._error = distance.relative
        return result

    def codes(self, source: Source) -> Iterator[Bytes]:
        if self._rounded is not None:
            yield as_bytes(self._rounded.codes)
            return
        info = self.module.tensor("codes")
        assert info is not None
        yield from source.data.chunks(info)

    def block_scale(self, source: Source) -> Iterator[Bytes]:
        if self._rounded is not None:
            yield as_bytes(self._rounded.block_scale)
            self._rounded = None
            return
        assert self._table is not None
        yield np.repeat(self._table[self._read(source, "scale").reshape(-1)], 2)

    def report(self) -> dict[str, Any]:
        result = {"from": "mxfp4", "to": "nvfp4", "octaves": self._octaves}
        if self._error:
            return {**result, "exact": False, "relative_error": self._error}
        return {**result, "exact": True}


class Quantise(_ToNVFP4):
    """Any values to NVFP4, rounded."""

    def __init__(self, module: Module, encoding: Encoding, input_scale: float | None) -> None:
        super().__init__(module, encoding, input_scale)
        self._scales: list[Tensor] = []
        self._error = Error()

    def _strips(self, source: Source) -> Iterator[Tensor]:
        for begin, end in _strips(self.module.shape):
            yield read_strip(source, self.module, begin, end)

    def prepare(self, source: Source) -> None:
        amax = torch.zeros(())
        for strip in self._strips(source):
            lowest, highest = torch.aminmax(strip)
            amax = torch.maximum(amax, torch.maximum(-lowest, highest))
            if not bool(torch.isfinite(amax)):
                info = next(iter(self.module.tensors.values()))
                raise CheckpointError(info.file, info.name, "holds a NaN or an infinity")
        self._global_scale = global_scale(amax)

    def codes(self, source: Source) -> Iterator[Bytes]:
        for strip in self._strips(source):
            part = quantize(strip, self._global_scale)
            self._error.add(strip, dequantize(part))
            self._scales.append(part.block_scale)
            yield as_bytes(part.codes)

    def block_scale(self, source: Source) -> Iterator[Bytes]:
        yield as_bytes(torch.cat(self._scales))
        self._scales = []

    def report(self) -> dict[str, Any]:
        return {
            "from": str(self.module.precision),
            "to": "nvfp4",
            "relative_error": self._error.relative,
        }


class QuantiseFP8(Step):
    """Any values to FP8 128x128 with power-of-two scales, rounded."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._scales: list[Tensor] = []
        self._error = Error()

    @property
    def outputs(self) -> list[Output]:
        rows, cols = self.module.shape
        blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
        return [Output("weight", "F8_E4M3", (rows, cols)), Output("scale", "F8_E8M0", blocks)]

    def prepare(self, source: Source) -> None:
        self._scales = []

    def stream(self, source: Source, output: Output) -> Iterator[Bytes]:
        if output.parameter == "scale":
            yield as_bytes(torch.cat(self._scales).to(torch.float8_e8m0fnu))
            self._scales = []
            return
        for begin, end in _strips(self.module.shape):
            strip = read_strip(source, self.module, begin, end)
            if not bool(torch.isfinite(strip).all()):
                info = next(iter(self.module.tensors.values()))
                raise CheckpointError(info.file, info.name, "holds a NaN or an infinity")
            part = quantize_fp8(strip)
            self._error.add(strip, plain(part))
            self._scales.append(part.scale)
            yield as_bytes(part.weight)

    def report(self) -> dict[str, Any]:
        return {
            "from": str(self.module.precision),
            "to": "fp8_block",
            "relative_error": self._error.relative,
        }


class Plainly(Step):
    """Dequantised or cast to a plain dtype."""

    def __init__(self, module: Module, dtype: str) -> None:
        super().__init__(module)
        self._dtype = dtype
        self._error = Error()

    @property
    def outputs(self) -> list[Output]:
        parameter = None if "" in self.module.tensors else "weight"
        return [Output(parameter, self._dtype, self.module.shape)]

    def prepare(self, source: Source) -> None:
        pass

    def stream(self, source: Source, output: Output) -> Iterator[Bytes]:
        for begin, end in _strips(self.module.shape):
            strip = read_strip(source, self.module, begin, end)
            rounded = strip.to(TORCH_DTYPES[self._dtype])
            self._error.add(strip, rounded.float())
            yield as_bytes(rounded)

    def report(self) -> dict[str, Any]:
        return {
            "from": str(self.module.precision),
            "to": self._dtype.lower(),
            "relative_error": self._error.relative,
        }


def nvfp4_step(module: Module, encoding: Encoding, input_scale: float | None) -> Step:
    """The step from whatever `module` is stored as to NVFP4 in `encoding`."""
    if module.precision is Precision.NVFP4:
        return Relabel(module, encoding, input_scale)
    if module.precision is Precision.MXFP4:
        return Rescale(module, encoding, input_scale)
    return Quantise(module, encoding, input_scale)
