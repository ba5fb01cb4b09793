"""Long generations."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from assay_smoke.checks.base import Check, Outcome
from assay_smoke.client import Answer
from assay_smoke.lab import Lab
from assay_smoke.suite import Count, Positive, Share, Strict
from assay_smoke.text import distinct_ngram_share, find_cycle, odd_characters, words

REPLACED = "\ufffd"


@dataclass(frozen=True)
class Window:
    first: int
    """Index of its first token."""
    last: int
    text: str
    surprise: float
    """Mean -log p of its tokens, nats."""


def windows(answer: Answer, size: int) -> Iterator[Window]:
    for first in range(0, len(answer.tokens), size):
        tokens = answer.tokens[first : first + size]
        if len(tokens) < size // 2 and first:
            return
        text = "".join(t.text for t in tokens)
        mean = statistics.fmean(-t.logprob for t in tokens)
        yield Window(first, first + len(tokens) - 1, text, mean)


class LongGeneration(Check):
    """Thousands of tokens in one answer, looked at window by window.

    One deployment was clean up to 1.7 k tokens and corrupt from 4 k on (sglang issue 33397): what
    overflows, wraps or drifts needs length. A window that fails tells where it began. What corrupts
    one token in thousands needs many tokens instead, and those are cheap in parallel: shorter
    answers are generated beside the long ones.
    """

    name = "long-generation"
    stage = "together"

    class Params(Strict):
        answers: Count = 2
        tokens: Count
        """Wanted in each answer; less where the model's context is smaller."""
        shorter: Annotated[int, Field(ge=0)] = 0
        """Further answers, of `shorter_tokens` each."""
        shorter_tokens: Count = 512
        window: Count = 256
        max_odd_share: Share = 0.01
        """Characters of a window that cannot be printed or are of a foreign script."""
        min_distinct: Share = 0.3
        """Distinct 5-grams of words in a window."""
        max_surprise: Positive = 2.5
        """Mean nats of a window's own tokens: a model that gropes is unsure at every token."""
        unsure_below: Share = 0.9
        """Share of the wanted tokens that must have come."""

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        room = (lab.client.max_model_len or 10**9) - 512
        wanted = min(self.params.tokens, room)
        shorter = min(self.params.shorter_tokens, wanted)
        lengths = [wanted] * self.params.answers + [shorter] * self.params.shorter
        prompts = list(lab.suite.long.prompts)
        lab.rng(self.name).shuffle(prompts)
        answers = await asyncio.gather(
            *(
                lab.chat(
                    [{"role": "user", "content": prompt}], label=f"{self.name} {prompt[:40]}",
                    max_tokens=length, min_tokens=length, thinking=False, stream=True,
                )
                for prompt, length in zip(prompts, lengths, strict=False)
            )
        )  # fmt: skip
        bad: list[str] = []
        tokens = looked = 0
        for answer in answers:
            tokens += answer.generated
            for window in windows(answer, self.params.window):
                looked += 1
                if (what := self._wrong(lab, answer, window)) is not None:
                    bad.append(f"{answer.label}: tokens {window.first}-{window.last}: {what}")
        repetition = 1 - min((distinct_ngram_share(words(a.text)) for a in answers), default=1.0)
        figures = {"tokens": float(tokens), "windows": float(looked), "repetition": repetition}
        detects = f"a window of {self.params.window} tokens that is garbage, up to token {wanted}"
        if bad:
            place = bad[0].split(": ", 1)[1]
            reason = f"{len(bad)} of {looked} windows, first {place}"
            return Outcome("fail", reason, detects, figures, tuple(bad[:5]))
        short = [
            f"{len(answer.tokens)} tokens where {length} were wanted"
            for answer, length in zip(answers, lengths, strict=False)
            if len(answer.tokens) < self.params.unsure_below * length
        ]
        if short:
            reason = f"not enough samples: {', '.join(short[:5])}"
            return Outcome("unsure", reason, "", figures)
        return Outcome("pass", f"{looked} windows of {tokens} tokens", detects, figures)

    def _wrong(self, lab: Lab, answer: Answer, window: Window) -> str | None:
        # Half a character in one token and half in the next is no fault of the text.
        text = window.text if REPLACED in answer.text else window.text.replace(REPLACED, "")
        odd = odd_characters(text, lab.suite.scripts, answer.prompt)
        if len(odd) > self.params.max_odd_share * max(1, len(text)):
            return f"{len(odd)} of {len(text)} characters are odd ({odd[0].why})"
        parts = words(text)
        distinct = distinct_ngram_share(parts)
        if distinct < self.params.min_distinct:
            return f"only {distinct:.0%} of its 5-grams are distinct"
        if (cycle := find_cycle(parts)) is not None:
            return f"{cycle.length} words repeat with period {cycle.period}"
        if not window.surprise <= self.params.max_surprise:
            return f"{window.surprise:.2f} nats a token"
        return None
