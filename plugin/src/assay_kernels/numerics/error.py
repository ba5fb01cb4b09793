"""The judge of a kernel's output (design contract 1).

A bf16 output may be at most 1.25 times as far from the reference as the reference rounded to bf16
is; an fp32 output at most 5e-5 away. Distances are relative L2 norms, taken over every token row of
every partition, and from 64 rows on over every output channel too, so that a wrong partition
cannot hide behind a larger neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BF16_FACTOR = 1.25
FP32_LIMIT = 5e-5
CHANNEL_ROWS = 64
"""Rows from which a channel holds enough samples to be judged by itself."""


@dataclass(frozen=True)
class Verdict:
    """The region of the output that comes nearest to its bound, or exceeds it most.

    row and partition name a token row within a partition of the fused matrix; for a channel
    region `row` is None and `channel` is the output channel. error and bound are relative L2.
    """

    passed: bool
    error: float
    bound: float
    partition: int
    row: int | None
    channel: int | None

    @property
    def ratio(self) -> float:
        """error / bound: at most 1 passes; inf where the output is not finite."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound else math.inf

    def __str__(self) -> str:
        where = f"row {self.row}" if self.channel is None else f"channel {self.channel}"
        verdict = "pass" if self.passed else "FAIL"
        return (
            f"{verdict}: partition {self.partition}, {where}: "
            f"error {self.error:.3g}, bound {self.bound:.3g}"
        )


def _relative_l2(actual: Tensor, reference: Tensor, dim: int) -> Tensor:
    distance = torch.linalg.vector_norm(actual - reference, dim=dim)
    norm = torch.linalg.vector_norm(reference, dim=dim)
    relative = torch.where(distance == 0, torch.zeros_like(distance), distance / norm)
    return torch.nan_to_num(relative, nan=math.inf, posinf=math.inf)


def _worst(error: Tensor, bound: Tensor) -> tuple[float, int]:
    """(error / bound, index) of the worst element."""
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound)
    index = int(torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).argmax())
    return float(ratio[index]), index


def _judge(
    actual: Tensor, reference: Tensor, partitions: Sequence[int] | None, limit: float | None
) -> Verdict:
    if actual.shape != reference.shape or actual.dim() != 2 or not actual.numel():
        raise ValueError(
            f"expected two non-empty [M, N] outputs, got {tuple(actual.shape)} "
            f"and {tuple(reference.shape)}"
        )
    sizes = list(partitions) if partitions is not None else [actual.shape[1]]
    if sum(sizes) != actual.shape[1]:
        raise ValueError(f"partitions {sizes} do not add up to {actual.shape[1]} channels")
    rounded = reference.to(torch.bfloat16).double()
    actual, reference = actual.double(), reference.double()

    candidates: list[tuple[float, Verdict]] = []
    start = 0
    for partition, size in enumerate(sizes):
        columns = slice(start, start + size)
        for dim in (1, 0) if actual.shape[0] >= CHANNEL_ROWS else (1,):
            error = _relative_l2(actual[:, columns], reference[:, columns], dim)
            if limit is None:
                bound = BF16_FACTOR * _relative_l2(rounded[:, columns], reference[:, columns], dim)
            else:
                bound = torch.full_like(error, limit)
            ratio, index = _worst(error, bound)
            verdict = Verdict(
                passed=bool(error[index] <= bound[index]) and math.isfinite(float(error[index])),
                error=float(error[index]),
                bound=float(bound[index]),
                partition=partition,
                row=index if dim == 1 else None,
                channel=start + index if dim == 0 else None,
            )
            candidates.append((ratio, verdict))
        start += size
    return max(candidates, key=lambda candidate: (not candidate[1].passed, candidate[0]))[1]


def judge_bf16(
    actual: Tensor, reference: Tensor, partitions: Sequence[int] | None = None
) -> Verdict:
    """Judge a bf16 output.

    actual: bf16 [M, N] from the kernel; reference: fp32 or fp64 [M, N] from the same inputs
    partitions: widths of the fused partitions along N, in order; None for one
    """
    return _judge(actual, reference, partitions, None)


def judge_fp32(
    actual: Tensor, reference: Tensor, partitions: Sequence[int] | None = None
) -> Verdict:
    """Judge an fp32 output against a reference accumulated in fp64; arguments as `judge_bf16`."""
    return _judge(actual, reference, partitions, FP32_LIMIT)
