"""One streamed chat completion: which tokens came when, and whether the answer is whole."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from assay_load.stream import errors
from assay_load.stream.errors import StreamError
from assay_load.stream.http1 import ResponseReader
from assay_load.stream.sse import EventReader

MAX_ERROR_BODY = 2000
"""Bytes kept of an answer that is not a stream."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # older vLLM
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    model: str | None = None
    id: str = ""


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Answer:
    """What came. Times are in seconds on the monotonic clock, None for what never came."""

    id: str = ""
    first_content: float | None = None
    first_reasoning: float | None = None
    first_tool: float | None = None
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    """When each chunk came that carried content, reasoning or a tool call."""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: int | None = None
    """Token ids in the stream; None if the server sends none."""
    bytes: int = 0

    @property
    def first(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def last(self) -> float | None:
        return self.arrivals[-1] if self.arrivals else None


class ChatStream:
    """Feed it what the socket gives; `finished` once the response is over and right.

    Every way to be wrong raises StreamError, from `feed`, `end_of_input` or `check`.
    """

    __slots__ = ("_done", "_error_body", "_events", "_model", "_usage", "answer", "http")

    def __init__(self, model: str) -> None:
        self.http = ResponseReader()
        self.answer = Answer()
        self._model = model
        self._events = EventReader()
        self._done = False
        self._usage: _Usage | None = None
        self._error_body = b""

    @property
    def finished(self) -> bool:
        return self.http.complete

    def feed(self, data: bytes, now: float) -> None:
        """`data` came at `now`."""
        had_head = self.http.status
        pieces = self.http.feed(data)
        self.answer.bytes += len(data)
        if not had_head and self.http.status:
            self._error_body = b""
        if self.http.status != 200:
            self._error_body = (self._error_body + b"".join(pieces))[:MAX_ERROR_BODY]
            if self.http.complete:
                self._refused()
            return
        if not had_head:
            kind = self.http.headers.get(b"content-type", b"")
            if not kind.lower().startswith(b"text/event-stream"):
                raise StreamError(errors.NOT_A_STREAM, kind.decode("latin-1"))
        for piece in pieces:
            for event in self._events.feed(piece):
                self._take(event, now)

    def end_of_input(self) -> None:
        self.http.end_of_input()
        if self.http.status != 200:
            self._refused()

    def _refused(self) -> None:
        detail = self._error_body.decode(errors="replace")
        raise StreamError(errors.http_status(self.http.status), detail)

    def _take(self, event: bytes, now: float) -> None:
        if self._done:
            raise StreamError(errors.MALFORMED_EVENT, "an event after [DONE]")
        if event == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decode(event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamError(errors.MALFORMED_EVENT, str(error)) from error
        if chunk.error is not None:
            raise StreamError(errors.SERVER_ERROR, str(chunk.error)[:MAX_ERROR_BODY])
        answer = self.answer
        if not answer.id:
            answer.id = chunk.id
            if chunk.model is not None and chunk.model != self._model:
                raise StreamError(errors.WRONG_MODEL, chunk.model)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._take_choice(choice, now)

    def _take_choice(self, choice: _Choice, now: float) -> None:
        answer, delta = self.answer, choice.delta
        some = False
        if delta.content:
            some = True
            if answer.first_content is None:
                answer.first_content = now
        if delta.reasoning or delta.reasoning_content:
            some = True
            if answer.first_reasoning is None:
                answer.first_reasoning = now
        if delta.tool_calls:
            some = True
            if answer.first_tool is None:
                answer.first_tool = now
        if some:
            answer.arrivals.append(now)
        if choice.token_ids is not None:
            answer.token_ids = (answer.token_ids or 0) + len(choice.token_ids)
        if choice.finish_reason is not None:
            answer.finish_reason = choice.finish_reason

    def check(self, output_tokens: int, exact: bool) -> None:
        """Is the answer whole, and do the server's counts fit the stream and the request?

        A chunk can carry several tokens, never less than one that was counted; some tokens show no
        text of their own. So without token ids the stream gives a lower bound, with them equality.
        """
        answer = self.answer
        if not self._done or self._events.pending:
            raise StreamError(errors.TRUNCATED, "no [DONE]")
        if answer.finish_reason is None:
            raise StreamError(errors.TRUNCATED, "no finish reason")
        usage = self._usage
        if usage is None or usage.completion_tokens is None:
            raise StreamError(errors.NO_USAGE)
        answer.prompt_tokens = usage.prompt_tokens
        answer.completion_tokens = counted = usage.completion_tokens
        if answer.token_ids is not None and answer.token_ids != counted:
            raise StreamError(errors.COUNT, f"usage {counted}, token ids {answer.token_ids}")
        if len(answer.arrivals) > counted:
            raise StreamError(errors.COUNT, f"usage {counted}, chunks {len(answer.arrivals)}")
        if counted > output_tokens or (exact and counted != output_tokens):
            raise StreamError(errors.COUNT, f"usage {counted}, asked for {output_tokens}")
        if exact and answer.finish_reason != "length":
            raise StreamError(errors.COUNT, f"finish reason {answer.finish_reason!r}")
        if not answer.arrivals:
            raise StreamError(errors.EMPTY)


def encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)
