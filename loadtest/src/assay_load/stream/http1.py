"""An incremental reader of one HTTP/1.1 response (RFC 9112), made for streams of small chunks.

It takes bytes as they come and returns the body's bytes as they are complete; it never waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from assay_load.stream.errors import MALFORMED_HTTP, StreamError

MAX_HEAD = 64 * 1024
"""Bytes of status line and headers; also of a chunk's size line, and of all trailers."""
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?\Z")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}\Z")


Phase = Callable[[list[bytes]], bool]


def _malformed(detail: str) -> StreamError:
    return StreamError(MALFORMED_HTTP, detail)


class ResponseReader:
    """`feed` until `complete`. `status` and `headers` (lower-case names) are there once the head
    was read; `reusable` tells whether the connection may serve another request."""

    __slots__ = (
        "_buffer", "_chunk_left", "_chunked", "_length_left", "_phase", "complete", "headers",
        "reusable", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.reusable = False
        self._buffer = b""
        self._phase: Phase = self._head
        self._chunked = False
        self._length_left: int | None = None
        self._chunk_left = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Pieces of the body that `data` completes; raises StreamError."""
        self._buffer = self._buffer + data if self._buffer else data
        pieces: list[bytes] = []
        while not self.complete and self._phase(pieces):
            pass
        if self.complete and self._buffer:
            raise _malformed("bytes after the end of the response")
        return pieces

    def end_of_input(self) -> None:
        """The connection was closed; raises StreamError if that leaves the response unfinished."""
        if self.complete:
            return
        if self._phase == self._until_close:
            self.complete = True
            return
        raise StreamError("connection_closed", "in the head" if not self.status else "in the body")

    # Each phase takes what it can from the buffer; False: it needs more bytes.

    def _head(self, _pieces: list[bytes]) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise _malformed(f"a head of more than {MAX_HEAD} bytes")
            return False
        if end > MAX_HEAD:
            raise _malformed(f"a head of more than {MAX_HEAD} bytes")
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        first, *lines = head.split(b"\r\n")
        match = _STATUS.fullmatch(first)
        if match is None:
            raise _malformed(f"status line {first[:80]!r}")
        status = int(match[2])
        headers = _headers(lines)
        if 100 <= status < 200:
            if status == 101:
                raise _malformed("an upgrade that nobody asked for")
            return True
        self.status, self.headers = status, headers
        connection = headers.get(b"connection", b"").lower()
        keep = match[1] == b"1" and b"close" not in connection
        self._choose_body(status, headers)
        self.reusable = keep and self._phase != self._until_close
        return True

    def _choose_body(self, status: int, headers: dict[bytes, bytes]) -> None:
        coding = headers.get(b"transfer-encoding")
        length = headers.get(b"content-length")
        if status in (204, 304):
            self.complete = True
        elif coding is not None:
            if coding.strip().lower() != b"chunked":
                raise _malformed(f"transfer-encoding {coding[:40]!r}")
            if length is not None:
                raise _malformed("both transfer-encoding and content-length")
            self._phase = self._chunk_size
        elif length is not None:
            if not length.isdigit() or len(length) > 15:
                raise _malformed(f"content-length {length[:40]!r}")
            self._length_left = int(length)
            self._phase = self._counted
            self.complete = self._length_left == 0
        else:
            self._phase = self._until_close

    def _counted(self, pieces: list[bytes]) -> bool:
        assert self._length_left is not None
        if not self._buffer:
            return False
        piece, self._buffer = self._buffer[: self._length_left], self._buffer[self._length_left :]
        pieces.append(piece)
        self._length_left -= len(piece)
        self.complete = self._length_left == 0
        return not self.complete

    def _until_close(self, pieces: list[bytes]) -> bool:
        if self._buffer:
            pieces.append(self._buffer)
            self._buffer = b""
        return False

    def _chunk_size(self, pieces: list[bytes]) -> bool:
        buffer = self._buffer
        end = buffer.find(b"\r\n", 0, MAX_HEAD)
        if end < 0:
            if len(buffer) >= MAX_HEAD:
                raise _malformed("a chunk size without an end")
            return False
        digits = buffer[:end]
        if b";" in digits:  # an extension, which nobody uses
            digits = digits.partition(b";")[0].rstrip(b" \t")
        if not _HEX.match(digits):
            raise _malformed(f"chunk size {digits[:40]!r}")
        size = int(digits, 16)
        begin = end + 2
        if size == 0:
            self._buffer = buffer[begin:]
            self._phase = self._trailers
            return True
        # The usual case: the whole chunk is there.
        if len(buffer) >= begin + size + 2:
            if buffer[begin + size : begin + size + 2] != b"\r\n":
                raise _malformed("a chunk that is longer than it says")
            pieces.append(buffer[begin : begin + size])
            self._buffer = buffer[begin + size + 2 :]
            return bool(self._buffer)
        self._chunk_left = size
        self._buffer = buffer[begin:]
        self._phase = self._chunk_data
        return True

    def _chunk_data(self, pieces: list[bytes]) -> bool:
        if self._chunk_left:
            piece = self._buffer[: self._chunk_left]
            if not piece:
                return False
            pieces.append(piece)
            self._chunk_left -= len(piece)
            self._buffer = self._buffer[len(piece) :]
            if self._chunk_left:
                return False
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise _malformed("a chunk that is longer than it says")
        self._buffer = self._buffer[2:]
        self._phase = self._chunk_size
        return True

    def _trailers(self, _pieces: list[bytes]) -> bool:
        if self._buffer[:2] == b"\r\n":
            self._buffer = self._buffer[2:]
            self.complete = True
            return False
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD:
            if len(self._buffer) > MAX_HEAD:
                raise _malformed("trailers without an end")
            return False
        _headers(self._buffer[:end].split(b"\r\n"))
        self._buffer = self._buffer[end + 4 :]
        self.complete = True
        return False


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.match(name):
            raise _malformed(f"header {line[:80]!r}")
        name, value = name.lower(), value.strip(b" \t")
        if any(c in value for c in (b"\r", b"\n", b"\0")):
            raise _malformed(f"header {line[:80]!r}")
        if name in headers:
            if name == b"content-length" and headers[name] != value:
                raise _malformed("two different content-lengths")
            value = value if name == b"content-length" else headers[name] + b", " + value
        headers[name] = value
    return headers
