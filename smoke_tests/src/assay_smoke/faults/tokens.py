"""A tokenizer without a vocabulary: the id of a token is its own bytes.

Words with the space before them, digits one by one, and V4's markup as single tokens, so that
lengths in tokens behave as with a real one. Ids are stable between processes.
"""

from __future__ import annotations

import re
from functools import lru_cache

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

_PIECE = re.compile(r"<｜[^｜]{1,40}｜>|</?think>| ?[^\W\d_]{1,12}|\d| ?[^\w\s]|\s|\w")


def encode_text(text: str) -> list[str]:
    """Tokens as texts; joined they are the input."""
    return _PIECE.findall(text)


@lru_cache(maxsize=1 << 17)
def token_id(token: str) -> int:
    return int.from_bytes(b"\x01" + token.encode("utf-8", "surrogatepass"), "big")


@lru_cache(maxsize=1 << 17)
def token_text(identifier: int) -> str:
    """The token of an id; the replacement character for a number that is none."""
    if identifier <= 0 or identifier.bit_length() > 8 * 200:
        return "\ufffd"
    raw = identifier.to_bytes((identifier.bit_length() + 7) // 8, "big")
    return raw[1:].decode(errors="replace") if raw[:1] == b"\x01" else "\ufffd"
