"""Renders the chart with the real helm; what every test here starts from."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from manifests import load

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s/chart"
BIN = Path(os.environ.get("ASSAY_K8S_TOOLS", ROOT / ".cache/k8s/bin"))
HELMS = ("helm3", "helm4")
SHA = "0123456789abcdef0123456789abcdef01234567"
CI = sorted(p.stem for p in (CHART / "ci").glob("*.yaml"))
Object = dict[str, Any]


class RefusedError(Exception):
    """helm's message."""


@functools.lru_cache(maxsize=512)
def _template(helm: str, release: str, namespace: str, values: str, ci: str, hooks: bool) -> str:
    command = [str(BIN / helm), "template", release, str(CHART), "--namespace", namespace]
    if ci:
        command += ["--values", str(CHART / "ci" / f"{ci}.yaml")]
    if not hooks:
        command.append("--no-hooks")
    done = subprocess.run(
        [*command, "--values", "-"], input=values, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def text(
    values: Object | None = None, *, ci: str = "b200x8", release: str = "r", namespace: str = "ns",
    helm: str = "helm4", hooks: bool = True,
) -> str:  # fmt: skip
    return _template(helm, release, namespace, json.dumps(values or {}), ci, hooks)


def render(values: Object | None = None, **how: Any) -> list[Object]:
    return load(text(values, **how))


def refusal(values: Object, **how: Any) -> str:
    """Why helm does not render these values; fails when it does."""
    try:
        text(values, **how)
    except RefusedError as error:
        return str(error)
    raise AssertionError(f"rendered: {values}")


def of(objects: Iterable[Object], kind: str, ending: str = "") -> list[Object]:
    return [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(ending)]


def one(objects: Iterable[Object], kind: str, ending: str = "") -> Object:
    found = of(objects, kind, ending)
    assert len(found) == 1, [o["metadata"]["name"] for o in found]
    return found[0]


def pod_spec(o: Object) -> Object:
    return o["spec"] if o["kind"] == "Pod" else o["spec"]["template"]["spec"]


def pods(objects: Iterable[Object]) -> Iterator[tuple[str, Object, Object]]:
    """(name, metadata, spec) of every pod that the objects would start."""
    for o in objects:
        name = f"{o['kind']}/{o['metadata']['name']}"
        if o["kind"] == "Pod":
            yield name, o["metadata"], o["spec"]
        elif o["kind"] in ("Deployment", "Job"):
            yield name, o["spec"]["template"]["metadata"], o["spec"]["template"]["spec"]
        elif o["kind"] == "LeaderWorkerSet":
            for role in ("leaderTemplate", "workerTemplate"):
                template = o["spec"]["leaderWorkerTemplate"][role]
                yield f"{name}.{role}", template["metadata"], template["spec"]
        elif o["kind"] == "AnalysisTemplate":
            for metric in o["spec"]["metrics"]:
                template = metric["provider"]["job"]["spec"]["template"]
                yield name, template["metadata"], template["spec"]


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def container(spec: Object, name: str) -> Object:
    (found,) = [c for c in containers(spec) if c["name"] == name]
    return found


def server(objects: Iterable[Object]) -> Object:
    """The container of the one Deployment's server."""
    return container(pod_spec(one(objects, "Deployment")), "server")


def env(c: Object) -> dict[str, Any]:
    names = [e["name"] for e in c.get("env", [])]
    assert len(names) == len(set(names)), names
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in c.get("env", [])}
