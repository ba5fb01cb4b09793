"""Two answers to one request, token by token, where near-ties are allowed to fall either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from assay_smoke.checks.base import Outcome
from assay_smoke.client import Answer, Token
from assay_smoke.stats import RateRule
from assay_smoke.text import excerpt


@dataclass(frozen=True)
class Divergence:
    index: int
    reference: str
    other: str
    gap: float
    """Nats by which the likelier of the two was ahead, as the surer side saw it; inf when unknown.
    """

    def words(self, label: str) -> str:
        return (
            f"{label}: token {self.index} is {excerpt(self.other, 24)!r}, not"
            f" {excerpt(self.reference, 24)!r}, {self.gap:.2f} nats apart"
        )


def first_divergence(reference: Answer, other: Answer) -> Divergence | None:
    """Where two token sequences part; None when they are equal, the end included."""
    for index, (a, b) in enumerate(zip(reference.tokens, other.tokens, strict=False)):
        if a.text != b.text:
            return Divergence(index, a.text, b.text, max(_gap(a, b.text), _gap(b, a.text)))
    short, long = sorted((reference, other), key=lambda answer: len(answer.tokens))
    if len(short.tokens) < len(long.tokens) and short.finish_reason != long.finish_reason:
        index = len(short.tokens)
        token = long.tokens[index]
        names = (token.text, "(the end)")
        if short is reference:
            names = ("(the end)", token.text)
        return Divergence(index, names[0], names[1], token.gap if token.gap is not None else 1e9)
    return None


def _gap(token: Token, rival: str) -> float:
    """Nats between what one side chose and the other side's choice, by the first side's word."""
    listed = dict(token.top)
    floor = min(listed.values(), default=token.logprob)
    ahead = token.logprob - listed.get(rival, floor)
    return ahead if ahead == ahead else float("inf")


@dataclass
class Comparisons:
    """Divergences over many pairs, and how many tokens were compared."""

    margin: float
    tokens: int = 0
    pairs: int = 0
    ties: int = 0
    found: list[str] = field(default_factory=list)

    def add(self, reference: Answer, other: Answer, label: str) -> None:
        if not reference.tokens or not other.tokens:
            if reference.text == other.text:
                return
            self.pairs += 1
            self.tokens += 1
            self.found.append(
                f"{label}: {excerpt(other.text, 50)!r}, not {excerpt(reference.text, 50)!r}"
            )
            return
        self.pairs += 1
        divergence = first_divergence(reference, other)
        self.tokens += min(len(reference.tokens), len(other.tokens))
        if divergence is None:
            return
        self.tokens -= min(len(reference.tokens), len(other.tokens)) - divergence.index - 1
        if divergence.gap > self.margin:
            self.found.append(divergence.words(label))
        else:
            self.ties += 1

    def outcome(self, rule: RateRule, what: str, **figures: float) -> Outcome:
        # One pair may be wrong in two ways.
        events = min(len(self.found), self.pairs)
        return Outcome.of_rate(
            rule, events, self.pairs, f"part by more than {self.margin:g} nats", what,
            self.found, tokens=self.tokens, near_ties=self.ties, **figures,
        )  # fmt: skip


def all_pairs(answers: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    return [(answers[0], other) for other in answers[1:]]
