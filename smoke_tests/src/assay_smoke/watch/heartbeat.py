"""Is the engine dead, or is it busy?

`/health` may answer 200 with a dead engine (vLLM issues 39863, 36451), and a long prefill makes a
healthy one silent. What tells them apart is `iteration_tokens_total`: it advances with every step,
so an engine that has requests running and makes no step for a while is stalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from assay_smoke.client import Metrics

Pulse = Literal["idle", "busy", "stalled", "unknown"]
PULSES: tuple[Pulse, ...] = ("idle", "busy", "stalled", "unknown")
STALLED_AFTER_SECONDS = 60.0
"""Longer than a step of the longest prefill chunk takes."""


@dataclass
class Heartbeat:
    """Feed it what `/metrics` said, and when."""

    stalled_after: float = STALLED_AFTER_SECONDS
    pulse: Pulse = "unknown"
    iterations: float | None = None
    started: float | None = None
    _moved: float = 0.0

    def note(self, metrics: Metrics | None, now: float) -> Pulse:
        """`now`: seconds of a clock that never goes back."""
        if metrics is None or metrics.iterations is None or metrics.running is None:
            self.pulse = "unknown"
            return self.pulse
        moved = metrics.iterations != self.iterations or metrics.started != self.started
        self.iterations, self.started = metrics.iterations, metrics.started
        if moved or metrics.running == 0 or self.pulse in ("unknown", "idle"):
            self._moved = now
        if metrics.running == 0:
            self.pulse = "idle"
        else:
            self.pulse = "stalled" if now - self._moved >= self.stalled_after else "busy"
        return self.pulse
