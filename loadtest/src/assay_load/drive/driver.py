"""One process's share of a run: hands sessions to users, times them, counts what came of it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import numpy as np
from gevent.event import Event

from assay_load.drive.settings import Assignment, Settings
from assay_load.measure.tally import Tally
from assay_load.stream.client import Client, Outcome
from assay_load.stream.reactor import Reactor
from assay_load.workload import corpus
from assay_load.workload.plan import Plan, Session, due_times
from assay_load.workload.schema import ClosedLoop, Ramp, Steps

REPORT_SECONDS = 0.5
ALL = "all"
"""The stage of a run that has only one."""

Observer = Callable[[str, Outcome], None]


class Driver:
    """`next_session` and `run` are for users; `tally` grows, `take_tally` empties it."""

    def __init__(
        self, settings: Settings, assignment: Assignment, worker: str, observer: Observer
    ) -> None:
        self._settings = settings
        self._workload = settings.workload
        self._target = settings.target(assignment.model)
        self._observer = observer
        self._reactor = Reactor()
        position, workers = assignment.workers.index(worker), len(assignment.workers)
        self._raw = RawLog.open(settings.raw, position if workers > 1 else None)
        text = corpus.load(self._workload.corpus)
        self._plan = Plan(self._workload, text, assignment.calibration, assignment.nonce)
        self._agenda = self._share(position, workers)
        self._wall = time.time() - time.monotonic()
        self._began: float | None = None
        self._deadline: float | None = None
        self._clients: list[Client] = []
        self._tally = Tally()
        self._ended_chunks = 0
        self._in_flight = 0
        self._exhausted = False
        self.start_lag = 0.0
        """Largest wait of a due session for a free user, seconds."""
        self.stage: str | None = None if isinstance(self._workload.arrival, Steps) else ALL
        """Where sessions that start now count; None: nowhere. A conductor of steps sets it."""
        self.finished = Event()
        """No session is left and none is running."""

    def _share(self, position: int, workers: int) -> Iterator[tuple[int, float | None]]:
        """(session, seconds from the start at which it is due; None: at once) of this worker."""
        stop = self._workload.stop
        due = due_times(self._workload.arrival, self._workload.seed, stop.seconds if stop else None)
        numbers = self._plan.indices()
        agenda: Iterator[tuple[int, float | None]] = (
            zip(numbers, itertools.repeat(None)) if due is None else zip(numbers, due)  # noqa: B905
        )
        return itertools.islice(agenda, position, None, workers)

    def next_session(self) -> tuple[Session, float] | None:
        """The next session and when it is due (monotonic); None once there is no more. Waits for
        the latter, and nobody else takes the session meanwhile."""
        if self._exhausted:
            return None
        entry = next(self._agenda, None)
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if entry is None:
            self._no_more()
            return None
        index, offset = entry
        due = now if offset is None else self._began + offset
        if index >= 0 and self._workload.stop is not None and self._workload.stop.seconds:
            # Measured time counts from the first session that is measured.
            self._deadline = self._deadline or due + self._workload.stop.seconds
            if due >= self._deadline:
                self._no_more()
                return None
        self._in_flight += 1
        try:
            session = self._plan.session(index)
            if offset is not None:
                gevent.sleep(max(0.0, due - time.monotonic()))
        except BaseException:
            self._leave()
            raise
        return session, due

    def _no_more(self) -> None:
        self._exhausted = True
        if not self._in_flight:
            self.finished.set()

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._exhausted and not self._in_flight:
            self.finished.set()

    def stop_starting(self) -> None:
        """No session starts any more; those that run go on."""
        self._no_more()

    def client(self) -> Client:
        """A connection for one user."""
        client = Client(self._target, self._reactor)
        self._clients.append(client)
        return client

    def run(self, session: Session, due: float, client: Client) -> None:
        """Every request of the session, one after the other; the answers go into the tally.

        A turn that fails ends its session.
        """
        stage = self._stage_of(session, due)
        name = session.kind.name
        try:
            self.start_lag = max(self.start_lag, time.monotonic() - due)
            for turn, request in enumerate(session.requests):
                if turn:
                    gevent.sleep(session.pauses[turn - 1])
                    due = time.monotonic()
                try:
                    outcome = client.chat(request, due, self._workload.timeout_seconds)
                except gevent.GreenletExit:
                    self._tally.interrupted(stage, name)
                    raise
                self._ended_chunks += len(outcome.answer.arrivals)
                self._tally.record(outcome, stage, name, self._workload.slo, self._wall)
                self._raw.write(session, turn, stage, outcome)
                self._observer(name, outcome)
                if outcome.error is not None:
                    break
        finally:
            self._leave()

    @property
    def closed_loop(self) -> bool:
        return isinstance(self._workload.arrival, ClosedLoop | Steps)

    def pause(self, session: Session) -> None:
        """The user's rest after a session in a closed loop."""
        if session.pauses[-1]:
            gevent.sleep(session.pauses[-1])

    def _stage_of(self, session: Session, due: float) -> str | None:
        if not session.measured:
            return None
        arrival = self._workload.arrival
        if isinstance(arrival, Ramp):
            assert self._workload.stop is not None
            assert self._workload.stop.seconds is not None
            assert self._began is not None
            share = (due - self._began) / self._workload.stop.seconds
            return f"window-{min(arrival.windows, int(share * arrival.windows) + 1)}"
        return self.stage

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def chunks(self) -> int:
        """Chunks with text so far, those of answers that have not ended included."""
        flying = (c.current for c in self._clients)
        return self._ended_chunks + sum(len(a.arrivals) for a in flying if a is not None)

    def take_tally(self) -> Tally:
        """What was counted since the last call."""
        taken, self._tally = self._tally, Tally()
        return taken

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._reactor.close()
        self._raw.close()


class RawLog:
    """One JSON line a request, for those who want to compute for themselves."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path else None

    @classmethod
    def open(cls, path: str | None, position: int | None) -> RawLog:
        if path is None:
            return cls(None)
        made = Path(path)
        if position is not None:
            made = made.with_name(f"{made.stem}.{position}{made.suffix}")
        return cls(made)

    def write(self, session: Session, turn: int, stage: str | None, outcome: Outcome) -> None:
        if self._file is None:
            return
        answer = outcome.answer
        line: dict[str, Any] = {
            "session": session.index,
            "turn": turn,
            "class": session.kind.name,
            "stage": stage,
            "id": answer.id,
            "due": outcome.due,
            "sent": outcome.sent,
            "ended": outcome.ended,
            "first": answer.first,
            "first_content": answer.first_content,
            "first_reasoning": answer.first_reasoning,
            "gaps": np.diff(np.frombuffer(answer.arrivals)).tolist() if answer.arrivals else [],
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "error": outcome.error.kind if outcome.error else None,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
