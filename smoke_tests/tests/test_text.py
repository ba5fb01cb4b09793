"""What a text looks like."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_smoke.text import (
    distinct_ngram_share,
    excerpt,
    find_cycle,
    odd_characters,
    script,
    special_tokens,
    top_ngram_share,
    words,
)

LATIN = frozenset({"Latin"})


@pytest.mark.parametrize(
    ("character", "name"),
    [("a", "Latin"), ("é", "Latin"), ("ж", "Cyrillic"), ("的", "Cjk"), ("が", "Hiragana"),
     ("가", "Hangul"), ("ω", "Greek"), ("7", "Common"), ("×", "Common"), ("\n", "Common"),
     ("😀", "Common"), ("Ａ", "Common")],
)  # fmt: skip
def test_scripts(character: str, name: str) -> None:
    assert script(character) == name


def test_odd_characters_are_those_that_nobody_asked_for() -> None:
    text = "The code is 4711 的 and\ufffd\x00."
    assert [o.why for o in odd_characters(text, LATIN)] == ["Cjk", "U+FFFD", "U+0000"]
    assert odd_characters("Ελλάδα and Ω", LATIN, also="Write α") == []
    assert odd_characters("naïve café — 5 × 3 = 15 ✓ 😀\n\t", LATIN) == []


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 10**6))
def test_a_cycle_is_found_with_its_place_and_period(period: int, before: int, seed: int) -> None:
    rng = random.Random(seed)
    fresh = [f"w{i}" for i in range(before)]
    loop = [f"l{i}" for i in range(period)]
    rng.shuffle(fresh)
    found = find_cycle(fresh + loop * (160 // period + 3))
    assert found is not None
    assert (found.period, found.start) == (period, before + period)


@given(st.lists(st.integers(0, 10**9), unique=True, max_size=400))
def test_what_never_repeats_has_no_cycle(items: list[int]) -> None:
    assert find_cycle(items) is None
    assert distinct_ngram_share(items) == 1.0


def test_a_refrain_is_no_cycle() -> None:
    verse = [f"v{i}" for i in range(60)]
    refrain = ["la"] * 8
    song = verse[:20] + refrain + verse[20:40] + refrain + verse[40:] + refrain
    assert find_cycle(song) is None


def test_shares_of_ngrams() -> None:
    assert top_ngram_share(["a"] * 9) == 1.0
    assert top_ngram_share(list("abcdefgh")) == 0.25
    assert top_ngram_share([]) == 0.0
    assert distinct_ngram_share(["a"] * 9) == 0.2


def test_words_of_scripts_without_spaces_are_single() -> None:
    assert words("Room 42, 東京!") == ["Room", "4", "2", ",", "東", "京", "!"]


@pytest.mark.parametrize(
    "text", ["a</think>", "<｜end▁of▁sentence｜>", "x <|im_end|>", "<｜DSML｜tool_calls>", "[INST]",
             "<tool_call>", "<0x0A>"],
)  # fmt: skip
def test_markup_is_seen(text: str) -> None:
    assert special_tokens(text)


@pytest.mark.parametrize(
    "text", ["a < b and c > d", "|x| <y>", "I think so", "<b>bold</b>", "2<|3"]
)
def test_what_only_looks_like_markup_is_not(text: str) -> None:
    assert special_tokens(text) == []


@given(st.text())
def test_an_excerpt_is_printable_and_short(text: str) -> None:
    shown = excerpt(text, 40)
    assert len(shown) <= 40
    assert shown.isprintable()


@pytest.mark.parametrize("token", ["turtle", "a", " ", "\n", " \t"])
def test_a_token_that_repeats_without_a_break_between_words_is_a_cycle(token: str) -> None:
    text = "Valentin the turtle went to the pond. " + token * 200
    found = find_cycle(words(text))
    assert found is not None
    assert found.period == len(token)
