"""Dead and busy told apart."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep

import pytest

from assay_kernels.launcher.client import Client
from assay_kernels.launcher.watchdog import Pulse, Signs, Watchdog, signs

PAGE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 17.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
http_requests_total{handler="/health"} 5.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 3.0
"""


def test_signs_of_life_are_the_engine_s_own() -> None:
    """Not the API server's: it counts requests for a dead engine too."""
    assert {engine: len(values) for engine, values in signs(PAGE).items()} == {"0": 2, "1": 1}


def engine(running: int, steps: int) -> Signs:
    steps_of = {"iteration_tokens_total_count{}": str(steps)}
    return {"0": {"num_requests_running{}": str(running)} | steps_of}


def test_a_busy_engine_is_alive_however_long_it_runs() -> None:
    pulse = Pulse(60, moved=0)
    for now in range(0, 1000, 10):
        pulse.note(engine(3, now), now)
        assert pulse.dead(now) is None
        assert not pulse.wants_probe(now)


def test_an_engine_that_stands_still_with_requests_is_dead() -> None:
    pulse = Pulse(60, moved=0)
    pulse.note(engine(3, 7), 10)
    pulse.note(engine(3, 7), 69)
    assert pulse.dead(69) is None
    pulse.answered(69)
    assert "requests running and made no step for 60 s" in (pulse.dead(70) or "")


def test_an_idle_engine_lives_as_long_as_it_answers_a_probe() -> None:
    pulse = Pulse(60, moved=0)
    pulse.note(engine(0, 7), 0)
    assert not pulse.wants_probe(29)
    assert pulse.wants_probe(30)
    pulse.answered(31)
    assert pulse.dead(90) is None
    assert "no request was answered for 60 s" in (pulse.dead(91) or "")


def test_one_of_two_engines_may_be_dead() -> None:
    pulse = Pulse(60, moved=0)
    for now in range(0, 80, 10):
        pulse.note({"0": {"num_requests_running{}": "1"}, "1": {"x{}": str(now)}}, now)
    assert "engine 0" in (pulse.dead(79) or "")


class Api(BaseHTTPRequestHandler):
    answer: Callable[["Api"], None]

    def do_GET(self) -> None:
        self.reply(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).answer(self)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def watch(answer: Callable[[Api], None], seconds: float) -> str | None:
    """The verdict over a server whose metrics never move."""
    handler = type("Handler", (Api,), {"answer": answer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    dog = Watchdog(Client("127.0.0.1", server.server_address[1]), "key", 0.6)
    dog.start()
    until = monotonic() + seconds
    while dog.verdict is None and monotonic() < until:
        sleep(0.05)
    server.shutdown()
    found, dog.verdict = dog.verdict, "ended with its test"
    return found


@pytest.mark.parametrize("status", [200, 400, 500])
def test_any_answer_is_a_sign_of_life(status: int) -> None:
    assert watch(lambda api: api.reply(status, b"{}"), 3) is None


def test_silence_is_death() -> None:
    assert "no request was answered" in (watch(lambda api: sleep(5), 20) or "")
