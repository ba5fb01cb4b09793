"""Strict YAML: unknown keys, repeated keys and wrong values are one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from assay_load.errors import InputError

SHOWN = 6
"""Problems of a file that one error names."""


class Strict(BaseModel):
    """Frozen; refuses unknown keys and silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _OneOfEachKey(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


T = TypeVar("T", bound=BaseModel)


def read_yaml(path: Path, model: type[T]) -> T:
    """The file as `model`; raises InputError that names the file, the key and the rule."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _OneOfEachKey)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    return parse(data, model, str(path))


def parse(data: Any, model: type[T], where: str) -> T:
    """`data` as `model`; raises InputError that names `where`, the key and the rule."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {rule(e)}" for e in error.errors()
        ]
        more = len(problems) - SHOWN
        text = "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise InputError(f"{where}: {text}") from error


def rule(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] == "missing":
        return "is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    value = error.get("input")
    shown = f" (is {value!r})" if isinstance(value, int | float | str | bool | None) else ""
    return message[:1].lower() + message[1:] + shown
