"""Make the files of the suite `miniature` from the miniature's own data: its battery and its world.

    PYTHONPATH=models python smoke_tests/make_miniature.py

Questions are those of `models/miniature/battery.jsonl.gz` that one short request can ask; passages
are known good text, with V4's chat markup, as the model learned it. Questions that the healthy
model gets wrong stand in WRONG: a battery measures the server, not the model's education.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from miniature import battery, chat, generate, stories

SUITES = Path(__file__).parent / "src" / "assay_smoke" / "suites"
LONGEST_CHARACTERS = 1200
WRONG = frozenset({"fact-067"})
TYPES = {str: "string", int: "integer", bool: "boolean", float: "number"}


def schema_of(value: dict[str, Any]) -> dict[str, Any]:
    """An object's schema: every key required, no other allowed."""
    return {
        "type": "object",
        "properties": {key: {"type": TYPES[type(v)]} for key, v in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }


def question(item: dict[str, Any]) -> dict[str, Any]:
    kept = {key: item[key] for key in ("id", "category", "expected", "messages", "max_tokens")}
    kept["kind"] = item["check"]
    for key in ("accept", "tools", "thinking"):
        if item.get(key):
            kept[key] = item[key]
    return kept


def questions() -> list[dict[str, Any]]:
    found = []
    for item in battery.load():
        size = sum(len(str(m.get("content"))) for m in item["messages"])
        if item["check"] == "story" or size > LONGEST_CHARACTERS or item["id"] in WRONG:
            continue
        found.append(question(item))
        flat = isinstance(item["expected"], dict) and all(
            type(v) in TYPES for v in item["expected"].values()
        )
        if item["check"] == "json" and flat and item["expected"]:
            schema = schema_of(item["expected"])
            found.append(found[-1] | {"id": f"schema-{item['id']}", "schema": schema})
    return found


def passages() -> list[dict[str, str]]:
    rng = random.Random(11)
    made = []

    def add(name: str, conversation: chat.Chat) -> None:
        made.append({"name": name, "text": chat.prompt_text(conversation)})

    for hero in (3, 17):
        name, kind = stories.HEROES[hero]
        told = [
            {"role": "user", "content": f"Tell me a long story about {name} the {kind}."},
            {"role": "assistant", "content": stories.journey(hero, 6, ends=False)},
        ]
        add(f"story of {name}", chat.Chat(told))
    for index in range(4):
        samples = [generate.fact(rng), generate.arithmetic(rng), generate.fact(rng)]
        turns = [m for s in samples for m in s.chat.messages[-2:]]
        for turn in turns:
            turn.pop("reasoning", None)
        add(f"conversation {index}", chat.Chat(turns))
    for index in range(2):
        add(f"notes {index}", plain(generate.haystack(rng, sentences=18, needles=3).chat))
    # Longer than 4 x index_topk: here the indexer has a choice, so only here its weights show.
    long = generate.haystack(rng, sentences=330, needles=12, early=True)
    add("long notes", plain(long.chat))
    return made


def plain(conversation: chat.Chat) -> chat.Chat:
    """Without thoughts."""
    conversation.thinking = False
    for turn in conversation.messages:
        turn.pop("reasoning", None)
    return conversation


def write(name: str, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (SUITES / name).write_text("\n".join(lines) + "\n")
    print(f"{name}: {len(records)}")


if __name__ == "__main__":
    write("miniature.questions.jsonl", questions())
    write("miniature.passages.jsonl", passages())
