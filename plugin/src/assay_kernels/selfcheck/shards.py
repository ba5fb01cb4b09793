"""Values of weights, computed from a shard's bytes once more.

This shares with loading what the checkpoint's headers say, and nothing of the way that the bytes
took since: no loader, no fused layer, no packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from assay_kernels.checkpoint import Checkpoint, Precision
from assay_kernels.numerics import BLOCK, FP8_BLOCK, decode_fp32


@dataclass(frozen=True)
class Part:
    """What a rank holds of one stored matrix: `rows` channels from `row` on, `columns` inputs from
    `column` on."""

    entry: str
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class Packed:
    """Rows of an NVFP4 matrix as the file has them."""

    codes: Tensor  # uint8 [n, columns/2]
    block_scale: Tensor  # float8_e4m3fn [n, columns/16]
    global_scale: Tensor  # fp32 [], a multiplier


class ShardReader:
    """Reads spans of rows; a file is mapped once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}

    def is_nvfp4(self, part: Part) -> bool:
        return self._checkpoint.precision(part.entry) == Precision.NVFP4

    def _rows(self, info: Any, spans: Sequence[tuple[int, int]]) -> Tensor:
        if info.file not in self._files:
            path = self._checkpoint.directory / info.file
            self._files[info.file] = safe_open(path, framework="pt")
        stored = self._files[info.file].get_slice(info.name)
        parts = [stored[start:stop] for start, stop in spans]
        return parts[0] if len(parts) == 1 else torch.cat([_bytes(p) for p in parts]).view(
            parts[0].dtype
        )  # fmt: skip

    def packed(self, part: Part, channels: Tensor | None = None) -> Packed:
        """NVFP4 rows of the part: all, or those of `channels` (int64, counted in the part)."""
        module = self._checkpoint.modules()[part.entry]
        spans = _spans(part, channels)
        codes, scale, scalar = (
            module.tensor(role) for role in ("codes", "block_scale", "global_scale")
        )
        first, last = part.column, part.column + part.columns
        return Packed(
            self._rows(codes, spans)[:, first // 2 : last // 2].contiguous(),
            self._rows(scale, spans)[:, first // BLOCK : last // BLOCK].contiguous(),
            self._checkpoint.global_scale(module, self._checkpoint.raw(scalar)),  # type: ignore[arg-type]
        )

    def values(self, part: Part, channels: Tensor | None = None) -> Tensor:
        """fp32 [n, columns] of the same rows, whatever stores them."""
        module = self._checkpoint.modules()[part.entry]
        if module.precision == Precision.NVFP4:
            packed = self.packed(part, channels)
            return decode_fp32(packed.codes, packed.block_scale) * packed.global_scale
        spans = _spans(part, channels)
        columns = slice(part.column, part.column + part.columns)
        if module.encoding is None:
            return self._rows(next(iter(module.tensors.values())), spans)[:, columns].float()
        weight, scale = module.tensor("weight"), module.tensor("scale")
        assert weight is not None
        assert scale is not None
        rows = torch.cat([torch.arange(start, stop) for start, stop in spans])
        inputs = torch.arange(columns.start, columns.stop)
        blocks = self._checkpoint.raw(scale).float()
        scales = blocks[rows // FP8_BLOCK][:, inputs // FP8_BLOCK]
        return self._rows(weight, spans)[:, columns].float() * scales


def _bytes(tensor: Tensor) -> Tensor:
    """For torch.cat, which knows fewer types."""
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def _spans(part: Part, channels: Tensor | None) -> list[tuple[int, int]]:
    """Runs of neighbouring stored rows, as [start, stop)."""
    if channels is None:
        return [(part.row, part.row + part.rows)]
    spans: list[tuple[int, int]] = []
    for channel in (channels + part.row).tolist():
        if spans and spans[-1][1] == channel:
            spans[-1] = (spans[-1][0], channel + 1)
        else:
            spans.append((channel, channel + 1))
    return spans
