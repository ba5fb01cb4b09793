"""Requests and their transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from assay_smoke.client import answer as wire
from assay_smoke.client.answer import Answer, Json, StreamedChat
from assay_smoke.client.metrics import Metrics
from assay_smoke.client.sse import SseParser
from assay_smoke.errors import CouldNotRunError, RefusedError, UnavailableError
from assay_smoke.text import excerpt

MAX_BODY = 64 * 2**20
"""Bytes of one answer that are read before it is given up."""
MAX_CONNECTIONS = 256

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Timeouts:
    """Seconds."""

    connect: float = 30.0
    idle: float = 60.0
    """Within a stream: without a byte from the server."""
    request: float = 300.0
    """From the first byte sent to the last one read."""


@dataclass(frozen=True)
class Secrets:
    """Keys that go into headers, and nowhere else."""

    api_key: str = field(default="", repr=False)
    bypass_key: str = field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return headers | ({"x-assay-key": self.bypass_key} if self.bypass_key else {})

    def hide(self, text: str) -> str:
        """`text` without them: a server may send back what it was given."""
        for secret in (self.api_key, self.bypass_key):
            if len(secret) >= 4:
                text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class Thinking:
    """How a suite switches thinking on and off: the chat template's argument."""

    argument: str = "thinking"

    def body(self, on: bool | None) -> dict[str, Any]:
        return {} if on is None else {"chat_template_kwargs": {self.argument: on}}


class Client:
    """One server, one model. `async with Client(url) as client:`."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        secrets: Secrets | None = None,
        timeouts: Timeouts | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CouldNotRunError(f"--url {url}: must be http://HOST:PORT or https://HOST:PORT")
        if parts.username or parts.password:
            raise CouldNotRunError("--url: no credentials in an address; keys come from files")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.max_model_len: int | None = None
        self.secrets = secrets or Secrets()
        self.timeouts = timeouts or Timeouts()
        self.thinking = thinking or Thinking()
        # A connection for each request: one that is kept may be closed by the server in the very
        # moment in which it is used again, and that would look like an outage.
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            # A compressed stream would be held back until a block of it is full.
            headers=self.secrets.headers() | {"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(self.timeouts.idle, connect=self.timeouts.connect),
            limits=limits,
            # A proxy of the environment is for the outside world; a server under test is not it.
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    # --- transport ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A response whose head has come; every failure of transport becomes UnavailableError."""
        limit = timeout or self.timeouts.request
        # A whole answer sends nothing until it is finished; only a stream can fall silent.
        idle = self.timeouts.idle if body is not None and body.get("stream") else limit
        patience = httpx.Timeout(min(idle, limit), connect=self.timeouts.connect)
        try:
            async with (
                asyncio.timeout(limit),
                self._http.stream(method, self.url + path, json=body, timeout=patience) as response,
            ):
                yield response
        except TimeoutError as error:
            raise UnavailableError(f"{path}: no end after {limit:g} s") from error
        except httpx.ConnectError as error:
            raise UnavailableError(f"{self.url} cannot be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise UnavailableError(f"{path}: nothing came for {min(idle, limit):g} s") from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            words = self.secrets.hide(str(error) or type(error).__name__)
            raise UnavailableError(f"{path}: the connection broke off: {words}") from error

    async def _body(self, response: httpx.Response) -> bytes:
        pieces, size = [], 0
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > MAX_BODY:
                raise UnavailableError(f"an answer of more than {MAX_BODY} bytes was given up")
            pieces.append(piece)
        return b"".join(pieces)

    async def _refuse_errors(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        raw = await self._body(response) if 400 <= status < 600 else b""
        detail = self.secrets.hide(excerpt(raw[:4000].decode(errors="replace"), 300))
        words = f"{path} answered {status}" + (f": {detail}" if detail else "")
        if status in (401, 403):
            raise RefusedError(f"{words} (a key? --api-key-file, ASSAY_API_KEY)", status)
        if status == 503 and "retry-after" in response.headers:
            raise RefusedError(f"{words} (the door is closed)", status)
        if status >= 500:
            raise UnavailableError(words, status)
        raise RefusedError(words, status)

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> bytes:  # fmt: skip
        """Body of a 2xx answer; raises UnavailableError or RefusedError otherwise."""
        async with self._open(method, path, body, timeout) as response:
            await self._refuse_errors(response, path)
            return await self._body(response)

    # --- what a server is --------------------------------------------------------------------

    async def find_model(self) -> str:
        """Name of the served model, which later requests use; its context if the server says."""
        raw = await self.request("GET", "/v1/models", timeout=min(30, self.timeouts.request))
        try:
            cards = wire.parse_json(raw)["data"]
            known = {str(card["id"]): card for card in cards}
            name = self.model or next(iter(known))
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise CouldNotRunError(
                f"{self.url}/v1/models lists no model: not an OpenAI-compatible server?"
            ) from error
        if name not in known:
            served = excerpt(", ".join(known), 200)
            raise CouldNotRunError(f"{self.url} serves {served}, not {name}")
        self.model = name
        length = known[name].get("max_model_len")
        self.max_model_len = length if isinstance(length, int) and length > 0 else None
        return name

    async def metrics(self) -> Metrics | None:
        """None when the server has no metrics."""
        try:
            raw = await self.request("GET", "/metrics", timeout=10)
        except RefusedError:
            return None
        return Metrics.parse(raw.decode(errors="replace"))

    async def healthy(self) -> bool:
        try:
            await self.request("GET", "/health", timeout=10)
        except CouldNotRunError:
            return False
        return True

    async def version(self) -> str:
        try:
            found = wire.parse_json(await self.request("GET", "/version", timeout=10))
            return excerpt(str(found["version"]), 60)
        except (CouldNotRunError, ValueError, KeyError, TypeError):
            return "unknown"

    async def tokenize(self, text: str | Sequence[Message], **more: Any) -> list[int]:
        """Token ids of a text, or of a chat with the opening of an answer."""
        source = {"prompt": text} if isinstance(text, str) else {"messages": list(text)}
        raw = await self.request("POST", "/tokenize", {"model": self.model, **source, **more})
        try:
            ids = wire.parse_json(raw)["tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise CouldNotRunError("/tokenize answered without tokens") from error
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise CouldNotRunError("/tokenize answered with something that is no token id")
        return ids

    # --- answers -----------------------------------------------------------------------------

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        label: str = "",
        max_tokens: int,
        thinking: bool | None = None,
        logprobs: int | None = None,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        **more: Any,
    ) -> Answer:
        """One greedy chat completion; `logprobs` is how many likeliest tokens to list."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **self.thinking.body(thinking),
            **more,
        }
        if tools:
            body["tools"] = list(tools)
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
        prompt = "\n".join(str(m.get("content") or "") for m in messages)
        forced = {"response_format", "logit_bias"} & set(more)
        answer = Answer(
            label,
            prompt + (str(tools) if tools else ""),
            chat=True,
            asked_logprobs=logprobs is not None,
            asked_tokens=max_tokens,
            free=not forced and not tools,
            endless="min_tokens" in more,
        )
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            await self._stream(body, answer)
        else:
            await self._whole("/v1/chat/completions", body, answer, wire.read_chat)
        return answer

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        label: str = "",
        max_tokens: int,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> Answer:
        """One greedy text completion of a text or of token ids."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }
        if logprobs is not None:
            body["logprobs"] = logprobs
        if prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs
        answer = Answer(
            label,
            prompt if isinstance(prompt, str) else "",
            asked_logprobs=logprobs is not None,
            asked_tokens=max_tokens,
            free="logit_bias" not in more,
        )
        await self._whole("/v1/completions", body, answer, wire.read_completion)
        return answer

    async def _whole(self, path: str, body: Mapping[str, Any], answer: Answer, read: Any) -> None:
        began = time.monotonic()
        raw = await self.request("POST", path, body)
        answer.seconds = time.monotonic() - began
        try:
            document: Json = wire.parse_json(raw)
        except ValueError:
            answer.problem(f"the answer is not JSON: {excerpt(raw[:200].decode(errors='replace'))}")
            return
        read(answer, document)

    async def _stream(self, body: Mapping[str, Any], answer: Answer) -> None:
        began = time.monotonic()
        parser, chat = SseParser(), StreamedChat(answer)
        path = "/v1/chat/completions"
        async with self._open("POST", path, body) as response:
            await self._refuse_errors(response, path)
            size = 0
            # aiter_raw hands on each read of the socket: nothing waits for a buffer to fill.
            async for piece in response.aiter_raw():
                size += len(piece)
                if size > MAX_BODY:
                    raise UnavailableError(f"a stream of more than {MAX_BODY} bytes was given up")
                for data in parser.feed(piece):
                    if chat.piece(data) and answer.first_token_seconds is None:
                        answer.first_token_seconds = time.monotonic() - began
        answer.seconds = time.monotonic() - began
        if chat.error is not None:
            words = self.secrets.hide(excerpt(str(chat.error.get("message")), 300))
            raise UnavailableError(f"{path}: an error within a stream: {words}", 500)
        parser.close()
        chat.close()
        for words in parser.problems:
            answer.problem(words)
