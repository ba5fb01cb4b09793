"""A vLLM server behind its door, from its start to its end."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from assay_kernels.launcher import (
    client,
    logfile,
    processes,
    procfs,
    ready,
    shm,
    state,
    watchdog,
)
from assay_kernels.launcher.console import Progress
from assay_kernels.launcher.settings import LaunchError, Settings, stalled_after
from assay_kernels.vllm_plugin import proof

BEHIND_THE_DOOR = "/v1/models"
UNOPENED_STOP_SECONDS = 3.0
"""How long vLLM may take to end while no client has been let in."""
RANK_SECONDS = 60.0
"""How long a worker without the plugin may take to say its rank before it is named without one."""


class Server:
    """A vLLM server in the hands of a guard; what `start` has begun, `stop` ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.key = ""
        self.client = client.Client(settings.host, settings.port)
        self.titles: dict[int, str] = {}
        self.opened = False
        self.lock: IO[str] | None = None
        self.guard: subprocess.Popen[bytes] | None = None
        self.report: int | None = None
        self.root_pid: int | None = None

    def start(self) -> None:
        settings = self.settings
        self.lock = state.take(settings.state)
        state.make_afresh(settings.run_dir)
        self.key = state.door_key(settings.key_file)
        shm.clear(settings.state / "shm.json")
        procfs.adopt_orphans()
        command = settings.command
        self.report, for_the_guard = os.pipe()
        guard = [sys.executable, "-m", "assay_kernels.launcher.guard", str(for_the_guard)]
        try:
            with logfile.sink(settings.log, settings.echo) as log:
                os.write(log, f"$ {shlex.join(command)}\n".encode())
                self.guard = subprocess.Popen(
                    [*guard, str(settings.grace), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=settings.environment,
                    pass_fds=[for_the_guard],
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"vLLM could not be started: {error}", 2) from error
        finally:
            os.close(for_the_guard)

    def stop(self) -> None:
        """Return once nothing of vLLM is running; raises LaunchError for what cannot be ended."""
        if self.guard is not None:
            self.close_door()
            assert self.guard.stdin is not None
            self.guard.stdin.close()
            # Before the door has opened there is no client's request to wait for.
            with suppress(subprocess.TimeoutExpired):
                self.guard.wait(None if self.opened else UNOPENED_STOP_SECONDS)
        left = self.kill()
        if self.report is not None:
            os.close(self.report)
        if self.lock is not None:
            self.lock.close()
        if left:
            raise LaunchError(f"vLLM is still ending, killed but not gone: pids {left}")

    def kill(self) -> list[int]:
        """End at once what is left below the launcher, the guard included; what does not end."""
        return procfs.kill_descendants(50, lambda: time.sleep(0.05))

    def root(self) -> int | None:
        """pid of vLLM's first process, as the guard reported it; None until then."""
        if self.root_pid is None and self.report is not None:
            readable, _, _ = select.select([self.report], [], [], 0)
            line = os.read(self.report, 64) if readable else b""
            self.root_pid = int(line) if line else None
        return self.root_pid

    def processes(self) -> list[processes.Process]:
        root = self.root()
        found = [] if root is None else processes.of_vllm(root)
        self.titles |= {process.pid: process.title for process in found}
        return found

    def check_alive(self) -> None:
        assert self.guard is not None
        if self.guard.poll() is None:
            return
        lines = logfile.read(self.settings.log)
        self.check_plugin_imports(lines)
        reason = logfile.last_error(lines)
        if self.guard.returncode < 0:
            reason = "its guard was killed"
        elif self.guard.returncode == 128 + signal.SIGKILL:
            reason = "it was killed from outside (out of memory?)"
        elif reason is None:
            reason = f"no error in its log, exit code {self.guard.returncode}"
        raise LaunchError(f"vLLM ended: {reason}\n  log: {self.settings.log}")

    def check_plugin_imports(self, lines: list[str]) -> None:
        """Stop as soon as the log tells of a process in which vLLM could not import the plugin."""
        if not self.settings.require or not (failures := logfile.plugin_failures(lines)):
            return
        failure = failures[0]
        self.refuse([f"{self.name(failure.pid)} could not import the plugin: {failure.reason}"])

    def name(self, pid: int | None) -> str:
        """A process's title with its rank, for which a starting worker is given some time."""
        if pid is None:
            return "vLLM's API server"
        deadline = time.monotonic() + RANK_SECONDS
        while procfs.start_ticks(pid) is not None and time.monotonic() < deadline:
            self.titles[pid] = title = procfs.title(pid)
            if title.startswith("VLLM::") and title != "VLLM::Worker":
                break
            time.sleep(0.2)
        title = self.titles.get(pid, "")
        return f"{title if title.startswith('VLLM::') else 'a vLLM process'} (pid {pid})"

    def refuse(self, problems: list[str]) -> NoReturn:
        raise LaunchError(
            "the plugin is not active in every vLLM process, so nothing is served:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"  log: {self.settings.log}; to serve without this check: ASSAY_REQUIRE=0"
        )

    def wait_until_healthy(self, progress: Progress) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        while True:
            lines = logfile.read(self.settings.log)
            progress.show(logfile.stage(lines))
            self.processes()
            self.check_alive()
            self.check_plugin_imports(lines)
            if self.client.healthy():
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"vLLM was not ready after {self.settings.start_seconds:.0f} s"
                    f" ({logfile.stage(lines)})\n  log: {self.settings.log}"
                )
            time.sleep(0.5)

    def verify_door(self) -> None:
        """A client must be told to wait, now that the server answers."""
        try:
            status = self.client.status_without_key(BEHIND_THE_DOOR)
        except client.NoAnswerError as error:
            self.check_alive()
            raise LaunchError(f"the server {error}\n  log: {self.settings.log}") from error
        expected = 401 if self.settings.keys_file else 503
        if status != expected:
            raise LaunchError(
                "the closed door is not in front of the server, so it was ended:"
                f" {BEHIND_THE_DOOR} answered {status} without the key, not {expected}\n"
                f"  log: {self.settings.log}"
            )

    def verify_plugin(self) -> list[proof.Proof]:
        """Every vLLM process's proof; refuses, or warns, when one is missing."""
        found = self.processes()
        proofs = proof.read_all(self.settings.run_dir)
        wrong = processes.unproven(found, proofs, is_quantised(self.settings))
        if not wrong:
            return proofs
        failures = logfile.plugin_failures(logfile.read(self.settings.log))
        reasons = {failure.pid: failure.reason for failure in failures}
        left_out = self.settings.left_out_by
        problems = []
        for pid, what in wrong.items():
            if pid in reasons:
                what += f": {reasons[pid]}"
            elif left_out is not None:
                what += f": {left_out}"
            problems.append(what)
        if self.settings.require:
            self.refuse(problems)
        for problem in problems:
            print(f"warning: {problem}", flush=True)
        return proofs

    def assay(self) -> ready.Report:
        """Ask the ready tier of the profile's suite through the door's side entrance; raises
        LaunchError, or warns, when the server is not found sound."""
        settings = self.settings
        with ready.Asking(
            settings.variables, self.client.url, settings.key_file, settings.run_dir
        ) as asking:
            while not asking.ended(0.2):
                self.check_alive()
        report = asking.report()
        if report.passed:
            return report
        self.check_alive()
        words = report.words()
        if self.settings.require:
            raise LaunchError(f"{words}, so nothing is served\n  log: {self.settings.log}")
        print(f"warning: {words}", flush=True)
        return report

    def wait_for_canary(self) -> None:
        """Until somebody else, who holds the bypass key, has opened the door."""
        while not (self.settings.run_dir / "open").exists():
            self.check_alive()
            time.sleep(0.5)
        self.opened = True

    def open_door(self) -> None:
        self.opened = True
        (self.settings.run_dir / "open").touch()

    def close_door(self) -> None:
        with suppress(OSError):  # an end is an end: the server behind the door goes too
            (self.settings.run_dir / "open").unlink(missing_ok=True)

    def watch(self) -> NoReturn:
        seconds = stalled_after(self.settings.variables)
        dog = watchdog.Watchdog(self.client, self.key, seconds)
        if seconds:
            dog.start()
        shm.record(self.settings.state / "shm.json", procfs.descendants(os.getpid()))
        while dog.verdict is None:
            self.check_alive()
            time.sleep(0.5)
        self.close_door()
        self.kill()  # nothing in it would answer a wish to stop
        raise LaunchError(f"the server was ended because {dog.verdict}\n  log: {self.settings.log}")


def is_quantised(settings: Settings) -> bool:
    """Whether the checkpoint says that it is; a model that is not a local folder counts as such."""
    config = settings.checkpoint
    if config is None:
        return True
    return (
        "quantization_config" in config or (Path(settings.model) / "hf_quant_config.json").is_file()
    )
