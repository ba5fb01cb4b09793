"""Compile every GPU kernel before anything is served; no GPU is needed.

    python -m assay_kernels.kernels.precompile --arch sm_90a [--jobs N] [--only NAME ...]

Kernels go where the server will look for them (`ASSAY_KERNEL_CACHE`). What is there already is left
alone, so a run that was interrupted goes on. Exit code 0: nothing is missing; 1: a kernel does not
compile, and which; 2: there are no kernels for that architecture, or no compiler.

A server whose checkpoint is of other sizes, or whose batches are longer than `MOST_TOKENS`,
compiles what it lacks at its start.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from assay_kernels.kernels.shapes import SHARES, Kind, Share, dense, grouped
from assay_kernels.kernels.sm90.compiler import Epilogue, KernelKey, cache_folder, load_kernel
from assay_kernels.kernels.sm90.config import GemmConfig

MOST_TOKENS = 8192
"""Longest batch that is prepared for: what vLLM takes on these GPUs unless told
(max_num_batched_tokens of a server, EngineArgs.get_batch_defaults)."""


class Kernel(Protocol):
    """One object file of the cache. Can be sent to another process."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path:
        """Where the server looks for it."""
        ...

    def make(self) -> None:
        """Compile it into `path`, whole or not at all."""
        ...


@dataclass(frozen=True)
class HopperKernel:
    """A kernel of sm_90a."""

    key: KernelKey

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def path(self) -> Path:
        return cache_folder() / f"{self.name}.o"

    def make(self) -> None:
        load_kernel(self.key)


def batch_sizes() -> list[int]:
    """Numbers of tokens at which a choice of configuration can change: each up to 256, where the
    tuned table's steps are, then both ends of every 64, which all tile sizes are multiples of."""
    few = range(1, min(256, MOST_TOKENS) + 1)
    edges = (m for end in range(320, MOST_TOKENS + 1, 64) for m in (end - 63, end))
    return [*few, *edges]


def hopper(shares: Iterable[Share]) -> list[Kernel]:
    """Every kernel that `sm90.kernels` can ask for on these GPUs."""
    epilogues: dict[Kind, Epilogue] = {"dense": "bf16", "swiglu": "swiglu", "fp32": "fp32"}
    keys = {KernelKey(None)}
    shares = list(shares)
    for product in sorted({product for share in shares for product in dense(share)}):
        keys |= {
            KernelKey(
                GemmConfig.for_dense(product.n, product.k, m, product.group),
                epilogues[product.kind],
            )
            for m in batch_sizes()
        }
    for layer in sorted({grouped(share) for share in shares}):
        # The kernel holds the experts' row counts in registers or shared memory: two sizes of it.
        table = 64 if layer.experts <= 64 else 256
        for m in batch_sizes():
            rows = m * layer.top_k * layer.experts / layer.of
            first = GemmConfig.for_grouped(layer.hidden, rows, layer.experts, 2 * layer.inter)
            second = GemmConfig.for_grouped(layer.inter, rows, layer.experts, layer.hidden)
            keys.add(KernelKey(first, "swiglu", table))
            keys.add(KernelKey(second, "combine", table, True))
    return [HopperKernel(key) for key in sorted(keys, key=lambda key: key.name)]


TARGETS: dict[str, Callable[[Iterable[Share]], list[Kernel]]] = {"sm_90a": hopper}
"""Architecture -> its kernels. One with kernels of its own adds a line here."""


def kernels(arch: str) -> list[Kernel]:
    """Every kernel of an architecture. Raises KeyError for one that has none."""
    return TARGETS[arch](SHARES)


def missing(archs: Iterable[str]) -> list[str]:
    """`arch/name` of what is not in the cache. Raises KeyError for an architecture without any."""
    return [f"{arch}/{k.name}" for arch in archs for k in kernels(arch) if not k.path.is_file()]


def _make(kernel: Kernel) -> float:
    began = time.monotonic()
    kernel.make()
    return time.monotonic() - began


def compile_all(
    todo: Sequence[Kernel], jobs: int, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Compile in `jobs` processes; kernel -> why not, for those that failed."""
    failed: dict[str, str] = {}
    # The compiler keeps memory from kernel to kernel: a process makes a few and is replaced.
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=16
    )
    with pool:
        running = {pool.submit(_make, kernel): kernel for kernel in todo}
        for number, done in enumerate(as_completed(running), 1):
            name = running[done].name
            if (error := done.exception()) is not None:
                failed[name] = f"{type(error).__name__}: {error}"
                say(f"{number}/{len(todo)} {name}: FAILED: {failed[name]}")
            else:
                say(f"{number}/{len(todo)} {name}: {done.result():.1f} s")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="precompile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", action="append", help="default: every one with kernels")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", help="kernels by name")
    given = parser.parse_args(arguments)
    archs = given.arch or list(TARGETS)
    if unknown := [arch for arch in archs if arch not in TARGETS]:
        print(
            f"precompile: no kernels for {', '.join(unknown)} in this version; there are some for"
            f" {', '.join(TARGETS)}",
            file=sys.stderr,
        )
        return 2
    if importlib.util.find_spec("cutlass") is None:
        print(
            "precompile: the CUTLASS DSL is not installed: pip install 'assay-kernels[cuda]'",
            file=sys.stderr,
        )
        return 2
    failed: dict[str, str] = {}
    for arch in archs:
        found = [k for k in kernels(arch) if not given.only or k.name in given.only]
        todo = [k for k in found if not k.path.is_file()]
        print(f"{arch}: {len(found)} kernels, {len(found) - len(todo)} of them are there")
        if todo:
            failed |= compile_all(todo, max(1, min(given.jobs, len(todo))))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
