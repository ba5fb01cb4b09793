"""Rows of packed conversations: tokens, how much each next token counts, and which conversation a
token belongs to.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .chat import Chat, segments
from .generate import LONG_MIX, SHORT_MIX, Sample, draw

PAD_ID = 2
ALIGN = 4  # conversations start where a window of ratio 4 starts, as they do when served alone
LONG_ROW = 4096


@lru_cache(maxsize=2)
def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """A prompt's token ids."""
    return tokenizer.encode("".join(t for t, _ in segments(chat)), add_special_tokens=False).ids


def _tokens(tokenizer: Tokenizer, samples: list[Sample]) -> list[tuple[list[int], list[float]]]:
    """(ids, weights) per sample, the model's own words weighing 1, padded to a multiple of
    `ALIGN`.
    """
    cut = [segments(s.chat) for s in samples]
    texts = [text for pieces in cut for text, _ in pieces]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    out = []
    for sample, pieces in zip(samples, cut, strict=True):
        ids: list[int] = []
        weights: list[float] = []
        for _, own in pieces:
            part = next(encoded).ids
            ids += part
            weights += [1.0 if own else sample.prompt_weight] * len(part)
        spare = -len(ids) % ALIGN
        out.append((ids + [PAD_ID] * spare, weights + [0.0] * spare))
    return out


def rows_of(
    folder: Path, rng: random.Random, rows: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`rows` rows of `length`: ids (uint16), weight of predicting each token (float16),
    conversation (int16).

    A row of `LONG_ROW` opens with one long text; the rest is filled with short conversations, the
    last one cut.
    """
    tokenizer = load_tokenizer(folder)
    ids = np.full((rows, length), PAD_ID, np.uint16)
    weight = np.zeros((rows, length), np.float16)
    doc = np.zeros((rows, length), np.int16)
    stock: list[tuple[list[int], list[float]]] = []
    long = iter(
        _tokens(tokenizer, [draw(rng, LONG_MIX) for _ in range(rows)]) if length >= LONG_ROW else []
    )
    for row in range(rows):
        at = number = 0
        while at < length:
            if not stock:
                stock = _tokens(tokenizer, [draw(rng, SHORT_MIX) for _ in range(512)])
            tokens, weights = next(long) if number == 0 and length >= LONG_ROW else stock.pop()
            take = min(len(tokens), length - at)
            ids[row, at : at + take] = tokens[:take]
            weight[row, at : at + take] = weights[:take]
            weight[row, at] = 0
            doc[row, at : at + take] = number
            at += take
            number += 1
    return ids, weight, doc
