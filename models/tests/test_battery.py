"""What the battery must contain, and that answers are judged as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from miniature import battery, stories
from miniature.chat import Chat
from miniature.data import encode, load_tokenizer

CHECKPOINT = Path(battery.__file__).parent / "checkpoint"
ITEMS = battery.load()
QUESTIONS = [i for i in ITEMS if i["check"] != "story"]


def test_composition() -> None:
    assert len(QUESTIONS) >= 200
    assert len({i["id"] for i in ITEMS}) == len(ITEMS)
    assert any(i["messages"][-1]["content"] == "What is the capital of France?" for i in QUESTIONS)
    assert sum(i["held_out"] for i in QUESTIONS) * 3 >= len(QUESTIONS)
    assert sum(i["category"] == "far_needle" for i in QUESTIONS) * 10 >= len(QUESTIONS)
    assert {"tool", "json", "arithmetic", "fact", "memory", "far_needle"} <= {
        i["category"] for i in QUESTIONS
    }
    assert any(i["thinking"] for i in QUESTIONS)
    assert any(i["check"] == "story" and i["max_tokens"] >= 2000 for i in ITEMS)


def test_far_needles_lie_more_than_2048_tokens_before_the_end() -> None:
    """In the last 2,048 tokens the person asked about stands in the question alone."""
    tokenizer = load_tokenizer(CHECKPOINT)
    for item in QUESTIONS:
        if item["category"] == "far_needle":
            ids = encode(tokenizer, Chat(item["messages"]))
            tail = tokenizer.decode(ids[-2048:], skip_special_tokens=False)
            assert len(ids) < 4000
            assert len(re.findall(rf"\b{item['needle']}\b", tail)) == 1, item["id"]


def _item(check: str, expected: Any, **more: Any) -> battery.Item:
    return {"id": "x", "check": check, "expected": expected} | more


@pytest.mark.parametrize(
    ("item", "right", "wrong"),
    [
        (_item("number", "42"), "40 + 2 = 42", "42 + 0 = 43"),
        (_item("word", "Fe"), "The symbol is Fe.", "The symbol is F."),
        (_item("word", "Oslo", accept=["Christiania"]), "Christiania", "Osloer"),
        (_item("prefix", "7 "), "7 is larger than 3.", "77 is larger than 3."),
        (_item("text", "red green"), " Red  green", "red"),
        (_item("json", {"a": 1}), '{"a":1}', '{"a": "1"}'),
    ],
)
def test_judging(item: battery.Item, right: str, wrong: str) -> None:
    assert battery.is_right(item, right)
    assert not battery.is_right(item, wrong)
    assert not battery.is_right(item, "")


def test_judging_of_tool_calls() -> None:
    item = _item("tool", [{"name": "f", "arguments": {"n": 3}}])
    call = {"function": {"name": "f", "arguments": json.dumps({"n": 3})}}
    assert battery.is_right(item, "", [call])
    assert not battery.is_right(item, "", [])
    assert not battery.is_right(item, "", [call, call])


def test_a_looping_story_is_told_from_one_that_moves_on() -> None:
    good = stories.journey(3, 30, ends=False)
    assert battery.story_report(good)["healthy"]
    assert not battery.story_report(" ".join(["the fox ran home and slept"] * 100))["healthy"]
    chapter = stories.chapter(3, 1)
    looping = good[:3000] + (chapter + "\n\n") * 20
    assert not battery.story_report(looping)["healthy"]
