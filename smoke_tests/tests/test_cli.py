"""The command: exit codes, files, and what it says when it cannot run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

Smoke = Callable[..., subprocess.CompletedProcess[str]]


def test_a_good_server_passes_and_the_reports_say_so(
    broken: Any, smoke: Smoke, tmp_path: Path, recorded: Path
) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "markdown")}
    flags = [a for name, path in files.items() for a in (f"--{name}", path)]
    done = smoke(
        "run",
        "--url",
        broken().url,
        "--tier",
        "ready",
        "--seed",
        "5",
        "--reference",
        recorded,
        *flags,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(files["json"].read_text())
    assert report["verdict"] == "pass"
    assert report["seed"] == 5
    assert report["tokens"]["generated"] > 50
    assert report["sample"]["question"]
    assert {"name", "verdict", "reason", "detects", "figures", "examples"} <= set(
        report["checks"][0]
    )
    suite = ElementTree.parse(files["junit"]).getroot()
    assert suite.get("failures") == suite.get("errors") == "0"
    assert int(suite.get("tests", 0)) == len(report["checks"])
    assert files["markdown"].read_text().startswith("### Coherence: pass")
    assert "PASS" in done.stdout


def test_a_bad_server_fails_and_names_the_check(broken: Any, smoke: Smoke, tmp_path: Path) -> None:
    out, junit = tmp_path / "report.json", tmp_path / "report.xml"
    url = broken("garbage", rate=1.0, kind="unprintable").url
    done = smoke("run", "--url", url, "--tier", "ready", "--json", out, "--junit", junit)
    assert done.returncode == 1
    report = json.loads(out.read_text())
    verdicts = {c["name"]: c["verdict"] for c in report["checks"]}
    assert report["verdict"] == "fail"
    assert verdicts["known-answers"] == verdicts["script-mix"] == "fail"
    assert ElementTree.parse(junit).getroot().find(".//failure") is not None
    assert all(c.isprintable() or c in "\n" for c in done.stdout), (
        "garbage must not reach a terminal"
    )


def test_nobody_there_is_no_verdict(smoke: Smoke, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = smoke("run", "--url", url, "--json", tmp_path / "r.json")
    assert done.returncode == 2
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["verdict"] == "error"
    assert "cannot be reached" in report["error"]
    assert {c["verdict"] for c in report["checks"]} == {"error"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--suite", "nope"], "no suite 'nope'"),
        (["run", "--suite", "/nowhere/s.yaml"], "/nowhere/s.yaml"),
        (["run", "--tier", "huge"], "--tier"),
        (["run", "--check", "nope"], "--check nope"),
        (["run", "--url", "localhost:8000"], "must be http://HOST:PORT"),
        (["run", "--url", "http://user:pw@localhost"], "no credentials in an address"),
        (["run", "--api-key-file", "/nowhere/key"], "--api-key-file /nowhere/key"),
        (["run", "--reference", "/nowhere/ref"], "/nowhere/ref"),
        (
            ["record", "--out", "/nowhere/ref.json", "--url", "http://127.0.0.1:9"],
            "cannot be reached",
        ),
        (["fault-server", "--mode", "nope"], "--mode nope"),
        (["fault-server", "--mode", "nan", "--param", "form=odd"], "form"),
        (["fault-server", "--mode", "nan", "--param", "form"], "NAME=VALUE"),
        (["watch", "--listen", "nowhere"], "HOST:PORT"),
        (["watch", "--fail-after", "0"], "--fail-after"),
        (["watch", "--jitter", "2"], "--jitter"),
        (["eat"], "eat"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(
    smoke: Smoke, arguments: list[str], words: str
) -> None:
    done = smoke(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_that_cannot_be_written_is_no_verdict(broken: Any, smoke: Smoke) -> None:
    done = smoke(
        "run", "--url", broken().url, "--tier", "probe", "--quiet", "--json", "/nowhere/r.json"
    )
    assert done.returncode == 2
    assert "cannot write /nowhere/r.json" in done.stderr


def test_the_wrong_model_is_no_verdict(broken: Any, smoke: Smoke) -> None:
    done = smoke("run", "--url", broken().url, "--tier", "probe", "--model", "other")
    assert done.returncode == 2
    assert "serves assay-faulty, not other" in done.stdout


class RawServer:
    """Answers every connection with the same bytes, and closes it."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.requests = answer, b""
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                try:
                    self.requests += connection.recv(65536)
                    connection.sendall(self.answer)
                except OSError:
                    continue


def http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


MODELS = b'{"data": [{"id": "m", "max_model_len": 8192}]}'


@pytest.fixture
def raw() -> Iterator[Callable[[bytes], RawServer]]:
    servers: list[RawServer] = []

    def start(answer: bytes) -> RawServer:
        servers.append(RawServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.socket.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\x00\x01garbage", b"HTTP/1.1 200 OK\r\n", http(b"<html>"), http(b"{}"),
        http(b'{"data": []}'), http(b'{"data": {"id": 1}}'), http(b"[" * 50_000),
        http(b"gone", "404 Not Found"), http(b"no", "401 Unauthorized"), http(b"", "500 Oh"),
        http(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n"), http(b"\xff\xfe"),
        http(b"wait", "503 Service Unavailable", "Retry-After: 5\r\n"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        http(b"x", more="Content-Encoding: gzip\r\n"),
    ],
)  # fmt: skip
def test_no_server_can_crash_it_or_make_it_pass(raw: Any, smoke: Smoke, answer: bytes) -> None:
    done = smoke("run", "--url", raw(answer).url, "--tier", "ready")
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stdout


@pytest.mark.parametrize("tier", ["ready", "default"])
def test_a_server_that_answers_everything_with_its_models_fails(
    raw: Any, smoke: Smoke, tier: str
) -> None:
    done = smoke("run", "--url", raw(http(MODELS)).url, "--tier", tier)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stdout


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_keys_are_sent_and_never_shown(raw: Any, smoke: Smoke, tmp_path: Path, by: str) -> None:
    key = tmp_path / "key"
    key.write_text("# ours\nsk-very-secret\n")
    server = raw(http(b"you sent sk-very-secret and door-secret", "401 Unauthorized"))
    named = ["--api-key-file", key] if by == "flag" else []
    given = {"ASSAY_API_KEY_FILE": str(key)} if by == "variable" else {}
    done = smoke(
        "run", "--url", server.url, *named, "--json", tmp_path / "r.json",
        env=os.environ | {"ASSAY_BYPASS_KEY": "door-secret"} | given,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"authorization: bearer sk-very-secret" in server.requests.lower()
    assert b"x-assay-key: door-secret" in server.requests.lower()
    shown = done.stdout + done.stderr + (tmp_path / "r.json").read_text()
    assert "secret" not in shown
    assert "answered 401" in shown


def test_an_interrupted_run_ends_at_once_without_a_verdict(broken: Any) -> None:
    url = broken("slow", seconds=5).url
    command = [sys.executable, "-m", "assay_smoke", "run", "--url", url]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            process.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            process.send_signal(2)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors.strip() == "assay-smoke: interrupted"


def test_no_connection_is_used_twice(raw: Any, smoke: Smoke) -> None:
    """A server closes an idle connection when it likes; a request that meets that is no outage."""
    server = raw(http(MODELS))
    smoke("run", "--url", server.url, "--tier", "probe")
    heads = server.requests.lower().split(b"\r\n\r\n")
    assert server.requests.count(b"GET /v1/models") == 1
    assert len(heads) > 3, "every request reached a server that takes one a connection"
