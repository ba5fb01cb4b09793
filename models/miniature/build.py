"""Write `battery.jsonl.gz`: the questions that judge the miniature, drawn from `generate.py` with
seeds of their own.

usage: python -m miniature.build
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import generate as g
from . import world
from .battery import BATTERY
from .chat import segments
from .data import encode, load_tokenizer
from .phrasing import RELATION, RELATIONS

CHECKPOINT = Path(__file__).parent / "checkpoint"
FAR = 2048  # tokens between the needle and the end of the prompt


def _item(sample: g.Sample, held: bool, thinking: bool, max_tokens: int) -> dict[str, Any]:
    messages = [{k: v for k, v in m.items() if k != "reasoning"} for m in sample.chat.messages[:-1]]
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    item = {
        "category": sample.category,
        "held_out": held,
        "thinking": thinking,
        "max_tokens": max_tokens,
        "check": sample.check["kind"],
        "expected": sample.check["expected"],
        "messages": messages,
    }
    if "needle" in sample.check:
        item["needle"] = sample.check["needle"]
    return item | ({"tools": sample.chat.tools} if sample.chat.tools else {})


def _plan() -> list[tuple[Callable[[random.Random, bool], g.Sample], int, int, int, int]]:
    """(maker, seen wordings, unseen wordings, how many of each think, max_tokens)."""

    def call(rng: random.Random, held: bool) -> g.Sample:
        return g.tool_call(rng, held, stop_at_call=True)

    def hay(rng: random.Random, held: bool) -> g.Sample:
        return g.haystack(rng, held, sentences=rng.randint(10, 80), needles=rng.randint(3, 10))

    return [
        (g.fact, 22, 40, 6, 60),
        (g.arithmetic, 16, 18, 4, 90),
        (g.word_problem, 6, 6, 2, 90),
        (g.comparison, 3, 3, 0, 40),
        (g.follow_up, 4, 3, 0, 40),
        (g.mixed_turns, 3, 3, 0, 40),
        (g.memory, 8, 8, 2, 60),
        (g.copying, 4, 3, 0, 60),
        (g.listing, 5, 3, 0, 90),
        (g.small_talk, 5, 0, 1, 60),
        (g.json_answer, 9, 7, 0, 80),
        (call, 10, 8, 2, 120),
        (g.tool_call, 4, 3, 1, 80),
        (g.tool_unneeded, 3, 2, 0, 60),
        (hay, 8, 7, 2, 60),
        (g.counted_story, 2, 0, 0, 300),
        (g.short_story, 3, 2, 0, 90),
    ]


def _far_needle(rng: random.Random, held: bool) -> g.Sample:
    """A long text whose asked-for needle lies more than `FAR` tokens before the prompt's end."""
    tokenizer = load_tokenizer(CHECKPOINT)
    while True:
        sample = g.haystack(
            rng, held, sentences=rng.randint(250, 320), needles=rng.randint(6, 24), early=True
        )
        sample.chat.thinking = False
        if len(sample.chat.messages) > 3 or sample.chat.messages[0]["role"] == "system":
            continue
        prompt = g.Chat(sample.chat.messages[:-1])
        ids = encode(tokenizer, prompt)
        key = sample.chat.messages[-1]["content"].split()
        name = next(w for w in world.NAMES if w in {k.strip(".'s,") for k in key} or w in key)
        text = "".join(t for t, _ in segments(prompt))
        first = text.index(name)
        before = len(tokenizer.encode(text[:first], add_special_tokens=False).ids)
        if len(ids) - before > FAR + 64 and len(ids) < 3700:
            sample.category = "far_needle"
            sample.check["needle"] = name
            return sample


def build() -> list[dict[str, Any]]:
    """All items; the same ones every time."""
    items: list[dict[str, Any]] = []
    seen: set[str] = set()

    def add(sample: g.Sample, held: bool, thinking: bool, max_tokens: int) -> bool:
        key = json.dumps(sample.chat.messages[:-1][-1]["content"])
        if key in seen:
            return False
        seen.add(key)
        items.append(_item(sample, held, thinking, max_tokens))
        return True

    paris = g.fact(random.Random("paris"), False, RELATION["capital"], "France")
    paris.chat.messages = [
        {"role": "user", "content": "What is the capital of France?"},
        paris.chat.messages[-1],
    ]
    add(paris, False, False, 40)
    for relation in RELATIONS:  # every relation at least once in an unseen wording
        rng = random.Random(f"battery-{relation.name}")
        add(g.fact(rng, True, relation), True, False, 60)
    for number, (maker, plain, held, think, max_tokens) in enumerate(_plan()):
        for unseen, count in ((False, plain), (True, held)):
            rng = random.Random(f"battery-{number}-{unseen}")
            done = 0
            while done < count:
                thinks = think > done
                done += add(maker(rng, unseen), unseen, thinks, max_tokens + 100 * thinks)
    rng = random.Random("battery-far")
    for i in range(32):
        add(_far_needle(rng, i % 2 == 1), i % 2 == 1, False, 40)
    for i in range(3):
        rng = random.Random(f"battery-story-{i}")
        add(g.long_story(rng, i == 2, chapters=3), i == 2, False, 2000)
        items[-1]["expected"] = "a journey whose chapters move on"
    for i, item in enumerate(items):
        items[i] = {"id": f"{item['category']}-{i:03d}"} | item
    return items


def main() -> None:
    items = build()
    with gzip.GzipFile(BATTERY, "wb", mtime=0) as f:
        for item in items:
            f.write((json.dumps(item, ensure_ascii=False) + "\n").encode())
    print(
        len(items),
        "items,",
        sum(i["held_out"] for i in items),
        "in unseen wordings,",
        BATTERY.stat().st_size,
        "bytes",
    )


if __name__ == "__main__":
    main()
