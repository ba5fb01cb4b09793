"""Real text that prompts are cut from.

`python-reference`: the Python language reference, from the copy in the standard library of the
    Python that runs this (about 700 kB of English prose); nothing has to be shipped or fetched.
`miniature`: stories and questions of the closed world that the miniature V4 was trained on.
a path: a UTF-8 text file; blank lines part paragraphs, lines that begin with "? " are questions.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from assay_load.errors import InputError

MIN_CHARACTERS = 20_000
QUESTIONS = [
    "Summarise the text above for somebody who has not read it, point by point.",
    "Which rules does the text above state? Give each one with an example of your own.",
    "Rewrite the text above as a conversation between a teacher and a curious student.",
    "Explain the text above step by step, from the simplest idea to the hardest.",
    "Write a list of questions that the text above answers, and answer each of them.",
    "What follows in practice from the text above? Discuss it at length.",
]


@dataclass(frozen=True)
class Corpus:
    name: str
    text: str
    questions: list[str]

    @property
    def digest(self) -> str:
        """Identifies the text: prompts of two runs are the same only if this is."""
        content = self.text + "\0" + "\0".join(self.questions)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def cut(self, start: int, characters: int) -> str:
        """About `characters` of text from near `start`, at word boundaries; wraps round."""
        text, size = self.text, len(self.text)
        start %= size
        start = (text.find(" ", start) + 1) % size
        whole = text[start : start + characters]
        while len(whole) < characters:
            whole += "\n\n" + text[: characters - len(whole)]
        return whole.rsplit(" ", 1)[0] if " " in whole else whole


@functools.cache
def load(name: str) -> Corpus:
    """The corpus of that name or path; raises InputError."""
    if name == "python-reference":
        from pydoc_data.topics import topics

        return Corpus(name, "\n\n".join(topics[key] for key in sorted(topics)), QUESTIONS)
    packed = resources.files("assay_load") / "corpora" / f"{name}.txt.gz"
    try:
        if packed.is_file():
            content = gzip.decompress(packed.read_bytes()).decode()
        else:
            content = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"corpus {name!r}: cannot be read as UTF-8 text: {error}") from error
    return from_text(name, content)


def from_text(name: str, content: str) -> Corpus:
    questions = [line[2:].strip() for line in content.splitlines() if line.startswith("? ")]
    text = re.sub(r"^\? .*\n?", "", content, flags=re.MULTILINE).strip()
    if len(text) < MIN_CHARACTERS:
        raise InputError(
            f"corpus {name!r}: {len(text)} characters of text, at least {MIN_CHARACTERS} are needed"
        )
    return Corpus(name, text, questions or QUESTIONS)
