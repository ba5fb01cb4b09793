"""Checks that ask twice: the same question must have the same answer, whatever else goes on."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from assay_smoke.checks.answers import said
from assay_smoke.checks.base import Check, Outcome, RateParams
from assay_smoke.checks.compare import Comparisons
from assay_smoke.client import Answer
from assay_smoke.lab import Lab
from assay_smoke.prompts import NeedlePrompts
from assay_smoke.scoring import is_right
from assay_smoke.suite import Count, Question
from assay_smoke.text import excerpt


class RepeatParams(RateParams):
    questions: Count = 8
    """Questions drawn from those without tools and thinking."""
    repeats: Count = 2


class Repeating(Check):
    """Compares answers of one question with each other and with what is right."""

    stage = "alone"
    Params = RepeatParams
    params: RepeatParams

    def drawn(self, lab: Lab) -> list[Question]:
        plain = [
            q
            for q in lab.suite.questions
            if q.kind in ("number", "word", "text", "prefix") and not q.tools and not q.thinking
        ]
        lab.rng(self.name).shuffle(plain)
        # Short questions: what repeats is tested, not what is long.
        plain.sort(key=lambda q: sum(len(str(m.get("content"))) for m in q.messages) > 400)
        return plain[: self.params.questions]

    async def run(self, lab: Lab) -> Outcome:
        comparisons = Comparisons(lab.suite.margin)
        await self.compare(lab, comparisons)
        return comparisons.outcome(self.params.rule, "pairs of answers")

    @abstractmethod
    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        """Ask and add every pair."""


class Determinism(Repeating):
    """One question after another, each several times: greedy answers must not wander.

    Unstable output on an idle server means that something reads memory nobody wrote, such as stale
    padding of scales (vLLM issues 45888, 48898).
    """

    name = "determinism"

    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        for question in self.drawn(lab):
            first = await lab.ask(question, self.name)
            for _ in range(self.params.repeats):
                again = await lab.ask(question, self.name)
                comparisons.add(first, again, question.id)


class WarmSecondRequest(Repeating):
    """Prompts that the server has never seen, each asked twice: the second answer is warm.

    One engine gave NaN from the second request on (sglang issue 25704). Short probes that are
    always the same never meet a cold prompt again; so these carry a number drawn for the occasion.
    """

    name = "warm-second-request"

    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        needles = NeedlePrompts(lab.suite.needle, lab.rng(self.name))
        for index in range(self.params.questions):
            needle = needles.draw(sentences=3 + index % 5)
            label = f"new prompt {index}"
            answers = [
                await lab.chat(
                    needle.messages, label=f"{self.name} {label}", max_tokens=40, thinking=False
                )
                for _ in range(1 + self.params.repeats)
            ]
            for again in answers[1:]:
                comparisons.add(answers[0], again, label)
                if needle.found_in(answers[0]) and not needle.found_in(again):
                    comparisons.found.append(f"{label}: wanted {needle.code}, got {said(again)!r}")


class ConcurrentParams(RepeatParams):
    streams: Count = 8
    rounds: Count = 1


class ConcurrentStreams(Repeating):
    """Many streams at once against the answers that each question gets alone.

    Batching has kernels of its own, and corruption that needs a neighbour in the batch never shows
    in a single request.
    """

    name = "concurrent-streams"
    Params = ConcurrentParams
    params: ConcurrentParams

    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        questions = self.drawn(lab)
        alone = [await lab.ask(q, self.name) for q in questions]
        for _ in range(self.params.rounds):
            places = max(len(questions), self.params.streams)
            order = [i % len(questions) for i in range(places)]
            together = await asyncio.gather(
                *(lab.ask(questions[i], self.name, stream=True) for i in order)
            )
            for i, answer in zip(order, together, strict=True):
                comparisons.add(alone[i], answer, questions[i].id)


class PrefillDecodeParams(RepeatParams):
    prompt_tokens: Count = 1500
    """Rough length of the prompts that interrupt."""
    prefills: Count = 3
    decode_tokens: Count = 120


class PrefillDecode(Repeating):
    """Long prompts that arrive while others are being answered, against the same without them.

    Chunked prefill mixes both in one step; the metadata of that mix is built by code that neither a
    lone prompt nor a lone answer runs.
    """

    name = "prefill-decode"
    Params = PrefillDecodeParams
    params: PrefillDecodeParams

    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        prompts = lab.suite.long.prompts[: self.params.questions]
        needles = NeedlePrompts(lab.suite.needle, lab.rng(self.name))

        async def decode(prompt: str) -> Answer:
            return await lab.chat(
                [{"role": "user", "content": prompt}], label=f"{self.name} {prompt[:30]}",
                max_tokens=self.params.decode_tokens, thinking=False,
            )  # fmt: skip

        alone = await asyncio.gather(*(decode(prompt) for prompt in prompts))
        drawn = [
            needles.draw(tokens=self.params.prompt_tokens) for _ in range(self.params.prefills)
        ]

        async def interrupt(index: int) -> Answer:
            await asyncio.sleep(0.15 * (index + 1))
            return await lab.chat(
                drawn[index].messages, label=f"{self.name} prefill {index}", max_tokens=40,
                thinking=False,
            )  # fmt: skip

        mixed = await asyncio.gather(
            *(decode(prompt) for prompt in prompts), *(interrupt(i) for i in range(len(drawn)))
        )
        for prompt, before, during in zip(prompts, alone, mixed, strict=False):
            comparisons.add(before, during, f"answer to {prompt[:40]!r}")
        for needle, answer in zip(drawn, mixed[len(prompts) :], strict=True):
            comparisons.pairs += 1
            if not needle.found_in(answer):
                comparisons.found.append(
                    f"long prompt during decoding: wanted {needle.code}, got {said(answer)!r}"
                )


class PrefixCacheParams(RepeatParams):
    prompt_tokens: Count = 700
    """Rough length: several blocks of the cache."""


class PrefixCache(Repeating):
    """A long prompt new, and again with its beginning in the prefix cache.

    A hit resumes in the middle of a block, a window and a compressor's group; state that is not
    restored there changes the answer.
    """

    name = "prefix-cache"
    Params = PrefixCacheParams
    params: PrefixCacheParams

    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        needles = NeedlePrompts(lab.suite.needle, lab.rng(self.name))
        self.hits = 0.0
        for index in range(self.params.questions):
            needle = needles.draw(tokens=self.params.prompt_tokens)
            label = f"prompt {index}"
            before = await self._hits(lab)
            answers = [
                await lab.chat(m, label=f"{self.name} {label}", max_tokens=40, thinking=False)
                for m in (needle.messages, needle.messages, needle.asked_again())
            ]
            self.hits += await self._hits(lab) - before
            comparisons.add(answers[0], answers[1], f"{label}, all of it cached")
            for answer, what in zip(answers, ("new", "cached", "longer"), strict=True):
                comparisons.pairs += 1
                if not needle.found_in(answer):
                    comparisons.found.append(
                        f"{label}, {what}: wanted {needle.code}, got {said(answer)!r}"
                    )

    async def run(self, lab: Lab) -> Outcome:
        outcome = await super().run(lab)
        if outcome.verdict == "pass" and await self._hits(lab) and not self.hits:
            return Outcome(
                "unsure", "the prefix cache was never hit", outcome.detects, outcome.figures
            )
        return outcome

    async def _hits(self, lab: Lab) -> float:
        metrics = await lab.client.metrics()
        return (metrics.get("vllm:prefix_cache_hits_total") if metrics else None) or 0.0


class StreamEqualsWhole(Repeating):
    """The same answer streamed and in one piece.

    The two are put together by different code in the server: parsers that look at pieces lose or
    leak what stands at a boundary.
    """

    name = "stream-equals-whole"

    async def compare(self, lab: Lab, comparisons: Comparisons) -> None:
        pool = [q for q in lab.suite.questions if q.tools and q.kind == "tool" and not q.thinking]
        lab.rng(f"{self.name} tools").shuffle(pool)
        thinking = [q for q in lab.suite.questions if q.thinking and not q.tools]
        lab.rng(f"{self.name} thinking").shuffle(thinking)
        for question in [*self.drawn(lab), *pool[:2], *thinking[:2]]:
            whole, stream = await asyncio.gather(
                lab.ask(question, self.name), lab.ask(question, self.name, stream=True)
            )
            comparisons.add(whole, stream, question.id)
            if is_right(question, whole) and not is_right(question, stream):
                comparisons.found.append(
                    f"{question.id}: right in one piece, streamed {said(stream)!r}"
                )
            elif _same_tokens(whole, stream) and _visible(whole) != _visible(stream):
                comparisons.found.append(
                    f"{question.id}: streamed {excerpt(stream.text, 40)!r}, whole"
                    f" {excerpt(whole.text, 40)!r}"
                )


def _same_tokens(a: Answer, b: Answer) -> bool:
    return [t.text for t in a.tokens] == [t.text for t in b.tokens]


def _visible(answer: Answer) -> tuple[str, str, str | None]:
    return answer.content.strip(), answer.reasoning.strip(), answer.finish_reason
