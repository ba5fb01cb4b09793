"""values.yaml and its comments: what each value means, and what it may be.

Above a key stand, in any order, `# -- text` (with lines that go on) and `# @schema NAME: VALUE`, a
keyword of JSON Schema as YAML. `freeform: true` lets a map hold any key: a part of Kubernetes' own
API that its server checks. What is not said follows from the default: its type, and, for a map,
exactly the keys that stand there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Value:
    path: str
    default: Any
    description: str
    keywords: dict[str, Any]
    children: list[Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def read(path: Path) -> list[Value]:
    """All values, parents before children. Raises ValueError for one that nothing is said about."""
    text = path.read_text()
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    found: list[Value] = []
    _walk(root, "", lines, found)
    silent = [v.path for v in found if not v.children and not v.description]
    if silent:
        raise ValueError(f"{path.name}: nothing is said about {', '.join(silent)}")
    return found


def _walk(node: yaml.MappingNode, prefix: str, lines: list[str], found: list[Value]) -> list[Value]:
    values = []
    for key, child in node.value:
        comment = _comment(lines, key.start_mark.line)
        description, keywords = _parse(comment, f"{prefix}{key.value}")
        default = yaml.safe_load(yaml.serialize(child))
        value = Value(f"{prefix}{key.value}", default, description, keywords)
        found.append(value)
        if isinstance(child, yaml.MappingNode) and not keywords.get("freeform"):
            value.children = _walk(child, f"{value.path}.", lines, found)
        values.append(value)
    return values


def _comment(lines: list[str], line: int) -> list[str]:
    """The block of comment lines right above a line, without their marks."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return [text.strip().removeprefix("#").strip() for text in lines[first:line]]


def _parse(comment: list[str], path: str) -> tuple[str, dict[str, Any]]:
    keywords: dict[str, Any] = {}
    words: list[str] = []
    open_text = False
    for line in comment:
        if line.startswith("@schema "):
            keywords |= yaml.safe_load(line.removeprefix("@schema "))
            open_text = False
        elif line.startswith("-- "):
            if words:
                raise ValueError(f"{path}: is described twice")
            words.append(line.removeprefix("-- "))
            open_text = True
        elif open_text:
            words.append(line)
    return " ".join(words), keywords


_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))


def schema(values: list[Value]) -> dict[str, Any]:
    """JSON Schema (draft 7, which Helm 3 and 4 read) of all values."""
    top = [value for value in values if "." not in value.path]
    # `global` is Helm's own: a parent chart hands it down.
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_object(top, {"global": {}})}


def _object(children: list[Value], more: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {child.name: _of(child) for child in children} | (more or {})
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _of(value: Value) -> dict[str, Any]:
    said = {"description": value.description} if value.description else {}
    keywords = {k: v for k, v in value.keywords.items() if k != "freeform"}
    if value.children:
        return said | _object(value.children) | keywords
    if isinstance(value.default, dict):
        if not value.keywords.get("freeform"):
            raise ValueError(f"{value.path}: an empty map needs `@schema freeform: true`")
        return said | {"type": "object"} | keywords
    if "enum" in keywords:
        return said | keywords
    if "type" not in keywords:
        kind = next((name for type_, name in _TYPES if isinstance(value.default, type_)), None)
        if kind is None:
            raise ValueError(f"{value.path}: what type? `@schema type: ...`")
        said["type"] = "number" if kind == "integer" and "number" in str(keywords) else kind
    return said | keywords
