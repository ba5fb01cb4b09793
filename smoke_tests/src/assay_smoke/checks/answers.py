"""Checks that know what is right."""

from __future__ import annotations

import asyncio
import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jsonschema

from assay_smoke.checks.base import Check, Outcome, RateParams
from assay_smoke.client import Answer
from assay_smoke.lab import Lab
from assay_smoke.scoring import is_right
from assay_smoke.suite import Count, Question
from assay_smoke.text import excerpt


class QuestionParams(RateParams):
    categories: tuple[str, ...] = ()
    """Only questions of these; empty: all that the check can use."""
    sample: Count = 24
    """Questions to begin with; more are drawn while the rate is undecided."""
    first: tuple[str, ...] = ()
    """Ids that are always asked, and first."""


def said(answer: Answer) -> str:
    calls = "".join(f" {call.name}({call.arguments})" for call in answer.tool_calls)
    return excerpt(answer.content + calls, 80)


class Questioning(Check):
    """Asks questions until the share of wrong answers is decided, or none are left."""

    stage = "together"
    Params = QuestionParams
    params: QuestionParams
    wrong_words: ClassVar[str] = "wrong"

    def usable(self, question: Question) -> bool:
        return True

    def pool(self, lab: Lab) -> list[Question]:
        chosen = [
            q
            for q in lab.suite.questions
            if self.usable(q)
            and (not self.params.categories or q.category in self.params.categories)
        ]
        lab.rng(self.name).shuffle(chosen)
        first = [lab.suite.by_id[i] for i in self.params.first if i in lab.suite.by_id]
        return [*first, *(q for q in chosen if q not in first)]

    @abstractmethod
    async def problem(self, lab: Lab, question: Question) -> str | None:
        """Ask; what was wrong, in one line."""

    async def run(self, lab: Lab) -> Outcome:
        pool, wrong, asked = self.pool(lab), [], 0
        self.sample: tuple[str, str] | None = None
        if not pool:
            return Outcome("error", f"suite {lab.suite.name} has no question for this check")
        rule = self.params.rule
        batch = self.params.sample
        while asked < len(pool):
            part = pool[asked : asked + batch]
            problems = await asyncio.gather(*(self.problem(lab, q) for q in part))
            wrong += [p for p in problems if p]
            asked += len(part)
            if rule.decide(len(wrong), asked) != "unsure":
                break
        outcome = Outcome.of_rate(rule, len(wrong), asked, self.wrong_words, "answers", wrong)
        return replace(outcome, sample=self.sample)


class KnownAnswers(Questioning):
    """Questions that the healthy model answers right, with numeric scoring.

    Fluent nonsense passes every statistic of form; only a known answer shows it. A wrong MoE path
    once took GSM8K from 0.95 to 0.60, one wrong scale from 0.945 to 0.005.
    """

    name = "known-answers"

    def usable(self, question: Question) -> bool:
        return question.kind != "tool" and not question.thinking and question.json_schema is None

    async def problem(self, lab: Lab, question: Question) -> str | None:
        answer = await lab.ask(question, self.name)
        if self.sample is None or question.id in self.params.first:
            self.sample = (str(question.messages[-1].get("content")), answer.content)
        if is_right(question, answer):
            return None
        return (
            f"{question.id}: wanted {excerpt(str(question.expected), 40)!r}, got {said(answer)!r}"
        )


class ToolCalls(Questioning):
    """Tool calls with the right name and arguments that are JSON of the tool's schema.

    A call is the most brittle text a model writes: one wrong token and the parser gives up, which
    clients see as an empty answer or a call leaked into the content.
    """

    name = "tool-calls"
    wrong_words = "are no valid call"

    def usable(self, question: Question) -> bool:
        return question.kind == "tool" and not question.thinking

    async def problem(self, lab: Lab, question: Question) -> str | None:
        answer = await lab.ask(question, self.name)
        schemas = {
            t["function"]["name"]: t["function"].get("parameters", {}) for t in question.tools
        }
        if not answer.tool_calls:
            return f"{question.id}: no call, but {said(answer)!r}"
        for call in answer.tool_calls:
            if call.name not in schemas:
                return f"{question.id}: calls {excerpt(call.name, 40)!r}, which is not offered"
            if (wrong := schema_problem(call.arguments, schemas[call.name])) is not None:
                return f"{question.id}: {call.name}: {wrong}"
        if not is_right(question, answer):
            return f"{question.id}: wanted {question.expected}, got {said(answer)!r}"
        if answer.finish_reason != "tool_calls":
            return f"{question.id}: a call that finishes with {answer.finish_reason!r}"
        return None


def schema_problem(text: str, schema: dict[str, Any]) -> str | None:
    """Why a text is not JSON of a schema, in one line."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, RecursionError):
        return f"not JSON: {excerpt(text, 60)!r}"
    except jsonschema.ValidationError as error:
        return excerpt(error.message, 120)
    except jsonschema.SchemaError as error:
        return f"the suite's schema is wrong: {excerpt(error.message, 100)}"
    return None


class JsonSchema(Questioning):
    """Answers under a JSON schema that parse, fit it and are right.

    Constrained decoding hides garbage behind valid syntax: so the values are checked too, and the
    same path is where masks and wrong logits meet.
    """

    name = "json-schema"
    wrong_words = "are no valid JSON"

    def usable(self, question: Question) -> bool:
        return question.json_schema is not None

    async def problem(self, lab: Lab, question: Question) -> str | None:
        answer = await lab.ask(question, self.name)
        schema = question.json_schema
        assert schema is not None
        if (wrong := schema_problem(answer.content, schema)) is not None:
            return f"{question.id}: {wrong}"
        if not is_right(question, answer):
            return f"{question.id}: wanted {question.expected}, got {said(answer)!r}"
        return None


class ThinkingSwitch(Questioning):
    """Thinking on: reasoning, and a right answer apart from it. Off: none.

    vLLM's deepseek_v4 reasoning parser leaves the content empty when it sees no end of the thought
    (vLLM issue 48645), and a model that lost the marker thinks into its answer.
    """

    name = "thinking"
    wrong_words = "break the rule"

    def usable(self, question: Question) -> bool:
        return question.thinking and question.kind != "tool"

    async def problem(self, lab: Lab, question: Question) -> str | None:
        on, off = await asyncio.gather(
            lab.ask(question, self.name), lab.ask(question, self.name, thinking=False)
        )
        if not on.reasoning.strip():
            return f"{question.id}: thinking on, but no reasoning"
        if not is_right(question, on):
            return f"{question.id}: thinking on: wanted {question.expected!r}, got {said(on)!r}"
        if off.reasoning.strip():
            return f"{question.id}: thinking off, but reasoning {excerpt(off.reasoning, 40)!r}"
        if not is_right(question, off):
            return f"{question.id}: thinking off: wanted {question.expected!r}, got {said(off)!r}"
        return None


def number_pattern(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\d){re.escape(value)}(?!\d)")


def examples(problems: Sequence[str | None]) -> list[str]:
    return [p for p in problems if p]
