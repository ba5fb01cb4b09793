"""The door's sign: a file in the run folder that the server's door looks at."""

from __future__ import annotations

from pathlib import Path

SIGN = "open"


class Door:
    """The door of one server; `None` in place of a folder stands for a server without one."""

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir

    @property
    def is_open(self) -> bool:
        return self.run_dir is None or (self.run_dir / SIGN).exists()

    def open(self) -> bool:
        """False when the run folder is not there: the server is just being started."""
        if self.run_dir is None:
            return True
        try:
            (self.run_dir / SIGN).touch()
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.run_dir is not None:
            (self.run_dir / SIGN).unlink(missing_ok=True)
