"""A run inside this process: what `assay-load run` and the gate use."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from locust.env import Environment

from assay_load.drive.loadtest import LoadTest
from assay_load.drive.settings import Settings
from assay_load.drive.users import ChatUser
from assay_load.errors import TargetError
from assay_load.report.result import RunResult

# What goes wrong is raised here; Locust's advice on spawn rates is for ramps, which these are not.
for _name in ("locust", "assay_load"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


class LocalRun:
    """`start`, then `wait`; or `run` for both."""

    def __init__(self, settings: Settings) -> None:
        self._results: list[RunResult] = []
        self._environment = Environment(
            user_classes=[ChatUser],
            host=settings.url,
            parsed_options=argparse.Namespace(headless=True, assay_run=None),
            catch_exceptions=False,
        )
        self._runner: Any = self._environment.create_local_runner()
        self._test = LoadTest(self._environment, lambda: settings, self._results.append, quits=True)
        self._users = settings.workload.users()

    def start(self) -> None:
        self._runner.start(self._users, self._users)

    def wait(self) -> RunResult:
        """The result; a KeyboardInterrupt ends the run and makes it incomplete.

        Raises TargetError if the run could not start.
        """
        try:
            self._runner.greenlet.join()
        except KeyboardInterrupt:
            self._runner.quit()
        return self._result()

    def wind_down(self) -> None:
        """Start nothing more; the run ends when what runs has ended."""
        if self._test.conductor is not None:
            self._test.conductor.wind_down()

    def _result(self) -> RunResult:
        if self._test.failure is not None:
            raise TargetError(self._test.failure)
        (result,) = self._results
        return result


def run(settings: Settings) -> RunResult:
    """The result of one run; raises TargetError if it could not start."""
    local = LocalRun(settings)
    local.start()
    return local.wait()
