"""A copy of a checkpoint that must never be served: sound headers, wrong values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Fault = Literal["rolled", "nan"]
NAN = 0x7F
"""E4M3's NaN (OCP FP8 specification, 3.2)."""


def spoil(source: Path, target: Path, fault: Fault) -> int:
    """Copy `source` to `target`; how many tensors are other than they were.

    rolled: the block scales of every expert are half a matrix off, as when a loader takes them from
    another expert: fluent nonsense. nan: the first of them is no number.
    """
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    changed = 0
    for file in sorted(source.iterdir()):
        copy = target / file.name
        shutil.copyfile(file, copy)
        copy.chmod(0o644)
        if file.suffix == ".safetensors":
            data = bytearray(copy.read_bytes())
            for begin, end in block_scales(data):
                values = data[begin:end]
                half = len(values) // 2
                data[begin:end] = (
                    values[half:] + values[:half]
                    if fault == "rolled"
                    else bytes([NAN]) + values[1:]
                )
                changed += 1
            copy.write_bytes(data)
    return changed


def block_scales(data: bytearray) -> Iterator[tuple[int, int]]:
    """Where the experts' E4M3 scales lie in a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    for name, about in json.loads(bytes(data[8 : 8 + size])).items():
        if ".mlp." in name and name.endswith(".weight_scale"):
            assert about["dtype"] == "F8_E4M3", (name, about)
            begin, end = about["data_offsets"]
            yield 8 + size + begin, 8 + size + end
