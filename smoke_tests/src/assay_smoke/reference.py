"""Reference log-probabilities: what a trusted server said of known texts.

`assay-smoke record` writes them, the check `reference-kl` reads them. Texts are kept as token ids,
so a comparison needs no tokenizer and cannot be led astray by one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from assay_smoke import __version__, files
from assay_smoke.client import Client
from assay_smoke.errors import CouldNotRunError, SuiteError
from assay_smoke.suite import Passage, Strict, Suite, read_text, validated

LIKELIEST = 5
"""Tokens recorded per position."""


class Position(Strict):
    """The likeliest next tokens at one place."""

    logprobs: dict[int, float] = Field(min_length=1)
    """Token id -> nats."""

    @field_validator("logprobs")
    @classmethod
    def _real(cls, value: dict[int, float]) -> dict[int, float]:
        if not all(math.isfinite(p) and p <= 0 for p in value.values()):
            raise ValueError("a recorded log-probability must be finite and at most 0")
        return value

    @cached_property
    def _ranked(self) -> list[tuple[int, float]]:
        return sorted(self.logprobs.items(), key=lambda pair: -pair[1])

    @property
    def likeliest(self) -> int:
        return self._ranked[0][0]

    @property
    def gap(self) -> float:
        """Nats between the two likeliest."""
        return self._ranked[0][1] - self._ranked[1][1] if len(self._ranked) > 1 else math.inf


class Text(Strict):
    name: str
    ids: tuple[int, ...]
    positions: tuple[Position | None, ...]
    """One per token id: what was likely in its place. The first has none."""


class Reference(Strict):
    format: Literal[1]
    suite: str
    passages: str
    """Digest of the suite's passages: a reference of other texts is refused."""
    model: str
    server: str
    """Version that the server gave."""
    recorded_with: str
    likeliest: int = Field(ge=2, le=20)
    texts: tuple[Text, ...] = Field(min_length=1)

    @field_validator("texts")
    @classmethod
    def _whole(cls, value: tuple[Text, ...]) -> tuple[Text, ...]:
        for text in value:
            if len(text.ids) != len(text.positions):
                raise ValueError(
                    f"{text.name}: {len(text.positions)} positions, {len(text.ids)} ids"
                )
        return value


def digest(passages: tuple[Passage, ...]) -> str:
    return hashlib.sha256(json.dumps([p.model_dump() for p in passages]).encode()).hexdigest()


async def record(client: Client, suite: Suite) -> Reference:
    """Ask a trusted server for the distribution at every position of the suite's passages.

    Raises CouldNotRunError when it has none to give, or one that is no number.
    """
    texts = []
    for passage in suite.passages:
        answer = await client.complete(
            passage.text, label=f"record {passage.name}", max_tokens=1, prompt_logprobs=LIKELIEST
        )
        if answer.unreal or answer.problems:
            what = (answer.unreal + answer.problems)[0]
            raise CouldNotRunError(f"{passage.name}: {what}: not a server to record from")
        if not answer.prompt_ids or len(answer.prompt_ids) != len(answer.prompt_logprobs):
            raise CouldNotRunError("the server gives no prompt_logprobs with token ids")
        positions: list[Position | None] = []
        for position in answer.prompt_logprobs:
            if position is None:
                positions.append(None)
                continue
            ranked = sorted(position.items(), key=lambda pair: -pair[1])[:LIKELIEST]
            positions.append(Position(logprobs={i: round(p, 5) for i, p in ranked}))
        texts.append(
            Text(name=passage.name, ids=tuple(answer.prompt_ids), positions=tuple(positions))
        )
    return Reference(
        format=1,
        suite=suite.name,
        passages=digest(suite.passages),
        model=client.model,
        server=await client.version(),
        recorded_with=__version__,
        likeliest=LIKELIEST,
        texts=tuple(texts),
    )


def write(reference: Reference, path: Path) -> None:
    """Whole or not at all; gzipped when the name ends so. Raises CouldNotRunError."""
    raw = reference.model_dump_json().encode()
    data = gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw
    files.replace(path, data)


def read(path: Path, suite: Suite) -> Reference:
    """Raises SuiteError for a file that is no reference of this suite's texts."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"{path} is not JSON: {error}") from error
    reference = validated(Reference, value, str(path))
    if reference.passages != digest(suite.passages):
        raise SuiteError(f"{path} was recorded of other passages than suite {suite.name} has")
    return reference
