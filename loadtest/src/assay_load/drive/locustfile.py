"""Everything behind `locust -f loadtest/locustfile.py`: options, hooks, exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from locust import events
from locust.runners import WorkerRunner

from assay_load import outputs
from assay_load.drive import webui
from assay_load.drive.loadtest import LoadTest
from assay_load.drive.settings import Settings
from assay_load.drive.users import ChatUser
from assay_load.errors import InputError
from assay_load.report import markdown
from assay_load.report.files import write_all
from assay_load.report.result import RunResult

__all__ = ["ChatUser"]


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    group = parser.add_argument_group("Assay")
    group.add_argument(
        "--workload", default="chat", help="name of a shipped workload, or path of a .yaml"
    )
    group.add_argument("--scale", default="", help="one of the workload's scales: miniature")
    group.add_argument("--model", default="", help="the model to ask for; empty: the first served")
    group.add_argument("--out", default="", help="folder for result.json, report.html, plots")
    group.add_argument("--raw", default="", help="file for one JSON line a request")
    group.add_argument("--metrics-url", default="", help="the server's Prometheus page")
    group.add_argument("--gpus", type=int, default=0, help="GPUs of the server, for the cost")
    group.add_argument("--gpu-hour-price", type=float, default=0.0, help="price of a GPU hour")
    group.add_argument(
        "--token-ids", action="store_true", help="check token counts by token ids (vLLM)"
    )
    # How the master's decisions travel to the workers: not for hands.
    parser.add_argument("--assay-run", default="", help="==SUPPRESS==", include_in_web_ui=False)


def settings_of(options: Any, host: str | None) -> Settings:
    """Raises InputError."""
    if not host:
        raise InputError("--host: which server? for instance --host http://127.0.0.1:8000")
    settings = Settings.of(
        host,
        options.workload,
        options.scale or None,
        model=options.model or None,
        token_ids=options.token_ids,
        raw=options.raw or None,
        metrics_url=options.metrics_url or None,
        gpus=options.gpus,
        gpu_hour_price=options.gpu_hour_price or None,
    )
    if options.num_users:
        settings = settings.with_users(options.num_users)
    if seconds := getattr(options, "assay_seconds", None):
        settings = settings.with_seconds(seconds)
    return settings


@events.init.add_listener
def attach(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    options = environment.parsed_options
    worker = isinstance(runner, WorkerRunner)
    if not worker:
        fill_in_defaults(options, environment.host)
    writer = ResultWriter(environment, options)
    test = LoadTest(
        environment,
        lambda: settings_of(options, environment.host),
        writer.take,
        quits=bool(options.headless),
    )
    writer.test = test
    if web_ui is not None:
        webui.extend(web_ui, test)


def fill_in_defaults(options: Any, host: str | None) -> None:
    """The workload says how many users there are and when the run ends, unless the command line
    does."""
    try:
        workload = settings_of(options, host or "http://chosen.later").workload
        if options.headless:
            settings_of(options, host)
        if options.out:
            outputs.folder(Path(options.out), "--out")
        if options.raw:
            outputs.file(Path(options.raw), "--raw")
    except InputError as error:
        print(f"locust: {error}", file=sys.stderr)
        sys.exit(2)
    if options.num_users is None:
        options.num_users = workload.users()
    if options.spawn_rate is None:
        options.spawn_rate = options.num_users
    if options.run_time and options.headless:
        # Locust's own clock would cut requests that are on their way.
        options.assay_seconds, options.run_time = options.run_time, None


class ResultWriter:
    """Writes each result, and turns it into the exit code."""

    def __init__(self, environment: Any, options: Any) -> None:
        self._environment = environment
        self._options = options
        self.test: LoadTest | None = None
        environment.events.quitting.add_listener(self._on_quitting)

    def take(self, result: RunResult) -> None:
        print(markdown.summary(result), flush=True)
        if self._options.out:
            print(f"written: {write_all(result, Path(self._options.out))}", flush=True)
        self._environment.process_exit_code = exit_code(result)

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        if self.test is not None and self.test.failure is not None:
            environment.process_exit_code = 2


def exit_code(result: RunResult) -> int:
    """0 all well, 1 requests failed, 2 the run is incomplete."""
    if not result.complete:
        return 2
    return 1 if result.failed else 0
