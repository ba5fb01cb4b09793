"""Calling a kernel so that it has every chance to fail: twice, over poisoned memory, in a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class MismatchError(Exception):
    """A kernel's output is not what it must be; the message says how."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: a NaN equals itself, and -0.0 is not 0.0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _poison(like: Tensor) -> None:
    """Leave NaN in the memory that the allocator is likely to hand out next."""
    torch.full_like(like, float("nan"))


def call(run: Callable[[], Tensor], rows: Callable[[Tensor], Tensor] = lambda out: out) -> Tensor:
    """The output of `run`, the same from two calls and, on a GPU, from a graph's replay.

    rows: what of the output is defined. Raises MismatchError.
    """
    first = run()
    _poison(first)
    if not same_bits(rows(first), rows(run())):
        raise MismatchError("two calls with one input differ")
    if first.is_cuda:
        replayed = in_graph(run)
        if not same_bits(rows(first), rows(replayed)):
            raise MismatchError("a graph's replay differs from the call")
    return rows(first)


def in_graph(run: Callable[[], Tensor]) -> Tensor:
    """The output of the second replay of a graph that holds `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # scratch of this stream, and what compiles late, before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return out.clone()
