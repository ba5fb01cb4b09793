"""Judge every Hopper kernel on the GPU by contract 1's rule, and write what was found as JSON.

    python plugin/benchmarks/h200_check.py --out DIR [--quick]

Random and adversarial weights and inputs, outputs allocated over poisoned memory, numbers of tokens
at every boundary of the tiles, empty and crowded experts, and 1,000 repetitions bit by bit. Exits 1
if anything failed. `--quick` is short enough for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.kernels.interface import PackedWeight
from assay_kernels.kernels.sm90.kernels import HopperKernels
from assay_kernels.kernels.sm90.routing import SortedRows
from assay_kernels.numerics import decode_fp32, judge_bf16, judge_fp32

SHAPES = [(2048, 7168), (768, 7168), (7168, 384), (8192, 1536), (256, 256), (64, 64), (320, 192)]
BOUNDARIES = [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257]
LARGE = [4095, 4096, 4097]
DATA = ["random", "scale ends", "zero blocks", "huge column", "signed zeros", "partitions"]
LIMIT = 10.0


def weight(n: int, k: int, data: str, experts: int = 0) -> PackedWeight:
    lead = (experts,) if experts else ()
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device="cuda")
    bits = torch.randint(0x08, 0x7F, (*lead, n, k // 16), dtype=torch.uint8, device="cuda")
    alpha = (torch.rand(*lead, n, device="cuda") + 0.5) * 1e-4
    if data == "scale ends":
        ends = torch.tensor([1, 2, 3, 7, 8, 0x7E, 0x7D], dtype=torch.uint8, device="cuda")
        bits = ends[torch.randint(0, 7, bits.shape, device="cuda")]
    elif data == "zero blocks":
        bits[torch.rand(bits.shape, device="cuda") < 0.5] = 0
    elif data == "signed zeros":
        codes[torch.rand(codes.shape, device="cuda") < 0.7] = 0x80
    elif data == "partitions":
        alpha[..., : n // 2] *= 1000
    return PackedWeight(codes, bits.view(torch.float8_e4m3fn), alpha, None)


def tokens(m: int, k: int, data: str) -> Tensor:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    if data == "huge column":
        x[:, k // 3] *= 1e4
    return x


def copied(w: PackedWeight) -> PackedWeight:
    """`prepare` works in place."""
    return PackedWeight(w.codes.clone(), w.block_scale.clone(), w.alpha.clone(), None)


def exact(w: PackedWeight) -> Tensor:
    values = decode_fp32(w.codes, w.block_scale).double()
    return values * w.alpha.double().unsqueeze(-1)


def poison(*shapes: tuple[int, ...]) -> None:
    """Fill memory that the next allocations of these sizes will be given."""
    held = [torch.full(shape, float("nan"), device="cuda") for shape in shapes]
    del held


class Findings:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, verdict: Any, **where: Any) -> None:
        row = {
            "kind": kind,
            **where,
            "passed": verdict.passed,
            "error": verdict.error,
            "bound": verdict.bound,
        }
        self.rows.append(row)
        if not verdict.passed:
            print("FAIL", json.dumps(row), verdict, flush=True)

    def add_equal(self, kind: str, equal: bool, **where: Any) -> None:
        row = {"kind": kind, **where, "passed": equal}
        self.rows.append(row)
        if not equal:
            print("FAIL", json.dumps(row), flush=True)


def dense(kernels: HopperKernels, found: Findings, shapes: Any, counts: Any, data: Any) -> None:
    for n, k in shapes:
        for kind in data:
            w = weight(n, k, kind)
            values = exact(w)
            plain, gated = kernels.prepare(copied(w)), kernels.prepare_gate_up(copied(w))
            parts = [n // 2, n - n // 2] if kind == "partitions" else None
            for m in counts:
                x = tokens(m, k, kind)
                want = x.double() @ values.T
                poison((m, n), (m, n // 2))
                found.add(
                    "dense",
                    judge_bf16(kernels.dense(x, plain), want, parts),
                    n=n,
                    k=k,
                    m=m,
                    data=kind,
                )
                poison((m, n))
                got = kernels.dense(x, plain, torch.float32)
                found.add("compressor", judge_fp32(got, want, parts), n=n, k=k, m=m, data=kind)
                if kind != "partitions":
                    gate, up = (want * 1.0).chunk(2, dim=1)
                    activated = reference.swiglu(gate, up, LIMIT)
                    poison((m, n // 2))
                    got = kernels.dense_swiglu(x, gated, LIMIT)
                    found.add("dense_swiglu", judge_bf16(got, activated), n=n, k=k, m=m, data=kind)


def wo_a(kernels: HopperKernels, found: Findings, counts: Any) -> None:
    for groups, rank, k in ((2, 1024, 4096), (8, 128, 512), (1, 1024, 4096)):
        w = weight(groups * rank, k, "random")
        whole = copied(w)
        stack = replace(
            whole,
            codes=whole.codes.view(groups, rank, -1),
            block_scale=whole.block_scale.view(groups, rank, -1),
            alpha=whole.alpha.view(groups, rank),
        )
        operand = kernels.prepare(stack)
        values = exact(w).view(groups, rank, k)
        for m in counts:
            x = tokens(m, groups * k, "random").view(m, groups, k)
            want = torch.einsum("mgk,grk->mgr", x.double(), values).flatten(1)
            poison((m, groups * rank))
            got = kernels.wo_a(x, operand).flatten(1)
            parts = [rank] * groups
            found.add("wo_a", judge_bf16(got, want, parts), n=rank, k=k, m=m, groups=groups)


def grouped(kernels: HopperKernels, found: Findings, counts: Any) -> None:
    for local, every, hidden, width, top_k in (
        (8, 16, 512, 256, 4),
        (48, 384, 256, 128, 6),
        (256, 256, 256, 128, 6),
    ):
        w1, w2 = weight(2 * width, hidden, "random", local), weight(hidden, width, "random", local)
        l1, l2 = kernels.prepare_gate_up(copied(w1)), kernels.prepare(copied(w2))
        expert_map = torch.full((every,), -1, device="cuda")
        expert_map[torch.randperm(every, device="cuda")[:local]] = torch.arange(
            local, device="cuda"
        )
        for m in counts:
            for choice in ("skewed", "one expert", "none here"):
                odds = -1.2 * torch.arange(1, every + 1, device="cuda").float().log()
                noise = -torch.log(-torch.log(torch.rand(m, every, device="cuda")))
                ids = (noise + odds[torch.randperm(every, device="cuda")]).topk(top_k, 1).indices
                if choice == "one expert":
                    ids[:, 0] = int(torch.nonzero(expert_map == 0)[0])
                    ids[:, 1:] = -1
                elif choice == "none here":
                    ids[:] = -1
                gates = torch.rand(m, top_k, device="cuda") + 0.1
                x = tokens(m, hidden, "random")
                h = reference.grouped_l1(
                    x, ids, w1.codes, w1.block_scale, w1.alpha, LIMIT,
                    expert_map=expert_map, dtype=torch.float64,
                )  # fmt: skip
                want = reference.grouped_l2(
                    h.bfloat16(), ids, gates, w2.codes, w2.block_scale, w2.alpha,
                    expert_map=expert_map, dtype=torch.float64,
                )  # fmt: skip
                rows = SortedRows.from_router(ids, gates, local, expert_map)
                count = int(rows.ends[-1])
                where = {"experts": local, "m": m, "routing": choice, "rows": count}
                poison((m * top_k, hidden), (m * top_k, width), (m, hidden))
                got = kernels.grouped_l1(x, l1, rows, LIMIT)[:count]
                mine = torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1).flatten()
                order = torch.where(mine >= 0, mine, local).sort(stable=True).indices[:count]
                if count:
                    sorted_h = h.flatten(0, 1)[order]
                    found.add("grouped_l1", judge_bf16(got, sorted_h), **where)
                rounded = torch.full((m * top_k, width), float("nan"), device="cuda").bfloat16()
                rounded[:count] = h.flatten(0, 1)[order].bfloat16()
                for _ in range(2):  # the workspace is left as the first call found it
                    out = kernels.grouped_l2(rounded, l2, rows)
                    used = rows.fan > 0
                    if count:
                        found.add("grouped_l2", judge_bf16(out[used], want[used]), **where)
                    found.add_equal("grouped_l2 zeros", bool((out[~used] == 0).all()), **where)
                both = kernels.routed(x, l1, l2, rows, LIMIT)
                finite = bool(torch.isfinite(both).all()) and bool((both[~used] == 0).all())
                found.add_equal("routed", finite, **where)


def repetitions(kernels: HopperKernels, found: Findings, times: int) -> None:
    """The same bits every time: sums in fixed order, with and without split K."""
    for n, k in ((2048, 7168), (8192, 1536)):
        operand = kernels.prepare(weight(n, k, "random"))
        for m in (1, 16, 64, 129, 1024):
            x = tokens(m, k, "random")
            first = kernels.dense(x, operand)
            same = all(torch.equal(kernels.dense(x, operand), first) for _ in range(times))
            found.add_equal("repetitions", same, n=n, k=k, m=m, times=times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".assay/bench-h200"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    kernels, found = HopperKernels(), Findings()
    if options.quick:
        dense(kernels, found, [(256, 1024), (320, 192)], [1, 17, 65], ["random"])
        wo_a(kernels, found, [3])
        grouped(kernels, found, [5])
    else:
        dense(kernels, found, SHAPES, BOUNDARIES, ["random"])
        dense(kernels, found, [(2048, 7168), (768, 7168), (256, 256)], [1, 16, 33, 129], DATA[1:])
        dense(kernels, found, [(8192, 1536)], LARGE, ["random", "scale ends"])
        wo_a(kernels, found, [1, 7, 64, 129, 256, 300])
        grouped(kernels, found, [1, 2, 8, 33, 129, 400, 1000, 7000])
        repetitions(kernels, found, 1000)
    failed = [row for row in found.rows if not row["passed"]]
    summary: dict[str, int] = {}
    for row in found.rows:
        summary[row["kind"]] = summary.get(row["kind"], 0) + 1
    data = {
        "gpu": torch.cuda.get_device_name(),
        "checks": summary,
        "failed": failed,
        "rows": found.rows,
    }
    (options.out / "check.json").write_text(json.dumps(data))
    print(f"{len(found.rows)} checks, {len(failed)} failed:", json.dumps(summary))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
