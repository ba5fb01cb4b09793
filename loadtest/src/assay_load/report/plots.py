"""Plots of a result, as PNG bytes by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from assay_load.report.result import RunResult

INK = {"a": "#1f5fa8", "b": "#c4511f", "c": "#3a7d44", "d": "#7a4ca0"}
SIZE = (7.0, 3.6)


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure = Figure(figsize=SIZE, dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _staged(result: RunResult) -> list[Any]:
    return sorted((f for f in result.stages if f.name == "*" and f.load), key=lambda f: f.load or 0)


def _load_name(result: RunResult) -> str:
    ramp = result.workload["arrival"]["kind"] == "ramp"
    return "offered sessions/s" if ramp else "concurrency"


def latency_against_load(result: RunResult) -> Any | None:
    stages = [f for f in _staged(result) if "ttft" in f.metrics]
    if len(stages) < 2:
        return None
    figure, axes = _figure("Latency against load", _load_name(result), "TTFT, ms")
    x = [f.load for f in stages]
    for name, style in (("p50", "-o"), ("p99", "--s")):
        axes.plot(x, [getattr(f.metrics["ttft"], name) for f in stages], style, color=INK["a"],
                  label=f"TTFT {name}")  # fmt: skip
    other = axes.twinx()
    other.set_ylabel("ITL, ms")
    with_itl = [f for f in stages if "itl" in f.metrics]
    for name, style in (("p50", "-o"), ("p99", "--s")):
        other.plot([f.load for f in with_itl], [getattr(f.metrics["itl"], name) for f in with_itl],
                   style, color=INK["b"], label=f"ITL {name}")  # fmt: skip
    other.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="upper left")
    return figure


def throughput_against_load(result: RunResult) -> Any | None:
    stages = _staged(result)
    if len(stages) < 2:
        return None
    name = _load_name(result)
    figure, axes = _figure(f"Throughput against {name}", name, "tokens/s")
    x = [f.load for f in stages]
    axes.plot(x, [f.output_tokens_per_second for f in stages], "-o", color=INK["a"], label="output")
    axes.plot(x, [f.total_tokens_per_second for f in stages], "--s", color=INK["c"], label="all")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)
    return figure


def _distribution(result: RunResult, metrics: dict[str, str], title: str) -> Any | None:
    histograms = {label: result.histogram(metric) for metric, label in metrics.items()}
    histograms = {label: h for label, h in histograms.items() if h.count}
    if not histograms:
        return None
    figure, axes = _figure(title, "ms", "share of values up to it")
    for (label, histogram), color in zip(histograms.items(), INK.values(), strict=False):
        points = histogram.points()
        x = [points[0][0], *(ms for ms, _ in points)]
        axes.step(x, [0.0, *(share for _, share in points)], where="post", color=color, label=label)
    if max(h.percentile(99.9) or 0 for h in histograms.values()) > 20 * max(
        min(h.percentile(50) or 1 for h in histograms.values()), 0.1
    ):
        axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def ttft(result: RunResult) -> Any | None:
    metrics = {
        "ttft": "first token",
        "ttft_content": "first content token",
        "ttft_reasoning": "first reasoning token",
        "ttft_service": "first token, from sending",
    }
    return _distribution(result, metrics, "Time to first token")


def itl(result: RunResult) -> Any | None:
    metrics = {"itl": "each gap", "tpot": "mean gap of a request (TPOT)"}
    return _distribution(result, metrics, "Inter-token latency")


def timeline(result: RunResult) -> Any | None:
    if not result.timeline:
        return None
    figure, axes = _figure("Timeline", "seconds from the start", "output tokens/s")
    at = [s.at for s in result.timeline]
    axes.plot(at, [s.tokens for s in result.timeline], color=INK["a"], label="output tokens/s")
    failed = [(s.at, s.tokens) for s in result.timeline if s.failed]
    if failed:
        axes.plot(*zip(*failed, strict=True), "x", color="#c00000", label="a request failed")
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.set_ylabel("requests; KV cache, %")
    busy = [s.busy for s in result.timeline]
    other.step(at, busy, where="post", color=INK["c"], alpha=0.7, label="in flight")
    for key, label, color, factor in (
        ("waiting", "waiting in the server", INK["b"], 1.0),
        ("kv_cache", "KV cache, %", INK["d"], 100.0),
    ):
        points = [(p.at, factor * p.values[key]) for p in result.server.points if key in p.values]
        if points:
            other.plot(*zip(*points, strict=True), color=color, alpha=0.8, lw=1, label=label)
    other.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="lower right")
    return figure


PLOTS: dict[str, Callable[[RunResult], Any | None]] = {
    "latency-against-load": latency_against_load,
    "throughput-against-load": throughput_against_load,
    "ttft": ttft,
    "itl": itl,
    "timeline": timeline,
}


def draw(result: RunResult) -> dict[str, bytes]:
    """PNG bytes by name; a plot that the result has no data for is left out."""
    out = {}
    for name, plot in PLOTS.items():
        if (figure := plot(result)) is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", metadata={"Software": None})
            out[name] = buffer.getvalue()
    return out
