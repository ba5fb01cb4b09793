"""Which metrics and labels an expression asks for; enough of PromQL for our own expressions."""

from __future__ import annotations

import re

_STRING = re.compile(r'"[^"]*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHERS = re.compile(r"\{[^}]*\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
WORDS = {
    "sum",
    "max",
    "min",
    "avg",
    "count",
    "rate",
    "increase",
    "changes",
    "histogram_quantile",
    "time",
    "avg_over_time",
    "and",
    "or",
    "unless",
    "vector",
    "bool",
    "label_values",
}


def metrics(expression: str) -> set[str]:
    text = _STRING.sub('""', expression)
    for pattern in (_GROUPING, _MATCHERS, _RANGE):
        text = pattern.sub(" ", text)
    return {n for n in _NAME.findall(text) if n not in WORDS}
