"""A release policy: one YAML file. Unknown keys are errors; docs/gate.md explains every key."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from assay_load.errors import InputError
from assay_load.measure.tally import METRICS
from assay_load.report.result import Figures
from assay_load.strict import Strict, read_yaml
from assay_load.workload import schema

LARGER_IS_BETTER = (
    "output_tokens_per_second", "total_tokens_per_second", "requests_per_second", "goodput",
    "good_share",
)  # fmt: skip
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
METRIC_NAMES = (*LARGER_IS_BETTER, *(f"{m}.{s}" for m in METRICS for s in STATISTICS))


def larger_is_better(metric: str) -> bool:
    return metric in LARGER_IS_BETTER


def value_of(metric: str, figures: Figures) -> float | None:
    """A bound's figure in a result; None if nothing of the kind was measured."""
    if larger_is_better(metric):
        return float(getattr(figures, metric))
    name, _, statistic = metric.partition(".")
    percentiles = figures.metrics.get(name)
    return None if percentiles is None else float(getattr(percentiles, statistic))


class Bound(Strict):
    """On the median over the repetitions: not beyond `limit`, or not slower than the baseline's
    median by more than `margin` (0.1: 10 % longer, or 1/1.1 of the rate)."""

    metric: str
    limit: PositiveFloat | None = None
    """Smallest value of a rate or share, largest of a latency (ms)."""
    margin: PositiveFloat | None = None
    source: str | None = None
    """Where a limit comes from; needed with one."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.metric not in METRIC_NAMES:
            raise ValueError(f"metric: unknown; there are {', '.join(METRIC_NAMES)}")
        if (self.limit is None) == (self.margin is None):
            raise ValueError("exactly one of limit and margin is needed")
        if self.limit is not None and self.source is None:
            raise ValueError("source: a limit must say where it comes from")
        return self


class Load(Strict):
    """A workload and what it is held to. Zero failed requests and the exact number of completions
    are always asked for."""

    workload: str
    scale: str | None = None
    bounds: Annotated[list[Bound], Field(min_length=1)]

    @model_validator(mode="after")
    def _ends_by_count(self) -> Self:
        workload = schema.load(self.workload, self.scale)
        if workload.stop is None or workload.stop.sessions is None:
            raise ValueError(
                f"workload {self.workload!r}: must end after a number of sessions, or the number"
                " of completions could not be exact"
            )
        return self

    @property
    def key(self) -> str:
        name = Path(self.workload).stem
        return name if self.scale is None else f"{name}@{self.scale}"


class Suite(Strict):
    """A suite of `assay-smoke`."""

    suite: str
    tier: Literal["ready", "default", "full"]
    checks: list[str] = Field(default_factory=list)
    """Only these; all if empty."""


class UnderLoad(Suite):
    """The suite while a workload runs, for as long as the suite takes."""

    workload: str
    scale: str | None = None
    concurrency: PositiveInt
    """Of the workload, then a closed loop."""


class Coherence(Strict):
    before: Suite
    under_load: UnderLoad
    after: Suite


class Server(Strict):
    """What must be there. Anything else makes the run invalid."""

    model: str
    arch: str | None = None
    """As `assay_info` on the server's /metrics names it."""
    metrics: bool = True
    """The server must show its series: without them a restart would go unseen."""


class Policy(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")]
    about: str
    profile: str
    """The launch profile that the numbers are for."""
    hardware: str
    """`local-cpu`: the processor of this machine; else a name that the operator vouches for."""
    unmeasured: bool = False
    """The authors have never run this policy on that hardware."""
    server: Server
    repetitions: PositiveInt
    coherence: Coherence | None
    """None only where there is no language model to ask, as in a test of the gate itself."""
    loads: Annotated[list[Load], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.repetitions % 2 == 0 or self.repetitions < 3:
            raise ValueError("repetitions: must be odd and at least 3, for a median and a spread")
        keys = [load.key for load in self.loads]
        if len(set(keys)) != len(keys):
            raise ValueError("loads: the same workload and scale stand there twice")
        return self


def shipped() -> dict[str, Path]:
    """Name and file of each policy in the package."""
    folder = Path(str(resources.files("assay_load"))) / "policies"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(name_or_path: str) -> Policy:
    """A shipped policy by name, or any by its path ending in .yaml; raises InputError."""
    known = shipped()
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    elif name_or_path in known:
        path = known[name_or_path]
    else:
        raise InputError(
            f"no policy {name_or_path!r}: give a path to a .yaml, or one of " + schema.listed(known)
        )
    policy = read_yaml(path, Policy)
    if policy.name != path.stem:
        raise InputError(f"{path}: name: must be the file's, {path.stem!r} (is {policy.name!r})")
    return policy
