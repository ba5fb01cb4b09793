"""Make miniature.txt.gz from the miniature's own generator: stories it was trained to tell, and
questions it was trained to answer.

    .venv/bin/python loadtest/make_corpus.py
"""

from __future__ import annotations

import gzip
import random
import sys
from pathlib import Path

CORPORA = Path(__file__).resolve().parent / "src" / "assay_load" / "corpora"
ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = 18
HEROES = 40
QUESTIONS = 200


def main() -> None:
    sys.path.insert(0, str(ROOT / "models"))
    from miniature import generate, stories

    parts = [stories.journey(hero, CHAPTERS, ends=True) for hero in range(HEROES)]
    rng = random.Random(1)
    questions: list[str] = []
    while len(questions) < QUESTIONS:
        messages = generate.fact(rng).chat.messages
        question = next(m["content"] for m in messages if m["role"] == "user")
        if "\n" not in question and question not in questions:
            questions.append(question)
    text = "\n\n".join(parts) + "\n\n" + "\n".join(f"? {q}" for q in questions) + "\n"
    # No time stamp in it, so that the same text makes the same file.
    (CORPORA / "miniature.txt.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(text)} characters, {len(questions)} questions")


if __name__ == "__main__":
    main()
