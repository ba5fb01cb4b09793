"""A result as Markdown: short enough for a pull request, or for a terminal."""

from __future__ import annotations

from assay_load.report.result import Figures, RunResult

SHOWN = {
    "ttft": "TTFT", "ttft_content": "TTFT, content", "ttft_reasoning": "TTFT, reasoning",
    "itl": "ITL", "tpot": "TPOT", "e2e": "end to end",
}  # fmt: skip


def summary(result: RunResult) -> str:
    figures = result.figures
    name = result.workload["name"] + (f" (scale {result.scale})" if result.scale else "")
    lines = [f"### {name} on {result.model}", ""]
    if not result.complete:
        lines += ["**Incomplete:** " + "; ".join(result.incomplete_because), ""]
    expected = f" of {result.expected_requests}" if result.expected_requests else ""
    lines += [
        f"{figures.requests}{expected} requests in {figures.seconds:.1f} s, {result.failed} failed,"
        f" {figures.interrupted} interrupted; {figures.good_share:.1%} within the SLO "
        f"({figures.goodput:.2f} good requests/s); {figures.output_tokens_per_second:.1f} output "
        f"tokens/s, {figures.total_tokens_per_second:.1f} in all",
        "",
    ]
    if result.errors:
        lines += ["| error | count | example |", "|---|---|---|"]
        for kind, count in sorted(result.errors.items()):
            example = " ".join(result.error_examples.get(kind, "").split())[:120]
            lines.append(f"| {kind} | {count} | {example.replace('|', '/')} |")
        lines.append("")
    lines += ["| ms | count | mean | p50 | p90 | p99 | max |", "|---|---|---|---|---|---|---|"]
    for metric, title in SHOWN.items():
        if (p := figures.metrics.get(metric)) is not None:
            cells = " | ".join(f"{v:.1f}" for v in (p.mean, p.p50, p.p90, p.p99, p.max))
            lines.append(f"| {title} | {p.count} | {cells} |")
    lines.append("")
    if len(result.stages) > 1:
        lines += stages(result.stages)
    if result.cost is not None:
        price = result.cost.per_million_output_tokens
        per = f"; {price:.2f} per million output tokens" if price is not None else ""
        lines += [f"{result.cost.gpu_minutes:.2f} GPU-minutes on {result.cost.gpus} GPUs{per}", ""]
    return "\n".join(lines)


def stages(figures: list[Figures]) -> list[str]:
    lines = [
        "| stage | class | requests | failed | output tokens/s | TTFT p50 | TTFT p99 | ITL p50 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in figures:
        ttft, itl = f.metrics.get("ttft"), f.metrics.get("itl")
        times = [
            f"{p:.1f}" if p is not None else ""
            for p in (ttft and ttft.p50, ttft and ttft.p99, itl and itl.p50)
        ]
        lines.append(
            f"| {f.stage} | {f.name} | {f.requests} | {f.failed} | "
            f"{f.output_tokens_per_second:.1f} | {' | '.join(times)} |"
        )
    return [*lines, ""]
