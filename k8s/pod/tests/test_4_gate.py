"""The rendered gate Job's container against a server whose output is wrong."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chart import ROOT, of, pod_spec
from conftest import IMAGES, NAMESPACE, keys, rendered
from kubelet import Pod, address, docker

BAD = "assay-bad-server"
HARDWARE = "one node's processor"
POLICY = (ROOT / "docker/tests/policy.yaml").read_text().replace("assay-miniature", "assay-faulty")
"""Short, with wide bounds: the verdict here is about coherence. The model is the fault server's."""


class Api:
    """What of an API server the gate's Role reaches: one ConfigMap, and events; over TLS."""

    def __init__(self, folder: Path, host: str) -> None:
        self.maps: dict[str, Any] = {}
        self.events: list[Any] = []
        key, cert = folder / "key.pem", folder / "ca.crt"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj",
             "/CN=kubernetes", "-addext", f"subjectAltName=IP:{host}"],
            check=True, capture_output=True,
        )  # fmt: skip
        self.ca = cert.read_text()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                status, page = api.call(self.command, self.path, body, self.headers)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(page).encode())

            do_GET = do_POST = do_PATCH = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((host, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def call(self, method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        assert headers["Authorization"] == "Bearer account-token"
        resource, _, name = path.removeprefix(f"/api/v1/namespaces/{NAMESPACE}/").partition("/")
        if resource == "events":
            self.events.append(body)
            return 201, body
        if method == "POST":
            self.maps[body["metadata"]["name"]] = body
            return 201, body
        if name not in self.maps:
            return 404, {}
        if method == "PATCH":
            self.maps[name]["data"] |= body["data"]
        return 200, self.maps[name]


@pytest.fixture
def bad_server(engine: None) -> Iterator[str]:
    """Address of a server that answers 200 to everything, and nonsense."""
    docker("rm", "--force", BAD, check=False)
    docker(
        "run", "--detach", "--name", BAD, IMAGES["gate"], "assay-smoke", "fault-server",
        "--suite", "miniature", "--mode", "garbage", "--host", "0.0.0.0", "--port", "8000",
    )  # fmt: skip
    yield address(BAD)
    docker("rm", "--force", BAD, check=False)


@pytest.fixture
def api(bad_server: str, tmp_path: Path) -> Iterator[tuple[Api, str]]:
    """On this host, where containers of the engine's bridge find it."""
    host = docker("inspect", "-f", "{{.NetworkSettings.Gateway}}", BAD)
    found = Api(tmp_path, host)
    yield found, host
    found.server.shutdown()


BASELINE = {
    "format": "assay-gate-baseline/1", "recorded": 0, "policy": "policy", "loads": {},
    "identity": {
        "commit": None, "image": None, "model": "assay-faulty", "model_revision": None,
        "server": None, "arch": None, "profile": "docker/profiles/miniature-cpu.yaml",
        "hardware": HARDWARE, "url": "http://mini-assay-api:8000",
    },
}  # fmt: skip
"""Of this hardware, policy and model, so that the gate judges at all. It holds no figures: the
battery comes first and settles it."""


def test_the_hook_s_job_fails_the_release_and_keeps_its_verdict(
    api: tuple[Api, str], bad_server: str
) -> None:
    server, host = api
    objects = rendered(gate={"policy": "policy", "inlinePolicy": POLICY, "hardware": HARDWARE})
    (job,) = of(objects, "Job", "-gate")
    maps = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "ConfigMap"}
    maps["assay-baseline"] = {"baseline.json": json.dumps(BASELINE)}
    account = {"token": "account-token", "namespace": NAMESPACE, "ca.crt": server.ca}
    spec = pod_spec(job)
    # kubelet sets these in every container.
    for name, value in (("HOST", host), ("PORT", server.server.server_address[1])):
        spec["containers"][0]["env"].append(
            {"name": f"KUBERNETES_SERVICE_{name}", "value": str(value)}
        )
    pod = Pod(
        spec | {"terminationGracePeriodSeconds": 30}, maps, keys(), name="gate",
        projected={"account": account}, hosts={"mini-assay-api": bad_server},
    )  # fmt: skip
    code, log = pod.once(timeout=900)
    assert code == 1, log
    (kept,) = server.maps["mini-assay-verdicts"]["data"].values()
    verdict = json.loads(kept)
    assert (verdict["verdict"], verdict["release"]) == ("fail", "mini")
    assert any(c["part"] == "coherence" and c["outcome"] == "fail" for c in verdict["checks"])
    (event,) = server.events
    assert (event["type"], event["reason"]) == ("Warning", "GateFailed")
    assert event["involvedObject"]["name"] == "mini-assay-verdicts"
