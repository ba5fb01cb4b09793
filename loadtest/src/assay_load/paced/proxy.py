"""A proxy in front of a real server that makes it go wrong in a known way, so that one can see a
gate bite: the model's own answers, late, cut, garbled or from another process than before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

DOWN_SECONDS = 1.0
"""How long a restart refuses connections."""
COMPLETIONS = (b"/v1/chat/completions", b"/v1/completions")
_TEXT = re.compile(rb'("(?:content|reasoning|reasoning_content|text)": ?)"((?:[^"\\]|\\.)+)"')
_START = re.compile(rb"^(process_start_time_seconds(?:\{[^}]*\})?) \S+", re.MULTILINE)


@dataclass(frozen=True)
class Faults:
    slow: float = 1.0
    drop_every: int = 0
    restart_after: int = 0
    corrupt_above: int = -1
    garble: bool = False
    model: str = ""


class Proxy:
    """`load_upstream` gets the requests of load tests, which alone ask to ignore the end of text:
    so the paced server can stand in for the speed of one that answers questions."""

    def __init__(self, faults: Faults, upstream: str, load_upstream: str) -> None:
        self._faults = faults
        self._upstream = urlsplit(upstream)
        self._load_upstream = urlsplit(load_upstream or upstream)
        self._completions = 0
        self._streams = 0
        self._active = 0
        self._restarted: float | None = None
        self._down_until = 0.0
        self._writers: set[asyncio.StreamWriter] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if time.monotonic() < self._down_until:
            writer.transport.abort()
            return
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
            body = await reader.readexactly(int(length[1])) if length else b""
            path = head.split(b" ", 2)[1].partition(b"?")[0]
            await self._relay(path, head, body, writer)
        self._writers.discard(writer)
        with contextlib.suppress(OSError):
            writer.close()

    async def _relay(
        self, path: bytes, head: bytes, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """One request a connection: the answer's end is the connection's end at both sides."""
        head = re.sub(rb"(?im)^connection:.*\r\n", b"", head)
        head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        completion = path in COMPLETIONS
        stream = completion and b'"stream":true' in body.replace(b" ", b"")
        began = time.monotonic()
        behind = self._load_upstream if b'"ignore_eos":true' in body else self._upstream
        there, back = await asyncio.open_connection(behind.hostname, behind.port)
        self._active += completion
        self._completions += completion
        self._streams += stream
        number = self._completions
        try:
            back.write(head + body)
            if path in (b"/v1/models", b"/metrics"):
                writer.write(self._rewritten(path, await there.read()))
                await writer.drain()
                return
            every = self._faults.drop_every
            cut = stream and every and self._streams % every == 0
            if completion and number == self._faults.restart_after:
                self._restart()
            async for piece in self._delayed(there, began if completion else None):
                if cut and b"data:" in piece:
                    writer.write(piece[: len(piece) // 2])
                    await writer.drain()
                    writer.close()
                    return
                writer.write(self._garbled(piece) if completion else piece)
                await writer.drain()
        finally:
            self._active -= completion
            back.close()

    async def _delayed(
        self, there: asyncio.StreamReader, began: float | None
    ) -> AsyncIterator[bytes]:
        """What comes, when it comes; with `began`, `slow` times as long after that as it came."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"-"
            while data:
                data = await there.read(1 << 16)
                queue.put_nowait((time.monotonic(), data))

        reading = asyncio.create_task(read())
        try:
            while True:
                at, data = await queue.get()
                if not data:
                    return
                if began is not None:
                    due = began + self._faults.slow * (at - began)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                yield data
        finally:
            reading.cancel()

    def _garbled(self, data: bytes) -> bytes:
        above = self._faults.corrupt_above
        if self._faults.garble or (above >= 0 and self._active - 1 > above):
            # The same number of bytes, so that HTTP's chunk sizes stay true.
            return _TEXT.sub(lambda m: m[1] + b'"' + _noise(len(m[2])) + b'"', data)
        return data

    def _rewritten(self, path: bytes, response: bytes) -> bytes:
        head, _, body = response.partition(b"\r\n\r\n")
        if path == b"/v1/models" and self._faults.model:
            answer = json.loads(body)
            for model in answer["data"]:
                model["id"] = self._faults.model
            body = json.dumps(answer).encode()
        if path == b"/metrics" and self._restarted is not None:
            body = _START.sub(rb"\1 %f" % self._restarted, body)
        head = re.sub(rb"(?i)content-length: *\d+", b"content-length: %d" % len(body), head)
        return head + b"\r\n\r\n" + body

    def _restart(self) -> None:
        """Everything in flight is lost, nothing answers for a while, and the process is younger."""
        self._restarted = time.time()
        self._down_until = time.monotonic() + DOWN_SECONDS
        for writer in self._writers:
            writer.transport.abort()


def _noise(length: int) -> bytes:
    return (b" zq#vx" * (length // 6 + 1))[:length]


async def serve(faults: Faults, upstream: str, load_upstream: str, host: str, port: int) -> None:
    proxy = Proxy(faults, upstream, load_upstream)
    server = await asyncio.start_server(proxy.handle, host, port, backlog=1024)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(f"proxy on http://{host}:{port} to {upstream}: {faults}", flush=True)
    async with server:
        await stop.wait()


def main(faults: Faults, upstream: str, load_upstream: str, host: str, port: int) -> int:
    asyncio.run(serve(faults, upstream, load_upstream, host, port))
    return 0
