"""Ends a server whose engine makes no progress while requests run.

vLLM's `/health` does not exercise the engine, and Docker and Kubernetes restart what exits, not
what merely does not answer. So somebody has to decide "dead, not busy":

- Every engine tells of its steps on `/metrics`: tokens, running and waiting requests, use of the KV
  cache. One with requests running whose numbers stand still for `stalled_after` seconds is dead. A
  busy one moves them with each step, a long prefill included, which fills the KV cache. This is the
  canary's rule too.
- These numbers come from the engine itself, so one that was frozen while idle looks idle for ever.
  Where nothing moves, one token is asked for; no answer of any kind for as long is death as well.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from assay_kernels.launcher.client import Client, NoAnswerError

DEFAULT_SECONDS = 120.0
"""Longer than a kernel that is compiled while serving takes (20-60 s seen on an H200)."""

_SIGN = re.compile(
    r"^vllm:(?P<name>iteration_tokens_total_count|iteration_tokens_total_sum|generation_tokens_total"
    r"|prompt_tokens_total|kv_cache_usage_perc|num_requests_running|num_requests_waiting)"
    r"\{(?P<labels>[^}]*)\} (?P<value>\S+)$",
    re.MULTILINE,
)
Signs = dict[str, dict[str, str]]
"""engine -> metric with its labels -> value as it stands on the page."""


def signs(page: str) -> Signs:
    """The signs of life of each engine on a Prometheus page."""
    found: Signs = {}
    for match in _SIGN.finditer(page):
        engine = re.search(r'engine="([^"]*)"', match["labels"])
        key = f"{match['name']}{{{match['labels']}}}"
        found.setdefault(engine[1] if engine else "", {})[key] = match["value"]
    return found


def running(of_engine: dict[str, str]) -> bool:
    return any(
        float(value) > 0
        for name, value in of_engine.items()
        if name.startswith("num_requests_running")
    )


@dataclass
class Pulse:
    """Feed it what was seen, and when; it says what is dead."""

    stalled_after: float
    moved: float
    """When anything last moved, or answered a probe: seconds of a clock that never goes back."""
    _seen: Signs = field(default_factory=dict)
    _moved: dict[str, float] = field(default_factory=dict)

    def note(self, seen: Signs, now: float) -> None:
        for engine, values in seen.items():
            if values != self._seen.get(engine):
                self._moved[engine] = self.moved = now
        self._seen |= seen

    def answered(self, now: float) -> None:
        self.moved = now

    def wants_probe(self, now: float) -> bool:
        return now - self.moved >= self.stalled_after / 2

    def dead(self, now: float) -> str | None:
        """Why the server is dead; None while it may be alive."""
        for engine, since in self._moved.items():
            if running(self._seen[engine]) and now - since >= self.stalled_after:
                return (
                    f"engine {engine} has requests running and made no step for {now - since:.0f} s"
                )
        if now - self.moved >= self.stalled_after:
            return f"nothing moved and no request was answered for {now - self.moved:.0f} s"
        return None


class Watchdog:
    """A thread that looks at one server. `verdict` says why it is dead, once it is."""

    def __init__(self, client: Client, key: str, stalled_after: float) -> None:
        self.client = client
        self.key = key
        self.pulse = Pulse(stalled_after, time.monotonic())
        self.verdict: str | None = None
        self._every = min(10.0, stalled_after / 6)

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while self.verdict is None:
            time.sleep(self._every)
            with suppress(NoAnswerError):
                page = self.client.page("/metrics", self.key, self._every)
                self.pulse.note(signs(page), time.monotonic())
            if self.pulse.wants_probe(time.monotonic()):
                with suppress(NoAnswerError):
                    # Not longer: what moves meanwhile must be seen; a queue in front is no death.
                    self.client.one_token(self.key, self.pulse.stalled_after / 6)
                    self.pulse.answered(time.monotonic())
            self.verdict = self.pulse.dead(time.monotonic())
