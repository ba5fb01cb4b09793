"""What a rule is, and the registry of all of them.

A rule is one class: its docstring says what it finds and ends in where that was seen in public; its
attributes are what a finding tells the operator. The documents' table is made from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from assay_kernels.checkpoint.reader import Survey

if TYPE_CHECKING:
    from assay_kernels.audit.block import Block
    from assay_kernels.checkpoint.data import TensorReader


class Severity(StrEnum):
    """FAULT: served like this, the output is wrong or the server stops. WARNING: healthy under
    Assay, but somebody should know."""

    FAULT = "fault"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    tensor: stored name, or the file where no single tensor is meant
    found: what is there; effect: what it does to the output; action: what to do
    confidence: for a rule that decides by statistics, how sure it is
    """

    severity: Severity
    rule: str
    tensor: str
    file: str
    found: str
    effect: str
    action: str
    confidence: str | None = None

    def __str__(self) -> str:
        sure = f" [{self.confidence}]" if self.confidence else ""
        return (
            f"{self.severity.upper():7} {self.tensor}: {self.rule}: {self.found}{sure}; "
            f"{self.effect}; {self.action}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Rule(ABC):
    """One kind of thing that can be wrong."""

    id: ClassVar[str]
    severity: ClassVar[Severity] = Severity.FAULT
    effect: ClassVar[str]
    action: ClassVar[str]
    origin: ClassVar[str] = ""
    """Where it was met in public: an issue, a document."""

    def finding(
        self,
        tensor: str,
        file: str,
        found: str,
        *,
        confidence: str | None = None,
        severity: Severity | None = None,
        effect: str | None = None,
    ) -> Finding:
        return Finding(
            severity or self.severity,
            self.id,
            tensor,
            file,
            found,
            effect or self.effect,
            self.action,
            confidence,
        )


class HeaderRule(Rule):
    """Judges names, shapes, dtypes, index and config; reads no tensor data."""

    @abstractmethod
    def check(self, survey: Survey) -> Iterator[Finding]: ...


@dataclass(frozen=True)
class Measurement:
    """A number that a rule takes of one block and judges over the whole checkpoint.

    group: what is judged together; value: the rule's own
    """

    group: str
    tensor: str
    file: str
    value: Any


class DeepRule(Rule):
    """Judges tensor data, one block of weights at a time; several threads may call one rule."""

    def check(self, block: Block) -> Iterator[Finding]:
        """Findings within one block."""
        return iter(())

    def measure(self, block: Block) -> Iterator[Measurement]:
        """What `conclude` needs of one block."""
        return iter(())

    def conclude(
        self, survey: Survey, data: TensorReader, measured: list[Measurement]
    ) -> Iterator[Finding]:
        """Findings that take the whole checkpoint."""
        return iter(())

    def undecided(self, measured: list[Measurement]) -> str | None:
        """Why the rule could judge nothing, where it needs structure that may not be there."""
        return None


_REGISTRY: dict[str, Rule] = {}


def register(rule: type[Rule]) -> type[Rule]:
    """Class decorator: one instance of the rule, under its id."""
    assert rule.id not in _REGISTRY, rule.id
    assert rule.__doc__, rule.id
    _REGISTRY[rule.id] = rule()
    return rule


def all_rules() -> dict[str, Rule]:
    """Every rule by id, in the order in which they are documented."""
    from assay_kernels.audit import data_rules, header_rules, statistics

    assert header_rules
    assert data_rules
    assert statistics
    return dict(_REGISTRY)


def select(rules: Iterable[Rule], kind: type[Rule]) -> list[Any]:
    return [rule for rule in rules if isinstance(rule, kind)]
