"""files/release_gate.py against an API server and a gate of the test's own, over TLS as in a
pod."""

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chart import CHART

SCRIPT = CHART / "files/release_gate.py"
PASS = {
    "verdict": "pass",
    "checks": [{"part": "coherence", "name": "before", "outcome": "pass", "reason": "ok"}],
}
FAIL = {
    "verdict": "fail",
    "checks": [
        {"part": "coherence", "name": "after", "outcome": "fail", "reason": "Rome is not in France"}
    ],
}


class Api:
    """As much of the API server as the Role allows: a ConfigMap of one name, and events."""

    def __init__(self) -> None:
        self.maps: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.forbidden: set[str] = set()
        self.seen: list[tuple[str, str, str]] = []

    def answer(self, method: str, path: str, body: Any, kind: str) -> tuple[int, Any]:
        self.seen.append((method, path, kind))
        if method in self.forbidden:
            return 403, {"message": "forbidden: no"}
        prefix = "/api/v1/namespaces/ns/"
        assert path.startswith(prefix)
        resource, _, name = path.removeprefix(prefix).partition("/")
        if resource == "events" and method == "POST":
            self.events.append(body)
            return 201, body
        if method == "POST":
            self.maps[body["metadata"]["name"]] = body
            body["metadata"]["uid"] = "u-1"
            return 201, body
        if name not in self.maps:
            return 404, {"message": "not found"}
        if method == "PATCH":
            assert kind == "application/merge-patch+json"
            data = self.maps[name]["data"] | body["data"]
            self.maps[name]["data"] = {k: v for k, v in data.items() if v is not None}
        return 200, self.maps[name]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "ca.crt"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            str(key),
            "-out",
            str(cert),
            "-days",
            "2",
            "-subj",
            "/CN=kubernetes",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


class Pod:
    """The script as the Job runs it."""

    def __init__(self, folder: Path, port: int, certificate: Path, server: str) -> None:
        self.folder, self.server = folder, server
        account = folder / "account"
        account.mkdir()
        (account / "token").write_text("account-token\n")
        (account / "namespace").write_text("ns")
        (account / "ca.crt").write_bytes(certificate.read_bytes())
        (folder / "keys").mkdir()
        (folder / "keys/api_keys").write_text("# clients\nkey-of-a-client\nanother\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "ACCOUNT_DIR": str(account),
            "KEYS_DIR": str(folder / "keys"),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(port),
            "RELEASE": "r",
            "VERDICTS": "r-assay-verdicts",
            "IDENTITY": "green-123",
            # A proxy of the site is not for the API server.
            "HTTPS_PROXY": "http://127.0.0.1:1",
            "HTTP_PROXY": "http://127.0.0.1:1",
        }

    def gate(self, verdict: Any, code: int) -> list[str]:
        """A stand-in for assay-gate that leaves this verdict, and what key it was given."""
        text = "" if verdict is None else json.dumps(verdict)
        return [
            sys.executable,
            "-c",
            "import os, pathlib, sys\n"
            f"out = pathlib.Path({str(self.folder / 'out')!r}); out.mkdir(exist_ok=True)\n"
            "(out / 'key').write_text(os.environ.get('ASSAY_API_KEY', ''))\n"
            f"text = {text!r}\n"
            "text and (out / 'gate.json').write_text(text)\n"
            f"sys.exit({code})",
        ]

    def run(self, command: list[str], wait: float = 5) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                str(SCRIPT),
                "run",
                str(self.folder / "out"),
                self.server,
                str(wait),
                "--",
                *command,
            ],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def check(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), "check"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )


def serve(answer: Any, context: ssl.SSLContext | None = None) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, found = answer(self.command, self.path, body, self.headers)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PATCH = do_GET  # noqa: N815 (http.server's names)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def door() -> dict[str, Any]:
    return {"shut": 0, "asked": []}


@pytest.fixture
def pod(
    tmp_path: Path, certificate: tuple[Path, Path], api: Api, door: dict[str, Any]
) -> Iterator[Pod]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])

    def kubernetes(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        assert headers["Authorization"] == "Bearer account-token"
        return api.answer(method, path, body, headers["Content-Type"])

    def vllm(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        door["asked"].append(headers.get("Authorization"))
        if door["shut"]:
            door["shut"] -= 1
            return 503, {}
        return 200, {"data": []}

    servers = [serve(kubernetes, context), serve(vllm)]
    yield Pod(
        tmp_path,
        servers[0].server_port,
        certificate[1],
        f"http://127.0.0.1:{servers[1].server_port}",
    )
    for server in servers:
        server.shutdown()
        server.server_close()


def kept(api: Api) -> dict[str, Any]:
    return {k: json.loads(v) for k, v in api.maps["r-assay-verdicts"]["data"].items()}


def test_a_pass_is_kept_and_told(pod: Pod, api: Api) -> None:
    done = pod.run(pod.gate(PASS, 0))
    assert done.returncode == 0, done.stderr
    assert kept(api)["green-123.json"]["verdict"] == "pass"
    (event,) = api.events
    assert (event["type"], event["reason"]) == ("Normal", "GatePassed")
    assert event["involvedObject"]["name"] == "r-assay-verdicts"
    assert pod.check().returncode == 0


def test_a_fail_is_kept_told_and_returned(pod: Pod, api: Api) -> None:
    done = pod.run(pod.gate(FAIL, 1))
    assert done.returncode == 1
    assert kept(api)["green-123.json"]["exit_code"] == 1
    (event,) = api.events
    assert (event["type"], event["reason"]) == ("Warning", "GateFailed")
    assert "Rome is not in France" in event["message"]
    check = pod.check()
    assert check.returncode == 1
    assert "Rome is not in France" in check.stderr


def test_a_gate_that_dies_is_no_verdict(pod: Pod, api: Api) -> None:
    for command in (pod.gate(None, 1), pod.gate(PASS, 137)):
        assert pod.run(command).returncode == 2
        assert kept(api)["green-123.json"]["verdict"] == "invalid"
        assert pod.check().returncode == 1


def test_a_verdict_that_says_pass_with_another_exit_code_does_not_count_as_one(pod: Pod) -> None:
    assert pod.run(pod.gate(PASS, 1)).returncode == 1


def test_it_waits_for_the_door_with_a_client_s_key(pod: Pod, door: dict[str, Any]) -> None:
    door["shut"] = 3
    assert pod.run(pod.gate(PASS, 0), wait=20).returncode == 0
    assert door["asked"] == ["Bearer key-of-a-client"] * 4
    assert (pod.folder / "out/key").read_text() == "key-of-a-client"


def test_a_door_that_stays_shut_is_no_verdict_and_the_gate_does_not_run(
    pod: Pod, api: Api, door: dict[str, Any]
) -> None:
    door["shut"] = 10_000
    done = pod.run(pod.gate(PASS, 0), wait=1)
    assert done.returncode == 2
    assert not (pod.folder / "out").exists()
    assert "let no client in" in kept(api)["green-123.json"]["checks"][0]["reason"]


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_a_pass_that_could_not_be_recorded_is_none(pod: Pod, api: Api, method: str) -> None:
    if method == "PATCH":
        assert pod.run(pod.gate(PASS, 0)).returncode == 0
    api.forbidden = {method}
    done = pod.run(pod.gate(PASS, 0))
    assert done.returncode == 2
    assert "could not be recorded" in done.stderr
    assert "403" in done.stderr


def test_without_a_token_the_gate_s_code_is_all(pod: Pod, api: Api) -> None:
    (pod.folder / "account/token").unlink()
    assert [pod.run(pod.gate(v, c)).returncode for v, c in ((PASS, 0), (FAIL, 1))] == [0, 1]
    assert api.seen == []


def test_without_keys_none_is_sent(pod: Pod, door: dict[str, Any]) -> None:
    (pod.folder / "keys/api_keys").unlink()
    assert pod.run(pod.gate(PASS, 0)).returncode == 0
    assert door["asked"] == [None]


def test_verdicts_stay_side_by_side_and_the_oldest_go(pod: Pod, api: Api) -> None:
    old = {
        f"old-{n:02}.json": json.dumps({"verdict": "pass", "recorded": f"2020-01-{n + 1:02}"})
        for n in range(25)
    }
    api.maps["r-assay-verdicts"] = {
        "metadata": {"name": "r-assay-verdicts", "uid": "u"},
        "data": dict(old),
    }
    assert pod.run(pod.gate(PASS, 0)).returncode == 0
    assert sorted(kept(api)) == ["green-123.json", *(f"old-{n:02}.json" for n in range(6, 25))]


def test_a_verdict_too_long_for_an_object_keeps_what_failed(pod: Pod, api: Api) -> None:
    many = [PASS["checks"][0] | {"reason": "x" * 500} for _ in range(200)]
    verdict = FAIL | {"checks": [*many, *FAIL["checks"]]}
    assert pod.run(pod.gate(verdict, 1)).returncode == 1
    assert kept(api)["green-123.json"]["checks"] == FAIL["checks"]


def test_what_was_never_judged_is_not_switched_to(pod: Pod, api: Api) -> None:
    done = pod.check()
    assert done.returncode == 1
    assert "it was never judged" in done.stderr
    api.forbidden = {"GET"}
    assert pod.check().returncode == 2


def test_wrong_arguments_say_how() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "go"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "release_gate.py run OUT URL WAIT_SECONDS" in done.stderr
