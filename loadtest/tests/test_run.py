"""Runs inside this process against the paced server and the proxy: counts, order, coordinated
omission, stages, aborts, the server's own series."""

from __future__ import annotations

import itertools
import json
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay_load.drive.run import run
from assay_load.drive.settings import Settings
from assay_load.errors import InputError, TargetError
from assay_load.stream.client import Client, Target
from assay_load.stream.reactor import Reactor
from assay_load.stream.transport import Address
from assay_load.workload.plan import PlannedRequest


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_planned_request_is_sent_once_and_counted_right(
    paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    raw = tmp_path / "raw.jsonl"
    result = run(Settings.of(paced, workload(), None, raw=str(raw), token_ids=True))
    assert result.complete
    assert result.expected_requests == result.figures.requests == 24
    assert (result.failed, result.figures.interrupted, result.warmup_requests) == (0, 0, 4)
    sent = lines(raw)
    assert sorted(line["session"] for line in sent) == list(range(-4, 24))
    measured = [line for line in sent if line["session"] >= 0]
    assert result.figures.completion_tokens == sum(line["completion_tokens"] for line in measured)
    assert all(len(line["gaps"]) == line["completion_tokens"] - 1 for line in measured)
    assert result.server.points[-1].values["generation_tokens"] >= result.figures.completion_tokens
    assert sum(second.tokens for second in result.timeline) == pytest.approx(
        sum(line["completion_tokens"] for line in sent)
    )


def test_no_token_is_seen_before_the_server_sent_it(
    paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    raw = tmp_path / "raw.jsonl"
    run(Settings.of(paced, workload(), None, raw=str(raw)))
    with urllib.request.urlopen(f"{paced}/paced/truth") as answer:
        truth = {entry["id"]: entry for entry in json.load(answer)["requests"]}
    for line in lines(raw):
        true = truth[line["id"]]
        # Both clocks are the kernel's monotonic one. The server notes the time after sending.
        assert line["sent"] <= true["received"] <= true["first"]
        assert line["first"] >= true["received"]


def test_a_session_that_waited_for_a_free_user_counts_from_when_it_was_due(
    paced: str, workload: Callable[..., str], tmp_path: Path
) -> None:
    raw = tmp_path / "raw.jsonl"
    name = workload(
        arrival="{kind: poisson, rate: 200.0, pool: 1}", output="{kind: constant, tokens: 10}"
    )
    result = run(Settings.of(paced, name, None, raw=str(raw)))
    sent = sorted(lines(raw), key=lambda line: line["due"])
    # One user only: each request was sent after the one before it had ended, due or not.
    for before, after in itertools.pairwise(sent):
        assert after["sent"] >= before["ended"]
    waits = [line["sent"] - line["due"] for line in sent if line["session"] >= 0]
    lag = result.figures.metrics["start_lag"]
    assert lag.max == pytest.approx(1000 * max(waits), rel=1e-3)
    ttft, service = (result.figures.metrics[m] for m in ("ttft", "ttft_service"))
    assert ttft.mean == pytest.approx(service.mean + lag.mean, rel=1e-3)
    assert ttft.p99 > service.p99


def test_steps_end_at_saturation_and_count_what_came_in_their_time(
    start_tool: Any, workload: Callable[..., str]
) -> None:
    server = start_tool("paced", "--ttft", "0.01", "--rate", "200", "--slots", "2")
    steps = "{kind: steps, concurrency: [1, 2, 4, 8, 16], seconds: 2.0, settle_seconds: 0.5}"
    result = run(Settings.of(server.url, workload(arrival=steps, stop=None), None))
    assert result.complete
    stages = [f for f in result.stages if f.name == "*"]
    loads = [f.load for f in stages]
    # Two slots: more than two at a time bring nothing more.
    assert loads[:3] == [1, 2, 4]
    assert 16 not in loads
    rates = {f.load: f.output_tokens_per_second for f in stages}
    assert rates[2] > 1.5 * rates[1]


def test_a_ramp_reports_its_windows(paced: str, workload: Callable[..., str]) -> None:
    name = workload(
        arrival="{kind: ramp, start_rate: 10.0, end_rate: 40.0, windows: 3, pool: 64}",
        stop="{seconds: 3.0}", more="seed: 3\n",
    )  # fmt: skip
    result = run(Settings.of(paced, name, None))
    assert {f.stage: f.load for f in result.stages} == {
        "window-1": 15.0, "window-2": 25.0, "window-3": 35.0,
    }  # fmt: skip
    assert result.complete


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(("--drop-every", "4"), "connection_closed"), (("--model", "other"), None)],
)
def test_faults_of_a_server_are_counted_by_kind(
    start_tool: Any,
    paced: str,
    workload: Callable[..., str],
    fault: tuple[str, ...],
    kind: str | None,
) -> None:
    proxy = start_tool("faulty", "--upstream", paced, *fault)
    settings = Settings.of(
        proxy.url, workload(output="{kind: constant, tokens: 40}"), None, model="paced"
    )
    if kind is None:
        with pytest.raises(TargetError, match="serves other, not paced"):
            run(settings)
        return
    result = run(settings)
    assert set(result.errors) == {kind}
    # Every fourth of 28, and of the six that calibrated before.
    assert result.failed == pytest.approx(7, abs=1)


def test_a_restart_in_the_middle_is_seen(
    start_tool: Any, paced: str, workload: Callable[..., str]
) -> None:
    proxy = start_tool("faulty", "--upstream", paced, "--restart-after", "20")
    result = run(Settings.of(proxy.url, workload(stop="{sessions: 60}"), None))
    assert result.server.restarted is not None
    assert not result.complete
    assert result.failed > 0


def test_a_hopeless_run_is_given_up(
    start_tool: Any, paced: str, workload: Callable[..., str]
) -> None:
    proxy = start_tool("faulty", "--upstream", paced, "--drop-every", "1")
    name = workload(
        stop="{sessions: 100000}", output="{kind: constant, tokens: 40}",
        more="abort: {failed_share: 0.3, after_requests: 10}\n",
    )  # fmt: skip
    result = run(Settings.of(proxy.url, name, None))
    assert not result.complete
    assert "abort.failed_share" in result.incomplete_because[0]


def test_a_server_that_hangs_is_a_timeout(start_tool: Any, workload: Callable[..., str]) -> None:
    server = start_tool("paced", "--ttft", "600")
    name = workload(more="timeout_seconds: 0.3\nabort: {failed_share: 1.0}\n")
    result = run(Settings.of(server.url, name, None))
    assert result.errors == {"timeout": 28}
    assert result.complete


def test_a_server_that_is_not_there_is_no_result(workload: Callable[..., str]) -> None:
    with pytest.raises(TargetError, match="/v1/models"):
        run(Settings.of("http://127.0.0.1:9", workload(), None))
    with pytest.raises(InputError, match="must look like"):
        Settings.of("ftp://x", workload(), None)


def test_keys_come_from_the_environment_and_go_into_headers_only(
    monkeypatch: pytest.MonkeyPatch, workload: Callable[..., str], paced: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASSAY_API_KEY", "secret-one")
    file = tmp_path / "key"
    file.write_text("# the door's\nsecret-two\n")
    monkeypatch.setenv("ASSAY_BYPASS_KEY_FILE", str(file))
    settings = Settings.of(paced, workload(), None)
    headers = settings.target("m").headers
    assert headers == {"Authorization": "Bearer secret-one", "x-assay-key": "secret-two"}
    assert "secret" not in run(settings).model_dump_json()


def test_tls_streams_are_read_as_plain_ones_are(paced: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    port = tls_front(Address.of(paced), certificate, key)
    context = ssl.create_default_context(cafile=str(certificate))
    reactor = Reactor()
    target = Target(Address("localhost", port, True, ""), "paced", {}, context)
    request = PlannedRequest([{"role": "user", "content": "x" * 100_000}], [], 50, True, False, 1.0)
    client = Client(target, reactor)
    for _ in range(2):  # the second one on the kept connection
        outcome = client.chat(request, 0.0, 30.0)
        assert outcome.error is None
        assert len(outcome.answer.arrivals) == 50
    stranger = Client(replace(target, tls=ssl.create_default_context()), reactor)
    assert stranger.chat(request, 0.0, 30.0).error.kind == "connect"  # type: ignore[union-attr]
    reactor.close()


def tls_front(behind: Address, certificate: Path, key: Path) -> int:
    """A TLS server that passes everything on; its port. Made of gevent's sockets, as this process
    is gevent's."""
    import socket

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: Any, sink: Any) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass

    def serve() -> None:
        while True:
            plain, _ = listener.accept()
            try:
                near = context.wrap_socket(plain, server_side=True)
            except OSError:
                continue
            far = socket.create_connection((behind.host, behind.port))
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            threading.Thread(target=pump, args=(far, near), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])
