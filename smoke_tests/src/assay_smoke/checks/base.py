"""What a check is, and the registry of them all."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from assay_smoke.errors import SuiteError
from assay_smoke.lab import Lab
from assay_smoke.stats import RateRule
from assay_smoke.suite import Share, Strict, validated

Verdict = Literal["pass", "fail", "unsure", "error", "skip"]
"""unsure: not enough samples. error: could not run. skip: the server has nothing to check."""
Stage = Literal["alone", "together", "transcript"]
"""alone: nothing else may run meanwhile. together: at the same time as the others of its kind.
transcript: sends little or nothing, and looks at every answer that the others got."""

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    reason: str
    detects: str = ""
    """The size of fault that would have been seen."""
    figures: dict[str, float] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    sample: tuple[str, str] | None = None
    """One question and its answer, to show a person."""

    @classmethod
    def of_rate(
        cls, rule: RateRule, events: int, n: int, bad: str, of: str,
        examples: list[str] | None = None, **figures: float,
    ) -> Outcome:  # fmt: skip
        """Decide on `events` of `n`: '3 of 120 tokens repeat', `bad` being 'repeat'."""
        decision = rule.decide(events, n)
        reason = rule.words(events, n, f"{of} {bad}")
        if decision == "unsure":
            reason = f"not enough samples: {reason}"
            if events == 0:
                reason += f", {rule.samples_to_pass()} are needed"
        return cls(
            decision,
            reason,
            rule.detects(n, of),
            {"events": events, "samples": n, **figures},
            tuple((examples or [])[:MAX_EXAMPLES]),
        )


class RateParams(Strict):
    """What a rate may be; see `stats.RateRule`."""

    tolerated: Share = 0.0
    unacceptable: Share

    @property
    def rule(self) -> RateRule:
        return RateRule(self.tolerated, self.unacceptable)


class Check(ABC):
    """One reason to distrust an output. The class's docstring says which, and why."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    Params: ClassVar[type[Strict]]

    def __init__(self, params: Any) -> None:
        self.params = params

    async def prepare(self, lab: Lab) -> None:  # noqa: B027 -- most have nothing to prepare
        """Before anything is asked."""

    @abstractmethod
    async def run(self, lab: Lab) -> Outcome:
        """Ask, look, decide. Errors of `assay_smoke.errors` become the verdict 'error'."""

    @classmethod
    def why(cls) -> str:
        return inspect.cleandoc(cls.__doc__ or "")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            assert cls.__doc__, f"{cls.__name__} gives no reason"
            assert cls.name not in REGISTRY, cls.name
            REGISTRY[cls.name] = cls


REGISTRY: dict[str, type[Check]] = {}


def build(name: str, parameters: dict[str, Any], where: str) -> Check:
    """The check of that name; raises SuiteError for an unknown name or parameter."""
    if name not in REGISTRY:
        raise SuiteError(f"{where}: no such check; there are {', '.join(sorted(REGISTRY))}")
    check = REGISTRY[name]
    params = validated(check.Params, parameters, where)
    try:
        if isinstance(params, RateParams):
            _ = params.rule
    except ValueError as error:
        raise SuiteError(f"{where}: {error}") from error
    return check(params)
