"""The process that owns vLLM: whatever ends the launcher, nothing of vLLM outlives it.

    python -m assay_kernels.launcher.guard REPORT GRACE_SECONDS COMMAND...

REPORT is the number of an open pipe that takes one line, the pid of vLLM's first process. Standard
input is a pipe whose other end only the launcher holds. When it closes, because the launcher asks
for a stop or because it was killed in any way, the guard asks vLLM to stop, waits GRACE_SECONDS,
and kills what is left. It does the same with what a crashed vLLM leaves behind. Orphans cannot
escape: the guard adopts them. Killed together with the launcher, the guard can do nothing: then the
kernel asks vLLM to stop. Exit code: vLLM's, 128 + n for a signal n.
"""

import os
import select
import signal
import subprocess
import sys
import time

from assay_kernels.launcher import procfs

AFTERMATH_SECONDS = 5.0
"""How long processes whose main process has gone may take to end by themselves."""


class Guard:
    def __init__(self, command: list[str]) -> None:
        procfs.adopt_orphans()
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=procfs.end_with_parent,  # safe: the guard has no threads
        )
        self.exit_code: int | None = None
        self.asked_to_stop = False

    def ask_to_stop(self, *_: object) -> None:
        self.asked_to_stop = True

    def reap(self) -> None:
        """Collect the dead, adopted orphans among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def wait_until_asked(self) -> None:
        """Return when the launcher is gone or asks for a stop, or when vLLM has ended."""
        while self.exit_code is None and not self.asked_to_stop:
            readable, _, _ = select.select([0], [], [], 0.2)
            if readable and not os.read(0, 4096):
                return
            self.reap()

    def emptied_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self.reap()
            if not procfs.descendants(os.getpid()):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)

    def main_ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.05)
        return self.exit_code is not None

    def stop(self, grace: float) -> None:
        if self.exit_code is None:
            procfs.signal_all([self.child.pid], signal.SIGTERM)
            ended = self.main_ended_within(grace)
        else:
            ended = True
        if ended and not self.emptied_within(0.5):
            procfs.signal_all(procfs.descendants(os.getpid()), signal.SIGTERM)
            self.emptied_within(AFTERMATH_SECONDS)
        procfs.kill_descendants(20, lambda: self.emptied_within(0.5))


def main() -> int:
    report, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    guard = Guard(command)
    with os.fdopen(report, "w") as pipe:
        pipe.write(f"{guard.child.pid}\n")
    signal.signal(signal.SIGTERM, guard.ask_to_stop)
    guard.wait_until_asked()
    guard.stop(grace)
    return guard.exit_code if guard.exit_code is not None else 128 + signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main())
