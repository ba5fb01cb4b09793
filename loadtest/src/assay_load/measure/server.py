"""The server's own Prometheus series, sampled beside a run: queue, KV use, preemptions, restart."""

from __future__ import annotations

import re
from dataclasses import dataclass

GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache": "vllm:kv_cache_usage_perc",
}
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "corrupted": "vllm:corrupted_requests_total",
}
START = "process_start_time_seconds"
_NUMBER = r"(NaN|[+-]?(?:Inf|[0-9.]+(?:[eE][+-]?[0-9]+)?))"


@dataclass(frozen=True)
class Sample:
    """Values by short name, summed over engines (the KV use: the fullest engine); a series that the
    server lacks is left out."""

    wall: float
    values: dict[str, float]
    started: float | None
    """When the server's process started, seconds on the wall clock, where it tells."""


def _values(page: str, name: str) -> list[float]:
    pattern = rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+{_NUMBER}"
    return [float(text) for text in re.findall(pattern, page, re.MULTILINE)]


def parse(page: str, wall: float) -> Sample:
    """Only the lines that are wanted are looked at: a whole parse of vLLM's page takes long enough
    to delay the tokens that this process is timing."""
    values = {}
    for short, name in (GAUGES | COUNTERS).items():
        if found := [v for v in _values(page, name) if v == v]:
            values[short] = max(found) if short == "kv_cache" else sum(found)
    started = _values(page, START)
    return Sample(wall, values, min(started) if started else None)


def restarted(before: Sample, after: Sample) -> str | None:
    """How the second sample tells that the server restarted since the first; None if it did not."""
    if before.started is not None and after.started is not None:
        if after.started > before.started + 0.1:
            return f"its process started {after.started - before.started:.1f} s later than before"
        return None
    for short in COUNTERS:
        old, new = before.values.get(short), after.values.get(short)
        if old is not None and new is not None and new < old:
            return f"{COUNTERS[short]} fell from {old:g} to {new:g}"
    return None
