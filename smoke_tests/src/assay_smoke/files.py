"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from assay_smoke.errors import CouldNotRunError


def replace(path: Path, data: bytes) -> None:
    """Put `data` in the file's place; raises CouldNotRunError that names it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise CouldNotRunError(f"cannot write {path}: {error.strerror}") from error
