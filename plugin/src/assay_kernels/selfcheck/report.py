"""What the self-check found: a table for the log, JSON for a file, numbers for `/metrics`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay_kernels.checkpoint.writer import write_json


@dataclass(frozen=True)
class Row:
    """Layers of one kind, shape and kernel.

    kernel, weights: the largest error found, over its bound; both at most 1 once serving begins
    """

    kind: str
    shape: str
    impl: str
    layers: int
    kernel: float
    weights: float

    @property
    def ratio(self) -> float:
        return max(self.kernel, self.weights)


@dataclass(frozen=True)
class Report:
    """Of one rank. matrices: how many were read again; replaced: one sentence a failure."""

    arch: str
    seconds: float
    matrices: int
    rows: tuple[Row, ...]
    replaced: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """One header line, one aligned line a row, one line for every failure."""
        layers = sum(row.layers for row in self.rows)
        lines = [
            f"self-check on {self.arch}: {layers} layers, {self.matrices} matrices,"
            f" {self.seconds:.1f} s; largest error over its bound (at most 1 passes):"
        ]
        head = ("kind", "shape", "by", "layers", "kernel", "weights")
        cells = [head] + [
            (r.kind, r.shape, r.impl, str(r.layers), f"{r.kernel:.2f}", f"{r.weights:.2f}")
            for r in self.rows
        ]
        width = [max(len(line[i]) for line in cells) for i in range(len(head))]
        for line in cells:
            words = [f"{w:<{n}}" for w, n in zip(line[:3], width[:3], strict=True)]
            numbers = [f"{w:>{n}}" for w, n in zip(line[3:], width[3:], strict=True)]
            lines.append("  " + "  ".join(words + numbers))
        return "\n".join(lines + [f"  FAILED {sentence}" for sentence in self.replaced])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_json())
