"""What a load generator costs, and by how much its TTFT is wrong: a thousand streams on one core.

The paced server runs on one core and knows when it sent each first token; each client runs on
another core, one after the other, with the same arrivals: Poisson, so many a second that about a
thousand streams of 30 tokens/s are open at a time. The error of a client is how far its
percentiles of TTFT are from the server's own of the same requests; for assay-load also of each
single request. Others are measured if their program is there:

    --vllm PYTHON        of an environment with vLLM (default: .venv/bin/python, if there is one)
    --guidellm PROGRAM   (default: .venv-guidellm/bin/guidellm, if there is one)

Exit code: 0 assay-load keeps the bounds, 1 it does not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "load-client.json"
TOKENIZER = ROOT / "models" / "miniature" / "checkpoint"
MODEL = "paced"
TTFT_S = 0.2
TOKENS_PER_SECOND = 30
OUTPUT_TOKENS = 150
INPUT_TOKENS = 64
STREAMS = 1000
MAX_ERROR_P50_MS, MAX_ERROR_P99_MS = 5.0, 20.0
LEAST_STREAMS = 1000
BETWEEN_S = 3.0


class CannotMeasureError(Exception):
    """Exit code 2."""


@dataclass
class Row:
    """One client. Errors in ms: its percentile of TTFT less the server's; `each_*`: of single
    requests, where the client says which is which."""

    client: str
    requests: int
    streams: float
    """Most that were open at once, by the server's account."""
    rate: float
    """Tokens/s of a stream as the client saw it, median."""
    cpu: float
    """CPU seconds a second: of assay-load while it ran, of the others with their start and end."""
    error_p50: float
    error_p99: float
    each_p50: float | None = None
    each_p99: float | None = None


@dataclass(frozen=True)
class Plan:
    rate: float
    requests: int
    url: str
    folder: Path
    core: int


# --- the server -----------------------------------------------------------------------------------


@contextmanager
def paced_server(core: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        sys.executable, "-m", "assay_load.cli", "paced", "--port", str(port), "--ttft", str(TTFT_S),
        "--rate", str(TOKENS_PER_SECOND), "--model", MODEL,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=pinned(core))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise CannotMeasureError("the paced server did not start") from None
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def pinned(core: int) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, {core})


def truth(url: str) -> dict[str, dict[str, float]]:
    with urllib.request.urlopen(f"{url}/paced/truth", timeout=60) as answer:
        return {r["id"]: r for r in json.load(answer)["requests"]}


# --- the clients ----------------------------------------------------------------------------------


def run(command: list[str], plan: Plan, environment: dict[str, str] | None = None) -> float:
    """CPU seconds a second; raises CannotMeasureError."""
    log = plan.folder / "client.log"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with log.open("wb") as sink:
        code = subprocess.run(
            command, stdout=sink, stderr=subprocess.STDOUT, cwd=plan.folder,
            env=os.environ | (environment or {}), preexec_fn=pinned(plan.core),
        ).returncode  # fmt: skip
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise CannotMeasureError(f"{command[0]} ended {code}:\n{tail}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return busy / (time.monotonic() - began)


@dataclass
class Seen:
    """What a client says. Seconds."""

    ttft: list[float]
    tpot: list[float]
    cpu: float
    by_id: dict[str, float] | None = None


def assay_load(plan: Plan) -> Seen:
    workload = plan.folder / "bench.yaml"
    workload.write_text(
        "name: bench\nabout: Poisson arrivals, answers of one length.\n"
        f"arrival: {{kind: poisson, rate: {plan.rate}, pool: {2 * STREAMS}}}\n"
        f"stop: {{sessions: {plan.requests}}}\n"
        "classes:\n  - name: bench\n"
        f"    input: {{kind: constant, tokens: {INPUT_TOKENS}}}\n"
        f"    output: {{kind: constant, tokens: {OUTPUT_TOKENS}}}\n"
    )
    raw = plan.folder / "raw.jsonl"
    command = [
        sys.executable, "-m", "assay_load.cli", "run", str(workload), "--url", plan.url,
        "--out", str(plan.folder / "out"), "--raw", str(raw),
    ]  # fmt: skip
    run(command, plan)
    # The CPU of the run itself; plots and start-up are not part of it.
    result = json.loads((plan.folder / "out" / "result.json").read_text())
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    by_id = {line["id"]: line["first"] - line["sent"] for line in lines}
    tpot = [sum(line["gaps"]) / len(line["gaps"]) for line in lines]
    return Seen(list(by_id.values()), tpot, result["client"]["cpu_share"], by_id)


def vllm_bench(plan: Plan, python: Path) -> Seen:
    file = plan.folder / "vllm.json"
    command = [
        str(python), "-m", "assay_kernels.launcher.vllm_main", "bench", "serve",
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", plan.url,
        "--model", MODEL, "--tokenizer", str(TOKENIZER), "--dataset-name", "random",
        "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
        "--num-prompts", str(plan.requests), "--request-rate", str(plan.rate), "--ignore-eos",
        "--disable-tqdm", "--save-result", "--save-detailed", "--result-filename", str(file),
    ]  # fmt: skip
    cpu = run(command, plan)
    data = json.loads(file.read_text())
    tpot = [sum(gaps) / len(gaps) for gaps in data["itls"] if gaps]
    return Seen([t for t in data["ttfts"] if t], tpot, cpu)


def guidellm(plan: Plan, program: Path) -> Seen:
    file = plan.folder / "guidellm.json"
    command = [
        str(program), "run", "--backend", f"kind=openai_http,target={plan.url},model={MODEL}",
        "--profile", f"kind=poisson,rate={plan.rate}",
        "--constraint", f"kind=max_requests,count={plan.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={file}", "--disable-console-interactive",
    ]  # fmt: skip
    settings = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    cpu = run(command, plan, settings)
    requests = json.loads(file.read_text())["benchmarks"][0]["requests"]["successful"]
    ttft = [r["time_to_first_token_ms"] / 1000 for r in requests]
    tpot = [r["inter_token_latency_ms"] / 1000 for r in requests]
    return Seen(ttft, tpot, cpu)


# --- the measurement ------------------------------------------------------------------------------


def measure(name: str, client: Callable[[Plan], Seen], plan: Plan) -> Row:
    before = set(truth(plan.url))
    seen = client(plan)
    true = {i: r for i, r in truth(plan.url).items() if i not in before}
    if len(seen.ttft) < plan.requests * 0.99:
        raise CannotMeasureError(f"{name}: only {len(seen.ttft)} of {plan.requests} requests")
    server = [r["first"] - r["received"] for r in true.values()]

    def error(percent: float) -> float:
        return 1000 * float(np.percentile(seen.ttft, percent) - np.percentile(server, percent))

    each: list[float | None] = [None, None]
    if seen.by_id is not None:
        errors = [
            1000 * abs(ttft - (true[i]["first"] - true[i]["received"]))
            for i, ttft in seen.by_id.items()
        ]
        each = [float(np.percentile(errors, p)) for p in (50, 99)]
    return Row(
        name, len(seen.ttft), open_at_once(true), 1 / float(np.median(seen.tpot)), seen.cpu,
        error(50), error(99), *each,
    )  # fmt: skip


def open_at_once(true: dict[str, dict[str, float]]) -> float:
    """The most streams that were open at a time: each lasts from its request to its last token."""
    length = TTFT_S + (OUTPUT_TOKENS - 1) / TOKENS_PER_SECOND
    edges = [(r["received"], 1) for r in true.values()]
    edges += [(r["received"] + length, -1) for r in true.values()]
    return float(np.cumsum([step for _, step in sorted(edges)]).max())


def table(rows: list[Row]) -> str:
    lines = [
        "| client | streams at once | tokens/s a stream | CPU, cores | TTFT p50, error ms "
        "| TTFT p99, error ms | each request, p50 / p99 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        each = "" if r.each_p50 is None else f"{r.each_p50:.2f} / {r.each_p99:.2f}"
        lines.append(
            f"| {r.client} | {r.streams:.0f} | {r.rate:.1f} | {r.cpu:.2f} | {r.error_p50:+.2f} "
            f"| {r.error_p99:+.2f} | {each} |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each client's run")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv" / "bin" / "python")
    parser.add_argument(
        "--guidellm", type=Path, default=ROOT / ".venv-guidellm" / "bin" / "guidellm"
    )
    parser.add_argument("--only", choices=("assay-load",), help="leave the others out")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("bench-load: two cores are needed, one for the server", file=sys.stderr)
        return 2
    clients: dict[str, Callable[[Plan], Seen]] = {"assay-load": assay_load}
    if options.only is None:
        for name, program, how in (
            ("vllm bench serve", options.vllm, vllm_bench),
            ("guidellm", options.guidellm, guidellm),
        ):
            if program.exists():
                clients[name] = lambda plan, how=how, program=program: how(plan, program)
            else:
                print(f"bench-load: no {program}, so {name} is left out", flush=True)
    length = TTFT_S + OUTPUT_TOKENS / TOKENS_PER_SECOND
    rate = round(1.05 * STREAMS / length, 1)
    rows: list[Row] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="assay-bench-load-") as work:
        for name, client in clients.items():
            folder = Path(work, name.replace(" ", "-"))
            folder.mkdir()
            try:
                with paced_server(cores[0]) as url:
                    plan = Plan(rate, int(rate * options.seconds), url, folder, cores[1])
                    rows.append(measure(name, client, plan))
            except CannotMeasureError as error:
                failures.append(f"{name}: {error}")
            time.sleep(BETWEEN_S)
    print(table(rows))
    for failure in failures:
        print(f"bench-load: {failure}", file=sys.stderr)
    ours = next((r for r in rows if r.client == "assay-load"), None)
    if ours is None:
        return 2
    kept = passes(ours)
    figures: dict[str, Any] = {"rate": rate, "rows": [asdict(r) for r in rows], "passed": kept}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if kept else 1


def passes(ours: Row) -> bool:
    assert ours.each_p50 is not None
    assert ours.each_p99 is not None
    return (
        ours.streams >= LEAST_STREAMS
        and ours.rate >= 0.98 * TOKENS_PER_SECOND
        and ours.each_p50 <= MAX_ERROR_P50_MS
        and ours.each_p99 <= MAX_ERROR_P99_MS
        and abs(ours.error_p50) <= MAX_ERROR_P50_MS
        and abs(ours.error_p99) <= MAX_ERROR_P99_MS
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
