"""What a text looks like: repetition, scripts, characters that nobody prints, special tokens."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Cycle:
    """A stretch that only repeats itself."""

    start: int
    """Index at which the first repetition begins."""
    period: int
    length: int
    """Items that equal the one a period before."""


def find_cycle(
    items: Sequence[Hashable], min_length: int = 48, max_period: int = 256
) -> Cycle | None:
    """The longest stretch in which every item equals the one `period` before it.

    A stretch counts from `min_length` items and two whole periods on: a refrain is no cycle.
    """
    best: Cycle | None = None
    codes: dict[Hashable, int] = {}
    sequence = [codes.setdefault(item, len(codes)) for item in items]
    for period in range(1, min(max_period, len(sequence) // 3) + 1):
        run = 0
        needed = max(min_length, 2 * period)
        if best is not None:
            needed = max(needed, best.length + 1)
        for index in range(period, len(sequence)):
            if sequence[index] == sequence[index - period]:
                run += 1
            else:
                run = 0
                if len(sequence) - index - 1 < needed:
                    break
            if run >= needed:
                best = Cycle(index - run + 1, period, run)
                needed = run + 1
    return best


def top_ngram_share(items: Sequence[Hashable], n: int = 5) -> float:
    """Share of the commonest n-gram among all; 0 for a text shorter than n."""
    grams = Counter(zip(*(items[i:] for i in range(n)), strict=False))
    total = sum(grams.values())
    return max(grams.values()) / total if total else 0.0


def distinct_ngram_share(items: Sequence[Hashable], n: int = 5) -> float:
    """Distinct n-grams over all; 1 for a text shorter than n."""
    total = max(0, len(items) - n + 1)
    if not total:
        return 1.0
    return len(set(zip(*(items[i:] for i in range(n)), strict=False))) / total


LONGEST_WORD = 64
WORD = re.compile(
    r"[^\W\d_぀-ヿ㐀-鿿가-힯]+|\d|[^\w\s]|\w"
    rf"|\s{{{LONGEST_WORD},}}"
)


def words(text: str) -> list[str]:
    """Words; single characters for scripts that have no spaces between words.

    Single characters too for what is longer than any word or space: a token repeated without
    an end is one endless word, or space without any, and would otherwise not be seen to repeat.
    """
    found: list[str] = []
    for part in WORD.findall(text):
        if len(part) < LONGEST_WORD:
            found.append(part)
        else:
            found.extend(part)
    return found


COMMON = "Common"


@lru_cache(maxsize=65536)
def script(character: str) -> str:
    """Script of a character by its Unicode name: 'Latin', 'Cyrillic', 'Cjk', ...

    Digits, punctuation, spaces, marks and symbols belong to none: 'Common'. The first word of a
    letter's name is its script, but for a handful of presentation forms that do not matter here.
    """
    if unicodedata.category(character)[0] != "L":
        return COMMON
    name = unicodedata.name(character, "")
    first = name.split(" ", 1)[0].split("-", 1)[0]
    if first in ("FULLWIDTH", "HALFWIDTH", "MODIFIER", "MATHEMATICAL", "FEMININE", "MASCULINE"):
        return COMMON
    return first.capitalize() or "Unknown"


_UNPRINTABLE = frozenset({"Cc", "Cs", "Co", "Cn"})
_FINE = frozenset("\n\r\t")


@lru_cache(maxsize=65536)
def unprintable(character: str) -> bool:
    """Control, surrogate, private or unassigned characters, and the replacement character."""
    if character in _FINE:
        return False
    return character == "�" or unicodedata.category(character) in _UNPRINTABLE


@dataclass(frozen=True)
class Odd:
    """A character that does not belong."""

    index: int
    character: str
    why: str


def odd_characters(text: str, scripts: frozenset[str], also: str = "") -> list[Odd]:
    """Characters that cannot be printed or are of a script that is neither in `scripts` nor in the
    text `also` (the prompt: what was asked in Greek may be answered in Greek)."""
    allowed = scripts | {COMMON} | {script(c) for c in set(also)}
    known = set(also)
    odd = []
    for index, character in enumerate(text):
        if character.isascii() and (character.isprintable() or character in _FINE):
            if character.isalpha() and "Latin" not in allowed:
                odd.append(Odd(index, character, "Latin"))
            continue
        if character in known:
            continue
        if unprintable(character):
            odd.append(Odd(index, character, f"U+{ord(character):04X}"))
        elif script(character) not in allowed:
            odd.append(Odd(index, character, script(character)))
    return odd


SPECIAL_TOKEN = re.compile(
    r"<\s*[｜|][^<>\n]{1,40}[｜|]\s*>"  # DeepSeek, ChatML
    r"|</?think>|</?tool_calls?>|</?tool_call(?:s_section)?_?(?:begin|end)?>"
    r"|<\|?(?:bos|eos|pad|unk|s|/s|begin_of_text|end_of_text|im_start|im_end|eot_id)\|?>"
    r"|\[/?INST\]|｜DSML｜|<0x[0-9A-Fa-f]{2}>"
)
"""Markup of chat formats and tokenizers that no client may see in content or reasoning."""


def special_tokens(text: str) -> list[str]:
    return SPECIAL_TOKEN.findall(text)


def excerpt(text: str, limit: int = 120) -> str:
    """Printable, in one line, shortened in the middle."""
    shown = "".join(c if c.isprintable() or c in _FINE else f"\\u{ord(c):04x}" for c in text)
    shown = " ".join(shown.split())
    if len(shown) <= limit:
        return shown
    half = (limit - 5) // 2
    return f"{shown[:half]} ... {shown[-half:]}"
