"""The working folder inside an unfinished conversion: a lock, a journal, files being written.

A shard is written here under its own name, synced, moved to its place and only then entered in the
journal, so that the journal never speaks of a shard that is not whole. A kill costs at most the
shards that were being written. The folder goes when everything else is in place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from assay_kernels.checkpoint.writer import sync_directory

WORK_FOLDER = ".assay-convert"
_LEFT_OVER = ".assay-convert-done"
_JOURNAL = "journal.jsonl"
_PLAN = "plan.json"


def clear_left_over(destination: Path) -> None:
    """What a kill in the very last step leaves of a finished conversion's working folder."""
    shutil.rmtree(destination / _LEFT_OVER, ignore_errors=True)


class InUseError(Exception):
    """Another conversion holds the folder, or it is of another plan. The message says which."""


class Work:
    """The journal of one conversion. `done` maps a finished shard to what was noted about it."""

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self.folder = destination / WORK_FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise InUseError(f"another conversion is writing to {destination}") from None
        self._lock = Lock()
        self._parts = self.folder / "parts"
        self.done: dict[str, dict[str, Any]] = {}

    @property
    def begun(self) -> bool:
        """Whether an earlier run left a plan here."""
        return (self.folder / _PLAN).exists()

    def close(self) -> None:
        self._lock_file.close()

    def recall(self, name: str, make: Callable[[], Any]) -> Any:
        """A JSON value that a first run makes and every later one reads."""
        path = self.folder / name
        if not path.exists():
            value = make()
            temporary = path.with_suffix(".part")
            with temporary.open("w") as stream:
                json.dump(value, stream)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            sync_directory(self.folder)
        return json.loads(path.read_text())

    def begin(self, fingerprint: str) -> None:
        """Take up the plan, or raise InUseError if the folder belongs to another one."""
        found = self.recall(_PLAN, lambda: {"fingerprint": fingerprint})
        if found.get("fingerprint") != fingerprint:
            raise InUseError(
                f"{self._destination} holds the beginning of a different conversion (another "
                "source, target, option or version); remove it or choose another destination"
            )
        path = self.folder / _JOURNAL
        lines = path.read_text().split("\n") if path.exists() else []
        for line in lines[:-1]:  # what follows the last newline was cut off by a kill
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            shard = self._destination / entry["file"]
            if shard.is_file() and shard.stat().st_size == entry["bytes"]:
                self.done[entry["file"]] = entry
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir()

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A stream whose content stands at `name` in the destination afterwards, whole and synced.

        What a kill leaves of it stays in the working folder.
        """
        part = self._parts / name
        with part.open("wb", buffering=0) as stream:
            yield stream
            os.fsync(stream.fileno())
        part.replace(self._destination / name)
        sync_directory(self._destination)

    def note(self, entry: dict[str, Any]) -> None:
        """Enter a shard that is in its place into the journal."""
        with self._lock:
            self.done[entry["file"]] = entry
            with (self.folder / _JOURNAL).open("a") as stream:
                # The first newline ends a line that a kill may have cut off.
                stream.write("\n" + json.dumps(entry) + "\n")
                stream.flush()
                os.fsync(stream.fileno())

    def remove(self) -> None:
        """Under another name first: a kill must not leave half a journal."""
        gone = self._destination / _LEFT_OVER
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.replace(gone)
        shutil.rmtree(gone)
        sync_directory(self._destination)
