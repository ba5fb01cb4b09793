"""Runs one tier of a suite against one server."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from assay_smoke import __version__, reference
from assay_smoke.checks import Check, Outcome, build
from assay_smoke.client import Client, Secrets, Timeouts
from assay_smoke.client.http import Thinking
from assay_smoke.errors import CouldNotRunError, UnavailableError
from assay_smoke.lab import Lab
from assay_smoke.suite import Suite

Overall = Literal["pass", "fail", "error"]
EXIT_CODES: dict[Overall, int] = {"pass": 0, "fail": 1, "error": 2}

NOT_RUN = "was not run"

Progress = Callable[[str, Outcome | None], None]
"""Called with a check's name when it begins (None) and when it has ended."""


@dataclass(frozen=True)
class Result:
    """One check's outcome in a run."""

    name: str
    outcome: Outcome
    seconds: float


@dataclass
class Report:
    suite: str
    tier: str
    url: str
    seed: int
    model: str = ""
    server: str = ""
    error: str = ""
    """Why there is no verdict, when the whole run had to end."""
    results: list[Result] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> Overall:
        """A finding is a finding, whatever else could not run; without one, everything must have
        passed or have had nothing to check."""
        verdicts = [result.outcome.verdict for result in self.results]
        if "fail" in verdicts:
            return "fail"
        if self.error or not {"pass"} <= set(verdicts) <= {"pass", "skip"}:
            return "error"
        return "pass"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def sample(self) -> dict[str, str] | None:
        """One question and its answer, to show a person."""
        found = next((r.outcome.sample for r in self.results if r.outcome.sample), None)
        return None if found is None else {"question": found[0], "answer": found[1]}

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "suite": self.suite,
            "tier": self.tier,
            "url": self.url,
            "model": self.model,
            "server": self.server,
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "error": self.error or None,
            "sample": self.sample,
            "tokens": {"prompt": self.prompt_tokens, "generated": self.generated_tokens},
            "checks": [
                {
                    "name": result.name,
                    "verdict": result.outcome.verdict,
                    "reason": result.outcome.reason,
                    "detects": result.outcome.detects,
                    "seconds": round(result.seconds, 2),
                    "figures": {k: _number(v) for k, v in result.outcome.figures.items()},
                    "examples": list(result.outcome.examples),
                }
                for result in self.results
            ],
            "assay_smoke": __version__,
        }


def _number(value: float) -> float | None:
    """JSON holds no NaN and no infinity."""
    return round(value, 6) if abs(value) < float("inf") else None


@dataclass(frozen=True)
class Plan:
    """What to run, and where."""

    suite: Suite
    tier: str
    url: str
    model: str = ""
    secrets: Secrets = field(default_factory=Secrets)
    seed: int | None = None
    """None: drawn anew, so that no two runs ask the same."""
    reference: reference.Reference | None = None
    only: tuple[str, ...] = ()
    """Names of checks; empty: all of the tier."""

    def checks(self) -> list[Check]:
        tier = self.suite.tier(self.tier)
        unknown = set(self.only) - set(tier.checks)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise CouldNotRunError(f"--check {names}: not in tier {self.tier} of {self.suite.name}")
        chosen = {n: p for n, p in tier.checks.items() if not self.only or n in self.only}
        return [build(n, p or {}, f"{self.suite.name}.{self.tier}") for n, p in chosen.items()]

    def client(self) -> Client:
        tier = self.suite.tier(self.tier)
        return Client(
            self.url,
            model=self.model,
            secrets=self.secrets,
            timeouts=Timeouts(idle=tier.idle_timeout, request=tier.request_timeout),
            thinking=Thinking(self.suite.thinking_argument),
        )


class Battery:
    """One run. Whatever the server does, `run` returns a report."""

    def __init__(self, plan: Plan, progress: Progress = lambda name, outcome: None) -> None:
        self.plan = plan
        self.tier = plan.suite.tier(plan.tier)
        self.checks = plan.checks()
        self.progress = progress
        self.client = plan.client()
        seed = random.SystemRandom().randrange(2**32) if plan.seed is None else plan.seed
        self.report = Report(plan.suite.name, plan.tier, plan.url, seed)
        self._done: set[str] = set()
        self._gone = False
        """The server cannot be reached any more: what is left need not wait for it."""

    async def run(self) -> Report:
        began = time.monotonic()
        try:
            async with self.client, asyncio.timeout(self.tier.deadline):
                await self._run(self.client)
        except TimeoutError:
            self.report.error = (
                f"time-out: the tier's deadline of {self.tier.deadline:g} s has passed"
            )
        except CouldNotRunError as error:
            self.report.error = str(error)
        for check in self.checks:
            if check.name not in self._done:
                outcome = Outcome("error", self.report.error or NOT_RUN)
                self.report.results.append(Result(check.name, outcome, 0.0))
        order = {check.name: i for i, check in enumerate(self.checks)}
        self.report.results.sort(key=lambda result: order[result.name])
        self.report.seconds = time.monotonic() - began
        return self.report

    async def _run(self, client: Client) -> None:
        self.report.model = await client.find_model()
        self.report.server = await client.version()
        lab = Lab(client, self.plan.suite, self.tier, self.report.seed, self.plan.reference)
        try:
            for check in self.checks:
                await check.prepare(lab)
            for check in self._of("alone"):
                await self._one(check, lab)
            await asyncio.gather(*(self._one(check, lab) for check in self._of("together")))
            for check in self._of("transcript"):
                await self._one(check, lab)
        finally:
            self.report.prompt_tokens = lab.prompt_tokens
            self.report.generated_tokens = lab.generated_tokens

    def _of(self, stage: str) -> list[Check]:
        return [check for check in self.checks if check.stage == stage]

    async def _one(self, check: Check, lab: Lab) -> None:
        if self._gone and check.stage != "transcript":
            return
        self.progress(check.name, None)
        began = time.monotonic()
        try:
            outcome = await check.run(lab)
        except CouldNotRunError as error:
            outcome = Outcome("error", str(error))
            if isinstance(error, UnavailableError) and error.status is None:
                self._gone = True
                self.report.error = self.report.error or str(error)
        except Exception as error:  # a bug of ours must not look like a verdict on the server
            traceback.print_exc()
            outcome = Outcome("error", f"internal error: {error!r}"[:300])
        self._note(check, outcome, time.monotonic() - began)

    def _note(self, check: Check, outcome: Outcome, seconds: float) -> None:
        self._done.add(check.name)
        self.report.results.append(Result(check.name, outcome, seconds))
        self.progress(check.name, outcome)
