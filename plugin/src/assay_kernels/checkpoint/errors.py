"""What can be wrong with a checkpoint, as one error and one warning type."""

from __future__ import annotations

from dataclasses import dataclass


class CheckpointError(Exception):
    """A checkpoint that must not be served.

    file: name of the offending file inside the checkpoint
    tensor: the tensor as the file names it, or None when the whole file is meant
    rule: what had to hold, and what was found
    """

    def __init__(self, file: str, tensor: str | None, rule: str) -> None:
        super().__init__(file, tensor, rule)
        self.file = file
        self.tensor = tensor
        self.rule = rule

    def __str__(self) -> str:
        where = self.file if self.tensor is None else f"{self.file}: {self.tensor}"
        return f"{where}: {self.rule}"


@dataclass(frozen=True)
class CheckpointWarning:
    """Something that serves well only because it is handled. layer: canonical module name."""

    layer: str
    rule: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.rule}"
