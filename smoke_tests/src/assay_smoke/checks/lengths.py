"""Prompts of every awkward length."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from assay_smoke.checks.answers import said
from assay_smoke.checks.base import Check, Outcome, RateParams
from assay_smoke.checks.probabilities import rescore
from assay_smoke.lab import Lab
from assay_smoke.prompts import NeedlePrompts, ruler
from assay_smoke.stats import percent
from assay_smoke.suite import Count, Share

MODULUS = 4
"""V4's smaller compression window: a wrong digit at length = 3 mod 4 is vLLM issue 55927."""
ANSWER_TOKENS = 32


class BoundaryLengths(Check):
    """Prompts whose length in tokens lies at an edge, with answers that are known.

    Windows, blocks, chunks and compression groups end somewhere; the kernels that handle what is
    left over run at those lengths only. Lengths come in two kinds: every residue mod 4 many times,
    and each edge once, where a wrong answer is followed by more of that very length. The shortest
    lengths have no room for a question: their continuation is read again in prefill, at another
    length.
    """

    name = "boundary-lengths"
    stage = "together"

    class Params(RateParams):
        tolerated: Share = 0.05
        unacceptable: Share = 0.5
        shortest: tuple[int, ...] = tuple(range(1, 10))
        edges: tuple[int, ...]
        per_residue: Count = 12
        second_look: Count = 8

    params: Params

    async def run(self, lab: Lab) -> Outcome:
        needles = NeedlePrompts(lab.suite.needle, lab.rng(self.name))
        wrong: dict[str, list[bool]] = defaultdict(list)
        examples: list[str] = []
        await asyncio.gather(
            *(
                self._residues(lab, needles, wrong, examples)
                for _ in range(self.params.per_residue)
            ),
            self._edges(lab, needles, self.params.edges, wrong, examples),
            self._shortest(lab, wrong, examples),
        )
        again = [n for n in self.params.edges if any(wrong[f"length {n}"])]
        await self._edges(lab, needles, again * self.params.second_look, wrong, examples)
        return self._decide(wrong, examples)

    def _decide(self, wrong: dict[str, list[bool]], examples: list[str]) -> Outcome:
        rule = self.params.rule
        verdicts: dict[str, list[str]] = defaultdict(list)
        for group, marks in wrong.items():
            decision = rule.decide(sum(marks), len(marks))
            alone = group.startswith("length") and not any(marks)
            words = f"{group}: {sum(marks)} of {len(marks)} wrong"
            verdicts["pass" if alone else decision].append(words)
        total, asked = sum(sum(m) for m in wrong.values()), sum(len(m) for m in wrong.values())
        rate = rule.detectable(self.params.per_residue)
        detects = "any edge where every answer is wrong"
        if rate is not None:
            detects += f", any residue where {percent(rate)} are"
        figures = {"events": float(total), "samples": float(asked)}
        if not asked:
            return Outcome("unsure", "not enough samples: the model's context has no room", "")
        if verdicts["fail"]:
            reason = "; ".join(verdicts["fail"][:4])
            return Outcome("fail", reason, detects, figures, tuple(examples[:5]))
        if verdicts["unsure"]:
            reason = f"not enough samples: {'; '.join(verdicts['unsure'][:4])}"
            return Outcome("unsure", reason, detects, figures, tuple(examples[:5]))
        return Outcome("pass", f"{total} of {asked} answers wrong", detects, figures)

    async def _ask(
        self, lab: Lab, needles: NeedlePrompts, lengths: Iterable[int], examples: list[str],
        offset: bool = False,
    ) -> list[tuple[int, bool]]:  # fmt: skip
        """(length, wrong) of one hidden code at each length; others are left out."""
        wanted = list(lengths)
        # A switch of thinking belongs to the chat's encoding, so to the tokenizer's request.
        found = await ruler(
            lab.client,
            needles,
            max(wanted) + (200 if offset else 0),
            lab.client.thinking.body(False),
        )
        room = lab.client.max_model_len
        results = []
        for length in wanted:
            n = found.shortest + length if offset else length
            if n < found.shortest or n > found.longest or (room and n + ANSWER_TOKENS > room):
                continue
            answer = await lab.complete(
                found.prompt(n), label=f"{self.name} {n}", max_tokens=ANSWER_TOKENS
            )
            good = found.code.found_in(answer)
            if not good:
                examples.append(f"{n} tokens: wanted {found.code.code}, got {said(answer)!r}")
            results.append((n, not good))
        return results

    async def _residues(
        self, lab: Lab, needles: NeedlePrompts, wrong: dict[str, list[bool]], examples: list[str]
    ) -> None:
        start = needles.rng.randint(4, 90)
        lengths = range(start, start + MODULUS)
        for n, bad in await self._ask(lab, needles, lengths, examples, offset=True):
            wrong[f"length = {n % MODULUS} mod {MODULUS}"].append(bad)

    async def _edges(
        self, lab: Lab, needles: NeedlePrompts, edges: Iterable[int],
        wrong: dict[str, list[bool]], examples: list[str],
    ) -> None:  # fmt: skip
        asked = await asyncio.gather(*(self._ask(lab, needles, [n], examples) for n in edges))
        for n, bad in (pair for pairs in asked for pair in pairs):
            wrong[f"length {n}"].append(bad)

    async def _shortest(self, lab: Lab, wrong: dict[str, list[bool]], examples: list[str]) -> None:
        ids = await lab.client.tokenize(lab.suite.passages[0].text)

        async def one(length: int) -> None:
            prompt = ids[:length]
            label = f"{self.name} {length}"
            answer = await lab.complete(prompt, label=label, max_tokens=6)
            if not answer.ids:
                wrong[f"length {length}"].append(True)
                examples.append(f"{length} tokens: no answer")
                return
            again = await rescore(lab, prompt, answer.ids, f"{label} read again")
            worst = max(again.gaps, default=0.0)
            wrong[f"length {length}"].append(worst > lab.suite.margin)
            if worst > lab.suite.margin:
                examples.append(
                    f"{length} tokens: a token {worst:.1f} nats unlikely when read again"
                )

        await asyncio.gather(*(one(n) for n in self.params.shortest))
