"""Reads YAML of several objects, strictly."""

from __future__ import annotations

from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML's last one would win in silence."""


def _mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.constructor.ConstructorError(
            None, None, f"{', '.join(twice)} stands there twice", node.start_mark
        )
    return loader.construct_mapping(node, deep=True)


Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(text: str) -> list[dict[str, Any]]:
    return [d for d in yaml.load_all(text, Loader) if d is not None]
