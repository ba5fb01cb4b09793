"""Processes as the kernel tells of them; Linux only."""

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, however it dies."""
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third one (state) on; None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: with the pid, its identity. None if gone."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def title(pid: int) -> str:
    """Command line, or the title that the process gave itself; '' when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents before children; zombies are not alive."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        queue += below
        found += below
    return [child for child in found if start_ticks(child) is not None]


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill_descendants(times: int, pause: Callable[[], object]) -> list[int]:
    """End what is below this process; returns what did not end.

    A process may start another while it is being killed: look again, `pause` between, until none
    is left.
    """
    for _ in range(times):
        left = descendants(os.getpid())
        if not left:
            return []
        signal_all(left, signal.SIGKILL)
        pause()
    return descendants(os.getpid())
