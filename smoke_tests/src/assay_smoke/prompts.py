"""Prompts of any length whose right answer is known: a number hidden in filler."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from assay_smoke.client import Answer, Client
from assay_smoke.errors import CouldNotRunError
from assay_smoke.suite import Needle

TOKENS_PER_WORD = 1.25
"""Rough, for sizing a prompt whose exact length does not matter."""


@dataclass(frozen=True)
class HiddenCode:
    """One prompt and its answer."""

    name: str
    code: str
    text: str
    question: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]

    def asked_again(self) -> list[dict[str, Any]]:
        """The same conversation one turn on: its beginning is the same, token for token."""
        return [
            *self.messages,
            {"role": "assistant", "content": f"The code for {self.name} is {self.code}."},
            {"role": "user", "content": self.question.strip()},
        ]

    def found_in(self, answer: Answer) -> bool:
        """Whether the answer holds the code, and no other number of its length."""
        digits = "".join(c if c.isdigit() else " " for c in answer.content).split()
        return self.code in digits and not any(
            len(d) >= len(self.code) and d != self.code for d in digits
        )


class NeedlePrompts:
    """Draws hidden codes; no two prompts share their beginning by design, only by chance."""

    def __init__(self, needle: Needle, rng: random.Random) -> None:
        self.needle = needle
        self.rng = rng

    def draw(self, sentences: int | None = None, tokens: int | None = None) -> HiddenCode:
        """With so many sentences of filler, or about so many tokens."""
        name = self.rng.choice(self.needle.names)
        code = str(self.rng.randint(1000, 9999))
        filler: list[str] = []
        count = 0.0
        while (sentences is not None and len(filler) < sentences) or (
            tokens is not None and count < tokens
        ):
            sentence = self.rng.choice(self.needle.filler)
            filler.append(sentence)
            count += TOKENS_PER_WORD * len(sentence.split())
        return self._hide(name, code, filler)

    def _hide(self, name: str, code: str, filler: list[str]) -> HiddenCode:
        fact = self.needle.fact.format(name=name, code=code)
        place = self.rng.randint(0, min(2, len(filler)))
        body = " ".join([*filler[:place], fact, *filler[place:]])
        question = self.needle.question.format(name=name)
        return HiddenCode(name, code, self.needle.opening + body + question, question)


@dataclass(frozen=True)
class Ruler:
    """Token ids of one hidden code with more filler than any length needs: cut at will."""

    code: HiddenCode
    head: tuple[int, ...]
    filler: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def shortest(self) -> int:
        return len(self.head) + len(self.tail)

    @property
    def longest(self) -> int:
        return self.shortest + len(self.filler)

    def prompt(self, length: int) -> list[int]:
        """Exactly `length` token ids."""
        if not self.shortest <= length <= self.longest:
            raise ValueError(f"{length} is not within {self.shortest} to {self.longest}")
        return [*self.head, *self.filler[: length - self.shortest], *self.tail]


async def ruler(
    client: Client, prompts: NeedlePrompts, longest: int, extra: dict[str, Any]
) -> Ruler:
    """Tokenise a chat with and without its filler; what both begin and end with is kept whole.

    Works for any tokenizer and chat format, since nothing of either is assumed.
    """
    needle = prompts.needle
    name, code = prompts.rng.choice(needle.names), str(prompts.rng.randint(1000, 9999))
    fact, question = needle.fact.format(name=name, code=code), needle.question.format(name=name)
    filler: list[str] = []
    size = 0.0
    while size < 1.5 * longest + 64:
        filler.append(prompts.rng.choice(needle.filler))
        size += TOKENS_PER_WORD * len(filler[-1].split())
    full = HiddenCode(name, code, f"{needle.opening}{fact} {' '.join(filler)}{question}", question)
    bare = HiddenCode(name, code, f"{needle.opening}{fact}{question}", question)
    long = await client.tokenize(full.messages, **extra)
    short = await client.tokenize(bare.messages, **extra)
    head = 0
    while head < len(short) and short[head] == long[head]:
        head += 1
    tail = 0
    while tail < len(short) - head and short[-1 - tail] == long[-1 - tail]:
        tail += 1
    found = Ruler(
        full,
        tuple(long[:head]),
        tuple(long[head : len(long) - tail]),
        tuple(long[len(long) - tail :]),
    )
    if head + tail < len(short) - 4 or found.longest < longest:
        raise CouldNotRunError("/tokenize gives prompts that do not share beginning and end")
    return found
