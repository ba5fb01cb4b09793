"""Reading tensor bytes with plain reads, so that memory stays what the caller asked for.

A memory map would count every page it touched as the process's own, and one map per shard would
keep a whole checkpoint in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from assay_kernels.checkpoint.errors import CheckpointError, Fault
from assay_kernels.checkpoint.header import TensorInfo, data_start

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 4 * 2**20
"""Bytes of one streamed piece: large enough for the disk, small enough to stay in a CPU's cache."""

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class TensorReader:
    """Bytes of a checkpoint's tensors. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, tuple[int, int]] = {}
        self._lock = Lock()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor, _start in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, file: str) -> tuple[int, int]:
        """(descriptor, first byte of the data section)."""
        with self._lock:
            if file not in self._files:
                path = self._directory / file
                self._files[file] = os.open(path, os.O_RDONLY), data_start(path)
            return self._files[file]

    def fill(self, info: TensorInfo, begin: int, target: Bytes) -> None:
        """Read into `target` from byte `begin` of the tensor."""
        try:
            descriptor, start = self._open(info.file)
            position, rest = start + info.begin + begin, target.data
            while rest:
                count = os.preadv(descriptor, [rest], position)
                if not count:
                    raise CheckpointError(info.file, info.name, "is truncated", Fault.TRUNCATED)
                position, rest = position + count, rest[count:]
        except OSError as error:
            rule = f"cannot be read: {error.strerror}"
            raise CheckpointError(info.file, info.name, rule, Fault.UNREADABLE) from None

    def read(self, info: TensorInfo, begin: int = 0, end: int | None = None) -> Bytes:
        """Bytes [begin, end) of the tensor."""
        result = np.empty((info.nbytes if end is None else end) - begin, dtype=np.uint8)
        self.fill(info, begin, result)
        return result

    def chunks(self, info: TensorInfo) -> Iterator[Bytes]:
        """All bytes in order; a chunk is overwritten by the next one."""
        buffer = np.empty(min(CHUNK_BYTES, info.nbytes), dtype=np.uint8)
        for begin in range(0, info.nbytes, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, info.nbytes - begin)]
            self.fill(info, begin, part)
            yield part

    def tensor(self, info: TensorInfo) -> Tensor:
        """The whole tensor."""
        data = torch.from_numpy(self.read(info))
        return data.view(TORCH_DTYPES[info.dtype]).reshape(info.shape)

    def rows(self, info: TensorInfo, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a matrix."""
        width = info.nbytes // info.shape[0]
        data = torch.from_numpy(self.read(info, begin * width, end * width))
        return data.view(TORCH_DTYPES[info.dtype]).reshape(end - begin, *info.shape[1:])

    def scalar(self, info: TensorInfo) -> Tensor:
        """A one-element tensor as [] ."""
        return self.tensor(info).reshape(())
