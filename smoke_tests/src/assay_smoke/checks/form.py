"""Checks of form: they send nothing, and look at every answer that the others got."""

from __future__ import annotations

from collections import Counter

from assay_smoke.checks.base import Check, Outcome, RateParams
from assay_smoke.client import Answer
from assay_smoke.lab import Lab
from assay_smoke.suite import Count, Share
from assay_smoke.text import (
    excerpt,
    find_cycle,
    odd_characters,
    special_tokens,
    top_ngram_share,
    words,
)


def said_something(lab: Lab) -> list[Answer]:
    """Answers that were asked to generate: reading a prompt again asks for one token."""
    return [a for a in lab.transcript if a.asked_tokens > 1]


class ScriptMix(Check):
    """Characters that nobody prints, or of a script that neither suite nor prompt uses.

    Corrupt logits fall on any token, and most of a large vocabulary is of another script: a foreign
    letter in an English answer is the cheapest sign of a rare corruption, and one is enough.
    """

    name = "script-mix"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.01
        per: Count = 16
        """Characters that make one sample: about a word or two."""

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        bad, samples, examples = 0, 0, []
        for answer in said_something(lab):
            text = answer.text
            samples += -(-len(text) // self.params.per)
            odd = odd_characters(text, lab.suite.scripts, answer.prompt)
            bad += len({o.index // self.params.per for o in odd})
            if odd:
                first = odd[0]
                around = text[max(0, first.index - 20) : first.index + 20]
                examples.append(
                    f"{answer.label}: {first.why} at {first.index}: {excerpt(around)!r}"
                )
        return Outcome.of_rate(
            self.params.rule, bad, samples, "hold an odd character",
            f"pieces of {self.params.per} characters", examples,
        )  # fmt: skip


class Repetition(Check):
    """Answers that go round in circles, or say one phrase over and over.

    A model whose attention lost its past repeats itself; greedy decoding then never leaves the
    loop.
    """

    name = "repetition"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.1
        min_words: Count = 40
        """Shorter answers cannot be judged."""
        max_top_share: Share = 0.25
        """Share of the commonest 5-gram (SGLang's sanity kit)."""

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        looked, found = 0, []
        for answer in said_something(lab):
            parts = words(answer.text)
            if len(parts) < self.params.min_words:
                continue
            looked += 1
            if (cycle := find_cycle(parts)) is not None:
                found.append(
                    f"{answer.label}: from word {cycle.start} on {cycle.length} words repeat with"
                    f" period {cycle.period}"
                )
            elif (share := top_ngram_share(parts)) > self.params.max_top_share:
                found.append(f"{answer.label}: one phrase makes {share:.0%} of all 5-grams")
        return Outcome.of_rate(
            self.params.rule, len(found), looked, "repeat themselves", "longer answers", found
        )


class EmptyContent(Check):
    """Answers without content: empty, or with reasoning only.

    `200 OK` with empty content is how an uncalibrated activation scale and a lost end-of-thought
    marker both look to a client.
    """

    name = "empty-content"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.1

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        answers, found = said_something(lab), []
        for answer in answers:
            if answer.content.strip() or answer.tool_calls:
                continue
            if answer.finish_reason is None and answer.problems:
                continue  # broken off: `well-formed` tells of it
            what = (
                f"only reasoning, {len(answer.reasoning)} characters"
                if answer.reasoning
                else "empty"
            )
            found.append(f"{answer.label}: {what}, finish_reason {answer.finish_reason!r}")
        return Outcome.of_rate(
            self.params.rule, len(found), len(answers), "without content", "answers", found
        )


class FinishReasons(Check):
    """Answers to short questions that end for another reason than being finished.

    A model that misses its end token runs into max_tokens on everything; one that emits it too
    early cuts its answers. Neither needs to look wrong in any single answer.
    """

    name = "finish-reasons"
    stage = "transcript"

    class Params(RateParams):
        tolerated: Share = 0.02
        unacceptable: Share = 0.2

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        counts: Counter[str] = Counter()
        found, looked = [], 0
        for answer in said_something(lab):
            counts[str(answer.finish_reason)] += 1
            if not answer.label.startswith(
                ("known-answers", "determinism", "tool-calls", "thinking")
            ):
                continue
            looked += 1
            if answer.finish_reason not in ("stop", "tool_calls"):
                found.append(
                    f"{answer.label}: {answer.finish_reason!r} after {answer.generated} tokens:"
                    f" {excerpt(answer.text, 50)!r}"
                )
        mix = ", ".join(f"{reason} {n}" for reason, n in counts.most_common(6))
        outcome = Outcome.of_rate(
            self.params.rule, len(found), looked, "do not end by themselves", "short answers", found
        )
        return Outcome(
            outcome.verdict, f"{outcome.reason}; all: {mix}", outcome.detects, outcome.figures,
            outcome.examples,
        )  # fmt: skip


class SpecialTokens(Check):
    """Markup of the chat format in what a client sees.

    A leaked `</think>`, an end-of-sentence token or half a tool call means that a parser and the
    model disagree, which is a wrong tokenizer mode or a wrong token.
    """

    name = "special-tokens"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.1

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        answers, found = [a for a in said_something(lab) if a.chat], []
        for answer in answers:
            leaked = [t for t in special_tokens(answer.text) if t not in answer.prompt]
            if leaked:
                found.append(f"{answer.label}: {excerpt(leaked[0], 40)!r}")
        return Outcome.of_rate(
            self.params.rule, len(found), len(answers), "leak markup", "answers", found
        )


class WellFormed(Check):
    """Answers and streams that keep to the protocol.

    A stream without its end, an event that is no JSON, text after the finish reason: a client loses
    output, and a server that writes so is broken whatever it meant to say. Only what arrived whole
    counts; a connection that broke off is an outage.
    """

    name = "well-formed"
    stage = "transcript"

    class Params(RateParams):
        unacceptable: Share = 0.1

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        found = [f"{a.label}: {a.problems[0]}" for a in lab.transcript if a.problems]
        lied = [
            f"{a.label}: usage says {a.completion_tokens} tokens, {len(a.tokens)} came"
            for a in lab.transcript
            if not a.problems
            and a.free
            and a.completion_tokens is not None
            and a.tokens
            and abs(a.completion_tokens - len(a.tokens)) > 2
        ]
        return Outcome.of_rate(
            self.params.rule, len(found) + len(lied), len(lab.transcript), "break the protocol",
            "answers", [*found, *lied],
        )  # fmt: skip
