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
from typing import Any, Protocol

from assay_kernels.kernels.shapes import SHARES, Kind, Share, dense, grouped
from assay_kernels.kernels.sm90 import compiler as sm90
from assay_kernels.kernels.sm90.config import GemmConfig as HopperConfig
from assay_kernels.kernels.sm100 import compiler as sm100
from assay_kernels.kernels.sm100.config import GemmConfig as BlackwellConfig
from assay_kernels.kernels.sm100.shapes import all_keys

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


COMPILERS = {"sm_90a": sm90, "sm_100a": sm100}
"""Architecture -> the module that compiles for it and knows its cache."""


@dataclass(frozen=True)
class CachedKernel:
    """A kernel by its architecture and key, a `KernelKey` of that architecture's compiler."""

    arch: str
    key: Any

    @property
    def name(self) -> str:
        return str(self.key.name)

    @property
    def path(self) -> Path:
        folder: Path = COMPILERS[self.arch].cache_folder()
        return folder / f"{self.name}.o"

    def make(self) -> None:
        COMPILERS[self.arch].load_kernel(self.key)


def batch_sizes() -> list[int]:
    """Numbers of tokens at which a choice of configuration can change: each up to 256, where the
    tuned table's steps are, then both ends of every 64, which all tile sizes are multiples of."""
    few = range(1, min(256, MOST_TOKENS) + 1)
    edges = (m for end in range(320, MOST_TOKENS + 1, 64) for m in (end - 63, end))
    return [*few, *edges]


def hopper(shares: Iterable[Share]) -> list[Kernel]:
    """Every kernel that `sm90.kernels` can ask for on these GPUs."""
    epilogues: dict[Kind, sm90.Epilogue] = {"dense": "bf16", "swiglu": "swiglu", "fp32": "fp32"}
    keys = {sm90.KernelKey(None)}
    shares = list(shares)
    for product in sorted({product for share in shares for product in dense(share)}):
        keys |= {
            sm90.KernelKey(
                HopperConfig.for_dense(product.n, product.k, m, product.group),
                epilogues[product.kind],
            )
            for m in batch_sizes()
        }
    for layer in sorted({grouped(share) for share in shares}):
        # The kernel holds the experts' row counts in registers or shared memory: two sizes of it.
        table = 64 if layer.experts <= 64 else 256
        for m in batch_sizes():
            rows = m * layer.top_k * layer.experts / layer.of
            first = HopperConfig.for_grouped(layer.hidden, rows, layer.experts, 2 * layer.inter)
            second = HopperConfig.for_grouped(layer.inter, rows, layer.experts, layer.hidden)
            keys.add(sm90.KernelKey(first, "swiglu", table))
            keys.add(sm90.KernelKey(second, "combine", table, True))
    return [CachedKernel("sm_90a", key) for key in sorted(keys, key=lambda key: key.name)]


def blackwell(shares: Iterable[Share]) -> list[Kernel]:
    """Every kernel that `sm100.kernels` can ask for on these GPUs, with static and per-token scales
    of activations."""
    epilogues: dict[Kind, tuple[sm100.Epilogue, ...]] = {
        "dense": ("bf16",), "fp32": ("fp32",), "swiglu": ("swiglu", "requantise"),
    }  # fmt: skip
    keys = set(all_keys())  # those without a product, and the grouped ones, of which there are few
    for product in {product for share in shares for product in dense(share)}:
        for m in batch_sizes():
            swiglu = product.kind == "swiglu"
            config = BlackwellConfig.for_dense(product.n, product.k, m, swiglu=swiglu)
            keys |= {
                sm100.KernelKey("gemm", config, epilogue, row_scaled)
                for epilogue in epilogues[product.kind]
                for row_scaled in (False, True)
            }
    return [CachedKernel("sm_100a", key) for key in sorted(keys, key=lambda key: key.name)]


TARGETS: dict[str, Callable[[Iterable[Share]], list[Kernel]]] = {
    "sm_90a": hopper,
    "sm_100a": blackwell,
}
"""Architecture -> its kernels. One with kernels of its own adds a line here and to COMPILERS."""


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
