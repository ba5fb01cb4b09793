"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), reduced to
what a completion stream has: the data of each event."""

from __future__ import annotations

from assay_load.stream.errors import MALFORMED_EVENT, StreamError

MAX_EVENT = 16 * 1024 * 1024
"""Bytes of one event; more is an error and not a reason to eat the machine's memory."""


class EventReader:
    """`feed` bytes of the body, get the data of the events that they complete.

    Lines end with LF, CR LF or CR. Data stays bytes: a character that was cut in two between
    pieces is whole again by the time its event is.
    """

    __slots__ = ("_data", "_line", "_skip_lf", "_started")

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._skip_lf = False
        self._started = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of each event that is now complete; raises StreamError."""
        # The usual case: the piece is one event of one line, and nothing is left over.
        if (
            piece[:6] == b"data: "
            and piece[-2:] == b"\n\n"
            and not self._line
            and not self._data
            and piece.find(b"\n") == len(piece) - 2
            and b"\r" not in piece
        ):
            self._started, self._skip_lf = True, False
            return [piece[6:-2]]
        return self._feed_slowly(piece)

    @property
    def pending(self) -> bool:
        """Bytes came after the last complete event."""
        return bool(self._line or self._data)

    def _feed_slowly(self, piece: bytes) -> list[bytes]:
        if self._skip_lf and piece[:1] == b"\n":
            piece = piece[1:]
        if piece:
            self._skip_lf = piece[-1:] == b"\r"
        text = (self._line + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._line = text.split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if not self._started:
                line = line.removeprefix(b"\xef\xbb\xbf")
                self._started = True
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
        if len(self._line) + sum(map(len, self._data)) > MAX_EVENT:
            raise StreamError(MALFORMED_EVENT, f"an event of more than {MAX_EVENT} bytes")
        return events
