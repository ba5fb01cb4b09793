"""The plan of a run: which sessions there are and when each is due, drawn from seeds alone.

Every worker holds the same plan and runs its share of it, so a plan does not depend on how many
workers run it, or on how fast the server is. Lengths depend on the seed and the session's number;
so two repetitions ask for the same work. The text also carries the run's nonce: no prompt of an
earlier run is still in the server's prefix cache, unless the workload shares prefixes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from assay_load.workload.corpus import Corpus
from assay_load.workload.schema import (
    Arrival,
    Bursty,
    Choice,
    Constant,
    Length,
    LogNormal,
    Poisson,
    Ramp,
    RequestClass,
    Uniform,
    Workload,
)
from assay_load.workload.tools import TOOLS

SCRIPTED_ANSWER_TOKENS = 16
"""Length of earlier answers in a session's history: scripted, so that prompts stay the same."""


@dataclass(frozen=True)
class Calibration:
    """How much text makes a token on the server at hand, measured before the run (calibrate.py)."""

    characters_per_token: float


@dataclass(frozen=True)
class PlannedRequest:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    output_tokens: int
    exact: bool
    thinking: bool
    temperature: float

    def body(self, model: str, token_ids: bool) -> dict[str, Any]:
        """The request to `/v1/chat/completions`."""
        return {
            "model": model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "chat_template_kwargs": {"thinking": self.thinking},
            **({"ignore_eos": True} if self.exact else {}),
            **({"tools": self.tools} if self.tools else {}),
            **({"return_token_ids": True} if token_ids else {}),
        }


@dataclass(frozen=True)
class Session:
    index: int
    """Negative in the warm-up."""
    kind: RequestClass
    requests: list[PlannedRequest]
    pauses: list[float]
    """Seconds after each request; the last one is kept by closed-loop users only."""

    @property
    def measured(self) -> bool:
        return self.index >= 0


def draw(length: Length, rng: random.Random) -> int:
    """Tokens."""
    match length:
        case Constant(tokens=tokens):
            return tokens
        case Uniform(min=low, max=high):
            return rng.randint(low, high)
        case LogNormal(median=median, sigma=sigma, min=low, max=high):
            return min(high, max(low, round(median * math.exp(rng.gauss(0.0, sigma)))))
        case Choice(tokens=tokens, weights=weights):
            return rng.choices(tokens, weights)[0]
    raise AssertionError(length)


class Plan:
    def __init__(
        self, workload: Workload, corpus: Corpus, calibration: Calibration, nonce: str
    ) -> None:
        self._workload = workload
        self._corpus = corpus
        self._calibration = calibration
        self._nonce = nonce

    def indices(self) -> Iterator[int]:
        """Numbers of the sessions in their order: the warm-up's, then 0 .. sessions - 1 or for
        ever."""
        stop = self._workload.stop
        last = stop.sessions if stop is not None else None
        warmup = range(-self._workload.warmup.sessions, 0)
        return itertools.chain(warmup, itertools.count() if last is None else range(last))

    def session(self, index: int) -> Session:
        rng = random.Random(f"{self._workload.seed}/{index}")
        weights = [c.weight for c in self._workload.classes]
        (kind,) = rng.choices(self._workload.classes, weights)
        pauses = [
            rng.expovariate(1 / kind.think_seconds) if kind.think_seconds else 0.0
            for _ in range(kind.turns)
        ]
        return Session(index, kind, list(self._requests(index, kind, rng)), pauses)

    def expected_requests(self) -> int | None:
        """Measured requests of a complete run; None if time ends it."""
        stop = self._workload.stop
        if stop is None or stop.sessions is None:
            return None
        if all(c.turns == 1 for c in self._workload.classes):
            return stop.sessions
        return sum(self.session(i).kind.turns for i in range(stop.sessions))

    def _requests(
        self, index: int, kind: RequestClass, rng: random.Random
    ) -> Iterator[PlannedRequest]:
        tools = TOOLS[: kind.tools]
        history: list[dict[str, Any]] = []
        if kind.prefix is not None:
            group = index % kind.prefix.groups
            shared = random.Random(f"{self._workload.seed}/prefix/{kind.name}/{group}")
            text = f"Part {self._nonce} {group}. {self._text(kind.prefix.tokens, shared)}"
            history.append({"role": "system", "content": text})
        for turn in range(kind.turns):
            tokens = draw(kind.input, rng)
            if turn and tools:
                history += self._tool_result(turn, tokens, rng)
            else:
                # The number in front keeps two prompts from sharing a prefix by chance.
                text = f"Note {self._nonce} {index}. " if not history else ""
                history.append({"role": "user", "content": text + self._asked(tokens, rng)})
            yield PlannedRequest(
                list(history), tools, draw(kind.output, rng), kind.ending == "exact",
                kind.thinking, kind.temperature,
            )  # fmt: skip
            if not tools:
                answer = self._text(SCRIPTED_ANSWER_TOKENS, rng)
                history.append({"role": "assistant", "content": answer})

    def _text(self, tokens: int, rng: random.Random) -> str:
        characters = max(1, round(tokens * self._calibration.characters_per_token))
        return self._corpus.cut(rng.randrange(len(self._corpus.text)), characters)

    def _asked(self, tokens: int, rng: random.Random) -> str:
        """Text of about `tokens` that ends with a question."""
        question = rng.choice(self._corpus.questions)
        left = tokens - round(len(question) / self._calibration.characters_per_token)
        return f"{self._text(left, rng)}\n\n{question}" if left > 8 else question

    def _tool_result(self, turn: int, tokens: int, rng: random.Random) -> list[dict[str, Any]]:
        name = TOOLS[0]["function"]["name"]
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": name, "arguments": f'{{"path": "notes/part-{turn}.md"}}'},
        }
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": self._text(tokens, rng)},
        ]


def due_times(arrival: Arrival, seed: int, seconds: float | None) -> Iterator[float] | None:
    """Seconds from the start at which each session is due, in order; None in a closed loop.

    A ramp ends with its time, the other streams go on for ever.
    """
    rng = random.Random(f"{seed}/arrivals")
    match arrival:
        case Poisson(rate=rate):
            return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())
        case Bursty(rate=rate, burstiness=shape):
            gaps = (rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
            return itertools.accumulate(gaps)
        case Ramp():
            assert seconds is not None
            return _ramp(arrival, rng, seconds)
    return None


def _ramp(ramp: Ramp, rng: random.Random, seconds: float) -> Iterator[float]:
    """A Poisson stream with a straight-line rate, by thinning one of the largest rate."""
    most = max(ramp.start_rate, ramp.end_rate)
    at = 0.0
    while (at := at + rng.expovariate(most)) < seconds:
        rate = ramp.start_rate + (ramp.end_rate - ramp.start_rate) * at / seconds
        if rng.random() * most < rate:
            yield at
