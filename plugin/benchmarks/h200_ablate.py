"""Where the time of a dense kernel goes: the same kernel with one stage left out.

    python plugin/benchmarks/h200_ablate.py --out DIR [--cells N:K:M,..]

Variants compute nonsense and are compiled into a folder of their own: without the copies of tokens,
without decoding (codes go to the tensor cores as they are), and without products (loads alone). A
stage that the others hide costs nothing when it is left out; what is left is what bounds the cell.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from h200 import L2_BYTES, SHAPES, inner_calls, median_us, random_weight

from assay_kernels.kernels.objects import FUNCTION
from assay_kernels.kernels.sm90.config import GemmConfig

VARIANTS = ("whole", "without tokens", "without decoding", "loads alone")
CELLS = [*((n, k, 128) for n, k in SHAPES), (6144, 7168, 64), (6144, 7168, 16), (6144, 7168, 1)]


def compile_variant(job: tuple[GemmConfig, str, str]) -> str:
    """One process a variant: it changes the module that it compiles from."""
    config, variant, path = job
    try:
        import cutlass.cute as cute

        from assay_kernels.kernels.sm90 import compiler, gemm

        if variant == "without tokens":
            expect = cute.arch.mbarrier_arrive_and_expect_tx
            tokens = config.tokens * config.block_k * 2
            cute.arch.mbarrier_arrive_and_expect_tx = lambda at, size: expect(at, size - tokens)
            gemm.Gemm._copy_tokens = lambda *_, **__: None  # type: ignore[method-assign]
        elif variant == "without decoding":
            gemm.Gemm._decoded = lambda _, q, *__: (q, q, q, q)  # type: ignore[method-assign]
        elif variant == "loads alone":
            cute.gemm = lambda *_, **__: None
            gemm.Gemm._warp_products = lambda *_: None  # type: ignore[method-assign]
        compiled = compiler.compile_kernel(compiler.KernelKey(config))
        compiled.export_to_c(path, function_name=FUNCTION)
    except Exception as error:
        return f"{config.name}, {variant}: {type(error).__name__}: {error}"[:200]
    return ""


def measure(n: int, k: int, m: int, paths: dict[str, Path]) -> dict[str, Any]:
    import cutlass.cute as cute
    import torch

    from assay_kernels.kernels.interface import PackedWeight
    from assay_kernels.kernels.sm90 import kernels

    copies = math.ceil(3 * L2_BYTES / (n * k * 0.5625))
    alpha = torch.full((n,), 1e-4, device="cuda")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    row: dict[str, Any] = {"n": n, "k": k, "m": m, "config": GemmConfig.for_dense(n, k, m).name}
    library = kernels.HopperKernels()
    operands = [
        library.prepare(PackedWeight(*random_weight(n, k), alpha, None)) for _ in range(copies)
    ]
    for variant, path in paths.items():
        function = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
        kernels.load_kernel = lambda _, f=function: f  # type: ignore[assignment]
        calls = [lambda o=o: library.dense(x, o) for o in operands]
        row[variant] = round(median_us(calls, inner_calls(copies, m)), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".assay/bench-h200"))
    parser.add_argument("--cells", help="subset, as N:K:M,N:K:M")
    options = parser.parse_args()
    folder = options.out / "ablate"
    folder.mkdir(parents=True, exist_ok=True)
    cells = (
        [tuple(map(int, c.split(":"))) for c in options.cells.split(",")]
        if options.cells
        else CELLS
    )
    paths = {
        cell: {v: folder / f"{'_'.join(map(str, cell))}_{i}.o" for i, v in enumerate(VARIANTS)}
        for cell in cells
    }
    jobs = [
        (GemmConfig.for_dense(*cell), variant, str(path))
        for cell, of in paths.items()
        for variant, path in of.items()
    ]
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:
        for failure in filter(None, pool.map(compile_variant, jobs)):
            print("!", failure, flush=True)
    rows = []
    for cell in cells:
        rows.append(measure(*cell, paths[cell]))
        print(">", json.dumps(rows[-1]), flush=True)
    (options.out / "ablate.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
