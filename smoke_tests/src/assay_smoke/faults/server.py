"""The HTTP around the fault server: what vLLM answers on the paths that a battery asks."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from assay_smoke import __version__
from assay_smoke.faults.model import Model, Scores, Step, chat_text
from assay_smoke.faults.modes import BrokenOff, Mode, Reply, Request
from assay_smoke.faults.tokens import END_THINK, EOS, encode_text, token_id, token_text
from assay_smoke.suite import Suite

MODEL_NAME = "assay-faulty"
MAX_MODEL_LEN = 16384
BLOCK = 64
"""Tokens whose equality makes a prefix-cache hit."""
CHUNK = 32
"""Tokens between two pauses of a generation, so that requests overlap as on a real server."""
STEP_SECONDS = 0.001
PREFILL_SECONDS = 0.008
"""Before the first token: requests that come together are answered together."""


class CutOffError(Exception):
    """Ends a response as a crashed server does: uvicorn closes the connection."""


@dataclass(frozen=True)
class Wanted:
    """A request's parameters, whichever endpoint it came by."""

    tokens: list[str]
    """Of the prompt."""
    max_tokens: int
    min_tokens: int
    logprobs: bool
    top: int
    prompt_logprobs: int | None
    stream: bool
    chat: bool
    tools: bool
    schema: bool
    return_ids: bool
    usage: bool


class FaultServer:
    """The good model of a suite, with one mode in its way."""

    def __init__(self, suite: Suite, mode: Mode, jitter: float = 0.001) -> None:
        self.model = Model(suite)
        self.mode = mode
        self.jitter = jitter
        self.flying = 0
        self.number = 0
        self.seen: dict[int, int] = {}
        self.prefixes: set[int] = set()
        self.started = time.time()
        self.counts = dict.fromkeys(
            (
                "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total",
                "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
                "vllm:iteration_tokens_total_count",
            ),
            0.0,
        )  # fmt: skip
        self.counts["vllm:corrupted_requests_total"] = 0.0
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )

    # --- what the server is ------------------------------------------------------------------

    async def health(self, _: HttpRequest) -> Response:
        return Response()

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": f"assay-smoke-{__version__}"})

    async def models(self, _: HttpRequest) -> Response:
        card = {"id": MODEL_NAME, "object": "model", "max_model_len": MAX_MODEL_LEN}
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self, _: HttpRequest) -> Response:
        values = dict(self.counts)
        drafts = values["vllm:generation_tokens_total"]
        values["vllm:spec_decode_num_drafts_total"] = drafts
        values["vllm:spec_decode_num_accepted_tokens_total"] = 1.6 * drafts
        self.mode.metrics(values)
        gauges = {
            "process_start_time_seconds": self.started,
            "vllm:num_requests_running": float(self.flying),
            "vllm:num_requests_waiting": 0.0,
        }
        lines = []
        for name, value in values.items():
            family = name.removesuffix("_count")
            kind = "histogram" if name.endswith("_count") else "counter"
            lines += [f"# TYPE {family} {kind}", f'{name}{{model_name="{MODEL_NAME}"}} {value}']
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await http.json()
        if "messages" in body:
            thinking = bool(body.get("chat_template_kwargs", {}).get("thinking"))
            text = chat_text(body["messages"], body.get("tools"), thinking)
        else:
            text = body["prompt"]
        ids = [token_id(token) for token in encode_text(text)]
        return JSONResponse({"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids})

    # --- answers -----------------------------------------------------------------------------

    async def chat(self, http: HttpRequest) -> Response:
        body = await http.json()
        thinking = bool(body.get("chat_template_kwargs", {}).get("thinking"))
        text = chat_text(body["messages"], body.get("tools"), thinking)
        wanted = _wanted(body, encode_text(text), chat=True)
        return await self._answer(wanted)

    async def complete(self, http: HttpRequest) -> Response:
        body = await http.json()
        prompt = body["prompt"]
        tokens = encode_text(prompt) if isinstance(prompt, str) else [token_text(i) for i in prompt]
        return await self._answer(_wanted(body, tokens, chat=False))

    async def _answer(self, wanted: Wanted) -> Response:
        if len(wanted.tokens) + wanted.max_tokens > MAX_MODEL_LEN:
            return _error(400, f"the model's context is {MAX_MODEL_LEN} tokens")
        request = self._request(wanted)
        self.mode.begin(request)
        status = self.mode.status(request)
        if status != 200:
            await asyncio.sleep(0.002)
            detail = "Internal server error"
            return _error(status, detail)
        if wanted.stream:
            events = self._events(wanted, request)
            return StreamingResponse(events, media_type="text/event-stream")
        reply = await self._generate(wanted, request)
        if isinstance(self.mode, BrokenOff) and request.hit:
            return StreamingResponse(_cut_off(), media_type="application/json")
        document = self._document(wanted, request, reply)
        return Response(json.dumps(document), media_type="application/json")

    def _request(self, wanted: Wanted) -> Request:
        key = zlib.crc32(repr(wanted.tokens).encode())
        blocks = [
            zlib.crc32(repr(wanted.tokens[: n * BLOCK]).encode())
            for n in range(1, len(wanted.tokens) // BLOCK + 1)
        ]
        hit = wanted.prompt_logprobs is None and any(b in self.prefixes for b in blocks)
        self.counts["vllm:prefix_cache_queries_total"] += len(wanted.tokens)
        self.counts["vllm:prefix_cache_hits_total"] += BLOCK * sum(
            b in self.prefixes for b in blocks
        )
        self.counts["vllm:prompt_tokens_total"] += len(wanted.tokens)
        self.prefixes.update(blocks)
        seen = self.seen.get(key, 0)
        if wanted.prompt_logprobs is None:
            self.seen[key] = seen + 1
        request = Request(
            number=self.number,
            prompt_length=len(wanted.tokens),
            prompt_key=key,
            seen=seen,
            prefix_seen=hit,
            logprobs=wanted.logprobs or wanted.prompt_logprobs is not None,
            stream=wanted.stream,
            chat=wanted.chat,
            tools=wanted.tools,
            schema=wanted.schema,
            rng=random.Random(f"{self.mode.seed}/{self.number}"),
            in_flight=lambda: self.flying,
        )
        self.number += 1
        return request

    async def _generate(self, wanted: Wanted, request: Request, live: Any = None) -> Reply:
        """All tokens of an answer; `live(step)` is told of each as it comes."""
        listed = max(2, wanted.top, wanted.prompt_logprobs or 0)
        scores = Scores((self.mode.seed, request.number), self.jitter, listed)
        self.flying += 1
        try:
            await asyncio.sleep(PREFILL_SECONDS + 1e-6 * len(wanted.tokens))
            prefilled = self._prefill(wanted, request, scores)
            context = list(wanted.tokens[-4:])
            steps: list[Step] = []
            finish = "length"
            plan = self.model.continuation(wanted.tokens)
            for index, planned in enumerate(islice(plan, wanted.max_tokens)):
                if planned == EOS and index < wanted.min_tokens:
                    planned = " and"
                pause = self.mode.delay(request, index)
                if pause or index % CHUNK == CHUNK - 1:
                    await asyncio.sleep(pause or STEP_SECONDS)
                self.counts["vllm:iteration_tokens_total_count"] += 1
                meant = scores.step(planned, context, index)
                # The model goes on from what it meant to say: one bad token does not derail it.
                context = [*context[-3:], meant.token]
                steps.append(self.mode.step(request, index, meant))
                if planned == EOS:
                    finish = "stop"
                    break
            self.counts["vllm:generation_tokens_total"] += len(steps)
        finally:
            self.flying -= 1
        reply = Reply(steps, prefilled, finish=finish)
        self._parts(wanted, reply)
        self.mode.reply(request, reply)
        return reply

    def _prefill(self, wanted: Wanted, request: Request, scores: Scores) -> list[Step | None]:
        if wanted.prompt_logprobs is None:
            return []
        planned = self.model.predict(wanted.tokens)
        steps: list[Step | None] = [None]
        for index in range(1, len(wanted.tokens)):
            context = wanted.tokens[max(0, index - 4) : index]
            step = scores.read(wanted.tokens[index], planned[index], context, index)
            steps.append(self.mode.read(request, index, step))
        return steps

    def _parts(self, wanted: Wanted, reply: Reply) -> None:
        """Reasoning, content and calls, as the parsers of a real server cut them out."""
        texts = [step.token for step in reply.steps if step.token != EOS]
        if not wanted.chat:
            reply.content = "".join(texts)
            return
        if END_THINK in texts:
            cut = texts.index(END_THINK)
            reply.reasoning, texts = "".join(texts[:cut]), texts[cut + 1 :]
        elif wanted.tokens[-1] == "<think>":
            reply.reasoning, texts = "".join(texts), []
        plan = self.model.plan("".join(wanted.tokens))
        if wanted.tools and plan.calls:
            intact = "".join(texts) == "".join(f"\n\n{n}({a})" for n, a in plan.calls)
            if intact:
                reply.calls, reply.finish = list(plan.calls), "tool_calls"
                return
        reply.content = "".join(texts)

    # --- the wire ----------------------------------------------------------------------------

    def _document(self, wanted: Wanted, request: Request, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish}
        ids = [token_id(step.token) for step in reply.steps]
        document: dict[str, Any] = {
            "id": f"cmpl-{request.number}",
            "object": "chat.completion" if wanted.chat else "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": [choice],
            "usage": _usage(wanted, reply),
        }
        if wanted.chat:
            choice["message"] = {
                "role": "assistant", "content": reply.content or None,
                "reasoning": reply.reasoning or None, "tool_calls": _calls(reply.calls),
            }  # fmt: skip
            if wanted.logprobs:
                content = [
                    self._logprob(wanted, request, i, reply) for i in range(len(reply.steps))
                ]
                choice["logprobs"] = {"content": content}
            if wanted.return_ids:
                choice["token_ids"] = ids
                document["prompt_token_ids"] = [token_id(t) for t in wanted.tokens]
            return document
        choice["text"] = reply.content
        if wanted.logprobs:
            choice["logprobs"] = {
                "tokens": [step.token for step in reply.steps],
                "token_logprobs": [
                    self.mode.logprob(request, i, step.logprob, reply)
                    for i, step in enumerate(reply.steps)
                ],
                "top_logprobs": [dict(_cut(step, wanted.top)) for step in reply.steps],
            }
        if wanted.return_ids:
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = [token_id(t) for t in wanted.tokens]
        if wanted.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                None if step is None else self._position(wanted, request, i, step, reply)
                for i, step in enumerate(reply.prefilled)
            ]
        return document

    def _position(
        self, wanted: Wanted, request: Request, index: int, step: Step, reply: Reply
    ) -> dict[str, Any]:
        listed = [*_cut(step, wanted.prompt_logprobs or 0), (step.token, step.logprob)]
        return {
            str(token_id(token)): {
                "logprob": self.mode.logprob(request, index, p, reply), "decoded_token": token,
            }
            for token, p in listed
        }  # fmt: skip

    def _logprob(
        self, wanted: Wanted, request: Request, index: int, reply: Reply
    ) -> dict[str, Any]:
        step = reply.steps[index]
        top = [{"token": t, "logprob": p} for t, p in _cut(step, wanted.top)]
        value = self.mode.logprob(request, index, step.logprob, reply)
        return {"token": step.token, "logprob": value, "top_logprobs": top}

    async def _events(self, wanted: Wanted, request: Request) -> AsyncIterator[bytes]:
        if self.mode.delay(request, 0) or self.mode.delay(request, 10**6):
            # A slow or hanging server holds the client with a stream that has begun.
            yield _event(_piece({"role": "assistant", "content": ""}))
        reply = await self._generate(wanted, request)
        for number, event in enumerate(
            self.mode.events(request, self._stream(wanted, request, reply))
        ):
            if isinstance(self.mode, BrokenOff) and request.hit and number > 1:
                raise CutOffError
            yield event
            if number % CHUNK == CHUNK - 1:
                await asyncio.sleep(0)

    def _stream(self, wanted: Wanted, request: Request, reply: Reply) -> list[bytes]:
        """Every event; text goes in pieces of a token, log-probabilities beside them."""
        first = _piece({"role": "assistant", "content": ""})
        if wanted.return_ids:
            first["prompt_token_ids"] = [token_id(t) for t in wanted.tokens]
        events = [_event(first)]
        pieces: list[dict[str, Any]] = [{"reasoning": t} for t in encode_text(reply.reasoning)]
        pieces += [{"content": t} for t in encode_text(reply.content)]
        for index, (name, arguments) in enumerate(reply.calls):
            half = len(arguments) // 2
            pieces.append(_call_piece(index, name, ""))
            pieces += [
                _call_piece(index, None, part) for part in (arguments[:half], arguments[half:])
            ]
        entries = []
        if wanted.logprobs:
            entries = [self._logprob(wanted, request, i, reply) for i in range(len(reply.steps))]
        ids = [token_id(step.token) for step in reply.steps] if wanted.return_ids else []
        for index, delta in enumerate(pieces):
            probability = entries[index : index + 1]
            piece = _piece(delta, {"content": probability} if probability else None)
            piece["choices"][0]["token_ids"] = ids[index : index + 1]
            events.append(_event(piece))
        rest = entries[len(pieces) :]
        last = _piece({}, {"content": rest} if rest else None)
        last["choices"][0]["token_ids"] = ids[len(pieces) :]
        last["choices"][0]["finish_reason"] = reply.finish
        events.append(_event(last))
        if wanted.usage:
            events.append(_event({"choices": [], "usage": _usage(wanted, reply)}))
        return [*events, b"data: [DONE]\n\n"]


async def _cut_off() -> AsyncIterator[bytes]:
    yield b'{"choices": ['
    raise CutOffError


def _wanted(body: dict[str, Any], tokens: list[str], chat: bool) -> Wanted:
    count = body.get("top_logprobs") if chat else body.get("logprobs")
    return Wanted(
        tokens=tokens,
        max_tokens=int(body.get("max_tokens") or 16),
        min_tokens=int(body.get("min_tokens") or 0),
        logprobs=bool(body.get("logprobs")) if chat else body.get("logprobs") is not None,
        top=int(count or 0),
        prompt_logprobs=body.get("prompt_logprobs"),
        stream=bool(body.get("stream")),
        chat=chat,
        tools=bool(body.get("tools")),
        schema="response_format" in body,
        return_ids=bool(body.get("return_token_ids")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def _cut(step: Step, count: int) -> list[tuple[str, float]]:
    return [(token, p) for token, p in step.top[:count] if math.isfinite(p)]


def _usage(wanted: Wanted, reply: Reply) -> dict[str, int]:
    prompt, made = len(wanted.tokens), len(reply.steps)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _calls(calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


def _call_piece(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": function}]}


def _piece(delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


class Running:
    """`async with Running(server) as url:` serves on a free port of this process."""

    def __init__(self, server: FaultServer, host: str = "127.0.0.1", port: int = 0) -> None:
        config = uvicorn.Config(
            server.app, log_level="critical", access_log=False, lifespan="off",
            timeout_graceful_shutdown=0,
        )  # fmt: skip
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.config.load()
        self._socket = socket.create_server((host, port))
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def __aenter__(self) -> str:
        self._task = asyncio.create_task(self._uvicorn.serve([self._socket]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        return self.url

    async def finished(self) -> None:
        """Until a signal ends it."""
        await self._task

    async def __aexit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True
        with suppress(asyncio.CancelledError):
            await self._task
        self._socket.close()
