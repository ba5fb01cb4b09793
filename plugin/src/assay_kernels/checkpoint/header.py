"""Reading and validating safetensors headers, without touching tensor data.

The format: 8 bytes little-endian header length, a JSON object, then the data that the header's
offsets tile completely (https://github.com/huggingface/safetensors, "Format"). Everything that
does not fit raises CheckpointError; nothing else escapes, whatever the bytes.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from assay_kernels.checkpoint.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library itself."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a header states it. begin and end are byte offsets into the data section."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return result


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def parse_json_object(text: bytes, file: str) -> dict[str, Any]:
    """A JSON object with unique keys, or CheckpointError."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, None, f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, None, f"must be a JSON object, is a {type(value).__name__}")
    return value


def _parse_entry(file: str, name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(file, name, "entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(file, name, f"unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise CheckpointError(file, name, f"shape must be a list of sizes, is {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(file, name, f"data_offsets must be two sizes, is {offsets!r}")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            file, name, f"{dtype} {shape} takes {expected} bytes, data_offsets give {end - begin}"
        )
    return TensorInfo(file, name, dtype, tuple(shape), begin, end)


def parse_header(text: bytes, data_bytes: int, file: str) -> dict[str, TensorInfo]:
    """The header's JSON `text` of a file whose data section has `data_bytes` bytes."""
    header = parse_json_object(text, file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(file, None, "__metadata__ must map strings to strings")
    tensors = {name: _parse_entry(file, name, entry) for name, entry in header.items()}
    position = 0
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin < position:
            raise CheckpointError(file, info.name, "overlaps the tensor before it")
        if info.begin > position:
            raise CheckpointError(
                file, info.name, f"leaves a gap of {info.begin - position} bytes before it"
            )
        position = info.end
        if position > data_bytes:
            raise CheckpointError(
                file,
                info.name,
                f"file is truncated: tensor ends at data byte {position}, file at {data_bytes}",
            )
    if position != data_bytes:
        raise CheckpointError(file, None, f"{data_bytes - position} bytes follow the last tensor")
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, by the name in the file."""
    file = path.name
    try:
        with path.open("rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if total < 8:
                raise CheckpointError(file, None, f"file is truncated: {total} bytes")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    file, None, f"header of {length} bytes, at most {MAX_HEADER_BYTES} allowed"
                )
            if length > total - 8:
                raise CheckpointError(
                    file, None, f"file is truncated: header of {length} bytes, {total - 8} left"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(file, None, f"cannot be read: {error.strerror}") from None
    return parse_header(text, total - 8 - length, file)
