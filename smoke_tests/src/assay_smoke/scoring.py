"""Whether an answer says what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from assay_smoke.client import Answer, ToolCall
from assay_smoke.suite import Question

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?![\d])")


def last_number(text: str) -> Decimal | None:
    """The last number of a text; '1,234.50' is 1234.5."""
    found = NUMBER.findall(text)
    return number(found[-1]) if found else None


def number(text: str) -> Decimal | None:
    try:
        value = Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def is_right(question: Question, answer: Answer) -> bool:
    """number: the last one in the text equals the expected ("75.00" is "75"). word: it, or one of
    `accept`, stands there as a whole word. prefix: the text begins with it. text: equal up to white
    space and case. json: parses to the expected value. tool: the same calls in order."""
    if question.kind == "tool":
        return calls_equal(answer.tool_calls, question.expected)
    content = answer.content.strip()
    if answer.tool_calls or not content:
        return False
    expected = question.expected
    if question.kind == "json":
        try:
            return bool(json.loads(content) == expected)
        except (ValueError, RecursionError):
            return False
    wanted = [str(expected), *question.accept]
    match question.kind:
        case "number":
            return last_number(content) == number(str(expected))
        case "word":
            return any(_holds(content, word) for word in wanted)
        case "prefix":
            return any(content.startswith(words.strip()) for words in wanted)
        case "text":
            return _plain(content) in {_plain(words) for words in wanted}
    raise AssertionError(question.kind)


def calls_equal(calls: Sequence[ToolCall], expected: Any) -> bool:
    """Names and arguments, in order; arguments are compared as JSON values."""
    if len(calls) != len(expected):
        return False
    for call, wanted in zip(calls, expected, strict=True):
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return False
        if (call.name, arguments) != (wanted["name"], wanted["arguments"]):
            return False
    return True
