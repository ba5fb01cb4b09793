"""What a killed server leaves in /dev/shm.

A server that is killed cannot remove its shared memory, and with the host's IPC namespace the next
one finds the memory taken (llm-d issue 352). Only names that a server of this very state folder had
mapped are removed, and only while no other process that can be seen maps them: other programs use
/dev/shm too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
_MAPPED = re.compile(rf" ({re.escape(str(FOLDER))}/[^\n]+?)(?: \(deleted\))?$", re.MULTILINE)


def mapped(pids: Iterable[int]) -> set[Path]:
    """Files of /dev/shm that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            found |= {Path(name) for name in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())}
    return found


def record(path: Path, pids: Iterable[int]) -> None:
    """Remember what a server uses, for the next start after one that could not clean up."""
    with suppress(OSError):
        path.write_text(json.dumps(sorted(map(str, mapped(pids)))))


def clear(path: Path) -> list[Path]:
    """Remove what the record names and nobody uses; what was removed."""
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    in_use = mapped(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    removed = []
    for file in (Path(name) for name in names if isinstance(name, str)):
        if file.parent != FOLDER or file in in_use:
            continue
        with suppress(OSError):
            if file.stat().st_uid == os.getuid():
                file.unlink()
                removed.append(file)
    path.unlink(missing_ok=True)
    return removed
