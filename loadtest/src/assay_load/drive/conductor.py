"""A run from start to end, seen from the process that commands it (alone, or a master).

It prepares what every worker must agree on, merges what they report, takes the steps of a step
workload, gives up when the workload says so, and makes the result, also of a run that was cut.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

from assay_load import __version__
from assay_load.drive import calibrate
from assay_load.drive.driver import ALL
from assay_load.drive.sampler import Sampler
from assay_load.drive.settings import Assignment, Settings
from assay_load.measure.tally import SECOND, Tally
from assay_load.report import result
from assay_load.report.result import Figures, RunResult, Window, merged
from assay_load.stream.client import Client
from assay_load.stream.reactor import Reactor
from assay_load.workload import corpus
from assay_load.workload.plan import Plan
from assay_load.workload.schema import Ramp, Steps

STAGE = "assay_stage"
"""Message to all workers: {"stage": label or None}, or {"stop": True} to start nothing more."""
REPORT = "assay_report"
"""Message from a worker: a Report as a dict."""
WATCH_SECONDS = 0.1
HEARD_SECONDS = 0.2
"""For a message to reach every worker and its answer to come back."""
STOPPED = "it was stopped before its plan was done"

logger = logging.getLogger(__name__)


@dataclass
class WorkerState:
    finished: bool = False
    in_flight: int = 0
    start_lag: float = 0.0
    cpu_share: float = 0.0
    chunks: int = 0
    """Chunks that had come at `clock`, which is the worker's own monotonic clock."""
    clock: float = 0.0
    missing: bool = False
    closed: bool = False
    """It was stopped, and has reported all it has."""


class Conductor:
    """Made at the start of each run; `over` is set when the run has ended by itself."""

    def __init__(self, settings: Settings, runner: Any, workers: list[str]) -> None:
        self.settings = settings
        self._runner = runner
        self._reactor = Reactor()
        self.started = time.time()
        self._clock = time.monotonic()
        self.tally = Tally()
        self.workers = {worker: WorkerState() for worker in workers}
        self.over = Event()
        self._reasons: list[str] = []
        self._loads: dict[str, float] = {}
        self._windows: dict[str, Window] = {}
        self._greenlets: list[Any] = []
        self._draining: float | None = None
        self._result: RunResult | None = None
        client = Client(settings.target(""), self._reactor)
        try:
            model = calibrate.choose_model(client, settings.model)
            target = settings.target(model)
            client.close()
            client = Client(target, self._reactor)
            self._text = corpus.load(settings.workload.corpus)
            measured = calibrate.calibrate(client, target, self._text)
        finally:
            client.close()
        self.assignment = Assignment(Assignment.new_nonce(), model, measured, tuple(workers))
        self.sampler = Sampler(settings, Client(target, self._reactor))

    def start(self) -> None:
        self.sampler.start()
        self._greenlets.append(gevent.spawn(self._watch))
        if isinstance(self.settings.workload.arrival, Steps):
            self._greenlets.append(gevent.spawn(self._climb, self.settings.workload.arrival))

    # --- what workers tell ------------------------------------------------------------------------

    def receive(self, worker: str, report: dict[str, Any]) -> None:
        state = self.workers.get(worker)
        if state is None or self._result is not None:
            return  # left over from an earlier run
        self.tally.merge(Tally.from_wire(report["tally"]))
        state.finished = report["finished"]
        state.closed = report["closed"]
        state.chunks, state.clock = report["chunks"], report["clock"]
        state.in_flight = report["in_flight"]
        state.start_lag = max(state.start_lag, report["start_lag"])
        state.cpu_share = max(state.cpu_share, report["cpu_share"])

    def lost(self, worker: str) -> None:
        """A worker is gone; what it reported stays."""
        state = self.workers.get(worker)
        if state is not None and not (state.finished or state.missing or state.closed):
            state.missing = True
            self._reasons.append(f"the worker {worker} was lost, and what it had not reported")

    # --- while it runs ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until all is done, or it is time to give up."""
        workload = self.settings.workload
        while not self.over.is_set():
            gevent.sleep(WATCH_SECONDS)
            self._look_for_lost_workers()
            states = self.workers.values()
            if all(s.finished or s.missing or s.closed for s in states):
                if any(s.closed and not s.finished for s in states):
                    self._reasons.append(STOPPED)
                self.over.set()
                break
            if (reason := self._hopeless()) is not None:
                self.give_up(reason)
                break
            if self._draining and time.monotonic() - self._draining > workload.drain_seconds:
                self.give_up(f"requests still ran {workload.drain_seconds:g} s after the last step")

    def _look_for_lost_workers(self) -> None:
        clients = getattr(self._runner, "clients", None)
        if clients is None:
            return
        for worker in self.workers:
            if worker not in clients or clients[worker].state == "missing":
                self.lost(worker)

    def _hopeless(self) -> str | None:
        abort = self.settings.workload.abort
        groups = merged(self.tally.groups.values())
        failed = sum(self.tally.errors.values())
        ended = groups.counts["requests"] + groups.counts["failed"] + self.tally.warmup_requests
        if ended >= abort.after_requests and failed > abort.failed_share * ended:
            return f"{failed} of {ended} requests failed, more than abort.failed_share allows"
        lag = max((s.start_lag for s in self.workers.values()), default=0.0)
        if lag > abort.start_lag_seconds:
            return f"a session waited {lag:.1f} s for a free user of the pool"
        if time.monotonic() - self._clock > abort.seconds:
            return f"the run took longer than abort.seconds, {abort.seconds:g}"
        return None

    def give_up(self, reason: str) -> None:
        """End the run as it stands."""
        self._reasons.append(reason)
        self.over.set()

    def wind_down(self) -> None:
        """Start nothing more, and end the run when what runs has ended."""
        self._draining = time.monotonic()
        self._runner.send_message(STAGE, {"stop": True})

    def _climb(self, arrival: Steps) -> None:
        """The steps of concurrency, until the server is saturated."""
        before: Figures | None = None
        for users in arrival.concurrency:
            label = f"concurrency-{users}"
            self._loads[label] = users
            self._runner.start(users, max(1, users))
            gevent.sleep(arrival.settle_seconds)
            begin = self._announce(label)
            gevent.sleep(arrival.seconds - arrival.settle_seconds - HEARD_SECONDS)
            end = self._announce(None)
            gevent.sleep(1.0)  # for the requests that are about to end
            self._windows[label] = _window(begin, end, self._tokens_per_chunk())
            now = self._stage_figures(label)
            if before is not None and self._saturated(arrival, before, now):
                break
            before = now
        self.wind_down()

    def _announce(self, label: str | None) -> dict[str, tuple[int, float]]:
        """Begin or end a stage; (chunks, clock) of each worker at that moment."""
        self._runner.send_message(STAGE, {"stage": label})
        gevent.sleep(HEARD_SECONDS)
        return {worker: (s.chunks, s.clock) for worker, s in self.workers.items()}

    def _tokens_per_chunk(self) -> float:
        counts = merged(self.tally.groups.values()).counts
        return counts["completion_tokens"] / counts["chunks"] if counts["chunks"] else 1.0

    def _stage_figures(self, label: str) -> Figures:
        whole = merged(self._of_stage(label))
        return Figures.of(label, "*", whole, self._loads[label], self._windows[label])

    def _of_stage(self, label: str) -> Any:
        return (group for (stage, _), group in self.tally.groups.items() if stage == label)

    def _saturated(self, arrival: Steps, before: Figures, now: Figures) -> bool:
        if now.good_share < arrival.min_goodput:
            logger.info("saturated: goodput share %.2f", now.good_share)
            return True
        least = before.output_tokens_per_second * (1 + arrival.min_gain)
        if now.output_tokens_per_second < least:
            logger.info("saturated: %.1f output tokens/s", now.output_tokens_per_second)
            return True
        return False

    # --- afterwards -------------------------------------------------------------------------------

    def finish(self) -> RunResult:
        """The result of what was measured; the same one when asked again."""
        if self._result is None:
            if not self.over.is_set():
                self._reasons.append(STOPPED)
            for greenlet in self._greenlets:
                greenlet.kill()
            server = self.sampler.finish(self.started)
            self._result = self._make_result(server)
            self._reactor.close()
        return self._result

    def _make_result(self, server: result.Server) -> RunResult:
        settings, workload, tally = self.settings, self.settings.workload, self.tally
        plan = Plan(workload, self._text, self.assignment.calibration, self.assignment.nonce)
        whole = merged(tally.groups.values())
        if isinstance(workload.arrival, Ramp):
            self._loads |= _window_rates(workload.arrival)
        figures = Figures.of(ALL, "*", whole)
        reasons = list(self._reasons)
        if server.restarted:
            reasons.append(f"the server restarted: {server.restarted}")
        return RunResult(
            started=self.started,
            seconds=time.time() - self.started,
            complete=not reasons,
            incomplete_because=reasons,
            url=settings.url,
            model=self.assignment.model,
            workload=workload.model_dump(mode="json", exclude={"scales"}, exclude_none=True),
            scale=settings.scale,
            corpus=f"{self._text.name} {self._text.digest}",
            characters_per_token=self.assignment.calibration.characters_per_token,
            expected_requests=plan.expected_requests(),
            warmup_requests=tally.warmup_requests,
            errors=dict(tally.errors),
            error_examples=tally.details,
            figures=figures,
            stages=result.figures_by_stage(tally, self._loads, self._windows),
            histograms={
                metric: result.Sparse.model_validate(histogram.to_wire())
                for metric, histogram in whole.histograms.items()
            },
            timeline=_timeline(tally, self.started),
            server=server,
            client=result.Client(
                version=__version__,
                commit=commit(),
                python=platform.python_version(),
                processor=processor(),
                cores=len(os.sched_getaffinity(0)),
                workers=len(self.workers),
                cpu_share=max((s.cpu_share for s in self.workers.values()), default=0.0),
                start_lag_ms=1000 * max((s.start_lag for s in self.workers.values()), default=0.0),
            ),
            cost=_cost(settings, figures),
        )  # fmt: skip


def _window(
    begin: dict[str, tuple[int, float]], end: dict[str, tuple[int, float]], per_chunk: float
) -> Window:
    """Output tokens/s between two moments, of all workers; answers that had not ended count too."""
    spans = [(end[w][0] - chunks, end[w][1] - clock) for w, (chunks, clock) in begin.items()]
    spans = [(chunks, seconds) for chunks, seconds in spans if seconds > 0]
    rate = sum(chunks / seconds for chunks, seconds in spans) * per_chunk
    return Window(max((seconds for _, seconds in spans), default=0.0), rate)


def _window_rates(ramp: Ramp) -> dict[str, float]:
    """Mean rate of each window of a ramp."""
    step = (ramp.end_rate - ramp.start_rate) / ramp.windows
    return {f"window-{i + 1}": ramp.start_rate + step * (i + 0.5) for i in range(ramp.windows)}


def _timeline(tally: Tally, started: float) -> list[result.Second]:
    if not tally.seconds:
        return []
    seconds = range(int(started), max(tally.seconds) + 1)
    return [
        result.Second(
            at=second - int(started),
            **{
                k: float(tally.seconds[second][k]) if second in tally.seconds else 0.0
                for k in SECOND
            },
        )
        for second in seconds
    ]


def _cost(settings: Settings, figures: Figures) -> result.Cost | None:
    if not settings.gpus:
        return None
    minutes = settings.gpus * figures.seconds / 60
    price = settings.gpu_hour_price

    def per_million(tokens: int) -> float | None:
        return price * minutes / 60 / tokens * 1e6 if price is not None and tokens else None

    return result.Cost(
        gpus=settings.gpus,
        gpu_minutes=minutes,
        gpu_hour_price=price,
        per_million_output_tokens=per_million(figures.completion_tokens),
        per_million_tokens=per_million(figures.completion_tokens + figures.prompt_tokens),
    )


def commit() -> str | None:
    """Of this software: ASSAY_COMMIT, which the images set, or git's in a checkout."""
    if named := os.environ.get("ASSAY_COMMIT"):
        return named
    try:
        answer = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
