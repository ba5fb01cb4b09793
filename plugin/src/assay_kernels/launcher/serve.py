"""`assay-kernels serve`: from a checkpoint to an endpoint that has been found sound."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

from assay_kernels.launcher import ready
from assay_kernels.launcher.checks import check
from assay_kernels.launcher.console import Progress, announce, announce_ready
from assay_kernels.launcher.server import Server
from assay_kernels.launcher.settings import Settings


class StopRequested(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP: a wish, not an error."""


class StopSignals:
    """The wish to stop interrupts what the launcher does, but neither the start of vLLM, which
    could then be forgotten, nor its end; a second wish ends everything at once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.wished = False
        self.may_interrupt = True

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.receive)

    def receive(self, _number: int, _frame: FrameType | None) -> None:
        if self.wished:
            self.server.kill()
        self.wished = True
        if self.may_interrupt:
            self.may_interrupt = False
            raise StopRequested

    def start(self) -> None:
        self.may_interrupt = False
        self.server.start()
        self.may_interrupt = True
        if self.wished:
            self.may_interrupt = False
            raise StopRequested

    def stop(self) -> None:
        self.may_interrupt = False
        self.wished = True
        self.server.stop()


def run(server: Server, signals: StopSignals) -> NoReturn:
    """From nothing to an open door, until vLLM ends or a stop is asked for."""
    check(server.settings)
    announce(server.settings)
    progress = Progress()
    try:
        signals.start()
        server.wait_until_healthy(progress)
        server.verify_door()
        progress.show("checking that every process runs the plugin")
        proofs = server.verify_plugin()
        suite, report = ready.suite(server.settings.variables), None
        if suite == ready.CANARY:
            progress.show("waiting for a canary to open the door")
            server.wait_for_canary()
        else:
            progress.show(f"asking the suite {suite}")
            report = server.assay()
            server.open_door()
        progress.clear()
        announce_ready(server.settings, server.client.url, progress.seconds, proofs, report)
        server.watch()
    finally:
        progress.clear()


def serve(settings: Settings) -> int:
    """Run until asked to stop, then return 0; raises LaunchError on any other end."""
    server = Server(settings)
    signals = StopSignals(server)
    try:
        try:
            # Once either line has ended, by an exception or not, no signal interrupts any more.
            try:
                signals.listen()
                run(server, signals)
            finally:
                signals.may_interrupt = False
        finally:
            if server.guard is not None and server.guard.poll() is None:
                print("stopping ...", flush=True)
            signals.stop()
    except StopRequested:
        print("stopped", flush=True)
        return 0
