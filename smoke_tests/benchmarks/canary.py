"""What the canary costs a loaded server: output tokens/s of the miniature with and without it.

The server is started as `make serve` does. A closed loop of clients keeps it busy throughout; the
canary is stopped and let go on in turns, and the rate of neighbouring stretches compared. At its
default rate the cost is smaller than a small machine's noise, so the canary is run many times
faster here, and its cost scaled to the default rate by the probes that it really made.

Exit code: 0 the cost at the default rate is at most the bound, 1 it is not, 2 it could not be
measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from assay_smoke.client import Client

REPO = Path(__file__).resolve().parents[2]
MAX_COST = 0.01
DEFAULT_INTERVAL = 60.0
FAST_INTERVAL = 2.0
CLIENTS = 15
STRETCH_SECONDS = 12.0
PAIRS = 9
ANSWER_TOKENS = 96
STORY = "Tell me a long story about {}."
HEROES = ("Valentin the turtle", "Anna the fox", "Victor the rabbit")


class CannotMeasureError(Exception):
    """Exit code 2."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "assay_kernels.cli", "serve",
        str(REPO / "models/miniature/checkpoint"),
        "--config", str(REPO / "docker/profiles/miniature-cpu.yaml"), "--port", str(port),
        "--state-dir", str(folder / "state"),
    ]  # fmt: skip
    log = (folder / "serve.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    for _ in range(600):
        if b"Ctrl-C stops it." in (folder / "serve.log").read_bytes():
            return process
        if process.poll() is not None:
            break
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    raise CannotMeasureError((folder / "serve.log").read_text()[-2000:])


def start_canary(folder: Path, port: int, listen: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "assay_smoke", "watch", "--url", f"http://127.0.0.1:{port}",
        "--door", str(folder / "state" / "run"), "--listen", f"127.0.0.1:{listen}",
        "--interval", str(FAST_INTERVAL), "--tokens-per-hour", "100000000",
        "--bypass-key-file", str(folder / "state" / "bypass.key"),
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def probes(listen: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{listen}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return sum(
        map(float, re.findall(r"^assay_smoke_probes_total\{.*\} (\S+)$", text, re.MULTILINE))
    )


class Load:
    """Clients that ask for stories one after another, and the tokens that came so far."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.tokens = 0
        self.number = 0

    async def ask_for_ever(self) -> None:
        while True:
            self.number += 1
            hero = HEROES[self.number % len(HEROES)]
            text = f"({self.number}) {STORY.format(hero)}"
            answer = await self.client.chat(
                [{"role": "user", "content": text}], max_tokens=ANSWER_TOKENS,
                min_tokens=ANSWER_TOKENS, thinking=False,
            )  # fmt: skip
            self.tokens += answer.generated

    async def rate(self) -> float:
        """Tokens/s over a stretch."""
        before, began = self.tokens, time.monotonic()
        await asyncio.sleep(STRETCH_SECONDS)
        return (self.tokens - before) / (time.monotonic() - began)


async def measure(
    url: str, canary: subprocess.Popen[bytes], listen: int
) -> tuple[list[float], float]:
    """(relative cost of each pair of stretches, probes per second of the canary while it ran)."""
    async with Client(url) as client:
        await client.find_model()
        load = Load(client)
        tasks = [asyncio.create_task(load.ask_for_ever()) for _ in range(CLIENTS)]
        await asyncio.sleep(2 * STRETCH_SECONDS)
        costs, made, seconds = [], 0.0, 0.0
        for pair in range(PAIRS):
            rates = {}
            for on in (True, False) if pair % 2 else (False, True):
                canary.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                await asyncio.sleep(1.0)
                before = probes(listen) if on else 0.0
                rates[on] = await load.rate()
                if on:
                    made += probes(listen) - before
                    seconds += STRETCH_SECONDS
            canary.send_signal(signal.SIGCONT)
            costs.append(1 - rates[True] / rates[False])
            print(f"> without {rates[False]:6.1f}  with {rates[True]:6.1f} tokens/s", flush=True)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        return costs, made / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    out = parser.parse_args().json
    port, listen = free_port(), free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            server = start_server(folder, port)
        except CannotMeasureError as error:
            print(error, file=sys.stderr)
            return 2
        canary = start_canary(folder, port, listen)
        try:
            time.sleep(15)
            costs, per_second = asyncio.run(measure(f"http://127.0.0.1:{port}", canary, listen))
        finally:
            canary.kill()
            server.send_signal(signal.SIGINT)
            server.wait(60)
    if per_second <= 0:
        print("the canary made no probe", file=sys.stderr)
        return 2
    fast = statistics.median(costs)
    scale = 1 / DEFAULT_INTERVAL / per_second
    cost = fast * scale
    print(
        f"one probe in {1 / per_second:.1f} s costs {fast:.1%} (median of {PAIRS}); one in"
        f" {DEFAULT_INTERVAL:g} s, the default: {cost:.2%}"
    )
    if out is not None:
        record = {"costs": costs, "probes_per_second": per_second, "cost_at_default": cost}
        out.write_text(json.dumps(record) + "\n")
    return 0 if cost <= MAX_COST else 1


if __name__ == "__main__":
    sys.exit(main())
