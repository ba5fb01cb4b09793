"""The text is the same from the same seed, and the battery's unseen wordings are unseen."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from miniature import battery, build, generate, phrasing
from miniature.chat import prompt_text
from miniature.data import rows_of

CHECKPOINT = Path(battery.__file__).parent / "checkpoint"


def _squash(wording: str) -> str:
    return re.sub(r"[^a-z{}+*/-]+", " ", wording.lower()).strip()


def test_same_seed_same_text() -> None:
    def text(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [prompt_text(generate.draw(rng, generate.SHORT_MIX).chat) for _ in range(200)]

    assert text(3) == text(3)
    assert text(3) != text(4)


def test_same_seed_same_rows() -> None:
    first = rows_of(CHECKPOINT, random.Random("a"), 2, 1024)
    again = rows_of(CHECKPOINT, random.Random("a"), 2, 1024)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_rows_start_conversations_where_a_window_of_four_starts() -> None:
    _, _, doc = rows_of(CHECKPOINT, random.Random("b"), 4, 1024)
    starts = np.argwhere(np.diff(doc, axis=1) != 0)[:, 1] + 1
    assert len(starts) > 10
    assert not (starts % 4).any()


def _wording_sets() -> list[tuple[str, list[str], list[str]]]:
    sets = [(r.name, *phrasing.wordings(r)) for r in phrasing.RELATIONS]
    for op in "+-*/":
        train = [f.format(np=p) for f in phrasing.FRAMES for p in phrasing.ARITHMETIC[op]]
        held = [f.format(np=p) for f in phrasing.HELD_FRAMES for p in phrasing.ARITHMETIC[op]]
        held += [f.format(np=p) for f in phrasing.FRAMES for p in phrasing.HELD_ARITHMETIC[op]]
        train += phrasing.SUM_QUESTIONS[op]
        sets.append((op, train, held + phrasing.HELD_SUM_QUESTIONS[op]))
    sets.append(("comparison", phrasing.COMPARISONS, phrasing.HELD_COMPARISONS))
    sets.append(("more", phrasing.STORIES_MORE, phrasing.HELD_STORIES_MORE))
    sets.append(("less", phrasing.STORIES_LESS, phrasing.HELD_STORIES_LESS))
    sets.append(("times", phrasing.STORIES_TIMES, phrasing.HELD_STORIES_TIMES))
    sets += [(f"my {k}", entry[2], entry[4]) for k, entry in phrasing.MEMORIES.items()]
    for kind, entry in phrasing.NEEDLES.items():
        train = [f.format(np=p) for f in phrasing.FRAMES for p in entry[1]] + entry[2]
        held = [f.format(np=p) for f in phrasing.HELD_FRAMES for p in entry[1]] + entry[4]
        sets.append((f"needle {kind}", train, held))
    return sets


WORDINGS = {name: (train, held) for name, train, held in _wording_sets()}


@pytest.mark.parametrize("name", WORDINGS)
def test_no_unseen_wording_is_a_training_wording(name: str) -> None:
    """Compared without case and punctuation, with the slots open."""
    train, held = WORDINGS[name]
    assert held
    assert not {_squash(w) for w in train} & {_squash(w) for w in held}


def test_training_never_draws_a_question_of_the_battery_in_an_unseen_wording() -> None:
    """The same on filled-in text: 20,000 training conversations against the battery's questions."""
    asked = [i["messages"][-1] for i in battery.load() if i["held_out"]]
    unseen = {_squash(m["content"]) for m in asked if m["role"] == "user"}
    rng = random.Random("disjoint")
    for _ in range(20_000):
        for message in generate.draw(rng, generate.SHORT_MIX).chat.messages:
            if message["role"] == "user":
                assert _squash(message["content"]) not in unseen


def test_battery_file_is_what_the_code_builds() -> None:
    assert battery.load() == build.build()
