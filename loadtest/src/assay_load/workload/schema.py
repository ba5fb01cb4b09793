"""A workload: one YAML file. Unknown keys are errors; docs/load.md explains every key."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from assay_load.errors import InputError
from assay_load.strict import Strict, parse, read_yaml

NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]

TEMPLATE_TOKENS = 24
"""Tokens that V4's chat encoding adds around a short conversation: a margin, not a measurement."""

# --- lengths, in tokens ---------------------------------------------------------------------------


class Constant(Strict):
    kind: Literal["constant"]
    tokens: PositiveInt

    def largest(self) -> int:
        return self.tokens


class Uniform(Strict):
    kind: Literal["uniform"]
    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is larger than max {self.max}")
        return self

    def largest(self) -> int:
        return self.max


class LogNormal(Strict):
    """Clipped to min .. max; `sigma` is the standard deviation of the logarithm."""

    kind: Literal["lognormal"]
    median: PositiveInt
    sigma: PositiveFloat
    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.median <= self.max:
            raise ValueError(f"min {self.min} <= median {self.median} <= max {self.max} is needed")
        return self

    def largest(self) -> int:
        return self.max


class Choice(Strict):
    """One of `tokens`, with `weights` (equal ones if left out)."""

    kind: Literal["choice"]
    tokens: Annotated[list[PositiveInt], Field(min_length=1)]
    weights: list[PositiveFloat] | None = None

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.tokens):
            raise ValueError(f"{len(self.weights)} weights for {len(self.tokens)} lengths")
        return self

    def largest(self) -> int:
        return max(self.tokens)


Length = Annotated[Constant | Uniform | LogNormal | Choice, Field(discriminator="kind")]

# --- arrivals -------------------------------------------------------------------------------------


class ClosedLoop(Strict):
    """`concurrency` users; each starts its next session when the last one has ended."""

    kind: Literal["closed-loop"]
    concurrency: PositiveInt


class Open(Strict):
    """Sessions start when they are due, whatever the server does, while `pool` has a user free.

    A session that had to wait for a user counts from when it was due.
    """

    pool: PositiveInt = 512


class Poisson(Open):
    kind: Literal["poisson"]
    rate: PositiveFloat
    """Sessions a second."""


class Bursty(Open):
    """Gamma-distributed gaps: burstiness 1 is Poisson, below 1 comes in bursts, above 1 is more
    regular; the name and meaning are those of `vllm bench serve`."""

    kind: Literal["bursty"]
    rate: PositiveFloat
    burstiness: PositiveFloat


class Ramp(Open):
    """A Poisson stream whose rate goes from `start_rate` to `end_rate` in a straight line over the
    time of the run, reported in `windows` equal parts."""

    kind: Literal["ramp"]
    start_rate: PositiveFloat
    end_rate: PositiveFloat
    windows: PositiveInt = 5


class Steps(Strict):
    """Closed loop with growing concurrency: each of `concurrency` runs for `seconds`, of which the
    first `settle_seconds` are not measured. The first step that raises the output tokens/s by less
    than `min_gain` over the step before, or whose goodput share falls below `min_goodput`, is the
    last: the server is saturated."""

    kind: Literal["steps"]
    concurrency: Annotated[list[PositiveInt], Field(min_length=2)]
    seconds: PositiveFloat
    settle_seconds: NonNegative = 0.0
    min_gain: NonNegative = 0.05
    min_goodput: Share = 0.0

    @model_validator(mode="after")
    def _growing(self) -> Self:
        if sorted(set(self.concurrency)) != self.concurrency:
            raise ValueError("concurrency: each step must be larger than the one before")
        if self.settle_seconds >= self.seconds:
            raise ValueError("settle_seconds must be shorter than seconds")
        return self


Arrival = Annotated[
    ClosedLoop | Poisson | Bursty | Ramp | Steps,
    Field(discriminator="kind"),
]

# --- what is asked --------------------------------------------------------------------------------


class Prefix(Strict):
    """Text that requests have in common, at the front: `groups` different ones, in turn."""

    tokens: PositiveInt
    groups: PositiveInt = 1


class RequestClass(Strict):
    """One kind of session. `input` is the user's new text in a turn; a prefix, tools and the turns
    before come on top. The answer has `output` tokens: exactly (end-of-sequence is ignored), or at
    most (`natural`)."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    weight: PositiveFloat = 1.0
    input: Length
    output: Length
    ending: Literal["exact", "natural"] = "exact"
    thinking: bool = False
    prefix: Prefix | None = None
    turns: PositiveInt = 1
    """Requests in a session; each holds the ones before it."""
    think_seconds: NonNegative = 0.0
    """Mean of the (exponential) pause between two turns, and after a closed-loop session."""
    tools: Count = 0
    """Tools offered, out of the six in workload/tools.py; a turn but the first then carries a call
    and its result, `input` tokens long, instead of a user's text."""
    temperature: NonNegative = 1.0

    @model_validator(mode="after")
    def _known_tools(self) -> Self:
        from assay_load.workload.tools import TOOLS

        if self.tools > len(TOOLS):
            raise ValueError(f"tools: there are {len(TOOLS)}")
        return self

    def longest(self) -> int:
        """Tokens of the longest prompt and answer together; tools are not in it."""
        turn = self.input.largest() + TEMPLATE_TOKENS
        prefix = self.prefix.tokens if self.prefix else 0
        # Earlier answers are scripted and short: see plan.py.
        return prefix + self.turns * turn + self.output.largest()


class Stop(Strict):
    """When the run is over: after so many measured sessions, or so many measured seconds.
    Steps end by themselves and have no `stop`."""

    sessions: PositiveInt | None = None
    seconds: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.sessions is None) == (self.seconds is None):
            raise ValueError("exactly one of sessions and seconds is needed")
        return self


class Warmup(Strict):
    """Sessions at the front that are not measured; their failures count all the same."""

    sessions: Count = 0


class Slo(Strict):
    """A request is good if it keeps all of these; goodput counts good requests."""

    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None
    e2e_ms: PositiveFloat | None = None


class Abort(Strict):
    """When to give up: what was measured until then is kept, the run is marked incomplete."""

    failed_share: Share = 0.5
    """Checked once `after_requests` have ended."""
    after_requests: PositiveInt = 20
    start_lag_seconds: PositiveFloat = 30.0
    """Open arrivals: a session that waited longer for a free user."""
    seconds: PositiveFloat = 7200.0
    """The whole run, warm-up and drain included."""


class Scale(Strict):
    """What changes for a smaller or larger server. Keys that are left out change nothing."""

    lengths: PositiveFloat = 1.0
    """Factor on every length, prefixes included; never below one token."""
    rate: PositiveFloat | None = None
    """Poisson, bursty: the rate. Ramp: the end rate; the start keeps its proportion."""
    concurrency: PositiveInt | list[PositiveInt] | None = None
    step_seconds: PositiveFloat | None = None
    sessions: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    warmup_sessions: Count | None = None
    slo: Slo | None = None
    corpus: str | None = None
    think: NonNegative = 1.0
    """Factor on think_seconds."""
    tools: Count | None = None
    """At most so many tools."""
    context: PositiveInt | None = None


class Workload(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    about: str
    arrival: Arrival
    classes: Annotated[list[RequestClass], Field(min_length=1)]
    stop: Stop | None = None
    warmup: Warmup = Warmup()
    slo: Slo = Slo()
    abort: Abort = Abort()
    corpus: str = "python-reference"
    """`python-reference`, `miniature`, or a path to a text file (corpus.py)."""
    seed: int = 1
    timeout_seconds: PositiveFloat = 600.0
    """Of one request."""
    drain_seconds: NonNegative = 120.0
    """How long requests may still run once no new ones start."""
    context: PositiveInt = 131072
    """Tokens that prompt and answer may have together."""
    stream: Literal[True] = True
    """Only streaming answers have a TTFT; other runs are refused."""
    scales: dict[str, Scale] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        steps = isinstance(self.arrival, Steps)
        if steps and self.stop is not None:
            raise ValueError("stop: steps end by themselves, leave it out")
        if not steps and self.stop is None:
            raise ValueError("stop: is missing")
        if isinstance(self.arrival, Ramp) and (self.stop is None or self.stop.seconds is None):
            raise ValueError("stop: a ramp needs seconds")
        names = [c.name for c in self.classes]
        if len(set(names)) != len(names):
            raise ValueError("classes: two have the same name")
        for c in self.classes:
            if c.longest() > self.context:
                raise ValueError(
                    f"classes.{c.name}: up to {c.longest()} tokens, context is {self.context}"
                )
        return self

    def users(self) -> int:
        """Locust users at the start: the concurrency, or the pool that open arrivals draw on."""
        match self.arrival:
            case ClosedLoop(concurrency=users):
                return users
            case Steps(concurrency=steps):
                return steps[0]
            case Open(pool=pool):
                return pool
        raise AssertionError(self.arrival)

    def scaled(self, name: str | None) -> Workload:
        """The workload under one of its own scales; raises InputError for a name it lacks."""
        if name is None:
            return self
        if name not in self.scales:
            known = ", ".join(sorted(self.scales)) or "none"
            raise InputError(f"workload {self.name}: no scale {name!r} (there is: {known})")
        return parse(_apply(self, self.scales[name]), Workload, f"{self.name} scaled by {name}")


def _apply(workload: Workload, scale: Scale) -> dict[str, Any]:
    data = workload.model_dump(exclude_none=True)
    data["arrival"] = arrival = dict(data["arrival"])
    if scale.rate is not None and "rate" in arrival:
        arrival["rate"] = scale.rate
    if scale.rate is not None and "end_rate" in arrival:
        arrival["start_rate"] *= scale.rate / arrival["end_rate"]
        arrival["end_rate"] = scale.rate
    if scale.concurrency is not None and "concurrency" in arrival:
        arrival["concurrency"] = scale.concurrency
    if scale.step_seconds is not None and "settle_seconds" in arrival:
        arrival["settle_seconds"] *= scale.step_seconds / arrival["seconds"]
        arrival["seconds"] = scale.step_seconds
    for c in data["classes"]:
        c["input"] = _shorter(c["input"], scale.lengths)
        c["output"] = _shorter(c["output"], scale.lengths)
        if "prefix" in c:
            c["prefix"] = _shorter(c["prefix"], scale.lengths)
        c["think_seconds"] *= scale.think
        if scale.tools is not None:
            c["tools"] = min(c["tools"], scale.tools)
    if scale.sessions is not None:
        data["stop"] = {"sessions": scale.sessions}
    if scale.seconds is not None:
        data["stop"] = {"seconds": scale.seconds}
    if scale.warmup_sessions is not None:
        data["warmup"] = {"sessions": scale.warmup_sessions}
    for key in ("slo", "corpus", "context"):
        if (value := getattr(scale, key)) is not None:
            data[key] = value.model_dump(exclude_none=True) if key == "slo" else value
    return data


def _shorter(length: dict[str, Any], factor: float) -> dict[str, Any]:
    def one(tokens: int) -> int:
        return max(1, math.ceil(tokens * factor))

    out = dict(length)
    for key in ("tokens", "min", "max", "median"):
        if isinstance(out.get(key), list):
            out[key] = [one(t) for t in out[key]]
        elif key in out:
            out[key] = one(out[key])
    return out


# --- where they are -------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """Name and file of each workload in the package."""
    folder = Path(str(resources.files("assay_load"))) / "workloads"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(name_or_path: str, scale: str | None = None) -> Workload:
    """A shipped workload by name, or any by its path ending in .yaml; scaled if asked."""
    known = shipped()
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    elif name_or_path in known:
        path = known[name_or_path]
    else:
        raise InputError(
            f"no workload {name_or_path!r}: give a path to a .yaml, or one of {listed(known)}"
        )
    workload = read_yaml(path, Workload)
    if workload.name != path.stem:
        raise InputError(f"{path}: name: must be the file's, {path.stem!r} (is {workload.name!r})")
    for each in workload.scales:
        workload.scaled(each)
    return workload.scaled(scale)


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
