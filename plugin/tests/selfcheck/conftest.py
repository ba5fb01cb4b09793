"""Layers of the miniature as the self-check sees them, served by real kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay_kernels import selfcheck
from assay_kernels.checkpoint import Checkpoint, open_checkpoint
from assay_kernels.kernels.interface import KernelSet
from assay_kernels.kernels.tiled import ReferenceKernels
from assay_kernels.selfcheck import ExpertsSubject, LinearSubject, Part, ShardReader, Subject
from assay_kernels.settings import OnMismatch

CPU = torch.device("cpu")
MINIATURE = Path(__file__).resolve().parents[3] / "models" / "miniature" / "checkpoint"
LIMIT = 10.0
EXPERTS = 64


@dataclass
class World:
    checkpoint: Checkpoint
    reader: ShardReader

    def linear(
        self, entries: Sequence[str], kernels: KernelSet, op: Any = "dense", **extra: Any
    ) -> LinearSubject:
        parts = []
        for entry in entries:
            rows, columns = self.checkpoint.modules()[entry].shape
            parts.append(Part(entry, 0, rows, 0, columns))
        return self._served(
            LinearSubject(
                name=f"model.{entries[0]}", kind="test", method=SimpleNamespace(),
                layer=SimpleNamespace(), device=CPU, op=op, parts=tuple(parts), **extra,
            ),
            kernels,
        )  # fmt: skip

    def experts(self, layer: int, kernels: KernelSet, **extra: Any) -> ExpertsSubject:
        def part(expert: int, matrix: str) -> Part:
            entry = f"layers.{layer}.ffn.experts.{expert}.{matrix}"
            rows, columns = self.checkpoint.modules()[entry].shape
            return Part(entry, 0, rows, 0, columns)

        held = extra.pop("global_ids", tuple(range(EXPERTS)))
        return self._served(
            ExpertsSubject(
                name=f"model.layers.{layer}.ffn.experts", kind="routed", method=SimpleNamespace(),
                layer=SimpleNamespace(), device=CPU,
                experts=tuple((part(e, "w1"), part(e, "w3"), part(e, "w2")) for e in held),
                global_ids=held, num_global=EXPERTS, expert_map=extra.pop("expert_map", None),
                top_k=6, limit=LIMIT, **extra,
            ),
            kernels,
        )  # fmt: skip

    def _served(self, subject: Any, kernels: KernelSet) -> Any:
        subject.rebuild(kernels, self.reader)
        return subject

    def layer(self, n: int, kernels: KernelSet) -> list[Subject]:
        """Every matrix of one of the miniature's layers that has an indexer."""
        at = f"layers.{n}"
        return [
            self.linear([f"{at}.attn.wq_a", f"{at}.attn.wkv"], kernels),
            self.linear([f"{at}.attn.wq_b"], kernels),
            self.linear([f"{at}.attn.wo_a"], kernels, "wo_a", groups=8),
            self.linear([f"{at}.attn.wo_b"], kernels),
            self.linear(
                [f"{at}.attn.compressor.wkv", f"{at}.attn.compressor.wgate"],
                kernels,
                "compressor",
            ),
            self.linear([f"{at}.attn.indexer.wq_b"], kernels),
            self.linear(
                [f"{at}.ffn.shared_experts.w1", f"{at}.ffn.shared_experts.w3"],
                kernels,
                "dense_swiglu",
                limit=LIMIT,
            ),
            self.linear([f"{at}.ffn.shared_experts.w2"], kernels),
            self.experts(n, kernels),
        ]

    def check(
        self,
        subjects: Sequence[Subject],
        policy: OnMismatch = "fallback",
        fallbacks: Sequence[KernelSet] | None = None,
        seconds: float = 60.0,
    ) -> selfcheck.Report:
        return selfcheck.run(
            subjects,
            self.reader,
            fallbacks=[ReferenceKernels()] if fallbacks is None else fallbacks,
            policy=policy,
            deadline=selfcheck.Deadline(seconds),
            arch="cpu",
        )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on two, and far slower beside another program."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def world() -> World:
    checkpoint = open_checkpoint(MINIATURE)
    return World(checkpoint, ShardReader(checkpoint))
