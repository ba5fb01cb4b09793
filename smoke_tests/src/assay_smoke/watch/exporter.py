"""What the canary says of itself and of the server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from assay_smoke.battery import Report
from assay_smoke.watch.heartbeat import PULSES, Pulse
from assay_smoke.watch.policy import STATES, State

PREFIX = "assay_smoke_"
PROBE_BUCKETS = (0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160)
HEALTHY_SECONDS = 30.0
"""The loop looks at its clock more often than this, whatever the server does."""


class Exporter:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self.ready = gauge("ready", "1 while clients may be answered")
        self.state = gauge("state", "1 for the state that the canary is in", ["state"])
        self.door = gauge("door_open", "1 while the door is open")
        self.up = gauge("server_up", "1 when the last probe came to a verdict")
        self.checks = gauge("check_success", "1 passed, 0 not, of each check's last run", ["check"])
        self.verdicts = counter("checks", "Checks that were run", ["check", "verdict"])
        self.probes = counter("probes", "Probes by verdict", ["tier", "verdict"])
        self.skipped = counter("probes_skipped", "Probes left out for want of tokens")
        self.seconds = Histogram(
            PREFIX + "probe_seconds", "Seconds that a probe took", buckets=PROBE_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.tokens = counter("tokens", "Tokens that probes cost", ["kind"])
        self.kl = gauge("kl_mean_nats", "Mean KL divergence from the recorded reference")
        self.top1 = gauge("top1_share", "Share of positions that keep the reference's top-1 token")
        self.repetition = gauge("repetition_ratio", "Share of 5-grams of a long answer that repeat")
        self.last_good = gauge("last_good_timestamp_seconds", "When a probe last passed; 0: never")
        self.age = gauge(
            "last_good_age_seconds", "Seconds since then; of the canary's start if never"
        )
        self.restarts = counter("server_restarts", "Changes of the server's process that were seen")
        self.pulse = gauge("engine", "1 for what the engine does", ["pulse"])
        self.iterations = gauge("engine_iterations", "Steps that the engine says it has made")
        self._born = self._good = time.time()
        self.age.set_function(lambda: time.time() - self._good)
        self._beat = time.monotonic()
        self._ready = False
        self._reason = "starting"
        self.set_state("starting", False)
        self.set_pulse("unknown", None)

    # --- what the loop tells ------------------------------------------------------------------

    def beat(self) -> None:
        self._beat = time.monotonic()

    def set_state(self, state: State, door_open: bool, reason: str = "") -> None:
        self._ready = state == "ready" and door_open
        self._reason = reason or state
        self.ready.set(self._ready)
        self.door.set(door_open)
        for name in STATES:
            self.state.labels(name).set(name == state)

    def set_pulse(self, pulse: Pulse, iterations: float | None) -> None:
        for name in PULSES:
            self.pulse.labels(name).set(name == pulse)
        if iterations is not None:
            self.iterations.set(iterations)

    def note(self, report: Report) -> None:
        """One probe."""
        self.probes.labels(report.tier, report.verdict).inc()
        self.seconds.observe(report.seconds)
        self.up.set(report.verdict != "error")
        self.tokens.labels("prompt").inc(report.prompt_tokens)
        self.tokens.labels("generated").inc(report.generated_tokens)
        for result in report.results:
            outcome = result.outcome
            self.verdicts.labels(result.name, outcome.verdict).inc()
            if outcome.verdict in ("pass", "fail"):
                self.checks.labels(result.name).set(outcome.verdict == "pass")
            for figure, metric in (
                ("mean_kl", self.kl), ("top1", self.top1), ("repetition", self.repetition),
            ):  # fmt: skip
                if figure in outcome.figures:
                    metric.set(outcome.figures[figure])
        if report.verdict == "pass":
            self._good = time.time()
            self.last_good.set(self._good)

    # --- what others ask ----------------------------------------------------------------------

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/readyz", self._readyz),
                Route("/healthz", self._healthz),
                Route("/metrics", self._metrics),
            ]
        )

    async def _readyz(self, _: Request) -> Response:
        body = {"ready": self._ready, "reason": self._reason}
        return JSONResponse(body, 200 if self._ready else 503)

    async def _healthz(self, _: Request) -> Response:
        late = time.monotonic() - self._beat
        return JSONResponse(
            {"seconds_since_beat": round(late, 1)}, 200 if late < HEALTHY_SECONDS else 503
        )

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Quiet(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
