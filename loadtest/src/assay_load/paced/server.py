"""An OpenAI-compatible chat server that streams nothing of interest at a known pace.

It judges load generators: the pace, and when each first token left, are known, so what a client
measures can be held against the truth (`GET /paced/truth`). One thread on one epoll instance: a
thousand streams at 30 tokens/s take it about half a core. Linux only.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

WORDS = [
    " the", " server", " streams", " one", " word", " after", " the", " other", " and", " nobody",
    " waits", " for", " more", " than", " its", " own", " turn",
]  # fmt: skip
TAU = 1.0
"""Seconds over which drift forgets where it was."""
CHARACTERS_PER_TOKEN = 4
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Pace:
    ttft: float = 0.2
    """Seconds from the end of the request to the first token."""
    rate: float = 30.0
    """Tokens a second of each stream."""
    slow: float = 1.0
    """Factor on every wait."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of each wait."""
    drift: float = 0.0
    """The same of a factor that all streams share and that wanders within a second or so, as on a
    machine that others use too."""
    run_noise: float = 0.0
    """The same of a factor that is drawn anew after each pause in the load: from run to run."""
    slots: int = 0
    """Streams at a time, others wait for a free one; 0: any number."""
    model: str = "paced"
    seed: int = 1


@dataclass
class Connection:
    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    stream: Stream | None = None
    last: bool = False
    """The client asked for the connection to end with this response."""


@dataclass
class Stream:
    number: int
    connection: Connection
    left: int
    prompt_tokens: int
    total: int
    token_ids: bool
    head: bytes
    tail: bytes
    received: float
    sent: int = 0


class PacedServer:
    def __init__(self, pace: Pace, host: str, port: int) -> None:
        self._pace = pace
        self._random = random.Random(pace.seed)
        self._listener = socket.create_server((host, port), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._due: list[tuple[float, int, Stream]] = []
        self._waiting: list[Stream] = []
        self._active = 0
        self._number = 0
        self._truth: list[tuple[str, float, float]] = []
        self._started = time.time()
        self._counters = {"prompt": 0, "generation": 0}
        self._drift, self._drift_at = 0.0, time.monotonic()
        self._run_factor, self._idle_since = 1.0, 0.0
        self._stopping = False

    def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._stopping:
            now = time.monotonic()
            wait = max(0.0, self._due[0][0] - now) if self._due else 0.5
            for fd, events in self._epoll.poll(min(wait, 0.5)):
                if fd == self._listener.fileno():
                    self._accept()
                elif (connection := self._connections.get(fd)) is not None:
                    self._serve(connection, events)
            self._send_due()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._listener.close()

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = Connection(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                data = connection.sock.recv(1 << 18)
                if not data:
                    self._close(connection)
                    return
                connection.inbox += data
                self._take_requests(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is None:
            return
        self._epoll.unregister(connection.sock)
        connection.sock.close()
        if connection.stream is not None:
            connection.stream.left = -1
            connection.stream = None
            self._free_slot()

    def _send(self, connection: Connection, data: bytes) -> None:
        if connection.outbox:
            connection.outbox += data
            return
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        if sent < len(data):
            connection.outbox += data[sent:]
            self._epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, connection: Connection) -> None:
        sent = connection.sock.send(connection.outbox)
        del connection.outbox[:sent]
        if not connection.outbox:
            self._epoll.modify(connection.sock, select.EPOLLIN)
            if connection.stream is None:
                self._end_response(connection)

    # --- requests ---------------------------------------------------------------------------------

    def _take_requests(self, connection: Connection) -> None:
        while (end := connection.inbox.find(b"\r\n\r\n")) >= 0:
            head = bytes(connection.inbox[:end]).decode("latin-1")
            first, *lines = head.split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", "0"))
            if len(connection.inbox) < end + 4 + length:
                if headers.get("expect") == "100-continue":
                    self._send(connection, b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(connection.inbox[end + 4 : end + 4 + length])
            del connection.inbox[: end + 4 + length]
            connection.last = headers.get("connection", "").lower() == "close"
            path = first.split(" ")[1].partition("?")[0]
            self._answer(connection, path, body)

    def _answer(self, connection: Connection, path: str, body: bytes) -> None:
        if path == "/v1/models":
            model = {"id": self._pace.model, "object": "model", "owned_by": "assay"}
            self._json(connection, {"object": "list", "data": [model]})
        elif path in ("/health", "/ping"):
            self._json(connection, {})
        elif path == "/metrics":
            self._plain(connection, 200, self._metrics().encode(), "text/plain")
        elif path == "/paced/truth":
            truth = [{"id": i, "received": r, "first": f} for i, r, f in self._truth]
            self._json(connection, {"requests": truth})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self._complete(connection, path.endswith("/chat/completions"), body)
        else:
            self._json(connection, {"error": {"message": f"no {path}"}}, 404)

    def _json(self, connection: Connection, value: Any, status: int = 200) -> None:
        self._plain(connection, status, json.dumps(value).encode(), "application/json")

    def _plain(self, connection: Connection, status: int, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._send(connection, head.encode() + body)
        self._end_response(connection)

    def _end_response(self, connection: Connection) -> None:
        if connection.last and not connection.outbox:
            self._close(connection)

    def _metrics(self) -> str:
        return (
            f"process_start_time_seconds {self._started}\n"
            f"vllm:num_requests_running {self._active}\n"
            f"vllm:num_requests_waiting {len(self._waiting)}\n"
            f"vllm:prompt_tokens_total {self._counters['prompt']}\n"
            f"vllm:generation_tokens_total {self._counters['generation']}\n"
        )

    def _complete(self, connection: Connection, chat: bool, body: bytes) -> None:
        try:
            request = json.loads(body)
            text = json.dumps(request["messages"] if chat else request["prompt"])
            tokens = int(request.get("max_tokens") or request.get("max_completion_tokens") or 16)
        except (ValueError, KeyError, TypeError) as error:
            self._json(connection, {"error": {"message": repr(error)}}, 400)
            return
        if request.get("model") != self._pace.model:
            self._json(connection, {"error": {"message": "no such model"}}, 404)
            return
        prompt = math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        self._number += 1
        name = f"paced-{self._number}"
        kind = "chat.completion" if chat else "text_completion"
        if not request.get("stream"):
            words = "".join(WORDS[i % len(WORDS)] for i in range(tokens))
            said = {"message": {"role": "assistant", "content": words}} if chat else {"text": words}
            answer = {
                "id": name, "object": kind, "created": 0, "model": self._pace.model,
                "choices": [{"index": 0, "finish_reason": "length", **said}],
                "usage": usage(prompt, tokens),
            }  # fmt: skip
            self._json(connection, answer)
            return
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = (
            f'{{"id":"{name}","object":"{kind}","created":{int(time.time())},'
            f'"model":"{self._pace.model}","choices":[{{"index":0,'
        )
        opening = '"delta":{"content":"' if chat else '"text":"'
        tail = '"},"logprobs":null,' if chat else '","logprobs":null,'
        stream = Stream(
            self._number, connection, tokens, prompt, tokens,
            bool(request.get("return_token_ids")), (head + opening).encode(), tail.encode(),
            time.monotonic(),
        )  # fmt: skip
        connection.stream = stream
        self._send(connection, HEAD)
        if self._pace.slots and self._active >= self._pace.slots:
            self._waiting.append(stream)
        else:
            self._begin(stream)

    # --- streams ----------------------------------------------------------------------------------

    def _begin(self, stream: Stream) -> None:
        now = time.monotonic()
        if not self._active and now - self._idle_since > 0.05:
            self._run_factor = math.exp(self._random.gauss(0.0, self._pace.run_noise))
        self._active += 1
        self._counters["prompt"] += stream.prompt_tokens
        heapq.heappush(self._due, (now + self._wait(self._pace.ttft, now), stream.number, stream))

    def _free_slot(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle_since = time.monotonic()
        while self._waiting and self._active < self._pace.slots:
            stream = self._waiting.pop(0)
            if stream.left >= 0:
                self._begin(stream)

    def _wait(self, seconds: float, now: float) -> float:
        pace = self._pace
        seconds *= pace.slow * self._run_factor
        if pace.drift:
            passed = now - self._drift_at
            if passed > 0.02:
                keep = math.exp(-passed / TAU)
                fresh = math.sqrt(1 - keep * keep)
                self._drift = keep * self._drift + fresh * self._random.gauss(0.0, pace.drift)
                self._drift_at = now
            seconds *= math.exp(self._drift)
        if pace.jitter:
            seconds *= math.exp(self._random.gauss(0.0, pace.jitter))
        return seconds

    def _send_due(self) -> None:
        now = time.monotonic()
        due = self._due
        gap = 1.0 / self._pace.rate
        while due and due[0][0] <= now:
            at, number, stream = due[0]
            if stream.left <= 0:
                heapq.heappop(due)
                continue
            last = stream.left == 1
            self._send_token(stream, last)
            if not stream.sent:
                self._truth.append((f"paced-{number}", stream.received, time.monotonic()))
            stream.sent += 1
            stream.left -= 1
            if last:
                heapq.heappop(due)
                if stream.connection.stream is stream:
                    stream.connection.stream = None
                    self._free_slot()
                    self._end_response(stream.connection)
            else:
                heapq.heapreplace(due, (at + self._wait(gap, now), number, stream))

    def _send_token(self, stream: Stream, last: bool) -> None:
        self._counters["generation"] += 1
        word = WORDS[stream.sent % len(WORDS)].encode()
        ids = b'"token_ids":[7],' if stream.token_ids else b""
        reason = b'"finish_reason":"length"}]}' if last else b'"finish_reason":null}]}'
        event = b"".join((b"data: ", stream.head, word, stream.tail, ids, reason, b"\n\n"))
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if last:
            counts = {
                "id": f"paced-{stream.number}", "object": "chat.completion.chunk", "created": 0,
                "model": self._pace.model, "choices": [],
                "usage": usage(stream.prompt_tokens, stream.total),
            }  # fmt: skip
            end = f"data: {json.dumps(counts)}\n\ndata: [DONE]\n\n".encode()
            data += b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end)
        self._send(stream.connection, data)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def main(pace: Pace, host: str, port: int) -> int:
    server = PacedServer(pace, host, port)
    print(f"paced server on http://{host}:{server.port}, model {pace.model}", flush=True)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Pace(), "127.0.0.1", 18500))
