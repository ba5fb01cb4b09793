"""The loop: probe, decide, open or close, tell."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import uvicorn

from assay_smoke.battery import Battery, Plan, Report
from assay_smoke.client import Client, Metrics, Timeouts
from assay_smoke.errors import CouldNotRunError
from assay_smoke.watch.door import Door
from assay_smoke.watch.exporter import Exporter, Quiet
from assay_smoke.watch.heartbeat import STALLED_AFTER_SECONDS, Heartbeat
from assay_smoke.watch.policy import Hysteresis, Policy

PROBE = "probe"
READY = "ready"
STOP_SECONDS = 1.5


@dataclass(frozen=True)
class Settings:
    plan: Plan
    """Whom to probe with which suite; its tier is chosen anew for each probe."""
    door: Door = field(default_factory=lambda: Door(None))
    policy: Policy = field(default_factory=Policy)
    interval: float = 60.0
    """Seconds between two probes while all is well."""
    retry: float = 10.0
    """Seconds to the next probe after one that did not pass, or before the first has."""
    jitter: float = 0.2
    """Share by which an interval is longer or shorter, so that canaries do not march in step."""
    tokens_per_hour: int = 9000
    """Generated tokens that probes may cost; the ready tier of a starting server is not counted."""
    scrape: float = 10.0
    """Seconds between two looks at the engine."""
    stalled_after: float = STALLED_AFTER_SECONDS
    host: str = "127.0.0.1"
    port: int = 8090


class Budget:
    """Tokens that flow in at a constant rate, up to what an hour brings."""

    def __init__(self, per_hour: int, now: float) -> None:
        self.per_hour = per_hour
        self.left = per_hour / 4
        self._at = now

    def allows(self, now: float) -> bool:
        self.left = min(self.per_hour, self.left + (now - self._at) * self.per_hour / 3600)
        self._at = now
        return self.left > 0

    def spend(self, tokens: int) -> None:
        self.left -= tokens


class Canary:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.exporter = Exporter()
        self.hysteresis = Hysteresis(settings.policy)
        self.heartbeat = Heartbeat(settings.stalled_after)
        self.budget = Budget(settings.tokens_per_hour, time.monotonic())
        self.started: float | None = None
        """Start of the server process that the state is about."""
        self.said = ""

    async def run(self) -> int:
        """Until SIGTERM or SIGINT; the exit code."""
        try:
            listener = socket.create_server((self.settings.host, self.settings.port))
        except OSError as error:
            where = f"{self.settings.host}:{self.settings.port}"
            raise CouldNotRunError(f"--listen {where}: {error.strerror}") from error
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = Quiet(
            uvicorn.Config(
                self.exporter.app(), log_level="critical", access_log=False, lifespan="off",
                timeout_graceful_shutdown=0,
            )
        )  # fmt: skip
        tasks = [
            asyncio.create_task(server.serve([listener])),
            asyncio.create_task(self._probe_for_ever()),
            asyncio.create_task(self._watch_engine()),
            asyncio.create_task(self._beat()),
        ]
        stopped = asyncio.create_task(stop.wait())
        self._say(f"on http://{self.settings.host}:{listener.getsockname()[1]}, probing {self.url}")
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = server.force_exit = True
        for task in (stopped, *tasks[1:]):
            task.cancel()
        await asyncio.wait([stopped, *tasks], timeout=STOP_SECONDS)
        listener.close()
        for task in done - {stopped}:
            if (crash := task.exception()) is not None:
                raise crash
        return 0

    @property
    def url(self) -> str:
        return self.settings.plan.url

    def _say(self, words: str) -> None:
        if words != self.said:
            print(f"{time.strftime('%H:%M:%S')} canary {words}", file=sys.stderr, flush=True)
            self.said = words

    async def _beat(self) -> None:
        while True:
            self.exporter.beat()
            self.exporter.set_state(self.hysteresis.state, self.settings.door.is_open, self.reason)
            await asyncio.sleep(0.5)

    reason = "starting"

    # --- the engine --------------------------------------------------------------------------

    async def _watch_engine(self) -> None:
        plan = self.settings.plan
        timeouts = Timeouts(connect=5, idle=10, request=10)
        async with Client(plan.url, secrets=plan.secrets, timeouts=timeouts) as client:
            while True:
                metrics: Metrics | None = None
                with suppress(CouldNotRunError):
                    metrics = await client.metrics()
                pulse = self.heartbeat.note(metrics, time.monotonic())
                self.exporter.set_pulse(pulse, self.heartbeat.iterations)
                if metrics is not None and metrics.started is not None:
                    self._compare_start(metrics.started)
                await asyncio.sleep(self.settings.scrape)

    def _compare_start(self, started: float) -> None:
        if self.started is not None and started != self.started:
            self.exporter.restarts.inc()
            self._say("sees another server process: it has to prove itself")
            self.hysteresis.restart()
        self.started = started

    # --- probes ------------------------------------------------------------------------------

    async def _probe_for_ever(self) -> None:
        while True:
            await asyncio.sleep(await self._once())

    async def _once(self) -> float:
        """One probe, if there are tokens for it; seconds until the next."""
        door = self.settings.door
        if self.hysteresis.ready and not door.is_open:
            # Somebody made the run folder afresh: another server, whose start was not seen yet.
            self.hysteresis.restart()
        tier = READY if self.hysteresis.needs_ready_tier else PROBE
        now = time.monotonic()
        if tier == PROBE and not self.budget.allows(now):
            self.exporter.skipped.inc()
            return self._jittered(self.settings.interval)
        before = self.started
        report = await self._ask(tier)
        if report.verdict == "pass" and self.hysteresis.state == "incoherent":
            # What found the fault must pass too, or the door would open and shut for ever.
            report = await self._ask(PROBE)
        if before != self.started and before is not None:
            return self._jittered(self.settings.retry)  # half of it was about another process
        self._decide(report)
        return self._jittered(self.pause(report))

    def pause(self, report: Report) -> float:
        """Seconds to the next probe: soon after one that did not pass, and then less and less often
        while it keeps failing, since every proof costs a whole tier."""
        interval, retry = self.settings.interval, self.settings.retry
        if report.verdict == "pass":
            return interval if self.hysteresis.ready else retry
        if report.verdict == "error":
            return min(interval, retry)
        return min(interval, retry * float(2 ** min(10, max(0, self.hysteresis.fails - 3))))

    async def _ask(self, tier: str) -> Report:
        report = await Battery(replace(self.settings.plan, tier=tier)).run()
        if tier == PROBE:
            self.budget.spend(report.generated_tokens)
        self.exporter.note(report)
        return report

    def _decide(self, report: Report) -> None:
        door = self.settings.door
        state = self.hysteresis.note(report.verdict)
        reasons = [f"{r.name}: {r.outcome.reason}" for r in report.results
                   if r.outcome.verdict not in ("pass", "skip")]  # fmt: skip
        self.reason = (
            state
            if report.verdict == "pass"
            else f"{state}: {(report.error or '; '.join(reasons))[:300]}"
        )
        if state == "ready" and not door.is_open and not door.open():
            self.hysteresis.restart()
            self._say("finds no run folder to open the door in")
            return
        if state == "incoherent" and self.settings.policy.closes and door.is_open:
            door.close()
        self.exporter.set_state(state, door.is_open, self.reason)
        self._say(f"{'door open' if door.is_open else 'door shut'}, {self.reason}")

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self.settings.jitter * random.uniform(-1, 1))
