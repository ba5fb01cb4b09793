"""What one Locust process does in a load test, tied to Locust's events.

The same hooks serve `locust -f locustfile.py` in all its forms, and a run inside another program
(`run.py`). A process is a worker, a master, or both at once (Locust's local runner).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import gevent
from locust.runners import MasterRunner, WorkerRunner

from assay_load.drive.conductor import REPORT, STAGE, Conductor
from assay_load.drive.driver import REPORT_SECONDS, Driver
from assay_load.drive.settings import Assignment, Settings
from assay_load.errors import InputError, TargetError
from assay_load.report.result import RunResult
from assay_load.stream.client import Outcome
from assay_load.stream.errors import StreamError

LOCAL = "local"
"""Worker name of a process that is master and worker at once; Locust uses it in local messages."""

logger = logging.getLogger(__name__)


class LoadTest:
    """Set as `environment.load_test`, where users find their driver.

    `make_settings` is called at each start, for the web UI can change options between two runs;
    `on_result` gets each result, also that of a run that was cut. With `quits`, the end of the run
    ends Locust too.
    """

    def __init__(
        self,
        environment: Any,
        make_settings: Callable[[], Settings],
        on_result: Callable[[RunResult], None],
        *,
        quits: bool,
    ) -> None:
        self._environment = environment
        self._make_settings = make_settings
        self._on_result = on_result
        self._quits = quits
        self.driver: Driver | None = None
        self.conductor: Conductor | None = None
        self.failure: str | None = None
        """Why a run could not start."""
        self._reporter: Any = None
        self._busy = 0.0, 0.0
        environment.load_test = self
        runner = environment.runner
        self.commands = not isinstance(runner, WorkerRunner)
        self._works = not isinstance(runner, MasterRunner)
        self._name = LOCAL if self.commands else runner.client_id
        if self._works:
            runner.register_message(STAGE, self._on_stage)
        if self.commands:
            runner.register_message(REPORT, self._on_report)
        environment.events.test_start.add_listener(self._on_start)
        environment.events.test_stop.add_listener(self._on_stop)
        environment.events.quitting.add_listener(self._on_quitting)

    # --- Locust's events --------------------------------------------------------------------------

    def _on_start(self, environment: Any, **_: Any) -> None:
        try:
            settings = self._make_settings()
            self.failure = None
            if self.commands:
                self.conductor = self._make_conductor(settings)
                environment.parsed_options.assay_run = self.conductor.assignment.dumps()
            if self._works:
                assignment = Assignment.loads(environment.parsed_options.assay_run)
                self._start_driver(settings, assignment)
            if self.conductor is not None:
                self.conductor.start()
                gevent.spawn(self._await_end, self.conductor)
        except (InputError, TargetError, StreamError) as error:
            self.failure = str(error)
            logger.error("the run cannot start: %s", error)
            self.driver = None
            if self.commands:
                gevent.spawn(self._end_runner)

    def _make_conductor(self, settings: Settings) -> Conductor:
        runner = self._environment.runner
        if not self._works:
            clients = runner.clients
            names = [c.id for c in clients.ready + clients.running + clients.spawning]
            users = settings.workload.users()
            # A worker without a user would never come to its share of a plan; steps have no plan.
            if users < len(names) and settings.workload.stop is not None:
                raise InputError(f"{users} users cannot be shared by {len(names)} workers")
        else:
            names = [LOCAL]
        return Conductor(settings, runner, names)

    def _on_stop(self, **_: Any) -> None:
        if self.driver is not None:
            if self._reporter is not None:
                self._reporter.kill()
            self._report(closed=True)
            self.driver.close()
            self.driver = None
        if self.conductor is not None:
            conductor, self.conductor = self.conductor, None
            self._on_result(conductor.finish())

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        # Ctrl-C or SIGTERM while users run: what they have measured is wanted.
        if self.driver is not None or self.conductor is not None:
            environment.runner.stop()

    # --- a worker's part --------------------------------------------------------------------------

    def _start_driver(self, settings: Settings, assignment: Assignment) -> None:
        if self._name not in assignment.workers:
            logger.warning("this worker came too late for the run and stays idle")
            return
        self.driver = Driver(settings, assignment, self._name, self._observe)
        self._busy = time.process_time(), time.monotonic()
        self._reporter = gevent.spawn(self._report_on, self.driver)

    def _observe(self, name: str, outcome: Outcome) -> None:
        """Locust's own statistics."""
        error = outcome.error
        self._environment.events.request.fire(
            request_type="chat",
            name=name,
            response_time=(outcome.ended - outcome.due) * 1000,
            response_length=outcome.answer.bytes,
            exception=StreamError(error.kind) if error is not None else None,
            context={},
        )

    def _report_on(self, driver: Driver) -> None:
        while not driver.finished.wait(REPORT_SECONDS):
            self._report()
        self._report()

    def _report(self, closed: bool = False) -> None:
        assert self.driver is not None
        busy, clock = time.process_time(), time.monotonic()
        share = (busy - self._busy[0]) / max(1e-9, clock - self._busy[1])
        report = {
            "tally": self.driver.take_tally().to_wire(),
            "finished": self.driver.finished.is_set(),
            "closed": closed,
            "in_flight": self.driver.in_flight,
            "chunks": self.driver.chunks,
            "clock": time.monotonic(),
            "start_lag": self.driver.start_lag,
            "cpu_share": share,
        }
        self._environment.runner.send_message(REPORT, report)

    def _on_stage(self, msg: Any, **_: Any) -> None:
        if self.driver is None:
            return
        if msg.data.get("stop"):
            self.driver.stop_starting()
        else:
            self.driver.stage = msg.data["stage"]
            self._report()  # the counters as the stage begins or ends

    # --- the commander's part ---------------------------------------------------------------------

    def _on_report(self, msg: Any, **_: Any) -> None:
        if self.conductor is not None:
            self.conductor.receive(msg.node_id, msg.data)

    def _await_end(self, conductor: Conductor) -> None:
        conductor.over.wait()
        self._end_runner()

    def _end_runner(self) -> None:
        runner = self._environment.runner
        # A master that quits does not wait for its workers' last words; one that stops does.
        runner.stop()
        if self._quits:
            runner.quit()
