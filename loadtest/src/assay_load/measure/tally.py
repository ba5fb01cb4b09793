"""Everything that is counted about requests, in a form that merges exactly between processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay_load.measure.histogram import Histogram
from assay_load.stream.client import Outcome
from assay_load.workload.schema import Slo

METRICS = {
    "ttft": "Time to the first content, reasoning or tool token, from when the request was due",
    "ttft_content": "Time to the first content token, from when the request was due",
    "ttft_reasoning": "Time to the first reasoning token, from when the request was due",
    "ttft_service": "Time to the first token, from when the request was sent",
    "itl": "Gap between two chunks with text, each counted",
    "tpot": "Mean time per output token after the first, one value a request",
    "e2e": "Time to the end of the answer, from when the request was due",
    "start_lag": "How much later than due the request was sent",
}
COUNTS = (
    "requests", "good", "failed", "interrupted", "prompt_tokens", "completion_tokens", "chunks",
    "bytes",
)  # fmt: skip


@dataclass
class Group:
    """Requests of one stage and class that were measured. `requests` ended well; `failed` did not;
    `interrupted` were cut by the end of the run and count as neither."""

    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    first_due: float | None = None
    """Wall clock, seconds."""
    last_end: float | None = None

    def histogram(self, metric: str) -> Histogram:
        assert metric in METRICS, metric
        return self.histograms.setdefault(metric, Histogram())

    def widen(self, due: float | None, end: float | None) -> None:
        if due is not None:
            self.first_due = due if self.first_due is None else min(due, self.first_due)
        if end is not None:
            self.last_end = end if self.last_end is None else max(end, self.last_end)

    def merge(self, other: Group) -> None:
        self.counts.update(other.counts)
        for metric, histogram in other.histograms.items():
            self.histogram(metric).merge(histogram)
        self.widen(other.first_due, other.last_end)

    def to_wire(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "histograms": {m: h.to_wire() for m, h in self.histograms.items()},
            "first_due": self.first_due,
            "last_end": self.last_end,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Group:
        histograms = {m: Histogram.from_wire(h) for m, h in wire["histograms"].items()}
        return cls(Counter(wire["counts"]), histograms, wire["first_due"], wire["last_end"])


SECOND = ("started", "ended", "failed", "tokens", "busy")
"""What the timeline counts in each second of the wall clock. Tokens stand in the second in which
their chunk came; `busy` is the time that requests ran in that second, so their mean number."""


class Tally:
    """`groups` by (stage, class); `errors` by kind, the warm-up's too; `seconds` by wall second."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], Group] = {}
        self.errors: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        """One example of each kind of error."""
        self.seconds: dict[int, defaultdict[str, float]] = {}
        self.warmup_requests = 0

    def group(self, stage: str, name: str) -> Group:
        return self.groups.setdefault((stage, name), Group())

    def second(self, wall: float) -> defaultdict[str, float]:
        return self.seconds.setdefault(int(wall), defaultdict(float))

    def record(
        self, outcome: Outcome, stage: str | None, name: str, slo: Slo, wall_offset: float
    ) -> None:
        """One ended request; `stage` None: a warm-up. `wall_offset` turns monotonic into wall."""
        self.second(outcome.sent + wall_offset)["started"] += 1
        self.second(outcome.ended + wall_offset)["ended"] += 1
        if outcome.error is not None:
            self.second(outcome.ended + wall_offset)["failed"] += 1
            self.errors[outcome.error.kind] += 1
            self.details.setdefault(outcome.error.kind, str(outcome.error)[:500])
        self._timeline(outcome, wall_offset)
        if stage is None:
            self.warmup_requests += 1
            return
        group = self.group(stage, name)
        if outcome.error is not None:
            group.counts["failed"] += 1
            group.widen(outcome.due + wall_offset, outcome.ended + wall_offset)
            return
        answer = outcome.answer
        assert answer.first is not None
        assert answer.last is not None
        group.widen(outcome.due + wall_offset, answer.last + wall_offset)
        tokens = answer.completion_tokens
        times = {
            "ttft": answer.first - outcome.due,
            "ttft_service": answer.first - outcome.sent,
            "e2e": outcome.ended - outcome.due,
            "start_lag": outcome.sent - outcome.due,
        }
        if answer.first_content is not None:
            times["ttft_content"] = answer.first_content - outcome.due
        if answer.first_reasoning is not None:
            times["ttft_reasoning"] = answer.first_reasoning - outcome.due
        if tokens > 1:
            times["tpot"] = (answer.last - answer.first) / (tokens - 1)
        for metric, seconds in times.items():
            group.histogram(metric).add(seconds)
        if len(answer.arrivals) > 1:
            group.histogram("itl").add_many(np.diff(np.frombuffer(answer.arrivals)))
        group.counts.update(
            requests=1,
            good=int(is_good(times, slo)),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=tokens,
            chunks=len(answer.arrivals),
            bytes=answer.bytes,
        )

    def interrupted(self, stage: str | None, name: str) -> None:
        if stage is not None:
            self.group(stage, name).counts["interrupted"] += 1

    def _timeline(self, outcome: Outcome, wall_offset: float) -> None:
        begin, end = outcome.sent + wall_offset, outcome.ended + wall_offset
        for at in range(int(begin), int(end) + 1):
            self.second(at)["busy"] += min(end, at + 1) - max(begin, at)
        arrivals = outcome.answer.arrivals
        if not arrivals:
            return
        # Of a failed request the server's count is not known: a chunk is taken for a token.
        weight = (outcome.answer.completion_tokens or len(arrivals)) / len(arrivals)
        wall = np.floor(np.frombuffer(arrivals) + wall_offset).astype(np.int64)
        for second, count in zip(*np.unique(wall, return_counts=True), strict=True):
            self.second(int(second))["tokens"] += float(count * weight)

    def merge(self, other: Tally) -> None:
        for (stage, name), group in other.groups.items():
            self.group(stage, name).merge(group)
        self.errors.update(other.errors)
        for kind, detail in other.details.items():
            self.details.setdefault(kind, detail)
        for second, counts in other.seconds.items():
            mine = self.second(second)
            for key, count in counts.items():
                mine[key] += count
        self.warmup_requests += other.warmup_requests

    def to_wire(self) -> dict[str, Any]:
        """As JSON and MessagePack hold it."""
        return {
            "groups": [[stage, name, g.to_wire()] for (stage, name), g in self.groups.items()],
            "errors": dict(self.errors),
            "details": self.details,
            "seconds": {str(second): dict(counts) for second, counts in self.seconds.items()},
            "warmup_requests": self.warmup_requests,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Tally:
        made = cls()
        made.groups = {(s, n): Group.from_wire(g) for s, n, g in wire["groups"]}
        made.errors = Counter(wire["errors"])
        made.details = dict(wire["details"])
        made.seconds = {int(s): defaultdict(float, c) for s, c in wire["seconds"].items()}
        made.warmup_requests = wire["warmup_requests"]
        return made


def is_good(times: Mapping[str, float], slo: Slo) -> bool:
    """Does a request keep its objectives? A request of one token has no TPOT to miss."""
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2e": slo.e2e_ms}
    return all(
        limit is None or metric not in times or times[metric] * 1000 <= limit
        for metric, limit in limits.items()
    )
