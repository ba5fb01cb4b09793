"""Runs the gate where the release runs, and keeps its verdict in the cluster.

    release_gate.py run OUT URL WAIT_SECONDS -- assay-gate run ...   wait for the door, judge,
    record release_gate.py check                                            was this very release
    found good?

`run` ends with the gate's own exit code: 0 pass, 1 fail, 2 no verdict. Where there is a service
account's token, the verdict goes into the ConfigMap $VERDICTS under the key $IDENTITY.json, and an
event tells of it; one that cannot be recorded is no pass. `check` ends with 0 only if that key
holds a pass. Needs Python and nothing else: it runs in the gate's image.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ACCOUNT = Path(os.environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
KEYS = Path(os.environ.get("KEYS_DIR", "/etc/assay/keys"))
KEPT = 20
"""Verdicts that stay in the ConfigMap: an object holds at most 1 MiB."""
REASONS = {"pass": "GatePassed", "fail": "GateFailed", "invalid": "GateInvalid"}
LONGEST = 40_000
"""Bytes of one verdict; what is longer loses its passed checks."""

Verdict = dict[str, Any]
"""What assay-gate writes as gate.json."""


class ClusterError(Exception):
    """The API server refused; says what and why."""


class Cluster:
    """The API server, as this pod's service account."""

    def __init__(self) -> None:
        self.token = (ACCOUNT / "token").read_text().strip()
        self.namespace = (ACCOUNT / "namespace").read_text().strip()
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        if ":" in host:
            host = f"[{host}]"
        self.url = f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}"
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def call(
        self, method: str, path: str, body: object = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        """The answer; {} for 404. Raises ClusterError."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/namespaces/{self.namespace}/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}", "Content-Type": kind},
            method=method,
        )
        try:
            with self.opener.open(request, timeout=30) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {}
            detail = " ".join(error.read().decode(errors="replace").split())[:300]
            raise ClusterError(f"{method} {path}: {error.code} {detail}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ClusterError(f"{method} {path}: {error}") from error


def wait_for_door(url: str, seconds: float) -> bool:
    """Until the server lets a client in."""
    headers = {"Authorization": f"Bearer {key}"} if (key := api_key()) else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    said = ""
    while True:
        try:
            opener.open(
                urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=10
            ).close()
            return True
        except urllib.error.HTTPError as error:
            reason = f"it answers {error.code}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
        if reason != said:
            print(f"waiting for {url}: {reason}", flush=True)
            said = reason
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(5.0, seconds / 10))


def api_key() -> str:
    """The first key of the file; empty where clients need none."""
    try:
        lines = (KEYS / "api_keys").read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")


def judge(command: list[str], out: Path) -> Verdict:
    """The gate's verdict, or what stands for one that left none."""
    environment = os.environ | ({"ASSAY_API_KEY": key} if (key := api_key()) else {})
    code = subprocess.run(command, env=environment).returncode
    try:
        verdict: Verdict = json.loads((out / "gate.json").read_text())
    except (OSError, ValueError):
        verdict = {}
    if code not in (0, 1, 2) or not verdict:
        return no_verdict(f"the gate ended with {code} and left no verdict")
    return verdict | {"exit_code": code}


def no_verdict(reason: str) -> Verdict:
    check = {"part": "server", "name": "was judged", "outcome": "invalid", "reason": reason}
    return {"verdict": "invalid", "exit_code": 2, "checks": [check]}


def reasons(verdict: Verdict) -> str:
    wrong = [c for c in verdict.get("checks", []) if c.get("outcome") != "pass"]
    return "; ".join(f"{c.get('part')}, {c.get('name')}: {c.get('reason')}" for c in wrong)


def record(cluster: Cluster, verdict: Verdict) -> None:
    """Into the ConfigMap, and as an event on it. Raises ClusterError."""
    name, identity = os.environ["VERDICTS"], os.environ["IDENTITY"]
    now = datetime.now(UTC)
    kept = verdict | {
        "recorded": now.isoformat(timespec="seconds"),
        "release": os.environ["RELEASE"],
    }
    text = json.dumps(kept, sort_keys=True)
    if len(text) > LONGEST:
        kept["checks"] = [c for c in kept.get("checks", []) if c.get("outcome") != "pass"]
        text = json.dumps(kept, sort_keys=True)[:LONGEST]
    key = f"{identity}.json"
    found = cluster.call("GET", f"configmaps/{name}")
    labels = {
        "app.kubernetes.io/name": "assay",
        "app.kubernetes.io/instance": os.environ["RELEASE"],
    }
    if found:
        older = {k: v for k, v in (found.get("data") or {}).items() if k != key}
        surplus = sorted(older, key=lambda k: recorded(older[k]))[: max(0, len(older) - KEPT + 1)]
        patch = {"data": {key: text} | dict.fromkeys(surplus)}
        stored = cluster.call("PATCH", f"configmaps/{name}", patch, "application/merge-patch+json")
    else:
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels},
            "data": {key: text},
        }
        stored = cluster.call("POST", "configmaps", body)
    good = verdict["verdict"] == "pass"
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    message = f"gate: {verdict['verdict']} ({identity}) {reasons(verdict)}".strip()
    cluster.call(
        "POST",
        "events",
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}-", "labels": labels},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "name": name,
                "namespace": cluster.namespace,
                "uid": stored.get("metadata", {}).get("uid", ""),
            },
            "type": "Normal" if good else "Warning",
            "reason": REASONS[verdict["verdict"]],
            "message": message[:1000],
            "source": {"component": "assay-gate"},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        },
    )


def recorded(text: str) -> str:
    try:
        return str(json.loads(text).get("recorded", ""))
    except ValueError:
        return ""


def run(out: Path, url: str, seconds: float, command: list[str]) -> int:
    if wait_for_door(url, seconds):
        verdict = judge(command, out)
    else:
        verdict = no_verdict(f"{url} let no client in within {seconds:.0f} s")
        print(reasons(verdict), file=sys.stderr)
    if (ACCOUNT / "token").exists():
        try:
            record(Cluster(), verdict)
        except ClusterError as error:
            print(f"the verdict could not be recorded: {error}", file=sys.stderr)
            return int(verdict["exit_code"]) or 2
    return int(verdict["exit_code"])


def check() -> int:
    name, key = os.environ["VERDICTS"], f"{os.environ['IDENTITY']}.json"
    try:
        data = Cluster().call("GET", f"configmaps/{name}").get("data") or {}
        verdict = json.loads(data.get(key, "{}"))
    except (ClusterError, ValueError) as error:
        print(f"the verdict could not be read: {error}", file=sys.stderr)
        return 2
    if verdict.get("verdict") == "pass":
        print(f"{key}: passed at {verdict.get('recorded')}")
        return 0
    why = (
        f"its verdict is {verdict['verdict']}: {reasons(verdict)}"
        if verdict
        else "it was never judged"
    )
    print(f"{name}/{key}: the Service is not pointed at it, because {why}", file=sys.stderr)
    return 1


def main(arguments: list[str]) -> int:
    if arguments == ["check"]:
        return check()
    if len(arguments) > 5 and arguments[0] == "run" and arguments[4] == "--":
        return run(Path(arguments[1]), arguments[2].rstrip("/"), float(arguments[3]), arguments[5:])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
