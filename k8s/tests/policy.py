"""What no pod of the chart may be: Pod Security "restricted" of kubernetes.io/docs, and the
house's rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from chart import containers, pods

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Restricted's allow-list."""
SECRET_NAME = re.compile(r"(token|secret|password|passwd|api_?key|credential)", re.IGNORECASE)
FILES = re.compile(r"_(FILE|DIR|PATH)$")


def violations(objects: list[dict[str, Any]]) -> Iterator[str]:
    for name, _, spec in pods(objects):
        for line in pod(spec):
            yield f"{name}: {line}"


def pod(spec: dict[str, Any]) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield f"{key} is set"
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if security.get("runAsUser") == 0:
        yield "runs as root"
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "mounts a token by itself"
    if spec.get("enableServiceLinks") is not False:
        yield "links Services into its environment"
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']} is a {', '.join(kinds)}"
        if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
            yield f"volume {volume['name']} has no size limit"
    for c in containers(spec):
        for line in container(c):
            yield f"{c['name']}: {line}"


def container(c: dict[str, Any]) -> Iterator[str]:
    security = c.get("securityContext", {})
    if security.get("privileged"):
        yield "is privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "may escalate"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "writes to its root"
    capabilities = security.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield "keeps capabilities"
    if added := set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"adds {', '.join(sorted(added))}"
    tag = c["image"].rpartition("/")[2]
    if "@sha256:" not in tag and (":" not in tag or tag.endswith(":latest")):
        yield f"image {c['image']} is not pinned"
    for kind in ("requests", "limits"):
        for resource in ("cpu", "memory", "ephemeral-storage"):
            if resource not in c.get("resources", {}).get(kind, {}):
                yield f"has no {resource} in {kind}"
    for variable in c.get("env", []):
        name = variable["name"]
        if "value" in variable and SECRET_NAME.search(name) and not FILES.search(name):
            yield f"{name} stands in the clear"
    for word in [*c.get("command", []), *c.get("args", [])]:
        if re.search(r"--(api-key|token|password)(=|$)", str(word)):
            yield f"{word} shows a secret to every user of the node"
