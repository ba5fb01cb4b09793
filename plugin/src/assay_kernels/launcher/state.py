"""The folder in which a server keeps its log, its lock, its door's sign and key."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from assay_kernels.launcher.settings import LaunchError


def take(state: Path) -> IO[str]:
    """Claim the state folder for this launcher; released by the kernel, however it ends."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (state / "lock").open("w")
    except OSError as error:
        raise LaunchError(f"cannot keep run files in {state}: {error}", 2) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LaunchError(
            f"another server uses {state}; give this one a folder of its own: --state-dir", 2
        ) from None
    return file


def make_afresh(run_dir: Path) -> None:
    """An empty folder for the owner alone: a file `open` left in it would open the next door."""
    try:
        (run_dir / "open").unlink(missing_ok=True)
        if run_dir.exists():
            shutil.rmtree(run_dir)
        run_dir.mkdir(mode=0o700)
        (run_dir / "proof").mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(f"cannot make {run_dir} afresh: {error}", 2) from error


def door_key(path: Path) -> str:
    """The door's key in its file, for the owner alone. One that an earlier start left is kept: the
    canary beside the server knows it."""
    try:
        with suppress(FileNotFoundError):
            found = path.stat()
            private = found.st_uid == os.getuid() and not found.st_mode & 0o077
            if private and (key := path.read_text().strip()):
                return key
            path.unlink()
        key = secrets.token_urlsafe(24)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{key}\n")
    except OSError as error:
        raise LaunchError(f"cannot keep the door's key in {path}: {error.strerror}", 2) from error
    return key
