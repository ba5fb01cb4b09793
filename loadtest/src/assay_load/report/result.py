"""The result of one run as JSON; `result.schema.json` beside this file is made from these models
(`assay-load schema`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from assay_load.errors import InputError
from assay_load.measure.histogram import RELATIVE_ERROR, Histogram
from assay_load.measure.tally import METRICS, Group, Tally
from assay_load.strict import Strict, parse

FILE = "result.json"


class Percentiles(Strict):
    """Milliseconds. Percentiles are within `relative_error` of a measured value; mean, min and max
    are exact."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, histogram: Histogram) -> Percentiles | None:
        if not histogram.count:
            return None
        values: dict[str, Any] = {f"p{p}": histogram.percentile(p) for p in (50, 90, 95, 99)}
        assert histogram.smallest is not None
        assert histogram.largest is not None
        return cls(
            count=histogram.count,
            mean=histogram.mean() or 0.0,
            min=histogram.smallest / 1000,
            max=histogram.largest / 1000,
            **values,
        )


@dataclass(frozen=True)
class Window:
    """A stage with a fixed length: what came in it counts, whichever request it belongs to."""

    seconds: float
    output_tokens_per_second: float


class Figures(Strict):
    """Measured requests of a stage and a class; warm-up requests are not among them."""

    stage: str
    name: str = Field(description="The class; * for all of them together")
    load: float | None = Field(
        None, description="Concurrency of a step, or sessions a second of a ramp's window"
    )
    requests: int = Field(description="Requests that ended well")
    good: int = Field(description="Those of them that kept the SLO")
    failed: int
    interrupted: int = Field(description="Requests cut by the end of the run: neither well nor ill")
    prompt_tokens: int
    completion_tokens: int
    chunks: int = Field(description="Pieces of the streams that carried text")
    seconds: float = Field(
        description="From the first request due to the last token; of a step, its measured time"
    )
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput: float = Field(description="Good requests a second")
    good_share: float = Field(description="Good requests of all that ended, failed ones included")
    metrics: dict[str, Percentiles] = Field(description="; ".join(METRICS))

    @classmethod
    def of(
        cls,
        stage: str,
        name: str,
        group: Group,
        load: float | None = None,
        window: Window | None = None,
    ) -> Figures:
        counts = group.counts
        seconds = 0.0
        if group.first_due is not None and group.last_end is not None:
            seconds = max(0.0, group.last_end - group.first_due)
        if window is not None:
            seconds = window.seconds

        def rate(count: int) -> float:
            return count / seconds if seconds else 0.0

        ended = counts["requests"] + counts["failed"]
        output = rate(counts["completion_tokens"])
        if window is not None:
            output = window.output_tokens_per_second
        metrics = {m: Percentiles.of(group.histograms[m]) for m in METRICS if m in group.histograms}
        return cls(
            stage=stage,
            name=name,
            load=load,
            requests=counts["requests"],
            good=counts["good"],
            failed=counts["failed"],
            interrupted=counts["interrupted"],
            prompt_tokens=counts["prompt_tokens"],
            completion_tokens=counts["completion_tokens"],
            chunks=counts["chunks"],
            seconds=seconds,
            requests_per_second=rate(counts["requests"]),
            output_tokens_per_second=output,
            total_tokens_per_second=output + rate(counts["prompt_tokens"]),
            goodput=rate(counts["good"]),
            good_share=counts["good"] / ended if ended else 0.0,
            metrics={m: p for m, p in metrics.items() if p is not None},
        )


class Second(Strict):
    """One second of the run; `tokens` in the second in which they came."""

    at: int = Field(description="Seconds from the start")
    started: float
    ended: float
    failed: float
    tokens: float
    busy: float = Field(description="Mean number of requests that ran")


class ServerPoint(Strict):
    at: float = Field(description="Seconds from the start")
    values: dict[str, float]


class Server(Strict):
    """The server's own series, sampled beside the run; counters start at 0."""

    points: list[ServerPoint]
    restarted: str | None = Field(description="How a restart during the run was seen")
    started: float | None = Field(description="When the process started, seconds since the epoch")
    missing: str | None = Field(description="Why there are no series")


class Cost(Strict):
    gpus: int
    gpu_minutes: float
    gpu_hour_price: float | None
    per_million_output_tokens: float | None
    per_million_tokens: float | None


class Client(Strict):
    """The load generator itself."""

    version: str
    commit: str | None
    python: str
    processor: str
    cores: int
    workers: int
    cpu_share: float = Field(description="Busiest worker process: CPU seconds a second")
    start_lag_ms: float = Field(description="Longest wait of a due session for a free user")


class Sparse(Strict):
    """A histogram: bucket number to count, see measure/histogram.py."""

    counts: dict[str, int]
    sum_us: int
    min_us: int | None
    max_us: int | None


class RunResult(Strict):
    format: Literal["assay-load/1"] = "assay-load/1"
    started: float = Field(description="Seconds since the epoch")
    seconds: float = Field(description="The whole run, warm-up included")
    complete: bool
    incomplete_because: list[str]
    url: str
    model: str
    workload: dict[str, Any]
    scale: str | None
    corpus: str = Field(description="Name and digest of the text that prompts were cut from")
    characters_per_token: float
    expected_requests: int | None = Field(description="None where time ends the run")
    warmup_requests: int
    errors: dict[str, int] = Field(description="By kind, the warm-up's included")
    error_examples: dict[str, str]
    figures: Figures = Field(description="All measured requests together")
    stages: list[Figures] = Field(description="By stage and class, and by stage alone")
    histograms: dict[str, Sparse] = Field(description="Of all measured requests, by metric")
    relative_error: float = RELATIVE_ERROR
    timeline: list[Second]
    server: Server
    client: Client
    cost: Cost | None

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def histogram(self, metric: str) -> Histogram:
        if metric not in self.histograms:
            return Histogram()
        return Histogram.from_wire(self.histograms[metric].model_dump())

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        whole.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        whole.replace(path)
        return path


def read(path: Path) -> RunResult:
    """A result file; raises InputError."""
    import json

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    return parse(data, RunResult, str(path))


def figures_by_stage(
    tally: Tally, loads: dict[str, float], windows: dict[str, Window]
) -> list[Figures]:
    """Each stage as a whole, then its classes if there are several."""
    stages: dict[str, dict[str, Group]] = {}
    for (stage, name), group in tally.groups.items():
        stages.setdefault(stage, {})[name] = group
    out = []
    for stage, groups in stages.items():
        load = loads.get(stage)
        out.append(Figures.of(stage, "*", merged(groups.values()), load, windows.get(stage)))
        if len(groups) > 1:
            out += [Figures.of(stage, name, group, load) for name, group in groups.items()]
    return out


def merged(groups: Any) -> Group:
    whole = Group()
    for group in groups:
        whole.merge(group)
    return whole
