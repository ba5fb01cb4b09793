"""Strict validation of rendered objects: an unknown key is an error, and so is an unknown kind.

    python k8s/tests/validate.py VERSION < objects.yaml

`kubernetes-validate` alone lets a kind without a schema pass with a warning, a misspelt PodMonitor
among them.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from manifests import load

SCHEMAS = Path(__file__).with_name("schemas")
VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))
BUILT_IN = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
TYPES = {
    "ObjectMeta": "meta.v1", "LabelSelector": "meta.v1", "PodTemplateSpec": "core.v1",
    "SecretKeySelector": "core.v1", "JobSpec": "batch.v1",
    "HorizontalPodAutoscalerBehavior": "autoscaling.v2",
}  # fmt: skip
"""Types of Kubernetes that custom resources are made of -> the end of their package's name."""


def folder(version: str) -> Path:
    return BUILT_IN / f"v{version}.0-local-strict"


@functools.cache
def definitions(version: str) -> dict[str, Any]:
    return dict(json.loads((folder(version) / "_definitions.json").read_text())["$defs"])


@functools.cache
def built_in(api: str, kind: str, version: str) -> Draft202012Validator | None:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    path = folder(version) / f"{kind.lower()}-{group}.json"
    if not path.exists():
        return None
    schema = _inlined(json.loads(path.read_text()), version)
    return Draft202012Validator(schema)


def _inlined(schema: Any, version: str) -> Any:
    """The schema with the definitions of its version beside it."""
    result = _local(schema)
    result.pop("$id", None)
    return result | {"$defs": definitions_here(version)}


def _local(schema: Any) -> Any:
    return json.loads(json.dumps(schema).replace("/api/_definitions.json#/$defs/", "#/$defs/"))


@functools.cache
def definitions_here(version: str) -> dict[str, Any]:
    return dict(_local(definitions(version)))


@functools.cache
def custom(api: str, kind: str, version: str) -> Draft202012Validator | None:
    for path in SCHEMAS.glob("*.yaml"):
        found = yaml.safe_load(path.read_text())
        if (found["apiVersion"], found["kind"]) == (api, kind):
            schema = {
                "type": "object",
                "required": ["metadata", "spec"],
                "properties": {
                    "apiVersion": {"const": api},
                    "kind": {"const": kind},
                    "metadata": {"$kubernetes": "ObjectMeta"},
                    "spec": found["spec"],
                },
            }
            return Draft202012Validator(
                closed(schema, version) | {"$defs": definitions_here(version)}
            )
    return None


def closed(schema: Any, version: str) -> Any:
    """No object takes keys that its schema does not name; Kubernetes' types are looked up."""
    if isinstance(schema, list):
        return [closed(part, version) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if (name := schema.get("$kubernetes")) is not None:
        ending = f".{TYPES[name]}.{name}"
        (key,) = [k for k in definitions(version) if k.endswith(ending)]
        return {"$ref": f"#/$defs/{key}"}
    result = {key: closed(part, version) for key, part in copy.copy(schema).items()}
    if "properties" in result and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def errors(o: dict[str, Any], version: str) -> list[str]:
    """What is wrong with an object under a Kubernetes version, one line each."""
    api, kind = str(o.get("apiVersion")), str(o.get("kind"))
    name = f"{kind}/{o.get('metadata', {}).get('name')}"
    validator = built_in(api, kind, version) or custom(api, kind, version)
    if validator is None:
        return [f"{name}: there is no schema of {api} {kind} for Kubernetes {version}"]
    return [
        f"{name}: {'.'.join(map(str, e.absolute_path))}: {e.message[:300]}"
        for e in validator.iter_errors(o)
    ]


def main() -> int:
    found = [line for o in load(sys.stdin.read()) for line in errors(o, sys.argv[1])]
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
