"""A sample of the miniature's battery through the official client; `make battery` asks it all."""

from __future__ import annotations

import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from .server import REPO

sys.path.insert(0, str(REPO / "models"))

from miniature import battery

PER_CATEGORY = 3
MIN_SHARE = 0.9
"""The whole battery must reach 0.97; a sample of about thirty may have one or two wrong more."""


def sample() -> list[dict[str, Any]]:
    """The first questions of each category, long stories left out."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in battery.load():
        if item["check"] != "story" and len(found[item["category"]]) < PER_CATEGORY:
            found[item["category"]].append(item)
    return [item for items in found.values() for item in items]


def test_a_sample_of_the_battery_is_answered_right(client: OpenAI, model: str) -> None:
    def problem(item: dict[str, Any]) -> str | None:
        body = battery.request_body(item, model)
        thinking = body.pop("chat_template_kwargs")
        answer = client.chat.completions.create(
            **body, extra_body={"chat_template_kwargs": thinking}
        )
        message = answer.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or []]
        if battery.is_right(item, message.content or "", calls):
            return None
        said = message.content or str(calls)
        return f"{item['id']}: wanted {item['expected']!r}, got {said[:200]!r}"

    items = sample()
    with ThreadPoolExecutor(8) as pool:
        wrong = [found for found in pool.map(problem, items) if found]
    assert len(items) >= 20
    assert 1 - len(wrong) / len(items) >= MIN_SHARE, "\n".join(wrong)
