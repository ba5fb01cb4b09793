"""The manifest that `convert` leaves beside a checkpoint.

It holds a checksum of every file, what became of every tensor, and for dialect C the global scales
that the stored reciprocals were made from. Those originals could have stood in the shards' own
metadata; they stand here because a shard's header is written, and hashed, before its scales are
known. A reader takes an original only if its reciprocal is, to the bit, the one that is stored, so
a manifest that strayed from another checkpoint can do no harm.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay_kernels.checkpoint.config import read_json
from assay_kernels.checkpoint.errors import CheckpointError, Fault

MANIFEST_FILE = "assay-manifest.json"
MANIFEST_VERSION = 1

_HASH_CHUNK = 4 * 2**20


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, None where it has none; CheckpointError if it is broken."""
    if not (directory / MANIFEST_FILE).is_file():
        return None
    manifest = read_json(directory / MANIFEST_FILE)
    files = manifest.get("files")
    fits = isinstance(files, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    )
    if manifest.get("version") != MANIFEST_VERSION or not fits:
        rule = f"must be a manifest of version {MANIFEST_VERSION} with the checksums of its files"
        raise CheckpointError(MANIFEST_FILE, None, rule, Fault.HEADER)
    return manifest


def file_sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file; `advance` is told of every piece read, in bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def scale_bits(scale: Tensor) -> str:
    """An fp32 scalar to the bit, as hexadecimal."""
    return struct.pack(">f", float(scale)).hex()


def original_scale(
    manifest: Mapping[str, Any], entry: str, role: str, stored: Tensor
) -> Tensor | None:
    """The fp32 multiplier whose reciprocal is `stored`, if the manifest has it.

    role: "global_scale" or "input_scale"
    """
    scales = manifest.get("global_scales")
    found = scales.get(entry) if isinstance(scales, dict) else None
    text = found.get(role) if isinstance(found, dict) else None
    try:
        value = struct.unpack(">f", bytes.fromhex(text or ""))[0]
    except (struct.error, TypeError, ValueError):
        return None
    original = torch.tensor(value, dtype=torch.float32)
    return original if bool(original.reciprocal() == stored.reshape(())) else None
