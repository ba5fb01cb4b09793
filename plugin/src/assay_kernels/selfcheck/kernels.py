"""Whole outputs of one layer of each kind and shape, at few and many rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.kernels.interface import KernelSet
from assay_kernels.numerics import Verdict, judge_bf16, judge_fp32
from assay_kernels.selfcheck.calls import MismatchError, call
from assay_kernels.selfcheck.deadline import Deadline
from assay_kernels.selfcheck.inputs import activation, as_multiplied, generator, power_of_two
from assay_kernels.selfcheck.shards import Part, ShardReader
from assay_kernels.selfcheck.subject import ExpertsSubject, LinearSubject, Subject

ROWS = (129, 64, 7, 1)
"""A tile and one, a full tile, few, one. The largest first: what a smaller call reads beyond its
own rows, if it does, is then another call's."""


def check(subject: Subject, reader: ShardReader, deadline: Deadline) -> float:
    """The largest error over its bound. Raises MismatchError when one exceeds it."""
    if isinstance(subject, LinearSubject):
        return _linear(subject, reader, deadline)
    assert isinstance(subject, ExpertsSubject)
    return _experts(subject, reader, deadline)


def accept(verdict: Verdict, what: str) -> float:
    """The verdict's ratio; raises MismatchError unless it passed."""
    if not verdict.passed:
        raise MismatchError(f"{what}: {verdict}")
    return verdict.ratio


def _linear(subject: LinearSubject, reader: ShardReader, deadline: Deadline) -> float:
    wide = torch.float64 if subject.op == "compressor" else torch.float32
    weight = torch.cat([reader.values(part) for part in subject.parts])
    weight = weight.to(subject.device, wide)
    sizes = [part.rows for part in subject.parts]
    shape = (subject.groups, subject.k) if subject.op == "wo_a" else (subject.k,)
    gain = 1.0
    if subject.op == "dense_swiglu":
        gain = _gain(weight, subject.limit)
    worst = 0.0
    for m in ROWS:
        what = f"{subject.op} at {m} rows"
        x = (activation(f"{subject.name} {m}", m, *shape) * gain).to(subject.device)
        with deadline.step(f"{subject.name}: {what} by {subject.kernels.name}"):
            actual = call(lambda x=x: subject.run(x))  # type: ignore[misc]
        inputs = as_multiplied(subject.kernels, x, subject.input_scale).to(wide)
        if subject.op == "wo_a":
            per_group = weight.view(subject.groups, -1, subject.k)
            expected = torch.einsum("mgk,grk->mgr", inputs, per_group).flatten(1)
            partitions = [per_group.shape[1]] * subject.groups
        else:
            expected, partitions = inputs @ weight.T, sizes
        if subject.op == "dense_swiglu":
            gate, up = expected.chunk(2, dim=-1)
            expected = reference.swiglu(gate, up, subject.limit)
            partitions = [expected.shape[1]]
        judge = judge_fp32 if subject.op == "compressor" else judge_bf16
        worst = max(worst, accept(judge(actual, expected, partitions), what))
    return worst


def _gain(gate_up: Tensor, limit: float) -> float:
    """So large an input that gate and up, however different their weights, both meet the clamp."""
    probe = activation("gain", 8, gate_up.shape[1]).to(gate_up)
    halves = (probe @ gate_up.T).chunk(2, dim=-1)
    return power_of_two(limit / float(min(half.square().mean().sqrt() for half in halves)))


@dataclass
class _Batch:
    """One row count's input, output and, as experts are read, its reference."""

    m: int
    x: Tensor  # [M, H] bf16
    h: Tensor  # [R, I] bf16, what the second layer alone is fed
    ids: Tensor  # int32 [M, top_k], global
    router: Tensor  # fp32 [M, top_k]
    rows: Any
    ends: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.ends[-1]


def _choices(subject: ExpertsSubject, m: int) -> Tensor:
    """int32 [M, top_k] global expert ids, different in a row; from seven rows on one slot is
    unused, and one token's are all neighbours."""
    source = generator(f"{subject.name} routing {m}")
    ids = torch.stack(
        [torch.randperm(subject.num_global, generator=source)[: subject.top_k] for _ in range(m)]
    )
    here = subject.global_ids
    # At least one expert of this rank in every row, wherever the others live.
    ids[:, 0] = torch.tensor([here[i % len(here)] for i in range(m)])
    ids[:, 1:] = torch.where(ids[:, 1:] == ids[:, :1], -1, ids[:, 1:])
    if m >= 7:
        ids[3, -1] = -1
    return ids.int()


def _batches(subject: ExpertsSubject, gain: float) -> list[_Batch]:
    out = []
    for m in ROWS:
        name = f"{subject.name} {m}"
        ids = _choices(subject, m).to(subject.device)
        router = 0.25 + torch.rand(m, subject.top_k, generator=generator(f"{name} router"))
        router = router.to(subject.device)
        slots = m * subject.top_k
        batch = _Batch(
            m,
            (activation(f"{name} x", m, subject.hidden) * gain).to(subject.device),
            activation(f"{name} h", slots, subject.width).to(subject.device),
            ids,
            router,
            subject.route(ids, router),
        )
        batch.ends = batch.rows.ends.tolist()
        # On a CPU there is no row without an expert.
        batch.h = batch.h[: len(batch.rows.tokens)]
        out.append(batch)
    return out


def _experts(subject: ExpertsSubject, reader: ShardReader, deadline: Deadline) -> float:
    w1, w3, _ = subject.experts[0]
    gain = _gain(torch.cat([reader.values(w1), reader.values(w3)]), subject.limit)
    batches = _batches(subject, gain)
    expected = [_Expected(subject, batch) for batch in batches]
    for expert, parts in enumerate(subject.experts):
        if any(e.needs(expert) for e in expected):
            gate, up, down = (_on(reader, part, subject.device) for part in parts)
            for e in expected:
                e.add(expert, gate, up, down)
    # A composite of its own has a path of its own.
    composite = type(subject.kernels).routed is not KernelSet.routed
    worst = 0.0
    for batch, e in zip(batches, expected, strict=True):
        what = f"{subject.name}: routed experts at {batch.m} rows by {subject.kernels.name}"
        with deadline.step(what):
            h = call(
                lambda b=batch: subject.l1(b.x, subject.route(b.ids, b.router)),  # type: ignore[misc]
                lambda out, b=batch: out[: b.count],  # type: ignore[misc]
            )
            out = subject.l2(batch.h, batch.rows)
            whole = subject.both(batch.x, batch.rows) if composite else None
            if whole is not None and whole.is_cuda:
                torch.cuda.synchronize()
        worst = max(worst, accept(judge_bf16(h, e.l1), f"grouped_l1 at {batch.m} rows"))
        worst = max(
            worst, accept(judge_bf16(out, e.by_token(False)), f"grouped_l2 at {batch.m} rows")
        )
        if whole is not None:
            worst = max(
                worst, accept(judge_bf16(whole, e.by_token(True)), f"routed at {batch.m} rows")
            )
    return worst


def _on(reader: ShardReader, part: Part, device: torch.device) -> Tensor:
    return reader.values(part).to(device)


class _Expected:
    """The reference of one batch, gathered expert by expert."""

    def __init__(self, subject: ExpertsSubject, batch: _Batch) -> None:
        self._subject, self._batch = subject, batch
        kernels = subject.kernels
        self._tokens = batch.rows.tokens[: batch.count].long()
        self._router = batch.rows.weights[: batch.count].unsqueeze(-1)
        # Quantised once a token, then gathered.
        self._x = as_multiplied(kernels, batch.x, subject.input_scale13)[self._tokens]
        self._h = as_multiplied(kernels, batch.h[: batch.count], subject.input_scale2)
        self.l1 = self._x.new_empty(batch.count, subject.width)
        self._l2 = self._x.new_empty(batch.count, subject.hidden)  # by row, before the sum
        self._both = torch.empty_like(self._l2)

    def _own(self, expert: int) -> slice:
        ends = self._batch.ends
        return slice(ends[expert - 1] if expert else 0, ends[expert])

    def needs(self, expert: int) -> bool:
        own = self._own(expert)
        return bool(own.stop > own.start)

    def add(self, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        own, subject = self._own(expert), self._subject
        if own.stop == own.start:
            return
        x = self._x[own]
        hidden = reference.swiglu(x @ gate.T, x @ up.T, subject.limit)
        self.l1[own] = hidden
        rounded = as_multiplied(subject.kernels, hidden.to(torch.bfloat16), subject.input_scale2)
        self._l2[own] = self._h[own] @ down.T
        self._both[own] = rounded @ down.T

    def by_token(self, both: bool) -> Tensor:
        """fp32 [M, H]: the rows of the second layer (of both layers) by the router's weights."""
        out = (self._both if both else self._l2) * self._router
        total = torch.zeros(self._batch.m, out.shape[1], device=out.device)
        return total.index_add_(0, self._tokens, out)
