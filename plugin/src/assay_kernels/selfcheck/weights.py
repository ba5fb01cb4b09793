"""64 channels of every matrix through the kernel, against the shard's bytes read again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.numerics import Verdict, judge_bf16, judge_fp32
from assay_kernels.selfcheck.calls import call
from assay_kernels.selfcheck.deadline import Deadline
from assay_kernels.selfcheck.inputs import (
    activation,
    as_multiplied,
    generator,
    power_of_two,
    sampled_channels,
)
from assay_kernels.selfcheck.kernels import accept
from assay_kernels.selfcheck.shards import Part, ShardReader
from assay_kernels.selfcheck.subject import ExpertsSubject, LinearSubject, Subject

TOKENS = 4
TOKENS_AN_EXPERT = 2


def check(subject: Subject, reader: ShardReader, deadline: Deadline) -> float:
    """The largest error over its bound. Raises MismatchError when one exceeds it."""
    if isinstance(subject, LinearSubject):
        return _linear(subject, reader, deadline)
    assert isinstance(subject, ExpertsSubject)
    return _experts(subject, reader, deadline)


def _linear(subject: LinearSubject, reader: ShardReader, deadline: Deadline) -> float:
    wide = torch.float64 if subject.op == "compressor" else torch.float32
    paired = subject.op == "dense_swiglu"
    # Gate and up meet in one output channel: of both, the same ones.
    names = [subject.parts[0].entry if paired else part.entry for part in subject.parts]
    chosen = [sampled_channels(n, p.rows) for n, p in zip(names, subject.parts, strict=True)]
    weights = [
        reader.values(part, channels).to(subject.device, wide)
        for part, channels in zip(subject.parts, chosen, strict=True)
    ]
    shape = (subject.groups, subject.k) if subject.op == "wo_a" else (subject.k,)
    x = activation(f"{subject.name} weights", TOKENS, *shape).to(subject.device)
    if paired:
        rms = torch.cat(weights) @ x.to(wide).T
        x = x * power_of_two(subject.limit / 4 / float(rms.square().mean().sqrt()))
    with deadline.step(f"{subject.name}: {subject.op} by {subject.kernels.name}"):
        actual = call(lambda: subject.run(x))
    inputs = as_multiplied(subject.kernels, x, subject.input_scale).to(wide)
    if subject.op == "wo_a":
        group = chosen[0] // (subject.parts[0].rows // subject.groups)
        expected = torch.einsum("mck,ck->mc", inputs[:, group], weights[0])
    elif paired:
        gate, up = (inputs @ weight.T for weight in weights)
        expected = reference.swiglu(gate, up, subject.limit)
    else:
        expected = torch.cat([inputs @ weight.T for weight in weights], dim=1)
    if paired:
        columns, sizes = chosen[0], [len(chosen[0])]
    else:
        offsets = [sum(p.rows for p in subject.parts[:i]) for i in range(len(subject.parts))]
        columns = torch.cat([c + o for c, o in zip(chosen, offsets, strict=True)])
        sizes = [len(c) for c in chosen]
    judge = judge_fp32 if subject.op == "compressor" else judge_bf16
    sampled = actual[:, columns.to(actual.device)]
    return accept(judge(sampled, expected, sizes), " | ".join(p.entry for p in subject.parts))


def _experts(subject: ExpertsSubject, reader: ShardReader, deadline: Deadline) -> float:
    count = len(subject.experts)
    inner = sampled_channels(f"{subject.name} width", subject.width)
    outer = sampled_channels(f"{subject.name} hidden", subject.hidden)
    gate, up, down = (
        _sampled(reader, [parts[i] for parts in subject.experts], channels, subject.device)
        for i, channels in ((0, inner), (1, inner), (2, outer))
    )
    tokens = count * TOKENS_AN_EXPERT
    x = activation(f"{subject.name} weights x", tokens, subject.hidden).to(subject.device)
    h = activation(f"{subject.name} weights h", tokens, subject.width).to(subject.device)
    by_expert = x.float().view(count, TOKENS_AN_EXPERT, -1)
    rms = float(torch.bmm(by_expert, gate.transpose(1, 2)).square().mean().sqrt())
    x = x * power_of_two(subject.limit / 4 / rms)
    # One expert a token, and tokens in expert order: rows of either layer are tokens.
    ids = torch.tensor(subject.global_ids).repeat_interleave(TOKENS_AN_EXPERT)
    ids = ids.unsqueeze(1).int().to(subject.device)
    router = 0.5 + torch.rand(tokens, 1, generator=generator(f"{subject.name} weights router"))
    router = router.to(subject.device)
    with deadline.step(f"{subject.name}: weights of routed experts by {subject.kernels.name}"):
        hidden = call(lambda: subject.l1(x, subject.route(ids, router)))
        out = call(lambda: subject.l2(h, subject.route(ids, router)))
    inputs = as_multiplied(subject.kernels, x, subject.input_scale13)
    inputs = inputs.view(count, TOKENS_AN_EXPERT, -1)
    expected = reference.swiglu(
        torch.bmm(inputs, gate.transpose(1, 2)), torch.bmm(inputs, up.transpose(1, 2)),
        subject.limit,
    ).flatten(0, 1)  # fmt: skip
    first = _accept_experts(hidden[:, inner.to(hidden.device)], expected, subject, "w1 | w3")
    inputs = as_multiplied(subject.kernels, h, subject.input_scale2)
    inputs = inputs.view(count, TOKENS_AN_EXPERT, -1)
    expected = torch.bmm(inputs, down.transpose(1, 2)).flatten(0, 1) * router
    second = _accept_experts(out[:, outer.to(out.device)], expected, subject, "w2")
    return max(first, second)


def _accept_experts(
    actual: Tensor, expected: Tensor, subject: ExpertsSubject, matrix: str
) -> float:
    # A channel over several experts says nothing.
    verdict = _by_row(actual, expected)
    expert = (verdict.row or 0) // TOKENS_AN_EXPERT
    where = subject.experts[expert][2].entry.rpartition(".")[0]
    return accept(verdict, f"{where}, {matrix}")


def _by_row(actual: Tensor, expected: Tensor) -> Verdict:
    """Judged in pieces of fewer than 64 rows; the row counted through all of them."""
    parts = [judge_bf16(a, e) for a, e in zip(actual.split(63), expected.split(63), strict=True)]
    index = max(range(len(parts)), key=lambda i: (not parts[i].passed, parts[i].ratio))
    worst = parts[index]
    return replace(worst, row=(worst.row or 0) + 63 * index)


def _sampled(
    reader: ShardReader, parts: list[Part], channels: Tensor, device: torch.device
) -> Tensor:
    """fp32 [E, 64, K]."""
    return torch.stack([reader.values(part, channels) for part in parts]).to(device)
