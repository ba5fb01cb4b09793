"""Suites: one YAML each, strictly read. An unknown key, check or parameter is an error that names
the file, the place and the rule."""

from __future__ import annotations

import gzip
import json
from collections.abc import Hashable, Iterable
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from assay_smoke.errors import SuiteError

TIERS = ("probe", "ready", "default", "full")
"""`probe` is what the canary asks again and again, `ready` opens the door."""
TierName = Literal["probe", "ready", "default", "full"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Unknown keys are errors; nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Question(Strict):
    """One chat with a known answer; the rules of `kind` stand in `scoring.is_right`."""

    id: str
    category: str
    kind: Literal["number", "word", "prefix", "text", "json", "tool"]
    expected: Any
    accept: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] = ()
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """The answer's JSON schema, sent as response_format."""
    thinking: bool = False
    max_tokens: Count = 60


class Passage(Strict):
    """Known good text, chat markup included."""

    name: str
    text: Annotated[str, Field(min_length=1)]


class Needle(Strict):
    """How to hide a number in a text of any length and ask for it."""

    opening: str = ""
    fact: str
    """With {name} and {code}."""
    question: str
    """With {name}."""
    names: tuple[str, ...] = Field(min_length=1)
    filler: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _places(self) -> Needle:
        for text, places in ((self.fact, ("{name}", "{code}")), (self.question, ("{name}",))):
            for place in places:
                if place not in text:
                    raise ValueError(f"{text!r} must hold {place}")
        return self


class Long(Strict):
    """What makes the model write for long."""

    prompts: tuple[str, ...] = Field(min_length=1)


class Tier(Strict):
    """Checks and what they may cost."""

    tokens: Count
    """Generated tokens after which no more is asked."""
    deadline: Positive
    """Seconds after which the run is given up: exit 2."""
    request_timeout: Positive = 120
    """Seconds that one answer may take."""
    idle_timeout: Positive = 60
    """Seconds without a byte."""
    concurrency: Count = 8
    checks: dict[str, dict[str, Any] | None]


class _Tier(Strict):
    """As written: with what another tier lends."""

    extends: TierName | None = None
    tokens: Count | None = None
    deadline: Positive | None = None
    request_timeout: Positive | None = None
    idle_timeout: Positive | None = None
    concurrency: Count | None = None
    without: tuple[str, ...] = ()
    checks: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


class _Document(Strict):
    """A suite's YAML as written."""

    name: str
    about: str
    thinking_argument: str = "thinking"
    scripts: tuple[str, ...] = Field(min_length=1)
    margin: Positive
    questions: str
    passages: str
    reference: str | None = None
    needle: Needle
    long: Long
    tiers: dict[TierName, _Tier]


class Suite(Strict):
    """A suite with its files read."""

    name: str
    about: str
    thinking_argument: str
    """The chat template's argument that switches thinking."""
    scripts: frozenset[str]
    """Scripts in which a right answer may be written ('Latin', 'Cjk', ...)."""
    margin: float
    """Nats between the two likeliest tokens above which a greedy choice must not depend on the
    batch. GPU servers are not batch-invariant: below it a divergence says nothing."""
    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]
    reference: Path | None
    needle: Needle
    long: Long
    tiers: dict[TierName, Tier]

    @cached_property
    def by_id(self) -> dict[str, Question]:
        return {question.id: question for question in self.questions}

    def tier(self, name: str) -> Tier:
        found = {str(known): tier for known, tier in self.tiers.items()}.get(name)
        if found is None:
            raise SuiteError(
                f"suite {self.name} has no tier {name!r}; it has {', '.join(self.tiers)}"
            )
        return found


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


M = TypeVar("M", bound=BaseModel)


def one_line(error: Exception) -> str:
    """A validation error as 'place: rule; place: rule'."""
    if isinstance(error, ValidationError):
        found = []
        for e in error.errors()[:5]:
            place = ".".join(str(part) for part in e["loc"]) or "top level"
            rule = "unknown key" if e["type"] == "extra_forbidden" else e["msg"]
            found.append(f"{place}: {rule}")
        return "; ".join(found)
    return " ".join(str(error).split())


def validated(model: type[M], value: Any, where: str) -> M:
    """`value` as a `model`; raises SuiteError that names the place and the rule."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise SuiteError(f"{where}: {one_line(error)}") from error


def shipped() -> list[str]:
    """Names of the suites in the package."""
    folder = Path(str(resources.files("assay_smoke") / "suites"))
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a suite: a path, or the name of one that is shipped."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    if name not in shipped():
        raise SuiteError(
            f"no suite {name!r}: neither a .yaml file nor one of {', '.join(shipped())}"
        )
    return Path(str(resources.files("assay_smoke") / "suites" / f"{name}.yaml"))


def read_text(path: Path) -> str:
    """A text file, gzipped or not; raises SuiteError."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SuiteError(f"cannot read {path}: {one_line(error)}") from error


def read_lines(path: Path, model: type[M]) -> tuple[M, ...]:
    """One JSON object a line."""
    records = []
    for index, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SuiteError(f"{path}:{index}: not JSON: {error}") from error
            records.append(validated(model, value, f"{path}:{index}"))
    if not records:
        raise SuiteError(f"{path} is empty")
    return tuple(records)


def load(name: str) -> Suite:
    """Read a suite and everything that it names; raises SuiteError."""
    path = find(name)
    try:
        written = yaml.load(read_text(path), _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SuiteError(f"{path} is not YAML: {one_line(error)}") from error
    document = validated(_Document, written, str(path))
    questions = read_lines(path.parent / document.questions, Question)
    _refuse_twins((q.id for q in questions), path.parent / document.questions)
    passages = read_lines(path.parent / document.passages, Passage)
    _refuse_twins((p.name for p in passages), path.parent / document.passages)
    tiers = {name: _tier(document, name, str(path)) for name in document.tiers}
    reference = path.parent / document.reference if document.reference else None
    fields = document.model_dump(include={"name", "about", "thinking_argument", "margin"})
    return Suite(
        **fields,
        scripts=frozenset(document.scripts),
        needle=document.needle,
        long=document.long,
        questions=questions,
        passages=passages,
        reference=reference,
        tiers=tiers,
    )


def _refuse_twins(names: Iterable[str], path: Path) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SuiteError(f"{path}: {name!r} stands twice")
        seen.add(name)


def _tier(document: _Document, name: TierName, path: str, seen: tuple[str, ...] = ()) -> Tier:
    """A tier with what it extends; checks are merged parameter by parameter."""
    from assay_smoke.checks import build

    where = f"{path}: tiers.{name}"
    if name in seen:
        raise SuiteError(f"{where}: extends itself")
    written = document.tiers[name]
    values: dict[str, Any] = {}
    checks: dict[str, dict[str, Any]] = {}
    if written.extends is not None:
        if written.extends not in document.tiers:
            raise SuiteError(f"{where}: extends {written.extends}, which is not there")
        lent = _tier(document, written.extends, path, (*seen, name))
        values = lent.model_dump(exclude={"checks"})
        checks = {k: dict(v or {}) for k, v in lent.checks.items()}
    for gone in written.without:
        if checks.pop(gone, None) is None:
            raise SuiteError(f"{where}.without: {gone} is not in the tier it extends")
    own = written.model_dump(exclude={"extends", "without", "checks"}, exclude_none=True)
    for check, parameters in written.checks.items():
        checks[check] = checks.get(check, {}) | (parameters or {})
    tier = validated(Tier, {**values, **own, "checks": checks}, where)
    if not tier.checks:
        raise SuiteError(f"{where}: no checks")
    for check, parameters in tier.checks.items():
        build(check, parameters or {}, f"{where}.checks.{check}")
    return tier
