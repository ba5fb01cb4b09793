"""Writing a checkpoint so that a kill at any moment leaves nothing that looks like one.

Every file is written under a temporary name that no loader matches, synced, then renamed. Shards
come first and config.json last, so a directory with a config.json is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from assay_kernels.checkpoint.config import CONFIG_FILE
from assay_kernels.checkpoint.reader import INDEX_FILE

SHARD_BYTES = 4 * 2**30
"""Tensor bytes of a shard before the next one starts."""

_SINGLE_FILE = "model.safetensors"

_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary stream whose content appears at `path` on success, and nowhere otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object, atomically."""
    with atomic_file(path) as stream:
        stream.write(json.dumps(value, indent=2).encode() + b"\n")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, atomically. Wide dtypes come first, which keeps all data aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, tensor in ordered:
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            stream.write(data.numpy().data)


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += nbytes
    yield shard


def _write_sharded(directory: Path, shards: Iterable[dict[str, Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}.safetensors"
        write_safetensors(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / INDEX_FILE, index)


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    *,
    other_files: Iterable[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint into an empty or new directory.

    tensors: (stored name, tensor), consumed one shard at a time
    config: the whole config.json
    other_files: copied beside it under their own names (tokenizer and the like)

    Raises FileExistsError if the directory already holds a config or a shard.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if (path / CONFIG_FILE).exists() or any(path.glob("*.safetensors")):
        raise FileExistsError(f"{path} already holds a checkpoint or a part of one")
    shards = _shards(tensors, shard_bytes)
    first, second = next(shards), next(shards, None)
    if second is None:
        write_safetensors(path / _SINGLE_FILE, first)
    else:
        _write_sharded(path, chain([first, second], shards))
    for source in other_files:
        with atomic_file(path / source.name) as stream, source.open("rb") as original:
            while chunk := original.read(2**20):
                stream.write(chunk)
    write_json(path / CONFIG_FILE, config)
