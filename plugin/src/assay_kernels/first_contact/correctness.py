"""Every kernel at every boundary of its tiles, judged by design contract 1."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.kernels.interface import Groups, KernelSet, PackedWeight
from assay_kernels.numerics import (
    QuantizedActivation,
    judge_bf16,
    judge_fp32,
    quantize_activation,
    swizzle_128x4,
    unpack,
    unswizzle_128x4,
)

LIMIT = 10.0
BOUNDARIES = (1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
QUICK = (1, 17, 129)
SHAPES = ((2048, 7168), (768, 7168), (7168, 384), (1536, 4096), (256, 256))
QUICK_SHAPES = ((256, 256),)
WITHIN_STEPS = 0.001
"""Share of codes that may differ by a step behind a fused fp32 epilogue (design contract 1)."""
REQUANTISED = 0.05
"""Global scale of SwiGLU's output: at most 100 with the clamp, which is then within range."""


@dataclass(frozen=True)
class Subject:
    """What is judged: kernels, where they run, and whether they quantise their inputs."""

    kernels: KernelSet
    device: str
    w4a4: bool


def weight(n: int, k: int, device: str, scale: float | None, experts: int = 0) -> PackedWeight:
    """Random codes, scales over E4M3's normal range, two partitions with scales of their own."""
    lead = (experts,) if experts else ()
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device=device)
    bits = torch.randint(0x20, 0x50, (*lead, n, k // 16), dtype=torch.uint8, device=device)
    alpha = torch.full((*lead, n), 1e-3, device=device)
    alpha[..., n // 2 :] *= 30
    static = None if scale is None else torch.tensor(scale, device=device)
    return PackedWeight(codes, bits.view(torch.float8_e4m3fn), alpha, static)


def _copied(w: PackedWeight) -> PackedWeight:
    """Some kernels prepare in place."""
    return PackedWeight(w.codes.clone(), w.block_scale.clone(), w.alpha.clone(), w.input_scale)


def _input(subject: Subject, x: Tensor, w: PackedWeight) -> Tensor | QuantizedActivation:
    return quantize_activation(x, w.input_scale) if subject.w4a4 else x


def _alpha(subject: Subject, w: PackedWeight) -> Tensor:
    return w.alpha * w.input_scale if subject.w4a4 and w.input_scale is not None else w.alpha


def _tokens(m: int, k: int, device: str) -> Tensor:
    x = torch.randn(m, k, device=device)
    x[:, k // 3] *= 100
    return x.to(torch.bfloat16)


Case = tuple[str, dict[str, Any], Callable[[], str | None]]
"""kernel, where, and a check that returns what is wrong, or None."""


def _verdict(verdict: Any) -> str | None:
    return None if verdict.passed else str(verdict)


def _dense(subject: Subject, n: int, k: int, m: int, scale: float | None) -> Iterator[Case]:
    w = weight(n, k, subject.device, scale)
    x = _tokens(m, k, subject.device)
    where = {"n": n, "k": k, "m": m, "input_scale": scale}

    def expected() -> Tensor:
        return reference.dense(
            _input(subject, x, w), w.codes, w.block_scale, _alpha(subject, w), dtype=torch.float64
        )

    def bf16() -> str | None:
        out = subject.kernels.dense(x, subject.kernels.prepare(_copied(w)))
        return _verdict(judge_bf16(out, expected(), [n // 2, n - n // 2]))

    def fp32() -> str | None:
        out = subject.kernels.dense(x, subject.kernels.prepare(_copied(w)), torch.float32)
        return _verdict(judge_fp32(out, expected(), [n // 2, n - n // 2]))

    def swiglu() -> str | None:
        operand = subject.kernels.prepare_gate_up(_copied(w))
        out = subject.kernels.dense_swiglu(x, operand, LIMIT)
        gate, up = expected().chunk(2, dim=-1)
        return _verdict(judge_bf16(out, reference.swiglu(gate, up, LIMIT)))

    yield "dense", where, bf16
    yield "compressor", where, fp32
    yield "dense_swiglu", where, swiglu


def _wo_a(subject: Subject, groups: int, m: int, scale: float | None) -> Iterator[Case]:
    n, k = 1024, 512
    w = weight(n, k, subject.device, scale, groups)
    x = _tokens(m, groups * k, subject.device).view(m, groups, k)

    def check() -> str | None:
        out = subject.kernels.wo_a(x, subject.kernels.prepare(_copied(w)))
        exact = reference.wo_a(
            _input(subject, x, w),
            w.codes.flatten(0, 1),
            w.block_scale.flatten(0, 1),
            _alpha(subject, w).flatten(),
            dtype=torch.float64,
        )
        return _verdict(judge_bf16(out.reshape(m, -1), exact.reshape(m, -1), [n] * groups))

    yield "wo_a", {"groups": groups, "m": m, "input_scale": scale}, check


def _routed(subject: Subject, m: int, scale: float | None, routing: str) -> Iterator[Case]:
    experts, slots, hidden, inner = 8, 3, 512, 256
    w13 = weight(2 * inner, hidden, subject.device, scale, experts)
    w2 = weight(hidden, inner, subject.device, scale, experts)
    scores = torch.rand(m, experts)
    scores[:, 0] += {"spread": 0.0, "crowded": 9.0, "elsewhere": 0.0}[routing]
    mapping = torch.arange(experts)
    if routing == "elsewhere":
        mapping[1::2] = -1
    ids = scores.topk(slots, dim=1).indices
    groups = Groups.from_router(
        ids.to(subject.device),
        torch.rand(m, slots, device=subject.device),
        experts,
        mapping.to(subject.device),
    )
    x = _tokens(m, hidden, subject.device)
    where = {"m": m, "input_scale": scale, "routing": routing}

    def by_expert(inputs: Tensor, w: PackedWeight) -> Tensor:
        out = torch.zeros(inputs.shape[0], w.shape[1], dtype=torch.float64, device=inputs.device)
        for expert in torch.unique(groups.experts).tolist():
            rows = groups.experts == expert
            out[rows] = reference.dense(
                _input(subject, inputs[rows], w),
                w.codes[expert],
                w.block_scale[expert],
                _alpha(subject, w)[expert],
                dtype=torch.float64,
            )
        return out

    def l1() -> str | None:
        if not groups.tokens.numel():
            return None
        operand = subject.kernels.prepare_gate_up(_copied(w13))
        out = subject.kernels.grouped_l1(x, operand, groups, LIMIT)
        gate, up = by_expert(x[groups.tokens], w13).chunk(2, dim=-1)
        return _verdict(judge_bf16(out, reference.swiglu(gate, up, LIMIT)))

    def l2() -> str | None:
        h = _tokens(groups.tokens.shape[0], inner, subject.device)
        out = subject.kernels.grouped_l2(h, subject.kernels.prepare(_copied(w2)), groups)
        exact = torch.zeros(m, hidden, dtype=torch.float64, device=subject.device)
        if h.shape[0]:
            weighted = by_expert(h, w2) * groups.weights.double().unsqueeze(-1)
            exact.index_add_(0, groups.tokens, weighted)
        return _verdict(judge_bf16(out, exact))

    yield "grouped_l1", where, l1
    yield "grouped_l2", where, l2


def _quantiser(subject: Subject, m: int, k: int, scale: float | None) -> Iterator[Case]:
    """The Blackwell quantiser, bit for bit, and the requantising epilogue."""
    quantize = getattr(subject.kernels, "quantize_activation", None)
    if quantize is None:
        return
    kernels: Any = subject.kernels
    x = _tokens(m, k, subject.device)
    where = {"m": m, "k": k, "input_scale": scale}

    def codes() -> str | None:
        found = kernels.quantize_activation(x, scale)
        static = None if scale is None else torch.tensor(scale, device=subject.device)
        wanted = quantize_activation(x, static)
        if not found.codes.view(m, -1).equal(wanted.codes):
            return f"{int((found.codes.view(m, -1) != wanted.codes).sum())} bytes of codes differ"
        if not found.scales.equal(swizzle_128x4(wanted.block_scale.view(torch.uint8))):
            return "scales or their padding differ"
        if wanted.row_scale is not None and not found.row_scale.equal(wanted.row_scale):
            return "row scales differ"
        return None

    def requantised() -> str | None:
        w = weight(512, k, subject.device, scale)
        operand = kernels.prepare_gate_up(_copied(w))
        found = kernels.dense_swiglu_requantised(x, operand, LIMIT, REQUANTISED)
        exact = reference.dense(_input(subject, x, w), w.codes, w.block_scale, _alpha(subject, w))
        gate, up = exact.chunk(2, dim=-1)
        h = reference.swiglu(gate, up, LIMIT)
        wanted = quantize_activation(h, torch.tensor(REQUANTISED, device=subject.device))
        scales = unswizzle_128x4(found.scales, m, 256 // 16)
        same = scales == wanted.block_scale.view(torch.uint8)
        got, want = unpack(found.codes.view(m, -1)).int(), unpack(wanted.codes).int()
        # Blocks of another scale have other codes by right; they count as different scales.
        compared = same.repeat_interleave(16, dim=1)
        steps = ((got & 7) - (want & 7)).abs()[compared]
        if float((~same).float().mean()) > WITHIN_STEPS or float((steps > 0).float().mean()) > (
            WITHIN_STEPS
        ):
            return f"{int((~same).sum())} scales and {int((steps > 0).sum())} codes differ"
        return "a code differs by more than a step" if bool((steps > 1).any()) else None

    yield "quantize_activation", where, codes
    yield "requantise", where, requantised


def cases(subject: Subject, *, quick: bool) -> Iterator[Case]:
    for m in QUICK if quick else BOUNDARIES:
        for scale in (0.02, None):
            for n, k in QUICK_SHAPES if quick else SHAPES:
                yield from _dense(subject, n, k, m, scale)
            for groups in (2,) if quick else (1, 2, 16):
                yield from _wo_a(subject, groups, m, scale)
            for routing in ("spread", "crowded", "elsewhere"):
                yield from _routed(subject, m, scale, routing)
            for k in (256,) if quick else (256, 384, 7168):
                yield from _quantiser(subject, m, k, scale)


def judge(
    subject: Subject, *, quick: bool, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Counts by kernel and every failure; an exception is a failure of its case."""
    torch.manual_seed(0)
    counts: dict[str, int] = {}
    failures: list[dict[str, Any]] = []
    for kernel, where, check in cases(subject, quick=quick):
        counts[kernel] = counts.get(kernel, 0) + 1
        try:
            wrong = check()
        except Exception as error:  # the report must name every kernel, broken ones too
            wrong = "".join(traceback.format_exception_only(error)).strip()
        if wrong:
            failures.append({"kernel": kernel, **where, "wrong": wrong})
            say(f"FAIL {kernel} {where}: {wrong}")
    return {"checked": counts, "failures": failures}
