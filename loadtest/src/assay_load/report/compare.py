"""Is B slower than A? Two sets of repeated runs of one workload, held against each other."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from assay_load.errors import InputError
from assay_load.report.result import FILE, RunResult, read

METRICS = (
    "output_tokens_per_second", "goodput", "ttft.p50", "ttft.p99", "itl.p50", "itl.p99", "tpot.p50",
    "e2e.p50",
)  # fmt: skip
LARGER_IS_BETTER = ("output_tokens_per_second", "goodput")
LEAST_RUNS = 3
RESAMPLES = 10_000
SEED = 1
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Row:
    """`slowdown` is B against A, with the ends of its interval: 0.1 means 10 % longer, or a rate
    divided by 1.1. `verdict`: same, slower, or unclear."""

    metric: str
    a: float
    b: float
    slowdown: float
    low: float
    high: float
    verdict: str


def compare(a: Path, b: Path, margin: float, json_path: Path | None) -> int:
    """Print the table; 0 nothing is slower by more than the margin, 1 something is, 2 unclear."""
    if margin < 0:
        raise InputError("--margin: must not be negative")
    rows = table(results(a), results(b), margin)
    print(markdown(rows, margin))
    if json_path is not None:
        rows_json = [asdict(row) for row in rows]
        json_path.write_text(json.dumps({"margin": margin, "rows": rows_json}, indent=1) + "\n")
    verdicts = {row.verdict for row in rows}
    return 1 if "slower" in verdicts else 2 if "unclear" in verdicts else 0


def results(path: Path) -> list[RunResult]:
    """A result file, or every one below a folder; raises InputError."""
    files = [path] if path.is_file() else sorted(path.rglob(FILE))
    found = [read(file) for file in files]
    if len(found) < LEAST_RUNS:
        raise InputError(
            f"{path}: {len(found)} results, at least {LEAST_RUNS} are needed to know their spread"
            " (assay-load run --repeat)"
        )
    bad = [str(f) for f, r in zip(files, found, strict=True) if not r.complete or r.failed]
    if bad:
        raise InputError(f"incomplete or with failed requests: {', '.join(bad)}")
    return found


def table(a: list[RunResult], b: list[RunResult], margin: float) -> list[Row]:
    works = {json.dumps([r.workload, r.corpus], sort_keys=True) for r in (*a, *b)}
    if len(works) > 1:
        raise InputError("the results are of different workloads, scales or texts")
    rows = []
    for metric in METRICS:
        before, after = values(metric, a), values(metric, b)
        if before is not None and after is not None:
            rows.append(row(metric, before, after, margin))
    return rows


def values(metric: str, results: list[RunResult]) -> list[float] | None:
    out = []
    for result in results:
        name, _, statistic = metric.partition(".")
        if not statistic:
            value = float(getattr(result.figures, name))
        elif name in result.figures.metrics:
            value = float(getattr(result.figures.metrics[name], statistic))
        else:
            return None
        if value <= 0:
            return None
        out.append(value)
    return out


def row(metric: str, a: list[float], b: list[float], margin: float) -> Row:
    """Ratio of geometric means, with a bootstrap interval over runs (percentile method; deviations
    widened by sqrt(n / (n - 1)), for resamples of few runs vary too little)."""
    rng = np.random.default_rng(SEED)

    def means(values: list[float]) -> tuple[float, np.ndarray]:
        logs = np.log(values)
        drawn = rng.choice(logs, size=(RESAMPLES, len(logs))).mean(axis=1)
        widening = math.sqrt(len(logs) / (len(logs) - 1))
        return float(logs.mean()), logs.mean() + widening * (drawn - logs.mean())

    mean_a, drawn_a = means(a)
    mean_b, drawn_b = means(b)
    sign = -1 if metric in LARGER_IS_BETTER else 1
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.expm1(sign * (drawn_b - drawn_a)), [tail, 100 - tail])
    verdict = "slower" if low > margin else "same" if high <= margin else "unclear"
    slowdown = math.expm1(sign * (mean_b - mean_a))
    return Row(
        metric, math.exp(mean_a), math.exp(mean_b), slowdown, float(low), float(high), verdict
    )


def markdown(rows: list[Row], margin: float) -> str:
    lines = [
        f"| metric | A | B | B is slower by | {CONFIDENCE:.0%} interval | beyond {margin:.0%}? |",
        "|---|---|---|---|---|---|",
    ]
    words = {"same": "no", "slower": "**yes**", "unclear": "cannot tell"}
    lines += [
        f"| {r.metric} | {r.a:.2f} | {r.b:.2f} | {r.slowdown:+.1%} | {r.low:+.1%} .. {r.high:+.1%}"
        f" | {words[r.verdict]} |"
        for r in rows
    ]
    return "\n".join(lines)
