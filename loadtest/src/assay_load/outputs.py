"""Places for results, tried before anything is measured for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from assay_load.errors import InputError


def folder(path: Path, flag: str) -> Path:
    """The folder, made if need be; raises InputError that names the flag if nothing can be written
    there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error


def file(path: Path, flag: str) -> Path:
    """The path of a file that can be written; raises InputError that names the flag."""
    if path.is_dir():
        raise InputError(f"{flag} {path}: is a folder")
    folder(path.parent, flag)
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{flag} {path}: cannot be written")
    return path
