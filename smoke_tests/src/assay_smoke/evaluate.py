"""GSM8K from a local file, scored the way vLLM's own evaluation does.

Eight worked examples stand before each question; the last number of an answer is its answer;
answers without a number are counted apart, since they tell of a broken format rather than of bad
sums (vllm-project/vllm, tests/evals/gsm8k). Asked as chats, so `lm-eval`'s `local-chat-completions`
gives the same score on the same file; docs/coherence.md shows how.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from assay_smoke.battery import Plan, Progress, Report, Result
from assay_smoke.checks import Outcome
from assay_smoke.client import Client, Timeouts
from assay_smoke.errors import CouldNotRunError, SuiteError
from assay_smoke.scoring import last_number, number
from assay_smoke.stats import percent, wilson
from assay_smoke.suite import Strict, read_lines
from assay_smoke.text import excerpt

SHOTS = 8
MAX_TOKENS = 256
STOP = ["Question", "Assistant:", "<|separator|>"]
MARK = "####"
"""Stands before the answer in GSM8K's own solutions."""


class Problem(Strict):
    """One line of GSM8K."""

    question: Annotated[str, Field(min_length=1)]
    answer: str

    @field_validator("answer")
    @classmethod
    def _marked(cls, value: str) -> str:
        if number(value.rpartition(MARK)[2]) is None or MARK not in value:
            raise ValueError(f"an answer must end with '{MARK} NUMBER'")
        return value

    @property
    def value(self) -> Decimal:
        found = number(self.answer.rpartition(MARK)[2])
        assert found is not None
        return found


@dataclass(frozen=True)
class Task:
    shots: tuple[Problem, ...]
    problems: tuple[Problem, ...]
    at_least: float
    """Share of right answers that must lie below the interval."""
    concurrency: int = 16
    max_tokens: int = MAX_TOKENS

    def prompt(self, problem: Problem) -> str:
        shown = "".join(f"Question: {p.question}\nAnswer: {p.answer}\n\n" for p in self.shots)
        return f"{shown}Question: {problem.question}\nAnswer:"


def read(
    path: Path, shots: Path | None, at_least: float, limit: int | None, concurrency: int,
    max_tokens: int = MAX_TOKENS,
) -> Task:  # fmt: skip
    """Examples from a file of their own, else the first eight lines, which are then not asked."""
    lines = read_lines(path, Problem)
    if shots is None:
        examples, problems = lines[:SHOTS], lines[SHOTS:]
    else:
        examples, problems = read_lines(shots, Problem)[:SHOTS], lines
    if len(examples) < SHOTS:
        raise SuiteError(f"{shots or path}: {SHOTS} examples are needed, it has {len(examples)}")
    if not problems:
        raise SuiteError(
            f"{path}: nothing is left to ask after {SHOTS} examples; name others: --shots"
        )
    return Task(examples, problems[:limit], at_least, concurrency, max_tokens)


async def run(plan: Plan, task: Task, progress: Progress) -> Report:
    """Ask everything; whatever the server does, a report comes back."""
    report = Report("gsm8k", "eval", plan.url, 0)
    began = time.monotonic()
    progress("gsm8k", None)
    try:
        timeouts = Timeouts(request=600)
        async with Client(
            plan.url, model=plan.model, secrets=plan.secrets, timeouts=timeouts
        ) as client:
            outcome = await _ask(client, task, report)
    except CouldNotRunError as error:
        report.error = str(error)
        outcome = Outcome("error", str(error))
    report.seconds = time.monotonic() - began
    report.results.append(Result("gsm8k", outcome, report.seconds))
    progress("gsm8k", outcome)
    return report


async def _ask(client: Client, task: Task, report: Report) -> Outcome:
    report.model = await client.find_model()
    report.server = await client.version()
    places = asyncio.Semaphore(task.concurrency)

    async def ask(problem: Problem) -> tuple[Problem, str]:
        async with places:
            answer = await client.chat(
                [{"role": "user", "content": task.prompt(problem)}], max_tokens=task.max_tokens,
                stop=STOP, seed=42,
            )  # fmt: skip
            report.prompt_tokens += answer.prompt_tokens or 0
            report.generated_tokens += answer.generated
            return problem, answer.content

    answers = await asyncio.gather(*(ask(p) for p in task.problems))
    values = [(problem, last_number(text), text) for problem, text in answers]
    n = len(values)
    right = sum(value == problem.value for problem, value, _ in values)
    invalid = sum(value is None for _, value, _ in values)
    low, high = wilson(right, n)
    reason = (
        f"accuracy {right / n:.4f} ({percent(low)} to {percent(high)}), {right} of {n} right;"
        f" {invalid / n:.2%} invalid; at least {task.at_least:g}"
    )
    figures = {"accuracy": right / n, "invalid_rate": invalid / n, "samples": float(n)}
    examples = tuple(
        f"{excerpt(p.question, 50)!r}: wanted {p.value}, got {excerpt(t, 50)!r}"
        for p, v, t in values
        if v != p.value
    )
    if high < task.at_least:
        return Outcome("fail", reason, "", figures, examples[:5])
    if low < task.at_least:
        return Outcome("unsure", f"not enough samples: {reason}", "", figures, examples[:5])
    return Outcome("pass", reason, f"an accuracy below {task.at_least:g}", figures, examples[:5])
