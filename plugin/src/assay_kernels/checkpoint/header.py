"""Reading and validating safetensors headers, without touching tensor data.

The format: 8 bytes little-endian header length, a JSON object, then the data that the header's
offsets tile completely (https://github.com/huggingface/safetensors, "Format"). Everything that
does not fit raises CheckpointError; nothing else escapes, whatever the bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from assay_kernels.checkpoint.errors import CheckpointError, Fault

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


Problem = CheckpointError | None


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


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
        raise CheckpointError(file, None, f"must be JSON: {error}", Fault.HEADER) from None
    if not isinstance(value, dict):
        rule = f"must be a JSON object, is a {type(value).__name__}"
        raise CheckpointError(file, None, rule, Fault.HEADER)
    return value


def _parse_entry(file: str, name: str, entry: object) -> TensorInfo:
    def fail(rule: str) -> CheckpointError:
        return CheckpointError(file, name, rule, Fault.HEADER)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail("entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fail(f"unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise fail(f"shape must be a list of sizes, is {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise fail(f"data_offsets must be two sizes, is {offsets!r}")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise fail(f"{dtype} {shape} takes {expected} bytes, data_offsets give {end - begin}")
    return TensorInfo(file, name, dtype, tuple(shape), begin, end)


def _layout_fault(tensors: Iterable[TensorInfo], data_bytes: int, file: str) -> Problem:
    """The first place where the tensors do not tile the data section, or None."""
    position = 0
    for info in sorted(tensors, key=lambda info: (info.begin, info.end)):
        if info.begin < position:
            return CheckpointError(file, info.name, "overlaps the tensor before it", Fault.OVERLAP)
        if info.begin > position:
            rule = f"leaves a gap of {info.begin - position} bytes before it"
            return CheckpointError(file, info.name, rule, Fault.OVERLAP)
        position = info.end
        if position > data_bytes:
            rule = f"file is truncated: tensor ends at data byte {position}, file at {data_bytes}"
            return CheckpointError(file, info.name, rule, Fault.TRUNCATED)
    if position != data_bytes:
        rule = f"{data_bytes - position} bytes follow the last tensor"
        return CheckpointError(file, None, rule, Fault.OVERLAP)
    return None


def scan_header(text: bytes, data_bytes: int, file: str) -> tuple[dict[str, TensorInfo], Problem]:
    """The tensors that a header lists and how they fail to tile the data section, or None.

    text: the header's JSON; data_bytes: size of the file's data section
    Raises CheckpointError for a header that lists nothing intelligible.
    """
    header = parse_json_object(text, file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        rule = "__metadata__ must map strings to strings"
        raise CheckpointError(file, None, rule, Fault.HEADER)
    tensors = {name: _parse_entry(file, name, entry) for name, entry in header.items()}
    return tensors, _layout_fault(tensors.values(), data_bytes, file)


def parse_header(text: bytes, data_bytes: int, file: str) -> dict[str, TensorInfo]:
    """`scan_header` that raises whatever is wrong."""
    tensors, problem = scan_header(text, data_bytes, file)
    if problem is not None:
        raise problem
    return tensors


def _read_text(path: Path) -> tuple[bytes, int]:
    """(header JSON, bytes of the data section) of one safetensors file."""
    file = path.name

    def fail(rule: str, fault: Fault) -> CheckpointError:
        return CheckpointError(file, None, rule, fault)

    try:
        with path.open("rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if total < 8:
                raise fail(f"file is truncated: {total} bytes", Fault.TRUNCATED)
            if length > MAX_HEADER_BYTES:
                rule = f"header of {length} bytes, at most {MAX_HEADER_BYTES} allowed"
                raise fail(rule, Fault.HEADER)
            if length > total - 8:
                rule = f"file is truncated: header of {length} bytes, {total - 8} left"
                raise fail(rule, Fault.TRUNCATED)
            return stream.read(length), total - 8 - length
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}", Fault.UNREADABLE) from None


def data_start(path: Path) -> int:
    """Byte of the file at which the data section begins."""
    with path.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def scan_file(path: Path) -> tuple[dict[str, TensorInfo], Problem]:
    """`scan_header` of a file."""
    return scan_header(*_read_text(path), path.name)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, by the name in the file."""
    return parse_header(*_read_text(path), path.name)
