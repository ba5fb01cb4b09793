"""How vLLM's processes wait for each other on a CPU."""

from __future__ import annotations

import time
from typing import Any

SPIN_SECONDS = 0.0005
"""How long a reader polls for its next message before it rests."""
REST_MS = 1
"""Milliseconds that a rest lasts at most. A reader is woken when its message is written, but that
can get lost (vLLM looks again after 5 s); while steps follow each other, it looks this soon."""
FOLLOWS_SECONDS = 1.0
"""So long after a message the next one is on its way: vLLM's own bound."""


def spare_the_cores() -> None:
    """Let the readers of vLLM's shared-memory queue rest between messages, once per process.

    vLLM's readers poll for a second after each message. That is made for GPUs, whose host has cores
    to spare: here the engine's polling takes one of the cores that the worker computes on, through
    every step of it.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    plain: Any = shm_broadcast.SpinCondition
    if plain.__module__ == __name__:
        return

    class RestingCondition(plain):
        __module__ = __name__

        def __init__(self, is_reader: bool, context: Any, notify_address: str) -> None:
            super().__init__(is_reader, context, notify_address, SPIN_SECONDS)

        def wait(self, timeout_ms: int | None = None) -> None:
            if time.monotonic() <= self.last_read + FOLLOWS_SECONDS:
                timeout_ms = REST_MS if timeout_ms is None else min(timeout_ms, REST_MS)
            super().wait(timeout_ms)

    shm_broadcast.SpinCondition = RestingCondition
