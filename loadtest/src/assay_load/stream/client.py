"""One user's connection to the server: kept open between requests, as real clients do."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass

import gevent

from assay_load.stream.chat import Answer, ChatStream, encode
from assay_load.stream.errors import CLOSED, TIMEOUT, StreamError
from assay_load.stream.http1 import ResponseReader
from assay_load.stream.reactor import Reactor, Reader
from assay_load.stream.transport import Address, Transport
from assay_load.workload.plan import PlannedRequest

COMPLETIONS = "/v1/chat/completions"


@dataclass(frozen=True)
class Target:
    """The server as a client sees it."""

    address: Address
    model: str
    headers: dict[str, str]
    """Sent with every request: authorisation, if any."""
    tls: ssl.SSLContext | None = None
    token_ids: bool = False
    """Ask for the ids of the tokens, which makes the count of the stream exact (vLLM only)."""


@dataclass
class Outcome:
    """One request, from the moment it was due. Seconds on the monotonic clock."""

    due: float
    sent: float
    ended: float
    answer: Answer
    error: StreamError | None


class Plain:
    """The whole body of a response that is not a stream."""

    def __init__(self) -> None:
        self.http = ResponseReader()
        self.body = b""

    @property
    def finished(self) -> bool:
        return self.http.complete

    def feed(self, data: bytes, _now: float) -> None:
        self.body += b"".join(self.http.feed(data))

    def end_of_input(self) -> None:
        self.http.end_of_input()


class Client:
    """For one greenlet at a time."""

    def __init__(self, target: Target, reactor: Reactor) -> None:
        self._target = target
        self.reactor = reactor
        self._transport: Transport | None = None
        self.current: Answer | None = None
        """Of the request that is on its way."""

    def chat(self, request: PlannedRequest, due: float, timeout: float) -> Outcome:
        """Never raises for what the server does."""
        target = self._target
        body = encode(request.body(target.model, target.token_ids))
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        message = target.address.request("POST", COMPLETIONS, body, headers | target.headers)
        stream = ChatStream(target.model)
        self.current = stream.answer
        sent = time.monotonic()
        error = None
        try:
            stream = self._exchange(message, stream, timeout)
            stream.check(request.output_tokens, request.exact)
        except StreamError as problem:
            error = problem
        finally:
            self.current = None
        return Outcome(due, sent, time.monotonic(), stream.answer, error)

    def _exchange(self, message: bytes, stream: ChatStream, timeout: float) -> ChatStream:
        kept = self._transport is not None
        try:
            self._send_and_read(message, stream, timeout)
        except StreamError as error:
            # The server may close a kept connection just as a request is on its way. A request
            # of which no answer has begun is sent again, once, as RFC 9112 lets a client do.
            if not (kept and error.kind == CLOSED and stream.http.status == 0):
                raise
            stream = ChatStream(self._target.model)
            self.current = stream.answer
            self._send_and_read(message, stream, timeout)
        return stream

    def _send_and_read(self, message: bytes, reader: ChatStream | Plain, timeout: float) -> None:
        transport, self._transport = self._transport, None
        late = StreamError(TIMEOUT, f"{timeout:g} s")
        try:
            # Over everything: a server can also be slow to accept, or to read a long prompt.
            with gevent.Timeout(timeout, late):
                if transport is None:
                    transport = Transport(self._target.address, self._target.tls)
                transport.send(message)
                reading: Reader = reader
                self.reactor.read(transport, reading)
            if reader.http.reusable:
                self._transport = transport
        finally:
            if self._transport is None and transport is not None:
                transport.close()

    def get(self, path: str, timeout: float) -> bytes:
        """The body of a GET that answers 200; raises StreamError."""
        return self._plain("GET", path, b"", timeout)

    def post(self, path: str, body: bytes, timeout: float) -> bytes:
        """The body of a POST that answers 200; raises StreamError."""
        return self._plain("POST", path, body, timeout)

    def _plain(self, method: str, path: str, body: bytes, timeout: float) -> bytes:
        headers = {"Content-Type": "application/json"} | self._target.headers
        reader = Plain()
        self.close()
        self._send_and_read(
            self._target.address.request(method, path, body, headers), reader, timeout
        )
        if reader.http.status != 200:
            detail = reader.body[:500].decode(errors="replace")
            raise StreamError(f"http_{reader.http.status}", detail)
        return reader.body

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
