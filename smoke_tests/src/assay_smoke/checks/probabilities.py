"""Checks that read log-probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from assay_smoke.checks.base import Check, Outcome, RateParams
from assay_smoke.client import Answer
from assay_smoke.errors import CouldNotRunError
from assay_smoke.lab import Lab
from assay_smoke.reference import Position, Reference
from assay_smoke.stats import wilson
from assay_smoke.suite import Count, Positive, Share, Strict
from assay_smoke.text import excerpt


class NanLogprobs(Check):
    """Log-probabilities that are no numbers, in every form they take on the wire.

    NaN logits are incoherence, whatever the text looks like. vLLM answers 500 when it must write
    NaN into a whole answer, `null` in a stream, -9999 for -inf; others write `NaN`, which is not
    JSON. A 500 counts only if the same request succeeds whenever no log-probabilities are asked
    for: any other 500 is an outage, not NaN.
    """

    name = "nan-logprobs"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.2

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        asked = [a for a in lab.transcript if a.asked_logprobs]
        silent = [a for a in asked if a.content and not a.tokens and not a.tool_calls]
        told = len(asked) - len(silent)
        bad = [f"{a.label}: {a.unreal[0]}" for a in asked if a.unreal]
        if lab.other_500 and not bad:
            return Outcome("error", f"{lab.other_500} other 500s: an outage hides what is NaN")
        examples = [*([] if lab.other_500 else lab.nan_500), *bad]
        if not examples and silent and not any(a.tokens for a in asked):
            return Outcome("error", "the server gives no log-probabilities")
        return Outcome.of_rate(
            self.params.rule, min(len(examples), max(told, 1)), max(told, 1) if examples else told,
            "with log-probabilities that are none", "answers", examples,
            tokens=sum(len(a.tokens) for a in asked),
        )  # fmt: skip


class GreedyChoice(Check):
    """At temperature 0 each token must be the likeliest of its own distribution.

    Where it is not, the token was lost between the logits and the client: a sampler that reads
    another row, a detokenizer that reads another request.
    """

    name = "greedy-choice"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.01

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        found, tokens = [], 0
        for answer in lab.transcript:
            if not answer.free:
                continue
            for index, token in enumerate(answer.tokens):
                if not token.top or answer.held_back(index):
                    continue
                tokens += 1
                if token.behind > lab.suite.margin:
                    found.append(
                        f"{answer.label}: token {index} {excerpt(token.text, 24)!r} is"
                        f" {token.behind:.2f} nats behind {excerpt(token.top[0][0], 24)!r}"
                    )
        return Outcome.of_rate(
            self.params.rule, len(found), tokens, "are not the likeliest", "tokens", found
        )


@dataclass
class Rescored:
    """Generated tokens as prefill sees them."""

    gaps: list[float] = field(default_factory=list)
    """Nats by which each is less likely than the likeliest; inf where nothing was said of it."""
    unreal: list[str] = field(default_factory=list)


async def rescore(lab: Lab, prompt_ids: Sequence[int], ids: Sequence[int], label: str) -> Rescored:
    """Send prompt and answer as one prompt, and look at the answer's part."""
    answer = await lab.complete(
        [*prompt_ids, *ids], label=label, max_tokens=1, logprobs=None, prompt_logprobs=1
    )
    found = Rescored(unreal=list(answer.unreal))
    positions = answer.prompt_logprobs[len(prompt_ids) :]
    if len(positions) != len(ids):
        raise CouldNotRunError(
            f"prompt_logprobs: {len(answer.prompt_logprobs)} positions for"
            f" {len(prompt_ids) + len(ids)} tokens"
        )
    for token, position in zip(ids, positions, strict=True):
        if not position or token not in position:
            found.gaps.append(math.inf)
            continue
        gap = max(position.values()) - position[token]
        found.gaps.append(gap if gap == gap else math.inf)
    return found


LONG_PROMPT, LONG_PROMPT_SHARE = 1200, 5
"""A prompt of thousands of tokens is not read again for the dozen that followed it."""


class Rescoring(Check):
    """What was generated token by token, read again in one prefill: each token must be likely
    there.

    Decoding and prefill are different kernels, batches and caches over the same weights. A token
    that decoding got wrong, once in thousands and in fluent text, stands out in prefill by many
    nats, and its position is known. This is the check for rare corruption (vLLM issue 41985: 0.03 %
    of tokens, in 50 to 75 % of requests).
    """

    name = "rescoring"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share
        tokens: Count = 20000
        """Generated tokens to read again, those of long answers first."""
        parallel: Count = 4

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        answers = [
            a
            for a in lab.transcript
            if a.ids
            and a.free
            and 0 < len(a.prompt_ids) < max(LONG_PROMPT, LONG_PROMPT_SHARE * len(a.ids))
        ]
        answers.sort(key=lambda a: -len(a.ids))
        chosen, planned = [], 0
        for answer in answers:
            if planned >= self.params.tokens:
                break
            chosen.append(answer)
            planned += len(answer.ids)
        if not chosen:
            raise CouldNotRunError("the server does not say token ids (return_token_ids)")
        places = asyncio.Semaphore(self.params.parallel)

        async def again(answer: Answer) -> Rescored:
            async with places:
                return await rescore(
                    lab, answer.prompt_ids, answer.ids, f"{self.name} of {answer.label}"
                )

        results = await asyncio.gather(*(again(a) for a in chosen))
        found, tokens = [], 0
        for answer, result in zip(chosen, results, strict=True):
            for index, gap in enumerate(result.gaps):
                if answer.held_back(index):
                    continue
                tokens += 1
                if gap > lab.suite.margin:
                    found.append(
                        f"{answer.label}: token {index} is {gap:.1f} nats unlikely in prefill"
                    )
        return Outcome.of_rate(
            self.params.rule, len(found), tokens, "are unlikely when read again", "tokens", found
        )


class Perplexity(Check):
    """Text that is known to be good must not surprise the model.

    A model whose weights or scales are wrong finds its own language surprising long before it
    writes nonsense. Costs a prefill and no generated token.
    """

    name = "perplexity"
    stage = "together"

    class Params(Strict):
        max_nats: Positive
        """Mean surprise per token of a passage."""
        passages: Count = 8
        min_tokens: Count = 200
        """Fewer in all are not enough to tell."""

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        passages = lab.suite.passages[: self.params.passages]
        answers = await asyncio.gather(
            *(
                lab.complete(
                    p.text, label=f"{self.name} {p.name}", max_tokens=1, logprobs=None,
                    prompt_logprobs=0,
                )
                for p in passages
            )
        )  # fmt: skip
        worst, tokens, lines = 0.0, 0, []
        for passage, answer in zip(passages, answers, strict=True):
            nats = surprise(answer)
            if not nats:
                raise CouldNotRunError("the server gives no prompt_logprobs")
            tokens += len(nats)
            mean = sum(nats) / len(nats)
            lines.append(f"{passage.name}: {mean:.3f} nats a token, {len(nats)} tokens")
            worst = max(worst, mean if mean == mean else math.inf)
        reason = f"worst passage {worst:.3f} nats a token, at most {self.params.max_nats:g}"
        figures = {"worst_nats": worst, "tokens": float(tokens)}
        detects = f"a passage {self.params.max_nats - worst:.2f} nats a token worse"
        if worst > self.params.max_nats:
            return Outcome("fail", reason, "", figures, tuple(lines[:5]))
        if tokens < self.params.min_tokens:
            return Outcome("unsure", f"not enough samples: {tokens} tokens", "", figures)
        return Outcome("pass", reason, detects, figures)


def surprise(answer: Answer) -> list[float]:
    """-log p of each prompt token but the first; NaN where it is none."""
    ids = answer.prompt_ids
    nats = []
    for index, position in enumerate(answer.prompt_logprobs):
        if position is None or index >= len(ids):
            continue
        nats.append(-position.get(ids[index], math.nan))
    return nats


class Worst:
    """The window of positions with the largest mean divergence."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.place = ""
        self._text, self._first, self._last, self._values = "", 0, 0, list[float]()

    def add(self, text: str, index: int, divergence: float, size: int) -> None:
        if text != self._text or len(self._values) == size:
            self.close()
            self._text, self._first = text, index
        self._last = index
        self._values.append(divergence)

    def close(self) -> None:
        """End of a window, or of a text."""
        if self._values:
            mean = sum(math.inf if v != v else v for v in self._values) / len(self._values)
            if mean > self.mean:
                self.mean = mean
                self.place = f"{self._text}, positions {self._first}-{self._last}"
        self._values = []


class ReferenceKl(Check):
    """The distribution over the next token, against the one that a trusted server recorded.

    Two models can answer alike and still differ: mean KL divergence, its 99th percentile and the
    share of equal top-1 tokens see a wrong scale before a wrong word (llama.cpp's measure). The KL
    is taken over the recorded likeliest tokens and one bin for all others, so it is a lower bound.
    Its mean over windows tells of faults that begin at some length, and where.
    """

    name = "reference-kl"
    stage = "together"

    class Params(Strict):
        max_mean: Positive
        max_p99: Positive
        max_window: Positive
        """Mean over the worst `window` positions in a row, where a fault of length shows."""
        window: Count = 256
        min_top1: Share
        """Share of positions, those with a gap above the suite's margin, that keep their top-1."""
        texts: tuple[str, ...] = ()
        """Names of passages; empty: all."""
        min_positions: Count = 200

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        reference: Reference | None = lab.reference
        if reference is None:
            return Outcome("skip", f"no reference was given, and suite {lab.suite.name} has none")
        texts = [t for t in reference.texts if not self.params.texts or t.name in self.params.texts]
        if not texts:
            raise CouldNotRunError(f"the reference has none of {', '.join(self.params.texts)}")
        answers = await asyncio.gather(
            *(
                lab.complete(
                    text.ids, label=f"{self.name} {text.name}", max_tokens=1, logprobs=None,
                    prompt_logprobs=reference.likeliest,
                )
                for text in texts
            )
        )  # fmt: skip
        divergences: list[float] = []
        worst = Worst()
        clear = kept = 0
        lost = []
        for text, answer in zip(texts, answers, strict=True):
            if len(answer.prompt_logprobs) != len(text.positions):
                raise CouldNotRunError(
                    f"{text.name}: {len(answer.prompt_logprobs)} positions, the reference has"
                    f" {len(text.positions)}"
                )
            for index, (expected, found) in enumerate(
                zip(text.positions, answer.prompt_logprobs, strict=True)
            ):
                if expected is None:
                    continue
                divergence = kl(expected, found or {})
                divergences.append(divergence)
                worst.add(text.name, index, divergence, self.params.window)
                if expected.gap > lab.suite.margin:
                    clear += 1
                    likeliest = max(found, key=lambda i: found[i]) if found else None
                    if likeliest == expected.likeliest:
                        kept += 1
                    else:
                        lost.append(f"{text.name}: position {index}: KL {divergence:.2f}")
        worst.close()
        return self._decide(divergences, worst, clear, kept, lost)

    def _decide(
        self, divergences: list[float], worst: Worst, clear: int, kept: int, lost: list[str]
    ) -> Outcome:
        n = len(divergences)
        if n < self.params.min_positions or clear == 0:
            return Outcome("unsure", f"not enough samples: {n} positions, {clear} of them clear")
        finite = sorted(math.inf if d != d else d for d in divergences)
        mean, p99 = sum(finite) / n, finite[min(n - 1, int(0.99 * n))]
        share = kept / clear
        figures = {
            "mean_kl": mean, "p99_kl": p99, "window_kl": worst.mean, "top1": share,
            "positions": float(n),
        }  # fmt: skip
        reason = (
            f"mean KL {mean:.2g}, p99 {p99:.2g}, worst window {worst.mean:.2g} nats; top-1 kept at"
            f" {kept} of {clear} positions"
        )
        _, high = wilson(kept, clear)
        bad = []
        if not mean <= self.params.max_mean:
            bad.append(f"mean above {self.params.max_mean:g}")
        if not p99 <= self.params.max_p99:
            bad.append(f"p99 above {self.params.max_p99:g}")
        if not worst.mean <= self.params.max_window:
            bad.append(f"{worst.place} above {self.params.max_window:g}")
        if high < self.params.min_top1:
            bad.append(f"top-1 below {self.params.min_top1:g}")
        if bad:
            return Outcome("fail", f"{reason}: {', '.join(bad)}", "", figures, tuple(lost[:5]))
        detects = f"a mean KL above {self.params.max_mean:g} nats"
        return Outcome("pass", reason, detects, figures, tuple(lost[:5]))


def kl(expected: Position, found: dict[int, float]) -> float:
    """KL(expected || found) in nats over the tokens both list and one bin for the rest.

    Merging outcomes never raises a divergence, so this is at most the true one. A token that the
    server does not list is counted into the rest.
    """
    total = mass_expected = mass_found = 0.0
    for token, logprob in expected.logprobs.items():
        other = found.get(token)
        if other is None:
            continue
        if other != other:
            return math.inf
        p = math.exp(logprob)
        total += p * (logprob - other)
        mass_expected += p
        mass_found += math.exp(other)
    rest, rest_found = max(0.0, 1 - mass_expected), max(1e-12, 1 - mass_found)
    if rest > 1e-6:
        total += rest * (math.log(rest) - math.log(rest_found))
    return max(0.0, total)
