"""How often is the gate wrong? Verdicts on servers whose state is known.

  paced      a server with a known pace and with noise of three kinds: of each token, of the machine
             (all streams together, for a second or so), and from run to run. A hundred healthy ones
             and a hundred that are 15 % slower, each with noise of its own.
  miniature  the real one, as `make serve` starts it: ten healthy verdicts, and ten through a proxy
             that makes every answer take 15 % longer.

A verdict is right if it is `pass` on a healthy server and `fail` on a slowed one; `invalid` is
wrong on both. Exit code: 0 no more wrong ones than allowed, 1 more, 2 could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gate-stability.json"
SLOW = 1.15
TOKEN_NOISE, MACHINE_NOISE, RUN_NOISE = 0.10, 0.025, 0.01
MARGIN = {"paced": 0.08, "miniature": 0.10}
"""The miniature's is that of its shipped policy."""
ALLOWED = {"paced": 2, "miniature": 0}
WORKLOAD = """\
name: probe
about: Short answers of one length, for many verdicts.
arrival: {kind: closed-loop, concurrency: 12}
stop: {sessions: 60}
warmup: {sessions: 12}
classes:
  - name: probe
    input: {kind: constant, tokens: 32}
    output: {kind: constant, tokens: 25}
"""
POLICY = """\
name: stability
about: Speed alone.
profile: none
hardware: local-cpu
server: {{model: {model}}}
repetitions: 7
coherence: null
loads:
  - workload: {workload}
    bounds:
      - {{metric: output_tokens_per_second, margin: {margin}}}
      - {{metric: tpot.p50, margin: {margin}}}
"""


class CannotMeasureError(Exception):
    """Exit code 2."""


@dataclass
class Row:
    servers: str
    state: str
    verdicts: dict[str, int]
    wrong: int
    allowed: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def tool(command: list[str], port: int, seconds: float = 60) -> Iterator[str]:
    """A server for as long as the block lasts; its URL."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + seconds
    try:
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise CannotMeasureError(f"{' '.join(command[:4])} did not start")
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def load_tool(*arguments: str, port: int) -> list[str]:
    return [sys.executable, "-m", "assay_load.cli", *arguments, "--port", str(port)]


@contextlib.contextmanager
def paced(seed: int, slow: float) -> Iterator[str]:
    port = free_port()
    noise = ("--jitter", str(TOKEN_NOISE), "--drift", str(MACHINE_NOISE),
             "--run-noise", str(RUN_NOISE))  # fmt: skip
    pace = ("paced", "--ttft", "0.03", "--rate", "100", "--seed", str(seed), "--slow", str(slow))
    with tool(load_tool(*pace, *noise, port=port), port) as url:
        yield url


@contextlib.contextmanager
def miniature(folder: Path) -> Iterator[str]:
    port = free_port()
    command = [
        str(ROOT / ".venv" / "bin" / "assay-kernels"), "serve",
        str(ROOT / "models" / "miniature" / "checkpoint"),
        "--config", str(ROOT / "docker" / "profiles" / "miniature-cpu.yaml"),
        "--host", "127.0.0.1", "--port", str(port), "--state-dir", str(folder / "state"),
    ]  # fmt: skip
    with tool(command, port, 240) as url:
        yield url


@contextlib.contextmanager
def slowed(upstream: str) -> Iterator[str]:
    port = free_port()
    with tool(
        load_tool("faulty", "--upstream", upstream, "--slow", str(SLOW), port=port), port
    ) as url:
        yield url


def record(policy: Path, url: str, baseline: Path, out: Path) -> None:
    """Raises CannotMeasureError."""
    answer = subprocess.run(
        [sys.executable, "-m", "assay_load.gate.cli", "baseline", "--policy", str(policy),
         "--url", url, "--out", str(out), "--write", str(baseline), "--repetitions", "9"],
        capture_output=True, text=True,
    )  # fmt: skip
    if answer.returncode != 0:
        raise CannotMeasureError(answer.stdout + answer.stderr)


def judge(policy: Path, url: str, baseline: Path, out: Path) -> str:
    """The verdict of a gate in this process: to start an interpreter two hundred times would
    disturb the servers that are being timed."""
    from assay_load.gate import baseline as baselines
    from assay_load.gate import policy as policies
    from assay_load.gate.run import Options, judge_release

    found = judge_release(
        policies.load(str(policy)), Options(url, out), baselines.read(baseline), lambda _: None
    )
    seen = [f"{b.metric} {b.slowdown:+.1%} (seen {b.detectable:.1%})" for b in found.bounds]
    print(f"  {found.verdict}  {'; '.join(seen)}", file=sys.stderr, flush=True)
    return found.verdict


def work(policy: Path, baseline: Path, folder: Path) -> None:
    """Answer each line `state seed` with the verdict on such a server."""
    for line in sys.stdin:
        state, seed = line.split()
        with paced(int(seed), SLOW if state == "slowed" else 1.0) as url:
            print(judge(policy, url, baseline, folder / f"{state}-{seed}"), flush=True)


def row(servers: str, state: str, verdicts: list[str]) -> Row:
    right = "pass" if state == "healthy" else "fail"
    wrong = sum(verdict != right for verdict in verdicts)
    return Row(servers, state, dict(Counter(verdicts)), wrong, ALLOWED[servers])


def judge_paced(count: int, jobs: int, folder: Path) -> list[Row]:
    (folder / "probe.yaml").write_text(WORKLOAD)
    policy = folder / "stability.yaml"
    policy.write_text(
        POLICY.format(model="paced", workload=folder / "probe.yaml", margin=MARGIN["paced"])
    )
    baseline = folder / "baseline.json"
    with paced(0, 1.0) as url:
        record(policy, url, baseline, folder / "b")
    command = [sys.executable, __file__, "--work", str(policy), str(baseline), str(folder)]
    workers: queue.Queue[subprocess.Popen[str]] = queue.Queue()
    for _ in range(jobs):
        workers.put(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))

    def one(job: tuple[str, int]) -> str:
        worker = workers.get()
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write("{} {}\n".format(*job))
        worker.stdin.flush()
        verdict = worker.stdout.readline().strip()
        workers.put(worker)
        if not verdict:
            raise CannotMeasureError("a worker ended")
        return verdict

    # In turn, so that a slow hour of the machine hits both.
    states = ("healthy", "slowed")
    jobs_in_turn = [(state, 10_000 * s + i) for i in range(1, count + 1)
                    for s, state in enumerate(states)]  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = list(pool.map(one, jobs_in_turn))
    while not workers.empty():
        worker = workers.get()
        worker.communicate()
    return [row("paced", state, verdicts[s :: len(states)]) for s, state in enumerate(states)]


def judge_miniature(count: int, folder: Path) -> list[Row]:
    policy = folder / "stability.yaml"
    policy.write_text(
        POLICY.format(
            model="assay-miniature",
            workload="gate-probe\n    scale: miniature",
            margin=MARGIN["miniature"],
        )
    )
    baseline = folder / "baseline.json"
    verdicts: dict[str, list[str]] = {"healthy": [], "slowed": []}
    with miniature(folder) as url, slowed(url) as slow:
        record(policy, url, baseline, folder / "b")
        for number in range(count):  # in turn, so that a slow hour of the machine hits both
            for state, where in (("healthy", url), ("slowed", slow)):
                out = folder / f"{state}-{number}"
                verdicts[state].append(judge(policy, where, baseline, out))
    return [row("miniature", state, found) for state, found in verdicts.items()]


def table(rows: list[Row]) -> str:
    lines = [
        "| servers | state | pass | fail | invalid | wrong | allowed |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = " | ".join(str(r.verdicts.get(v, 0)) for v in ("pass", "fail", "invalid"))
        lines.append(f"| {r.servers} | {r.state} | {cells} | {r.wrong} | {r.allowed} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paced", type=int, default=100, help="verdicts of each state")
    parser.add_argument("--miniature", type=int, default=10, help="verdicts of each state")
    parser.add_argument("--jobs", type=int, default=2, help="paced verdicts at a time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--work", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        work(*options.work)
        return 0
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="assay-gate-stability-") as temporary:
            for name in ("paced", "miniature"):
                folder = Path(temporary, name)
                folder.mkdir()
                if name == "paced" and options.paced:
                    rows += judge_paced(options.paced, options.jobs, folder)
                if name == "miniature" and options.miniature:
                    rows += judge_miniature(options.miniature, folder)
    except CannotMeasureError as error:
        print(f"gate-stability: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    return 1 if any(r.wrong > r.allowed for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
