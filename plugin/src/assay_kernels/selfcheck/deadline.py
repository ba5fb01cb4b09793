"""A time-out for a step that may never come back.

A hung kernel leaves its process in a call of the driver that no exception reaches. So another
thread watches the clock, says which layer it was and ends the process; the launcher ends the rest.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


def end_process(message: str) -> None:
    """Say it where vLLM's log goes, and leave without any clean-up that could wait for the GPU."""
    print(f"SelfCheckError: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class Deadline:
    """`with deadline.step("layer, what"):` calls `expired(message)` after `seconds`."""

    def __init__(self, seconds: float, expired: Callable[[str], None] = end_process) -> None:
        self.seconds = seconds
        self._expired = expired

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        message = f"{what}: did not come back within {self.seconds:g} s, so nothing is served"
        timer = threading.Timer(self.seconds, self._expired, (message,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
