"""What a check works with: the server, the suite, and a record of every answer so far."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from assay_smoke.client import Answer, Client
from assay_smoke.errors import BudgetError, UnavailableError
from assay_smoke.suite import Question, Suite, Tier

LIKELIEST = 2
"""Log-probabilities asked for per generated token: the gap between two tells a tie from a fault."""
NAN_PAIRS = 3
"""Times that a 500 must come with log-probabilities, and not without, before it is called NaN."""


@dataclass
class Lab:
    client: Client
    suite: Suite
    tier: Tier
    seed: int
    reference: Any = None
    """`reference.Reference`, when there is one."""
    transcript: list[Answer] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    nan_500: list[str] = field(default_factory=list)
    """Requests that end in 500 only if log-probabilities are asked for."""
    other_500: int = 0
    """500s that came without asking for them, or not again: a server with those has an outage, and
    nothing that it answers 500 to is called NaN."""

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.tier.concurrency)

    def rng(self, name: str) -> random.Random:
        """Of one check: it draws the same whatever other checks do."""
        return random.Random(f"{self.seed}/{name}")

    async def chat(self, messages: Sequence[dict[str, Any]], **more: Any) -> Answer:
        return await self._asked(self.client.chat, messages, more)

    async def complete(self, prompt: str | Sequence[int], **more: Any) -> Answer:
        return await self._asked(self.client.complete, prompt, more)

    async def ask(self, question: Question, check: str, **more: Any) -> Answer:
        """A question as it stands in the suite."""
        values: dict[str, Any] = {
            "label": f"{check} {question.id}",
            "max_tokens": question.max_tokens,
            "thinking": question.thinking,
        }
        if question.tools:
            values["tools"] = question.tools
        if question.json_schema is not None:
            values["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": question.json_schema},
            }
        return await self.chat(question.messages, **(values | more))

    async def _asked(self, call: Any, subject: Any, more: dict[str, Any]) -> Answer:
        if self.generated_tokens >= self.tier.tokens:
            raise BudgetError(f"the tier's {self.tier.tokens} tokens are spent")
        wanted = {"logprobs": LIKELIEST} | more
        async with self._places:
            try:
                answer: Answer = await call(subject, **wanted)
            except UnavailableError as error:
                if error.status != 500 or wanted["logprobs"] is None:
                    raise
                answer = await self._without_logprobs(call, subject, wanted, error)
        self.prompt_tokens += answer.prompt_tokens or len(answer.prompt_ids)
        self.generated_tokens += answer.generated
        self.transcript.append(answer)
        return answer

    async def _without_logprobs(
        self, call: Any, subject: Any, wanted: dict[str, Any], error: UnavailableError
    ) -> Answer:
        """A 500: of a broken server, or of NaN log-probabilities, which JSON cannot hold?

        NaN it is when the request fails every time with them and never without them.
        """
        plain = wanted | {"logprobs": None}
        plain.pop("prompt_logprobs", None)
        pairs = 1 if self.nan_500 else NAN_PAIRS
        for _ in range(pairs):
            try:
                answer: Answer = await call(subject, **plain)
            except UnavailableError as without:
                self.other_500 += without.status == 500
                raise
            try:
                await call(subject, **wanted)
            except UnavailableError as again:
                if again.status != 500:
                    raise
            else:
                self.other_500 += 1
                raise error
        self.nan_500.append(f"{wanted.get('label', 'a request')}: {error}")
        return answer
