"""Is one of schemas/*.yaml at least as strict as the CRD that it stands for?

    python k8s/tests/compare_crd.py schemas/podmonitor.yaml CRD.yaml [CRD.yaml ...]

Prints each field that the CRD does not have, has with another type, or demands where ours does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def differences(ours: dict[str, Any], theirs: dict[str, Any], path: str) -> Iterator[str]:
    if "$kubernetes" in ours:
        if theirs.get("type") != "object":
            yield f"{path}: is {theirs.get('type')} there"
        return
    kinds = (
        {theirs.get("type")}
        if not theirs.get("x-kubernetes-int-or-string")
        else {"integer", "string"}
    )
    if kinds != {None} and ours.get("type") not in kinds:
        yield f"{path}: {ours.get('type')}, there {kinds}"
    if "enum" in theirs and not set(ours.get("enum", ["anything"])) <= set(theirs["enum"]):
        yield f"{path}: enum {ours.get('enum')}, there {theirs['enum']}"
    for key in ("pattern", "maxLength", "minLength", "maxItems", "minItems", "minimum", "maximum"):
        if key in theirs and key not in ours and "enum" not in ours:
            yield f"{path}: {key} {theirs[key]!r} is not asked for"
    missing = set(theirs.get("required", [])) - set(ours.get("required", []))
    if missing and ours.get("properties"):
        yield f"{path}: {', '.join(sorted(missing))} is required there"
    for key, part in ours.get("properties", {}).items():
        known = theirs.get("properties", {})
        extra = theirs.get("additionalProperties")
        if key in known:
            yield from differences(part, known[key], f"{path}.{key}")
        elif not isinstance(extra, dict) and not theirs.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{key}: is not there"
    if "items" in ours:
        yield from differences(ours["items"], theirs.get("items", {}), f"{path}[]")


def main() -> int:
    ours = yaml.safe_load(Path(sys.argv[1]).read_text())
    version = ours["apiVersion"].partition("/")[2]
    found: list[str] = []
    for crd in sys.argv[2:]:
        there = yaml.safe_load(Path(crd).read_text())
        assert there["spec"]["names"]["kind"] == ours["kind"], there["spec"]["names"]["kind"]
        (schema,) = [v["schema"] for v in there["spec"]["versions"] if v["name"] == version]
        spec = schema["openAPIV3Schema"]["properties"]["spec"]
        found += differences(ours["spec"], spec, "spec")
    print("\n".join(found) or f"{ours['kind']}: nothing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
