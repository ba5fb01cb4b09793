"""Microseconds of the dense product beside what is installed, and beside the prediction."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from assay_kernels.first_contact.correctness import Subject, weight
from assay_kernels.kernels.sm100 import performance
from assay_kernels.kernels.sm100.shapes import Shape

SHAPES = ((6144, 7168), (7168, 3072), (8192, 1536), (2048, 7168))
TOKENS = (1, 16, 64, 128, 1024, 4096)
COPIES = 6
"""Weights in turn, so that they come from memory."""
REPLAYS = 20


def microseconds(call: Callable[[int], object]) -> float:
    """Median over replays of a CUDA graph of COPIES calls, a call."""
    for i in range(COPIES):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(COPIES):
            call(i)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / COPIES)
    return float(statistics.median(times))


def _flashinfer(n: int, k: int, m: int, device: str) -> Callable[[int], object] | None:
    """FlashInfer's NVFP4 product on inputs quantised before, where it is installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    one = torch.ones((), device=device)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    a, a_scale = flashinfer.nvfp4_quantize(x, one)
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(COPIES)]
    b = [flashinfer.nvfp4_quantize(w, one) for w in weights]
    return lambda i: flashinfer.mm_fp4(a, b[i][0].T, a_scale, b[i][1].T, one, torch.bfloat16)


def _row(
    kind: dict[str, Any], implementation: str, call: Callable[[int], object] | None
) -> dict[str, Any]:
    if call is None:
        return {**kind, "impl": implementation, "us": None, "why": "not installed"}
    try:
        return {**kind, "impl": implementation, "us": microseconds(call)}
    except Exception as error:  # a peer's failure is a result, not the end of the run
        return {**kind, "impl": implementation, "us": None, "why": str(error)[:300]}


def _ours(subject: Subject, x: torch.Tensor, operands: list[Any], i: int) -> object:
    return subject.kernels.dense(x, operands[i])


def _cublas(x: torch.Tensor, weights: list[torch.Tensor], i: int) -> object:
    return torch.nn.functional.linear(x, weights[i])


def measure(subject: Subject, architecture: str) -> list[dict[str, Any]]:
    """Rows of (n, k, m, impl, us); ours includes quantising x."""
    rows: list[dict[str, Any]] = []
    for n, k in SHAPES:
        packed = [weight(n, k, subject.device, 0.02) for _ in range(COPIES)]
        operands = [subject.kernels.prepare(w) for w in packed]
        plain = [
            torch.randn(n, k, device=subject.device, dtype=torch.bfloat16) for _ in range(COPIES)
        ]
        for m in TOKENS:
            kind = {"n": n, "k": k, "m": m}
            x = torch.randn(m, k, device=subject.device, dtype=torch.bfloat16)
            ours = partial(_ours, subject, x, operands)
            rows.append(_row(kind, "ours", ours))
            rows.append(_row(kind, "cublas bf16", partial(_cublas, x, plain)))
            if architecture == "sm_100":
                rows.append(_row(kind, "flashinfer", _flashinfer_or_why(n, k, m, subject.device)))
                predicted = performance.blackwell(Shape("-", "-", n, k, "dense"), m)
            else:
                predicted = performance.hopper(n, k, m)
            rows.append({**kind, "impl": "predicted product", "us": predicted.us})
            rows.append({**kind, "impl": "floor", "us": predicted.floor_us})
    return rows


def _flashinfer_or_why(n: int, k: int, m: int, device: str) -> Callable[[int], object] | None:
    try:
        return _flashinfer(n, k, m, device)
    except Exception as error:
        message = str(error)

        def fail(_: int) -> object:
            raise RuntimeError(message)

        return fail
