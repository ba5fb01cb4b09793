"""Measure launch configurations on one H200 and write the tuning table that the kernels read.

    python plugin/benchmarks/h200_tune.py --out DIR [--shapes N:K,..] [--steps 8,16,..] [--write]

For each shape and each step of M every candidate is compiled (one process a core), judged against
fp32, and timed as `h200.py` times: a graph over rotating weights, programmatic dependent launch.
`--write` puts the best of each step into tuning.json; DIR/tune.json keeps every time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from h200 import L2_BYTES, SHAPES, decoded, inner_calls, median_us, random_weight

from assay_kernels.kernels.sm90.compiler import KernelKey, cache_folder, load_kernel
from assay_kernels.kernels.sm90.config import SMS, TUNING, GemmConfig

# Configurations change at these M; each step is measured at the M beside it.
STEPS = {8: 1, 16: 16, 32: 32, 64: 64, 128: 128, 320: 256, 2048: 1024, 1 << 30: 4096}
MOST_ERROR = 0.01


def blocks_of(config: GemmConfig, n: int, m: int) -> int:
    return math.ceil(n / config.rows) * math.ceil(m / config.tokens) * config.split_k


def few_tokens(n: int, k: int, m: int) -> list[GemmConfig]:
    """Up to 16 tokens: how to cut channels and K over the SMs, and how many blocks share one."""
    made = []
    for (warpgroups, tiles), split, held in product(
        ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1)), (1, 2, 3, 4, 5, 6, 7, 8), (2, 4)
    ):
        if k // 128 // split < 3:
            continue
        try:
            config = GemmConfig.make(
                8 if m <= 8 else 16, warpgroups, tiles, 128, split, held, warp_mma=True
            )
        except ValueError:
            continue
        blocks = blocks_of(config, n, m)
        if 96 <= blocks <= SMS * held and config.threads * held <= 1200:
            made.append(config)
    return [
        replace(config, stages=stages)
        for config in made
        for stages in (3, 4, 6)
        if stages <= config.stages and k // 128 // config.split_k >= stages
    ]


def some_tokens(n: int, k: int, m: int) -> list[GemmConfig]:
    """Up to 128 tokens: with two blocks an SM the next kernel starts beside this one's end."""
    made = []
    tokens = next(t for t in (32, 64, 128) if m <= t)
    splits = [s for s in (1, 2, 3, 4, 5, 6, 7, 8) if k // 64 // s >= 6]
    options: list[tuple[int, ...]] = []  # tokens, warpgroups, tiles, block_k, stages, held
    if tokens == 128:
        options += [(128, 2, 1, 64, 10, 1), (128, 2, 1, 128, 5, 1)]
        options += [(128, 3, 1, 128, 4, 1), (128, 4, 1, 64, 8, 1), (128, 2, 2, 64, 8, 1)]
        options += [(64, 2, 1, 128, 4, 2), (64, 2, 2, 128, 5, 1), (64, 4, 1, 128, 5, 1)]
    else:
        wide = 4 if tokens == 64 else 5
        options += [(tokens, 2, 1, 128, wide, 2), (tokens, 2, 1, 64, 2 * wide, 2)]
        options += [(tokens, 2, 1, 128, 8, 1), (tokens, 3, 1, 128, 6, 1), (tokens, 4, 1, 128, 5, 1)]
        options += [(tokens, 2, 2, 128, 5, 1), (tokens, 1, 1, 128, 4, 3)]
    for (t, warpgroups, tiles, block_k, stages, held), split, turns in product(
        options, splits, (False, True)
    ):
        group = 4 if block_k == 128 or tiles == 2 else 2
        try:
            config = GemmConfig(
                t, warpgroups, tiles, block_k, stages, split, held, group, alternate=turns
            )
        except ValueError:
            continue
        if 60 <= blocks_of(config, n, m) <= SMS * (held if t == 64 and tokens == 128 else 1):
            made.append(config)
    return made


def many_tokens(n: int, k: int, m: int) -> list[GemmConfig]:
    """Large tiles; the tensor cores are the time."""
    made = []
    for (tokens, warpgroups, tiles, block_k), split, turns in product(
        (
            (128, 2, 1, 128), (128, 3, 1, 64), (128, 3, 1, 128), (128, 2, 2, 64),
            (192, 2, 1, 64), (256, 2, 1, 64), (256, 2, 1, 128), (64, 2, 1, 128), (64, 2, 2, 128),
        ),
        (1, 2, 4) if m <= 320 else (1,),
        (False, True),
    ):  # fmt: skip
        try:
            config = GemmConfig.make(
                tokens, warpgroups, tiles, block_k, split, 2 if tokens == 64 and tiles == 1 else 1
            )
            made.append(replace(config, alternate=turns))
        except ValueError:
            continue
    return made


def candidates(n: int, k: int, m: int) -> list[GemmConfig]:
    """What may be fastest, and what the table and the heuristic say now."""
    more = few_tokens if m <= 16 else some_tokens if m <= 128 else many_tokens
    known = [GemmConfig.for_dense(n, k, m), GemmConfig.from_analytical_heuristic(n, k, m)]
    made = known + more(n, k, m)
    return list(dict.fromkeys(made))


def compile_one(config: GemmConfig) -> str:
    path = cache_folder() / f"{KernelKey(config).name}.o"
    try:
        if not path.exists():
            load_kernel(KernelKey(config))
    except Exception as error:
        return f"{config.name}: {type(error).__name__}: {error}"[:200]
    return ""


def measure(n: int, k: int, m: int, configs: list[GemmConfig]) -> list[dict[str, Any]]:
    import torch

    from assay_kernels.kernels.interface import PackedWeight
    from assay_kernels.kernels.sm90.kernels import HopperKernels

    kernels = HopperKernels()
    copies = math.ceil(3 * L2_BYTES / (n * k * 0.5625))
    alpha = torch.full((n,), 1e-4, device="cuda")
    weights = [random_weight(n, k) for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    want = x.float() @ decoded(*weights[0]).T
    operands = [kernels.prepare(PackedWeight(*w, alpha, None)) for w in weights]
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    rows = []
    for config in configs:
        row: dict[str, Any] = {"n": n, "k": k, "m": m, "config": config.name}
        try:
            calls = [
                lambda o=o, c=config: kernels._dense(x, o, out, "bf16", config=c) for o in operands
            ]
            out.fill_(float("nan"))
            row["error"] = float((calls[0]().float() - want).norm() / want.norm())
            row["us"] = median_us(calls, inner_calls(copies, m))
            if not row["error"] < MOST_ERROR:
                row["wrong"] = True
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".assay/bench-h200"))
    parser.add_argument("--shapes", help="subset, as N:K,N:K")
    parser.add_argument("--steps", help="subset, as 8,16")
    parser.add_argument("--write", action="store_true", help="update tuning.json")
    parser.add_argument("--show", type=int, default=6, help="how many of a cell to print")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = (
        [tuple(map(int, s.split(":"))) for s in options.shapes.split(",")]
        if options.shapes
        else SHAPES
    )
    steps = [int(s) for s in options.steps.split(",")] if options.steps else list(STEPS)
    cells = {(n, k, upto): candidates(n, k, STEPS[upto]) for n, k in shapes for upto in steps}
    every = list({config for found in cells.values() for config in found})
    begin = time.time()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for failure in filter(None, pool.map(compile_one, every)):
            print("!", failure, flush=True)
    print(f"{len(every)} kernels compiled in {time.time() - begin:.0f} s", flush=True)
    table = {(e["n"], e["k"]): e["steps"] for e in json.loads(TUNING.read_text())}
    measured: list[dict[str, Any]] = []
    for (n, k, upto), configs in cells.items():
        rows = measure(n, k, STEPS[upto], configs)
        measured += rows
        right = sorted((r for r in rows if "us" in r and "wrong" not in r), key=lambda r: r["us"])
        for bad in (r for r in rows if "us" not in r or "wrong" in r):
            print("!", json.dumps(bad), flush=True)
        now = next((r["us"] for r in rows if r["config"] == configs[0].name and "us" in r), 0.0)
        listed = ", ".join(f"{r['config']} {r['us']:.2f}" for r in right[: options.show])
        print(f"> {n} x {k} M={STEPS[upto]}: now {now:.2f} | {listed}", flush=True)
        best = next(c for c in configs if c.name == right[0]["config"])
        entry = table.setdefault((n, k), [])
        entry[:] = [s for s in entry if s["upto"] != upto]
        entry.append({"upto": upto, "config": asdict(best)})
        entry.sort(key=lambda s: s["upto"])
        (options.out / "tune.json").write_text(json.dumps(measured))
    made = [{"n": n, "k": k, "steps": found} for (n, k), found in table.items()]
    (options.out / "tuning.json").write_text(json.dumps(made, indent=1) + "\n")
    if options.write:
        TUNING.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
