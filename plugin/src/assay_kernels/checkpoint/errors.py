"""What can be wrong with a checkpoint, as one error and one warning type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """What kind of thing is wrong, where the rule's wording is for people."""

    CONFIG = "config"  # config.json has a value that no V4 has
    MARK = "mark"  # quantization_config is unknown, or the tensors contradict it
    INDEX = "index"  # the index is no index
    INDEX_FILE = "index file"  # it names a file that is not there
    INDEX_TENSOR = "index tensor"  # index and shards list different tensors
    UNREADABLE = "unreadable"
    HEADER = "header"
    TRUNCATED = "truncated"
    OVERLAP = "overlap"  # or a gap: the tensors do not tile the file
    NAME = "name"
    STRANGER = "stranger"  # a V4 name that this config.json has no place for
    DUPLICATE = "duplicate"
    MISSING = "missing"
    SCALE_MISSING = "scale missing"
    GLOBAL_SCALE_MISSING = "global scale missing"
    SHAPE = "shape"
    SCALE_SHAPE = "scale shape"
    DTYPE = "dtype"
    SCALE_DTYPE = "scale dtype"
    PRECISION = "precision"  # a format that the dialect does not store
    VALUE = "value"


class CheckpointError(Exception):
    """A checkpoint that must not be served.

    file: name of the offending file inside the checkpoint
    tensor: the tensor as the file names it, or None when the whole file is meant
    rule: what had to hold, and what was found
    expected: the shape that a tensor of the wrong shape should have
    """

    def __init__(
        self,
        file: str,
        tensor: str | None,
        rule: str,
        fault: Fault = Fault.VALUE,
        expected: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(file, tensor, rule, fault, expected)
        self.file = file
        self.tensor = tensor
        self.rule = rule
        self.fault = fault
        self.expected = expected

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
