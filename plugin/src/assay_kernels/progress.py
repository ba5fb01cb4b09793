"""A progress bar on stderr, only where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import TextIO

_WIDTH = 28
_INTERVAL = 0.2


class Progress:
    """Bytes done of bytes to do; `advance` may be called from any thread."""

    def __init__(self, title: str, total: int, stream: TextIO) -> None:
        self._title, self._total, self._stream = title, max(total, 1), stream
        self._done = 0
        self._began = self._shown = monotonic()
        self._lock = Lock()
        self._visible = stream.isatty()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = monotonic()
            if self._visible and now - self._shown >= _INTERVAL:
                self._shown = now
                self._stream.write("\r" + self.line(now - self._began) + "\x1b[K")
                self._stream.flush()

    def line(self, seconds: float) -> str:
        """What the bar says `seconds` after the start."""
        share = min(self._done / self._total, 1.0)
        bar = "#" * round(share * _WIDTH)
        rate = self._done / max(seconds, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        minutes, rest = divmod(round(max(left, 0.0)), 60)
        return (
            f"{self._title} [{bar:<{_WIDTH}}] {share:4.0%} "
            f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, "
            f"{rate / 1e9:.2f} GB/s, {minutes}:{rest:02d} left"
        )

    def clear(self) -> None:
        if self._visible:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """A bar over `total` bytes; nothing at all unless stderr is a terminal."""
    bar = Progress(title, total, sys.stderr)
    try:
        yield bar
    finally:
        bar.clear()
