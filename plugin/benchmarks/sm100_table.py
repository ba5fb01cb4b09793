"""Compile every Blackwell kernel without a GPU and write docs/kernels-sm100.md's tables.

    python plugin/benchmarks/sm100_table.py compile    # results/sm100.json; goes on where it was
    python plugin/benchmarks/sm100_table.py docs       # the tables, from that file

`compile` needs the CUTLASS DSL and the disassembler wheels; `docs` neither.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from assay_kernels.kernels.sm100.compiler import KernelKey
from assay_kernels.kernels.sm100.performance import blackwell
from assay_kernels.kernels.sm100.shapes import SHAPES, TOKENS, all_keys, key_for

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "sm100.json"
DOCS = HERE.parents[1] / "docs" / "kernels-sm100.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def compile_all() -> None:
    from assay_kernels.kernels.sm100.compiler import fingerprint
    from assay_kernels.kernels.sm100.evidence import gather

    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if done.get("fingerprint") != fingerprint():
        done = {"fingerprint": fingerprint(), "kernels": {}}
    for key in all_keys():
        if key.name not in done["kernels"]:
            found = gather(key)
            done["kernels"][key.name] = found.as_json()
            print(
                f"{key.name:<44}{found.seconds:>6.1f} s{found.registers:>5} registers", flush=True
            )
            RESULTS.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")


def _counts(opcodes: dict[str, int], *prefixes: str) -> str:
    parts = []
    for prefix in prefixes:
        matching = {o: c for o, c in sorted(opcodes.items()) if o.startswith(prefix)}
        parts += [f"{count} `{opcode}`" for opcode, count in matching.items()]
    return ", ".join(parts)


def _kernel_row(key: KernelKey, found: dict[str, Any]) -> str:
    config = key.config
    smem = f"{config.smem_bytes / 1024:.0f}" if config else "1"
    tmem = str(config.columns) if config else "-"
    evidence = _counts(
        found["opcodes"],
        "UTCOMMA",
        "UTCCP",
        "UTMALDG",
        "F2FP.SATFINITE.E2M1",
        "F2FP.SATFINITE.E4M3",
    )
    return (
        f"| {key.name} | {found['seconds']} | {found['registers']} | {found['stack']} | {smem} "
        f"| {tmem} | {found['barriers']} | {evidence or 'no tensor core, no conversion'} |"
    )


def tables(results: dict[str, Any]) -> str:
    lines = [
        "### Kernels, each compiled and inspected, not run",
        "Compile seconds on two shared cores; stack in bytes; smem in KiB a block; TMEM columns.",
        "",
        "| kernel | compile s | registers | stack | smem | TMEM | mbarriers | SASS |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = all_keys()
    recorded = results["kernels"]
    lines += [_kernel_row(key, recorded[key.name]) for key in keys if key.name in recorded]
    missing = [key.name for key in keys if key.name not in recorded]
    if missing:
        lines += ["", f"Not recorded ({len(missing)}): " + ", ".join(missing)]
    lines += [
        "",
        "### Predicted microseconds (floor), nothing here was measured",
        "The product alone: quantising x is a launch of its own. A floor is bytes once at 7.2 "
        "TB/s, operations once at 8.2 PFLOP/s.",
        "",
        "| model | layer | kernel | N x K | " + " | ".join(f"M = {m}" for m in TOKENS) + " |",
        "|---|---|---|---|" + "---|" * len(TOKENS),
    ]
    for shape in SHAPES:
        cells = []
        for m in TOKENS:
            predicted = blackwell(shape, m)
            cells.append(f"{predicted.us:.1f} ({predicted.floor_us:.1f})")
        stack = f"{shape.experts} x " if shape.experts else ""
        lines.append(
            f"| {shape.model} | {shape.layer} | {shape.kernel} | {stack}{shape.n} x {shape.k} | "
            + " | ".join(cells)
            + " |"
        )
    lines += [
        "",
        "Which kernel serves a shape (static scales; `_row_scaled` is the per-token twin):",
        "",
        "| layer kernel | M <= 16 | M = 64 | M = 4096 |",
        "|---|---|---|---|",
    ]
    for kernel in dict.fromkeys(shape.kernel for shape in SHAPES):
        shape = next(shape for shape in SHAPES if shape.kernel == kernel)
        names = [key_for(shape, m).name for m in (1, 64, 4096)]
        lines.append(f"| {kernel} | " + " | ".join(names) + " |")
    return "\n".join(lines)


def write_docs() -> None:
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCS.write_text(f"{before}{BEGIN}\n{tables(json.loads(RESULTS.read_text()))}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("compile", "docs"))
    {"compile": compile_all, "docs": write_docs}[parser.parse_args().action]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
