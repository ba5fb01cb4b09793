"""Server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html reads them.

Bytes come in pieces of any size: a character, a line ending or an event may be cut anywhere.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_LINE = 8 * 2**20
"""Bytes. The longest line that is kept: more is a finding, not a reason to fill the memory."""
_FIELDS = frozenset({"data", "event", "id", "retry"})


@dataclass
class SseParser:
    """`feed` bytes, get the data of whole events; `problems` says what no server should send."""

    max_line: int = MAX_LINE
    problems: list[str] = field(default_factory=list)
    _buffer: bytearray = field(default_factory=bytearray)
    _skipping: bool = False
    _data: list[str] = field(default_factory=list)
    _size: int = 0
    _ended_with_return: bool = False
    _first: bool = True

    def feed(self, piece: bytes) -> Iterator[str]:
        """Data of each event that ends within `piece`."""
        if self._ended_with_return and piece[:1] == b"\n":
            piece = piece[1:]
        if piece:
            self._ended_with_return = piece.endswith(b"\r")
        start = 0
        while start < len(piece):
            end, following = _line_end(piece, start)
            if end < 0:
                self._keep(piece[start:])
                return
            self._keep(piece[start:end])
            start = following
            yield from self._line()

    def close(self) -> None:
        """The stream has ended: what is left was cut off."""
        if self._buffer or self._skipping or self._data:
            self._problem("the stream ends within an event")
        self._buffer.clear()
        self._data.clear()

    def _keep(self, part: bytes) -> None:
        if self._skipping:
            return
        if len(self._buffer) + len(part) > self.max_line:
            self._problem(f"a line is longer than {self.max_line} bytes")
            self._buffer.clear()
            self._skipping = True
            return
        self._buffer += part

    def _line(self) -> Iterator[str]:
        raw, self._buffer = bytes(self._buffer), bytearray()
        if self._skipping:
            self._skipping = False
            return
        if self._first:
            raw = raw.removeprefix(codecs.BOM_UTF8)
            self._first = False
        if not raw:
            if self._data:
                data, self._data, self._size = "\n".join(self._data), [], 0
                yield data
            return
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            self._problem("a line is not UTF-8")
            line = raw.decode(errors="replace")
        name, _, value = line.partition(":")
        if not name:
            return  # a comment
        if name not in _FIELDS:
            self._problem(f"a line begins with {name[:40]!r}, which is no field of an event")
            return
        if name == "data":
            self._size += len(value)
            if self._size > self.max_line:
                self._problem(f"an event is longer than {self.max_line} bytes")
                self._data, self._size = [], 0
                return
            self._data.append(value.removeprefix(" "))

    def _problem(self, words: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(words)


def _line_end(piece: bytes, start: int) -> tuple[int, int]:
    """(index of the end of the line, start of the next); -1 when it does not end in this piece."""
    newline = piece.find(b"\n", start)
    back = piece.find(b"\r", start, newline if newline >= 0 else len(piece))
    if back < 0:
        return newline, newline + 1
    return back, back + (2 if piece[back + 1 : back + 2] == b"\n" else 1)
