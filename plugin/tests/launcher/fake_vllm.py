"""Stands in for `vllm serve` in tests of the launcher: real processes, a real door, no model.

It starts an engine and workers under vLLM's titles, lets each prove the plugin, and serves behind
`ClosedDoor`. What goes wrong is told by the environment: FAKE_UNPROVEN, FAKE_UNLOADED, FAKE_PLAIN,
FAKE_PARTLY and FAKE_STUBBORN name titles; FAKE_LOG is printed first; FAKE_CRASH ends it before it
serves; FAKE_DELAY makes it slow to chat; FAKE_NO_DOOR serves without one; FAKE_MODELS and FAKE_CHAT
are whole answers.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import setproctitle

from assay_kernels.vllm_plugin import proof
from assay_kernels.vllm_plugin.door import ClosedDoor


def named(variable: str, title: str) -> bool:
    return title in os.environ.get(variable, "").split(",")


def prove(title: str, loads: bool) -> None:
    if named("FAKE_UNPROVEN", title):
        return
    proof.record_registered()
    if loads and not named("FAKE_UNLOADED", title):
        how = "bf16 by cpu w4a16" if named("FAKE_PLAIN", title) else "nvfp4 by cpu w4a16"
        layers = {("routed", how): 1 if named("FAKE_PARTLY", title) else 4}
        expected = int(os.environ.get("FAKE_EXPECTED", "4"))
        proof.record_loaded(proof.Summary("cpu", "w4a16", "torch", layers, expected))


def child(title: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a child and wait until it has its title and its proof."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--as", title, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def be(title: str) -> None:
    """An engine, which has the workers below it, or a worker."""
    setproctitle.setproctitle(f"VLLM::{title}")
    if named("FAKE_STUBBORN", title):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    workers = os.environ.get("FAKE_WORKERS", "Worker_TP0,Worker_TP1").split(",")
    if title == "EngineCore":
        for worker in filter(None, workers):
            child(worker)
    prove(title, loads=title != "EngineCore" or workers == [""])
    print("up", flush=True)
    while True:
        time.sleep(60)


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["path"] == "/v1/chat/completions":
        await asyncio.sleep(float(os.environ.get("FAKE_DELAY", "0")))
    status, body = answer(scope["path"])
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def answer(path: str) -> tuple[int, bytes]:
    if path == "/health":
        return 200, b""
    if path == "/v1/models":
        return 200, os.environ.get("FAKE_MODELS", '{"data": [{"id": "fake"}]}').encode()
    choice = {
        "finish_reason": "stop",
        "message": {"content": os.environ.get("FAKE_ANSWER", "Paris."), "reasoning": "Hm."},
        "logprobs": {"content": [{"token": "Paris", "logprob": -0.25}, {"logprob": 0.0}]},
    }
    chat = os.environ.get("FAKE_CHAT", json.dumps({"choices": [choice]}))
    return int(os.environ.get("FAKE_CHAT_STATUS", "200")), chat.encode()


def main() -> None:
    if sys.argv[1] == "--as":
        be(sys.argv[2])
    print(os.environ.get("FAKE_LOG", ""), flush=True)
    print("rust:", os.environ.get("VLLM_USE_RUST_FRONTEND"), flush=True)
    print("bind:", os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
    if crash := os.environ.get("FAKE_CRASH"):
        raise RuntimeError(crash)
    prove("APIServer", loads=False)
    engine = child("EngineCore")
    import uvicorn

    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
    door = app if "FAKE_NO_DOOR" in os.environ else ClosedDoor(app)
    config = uvicorn.Config(
        door, host=arguments["--host"], port=int(arguments["--port"]), log_level="error"
    )
    threading.Thread(target=lambda: engine.wait(), daemon=True).start()
    uvicorn.Server(config).run()
    engine.terminate()


if __name__ == "__main__":
    main()
