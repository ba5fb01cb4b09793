"""What the door costs a request: the same ASGI application with it and without, in one run.

Both are called directly, with the scope of a chat request as uvicorn makes it, so that nothing but
the door is in the difference. They take turns in short blocks; a row's figure is the median over
the blocks of the difference of neighbours.

Exit code: 0 every median is at most the bound, 1 one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay_kernels.vllm_plugin.door import ClosedDoor

MAX_MICROSECONDS = 50.0
BLOCK = 2000
"""Requests between two looks at the clock."""
BLOCKS = 41
HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"user-agent", b"OpenAI/Python 3.57.0"),
    (b"x-stainless-lang", b"python"),
    (b"x-stainless-os", b"Linux"),
    (b"content-length", b"190"),
]
ANSWER = {"type": "http.response.start", "status": 200, "headers": []}


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send(ANSWER)
    await send({"type": "http.response.body", "body": b"{}"})


async def nowhere(_: Any) -> None:
    return


@contextmanager
def settings(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def seconds(application: Any, headers: list[tuple[bytes, bytes]], path: str) -> float:
    """For one block of requests."""

    async def block() -> float:
        began = time.perf_counter()
        for _ in range(BLOCK):
            scope = {"type": "http", "path": path, "root_path": "", "headers": headers}
            await application(scope, nowhere, nowhere)
        return time.perf_counter() - began

    return asyncio.run(block())


def row(headers: list[tuple[bytes, bytes]], path: str, folder: Path, keys: int) -> float:
    """Median cost in microseconds."""
    bypass = folder / "bypass.key"
    bypass.write_text("b" * 32)
    variables = {"ASSAY_RUN_DIR": str(folder), "ASSAY_BYPASS_KEY_FILE": str(bypass)}
    if keys:
        file = folder / "keys"
        file.write_text("".join(f"sk-{i:032}\n" for i in range(keys)))
        variables["ASSAY_API_KEYS_FILE"] = str(file)
    with settings(**variables):
        if not keys:
            os.environ.pop("ASSAY_API_KEYS_FILE", None)
        door = ClosedDoor(app)
    differences = []
    for index in range(BLOCKS):
        order = (door, app) if index % 2 else (app, door)
        took = {id(one): seconds(one, headers, path) for one in order}
        differences.append((took[id(door)] - took[id(app)]) / BLOCK * 1e6)
    return statistics.median(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    out = parser.parse_args().json
    known = (b"authorization", b"Bearer sk-" + b"0" * 31 + b"1")
    unknown = (b"authorization", b"Bearer sk-" + b"x" * 32)
    chat = "/v1/chat/completions"
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "open").touch()
        for what, headers, path, keys in (
            ("open, no keys", HEADERS, chat, 0),
            ("open, 4 keys, a known one", [*HEADERS, known], chat, 4),
            ("open, 1000 keys, a known one", [*HEADERS, known], chat, 1000),
            ("open, 1000 keys, an unknown one", [*HEADERS, unknown], chat, 1000),
            ("the bypass key", [*HEADERS, (b"x-assay-key", b"b" * 32)], chat, 4),
            ("health", HEADERS, "/health", 4),
        ):
            results[what] = row(headers, path, folder, keys)
            print(f"> {what:<32} {results[what]:6.2f} us", flush=True)
    if out is not None:
        out.write_text(json.dumps({"microseconds": results, "bound": MAX_MICROSECONDS}) + "\n")
    return 0 if max(results.values()) <= MAX_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
