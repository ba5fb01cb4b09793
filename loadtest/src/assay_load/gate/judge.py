"""What repetitions of a workload say about a policy's bounds."""

from __future__ import annotations

import math
import statistics

from assay_load.gate import noise
from assay_load.gate.baseline import Baseline, digest
from assay_load.gate.policy import Bound, Load, larger_is_better, value_of
from assay_load.gate.verdict import BoundFound, Check, Outcome
from assay_load.report.result import RunResult


def counts(load: Load, results: list[RunResult]) -> Check:
    """Zero failed requests, and exactly as many completions as planned, in every repetition."""
    problems = []
    for number, result in enumerate(results, 1):
        where = f"repetition {number}"
        if result.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.errors.items()))
            problems.append(f"{where}: {result.failed} failed requests ({kinds})")
        elif not result.complete:
            problems.append(f"{where}: incomplete: {'; '.join(result.incomplete_because)}")
        elif result.figures.requests != result.expected_requests:
            expected = result.expected_requests
            problems.append(f"{where}: {result.figures.requests} completions, not {expected}")
    total = sum(result.figures.requests for result in results)
    return Check(
        part=load.key,
        name="requests",
        outcome="fail" if problems else "pass",
        reason="; ".join(problems)
        or f"{total} requests in {len(results)} repetitions, none failed",
        seconds=sum(result.seconds for result in results),
    )


def bound(
    load: Load, rule: Bound, results: list[RunResult], baseline: Baseline | None
) -> tuple[Check, BoundFound | None]:
    """The check, and the figures behind it if there are any."""

    def check(outcome: Outcome, reason: str) -> Check:
        return Check(part=load.key, name=rule.metric, outcome=outcome, reason=reason)

    found = [value_of(rule.metric, result.figures) for result in results]
    values = [v for v in found if v is not None]
    if len(values) < len(results) or not values:
        return check("invalid", "not every repetition measured it"), None
    known = baseline.loads.get(load.key) if baseline else None
    if known is not None and known.digest != digest(results[0]):
        return check("invalid", "the baseline is of another version of the workload or text"), None
    before = known.values.get(rule.metric) if known else None
    median = statistics.median(values)
    up = larger_is_better(rule.metric)
    slow = seen = base = None
    if before:
        base = statistics.median(before)
        slow = noise.slowdown(median, base, up) if median > 0 and base > 0 else math.inf
        seen = noise.detectable(values, before)
    figures = BoundFound(
        load=load.key, metric=rule.metric, values=values, median=median, limit=rule.limit,
        margin=rule.margin, source=rule.source, baseline=base,
        slowdown=slow if slow is None or math.isfinite(slow) else None,
        detectable=seen if seen is None or math.isfinite(seen) else None,
    )  # fmt: skip
    if before is None or slow is None or seen is None:
        text = f"median {median:.4g}, but this bound was never measured on this hardware"
        return check("invalid", text), figures
    if rule.limit is not None:
        return check(*_limited(rule.limit, median, up)), figures
    assert rule.margin is not None
    return check(*_relative(rule.margin, slow, seen)), figures


def _limited(limit: float, median: float, up: bool) -> tuple[Outcome, str]:
    kept = median >= limit if up else median <= limit
    rule = "at least" if up else "at most"
    return "pass" if kept else "fail", f"median {median:.4g}, {rule} {limit:g} is asked for"


def _relative(margin: float, slow: float, seen: float) -> tuple[Outcome, str]:
    what = f"{slow:+.1%} against the baseline, {margin:.0%} allowed"
    noise_text = f"a slow-down of {seen:.1%} could have been seen"
    if slow > margin + seen:
        return "fail", f"slower: {what}; {noise_text}"
    if seen > margin:
        return "invalid", f"too noisy: {noise_text}, no smaller one; {what}"
    return ("fail" if slow > margin else "pass"), f"{what}; {noise_text}"
