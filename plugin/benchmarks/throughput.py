"""Output tokens/s of the NVFP4 checkpoint against the bf16 model derived from it, at several
concurrencies.

Both run on the same vLLM with the same plugin and profile, each in an engine process that stays up
for the whole run. Only one of the two works at a time, and they take turns (A B B A A B ..), so
that a machine that slows down or speeds up does it to both; the ratio of a pair of neighbouring
runs is what is kept, and its median over the repetitions judged.

The engine is driven directly, not through HTTP: on a small machine the server, its JSON and the
client share the cores with the model, and that cost, being the same for both, would only pull the
ratio towards 1.

A run sends `concurrency` prompts at once and lets each produce the same number of tokens,
end-of-sequence ignored; prefill is in the time. Prompts rotate, so no run repeats one that is in
the prefix cache.

Exit code: 0 every ratio is at least the bound, 1 one is not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from offline import CHECKPOINT, PROFILE, REPO, start_engine

MIN_RATIO = 0.95
CONCURRENCIES = (1, 8, 16)
MAX_SPREAD = 2.0
"""Largest over smallest ratio of one concurrency: beyond it something else used the machine."""
OUTPUT_TOKENS = 96
PROMPT_TOKENS = 48
START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 300.0
RESULTS = REPO / "docs" / "results" / "throughput-cpu.json"
FIRST_PLAIN_TOKEN = 64
"""Ids below this are special tokens in the miniature's vocabulary."""


class CannotMeasureError(Exception):
    """An engine did not start, died or did not answer; exit code 2."""


# --- the engine process: one JSON line in, one out ------------------------------------------------


def serve_lines(checkpoint: Path, profile: Path) -> None:
    """Answer each line {"prompts": [[id, ..], ..], "tokens": n} with {"seconds": s, "tokens":
    total}."""
    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import SamplingParams

    llm = start_engine(checkpoint, profile)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        plan = SamplingParams(
            max_tokens=job["tokens"], ignore_eos=True, temperature=0, detokenize=False
        )
        prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        started = time.perf_counter()
        done = llm.generate(prompts, plan, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = sum(len(answer.outputs[0].token_ids) for answer in done)
        answers.write(json.dumps({"seconds": seconds, "tokens": made}) + "\n")


class Engine:
    """A running `serve_lines` process."""

    def __init__(self, name: str, checkpoint: Path, profile: Path, mode: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(checkpoint), "--profile", str(profile)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("wb"), text=True,
            env=os.environ | {"ASSAY_ARITHMETIC": mode},
        )  # fmt: skip
        self._answer(START_TIMEOUT_S)

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Output tokens/s of one batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer(RUN_TIMEOUT_S)
        if answer["tokens"] != tokens * len(prompts):
            raise CannotMeasureError(
                f"{self.name}: {answer['tokens']} tokens, not {tokens * len(prompts)}"
            )
        return float(answer["tokens"] / answer["seconds"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        stop = threading.Timer(timeout_s, self._process.kill)
        stop.start()
        line = self._process.stdout.readline()
        stop.cancel()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise CannotMeasureError(f"the {self.name} engine ended or was too slow:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        pipe: IO[str] | None = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- the measurement ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Medians at one concurrency; `ratios` holds one NVFP4 / bf16 ratio a repetition."""

    concurrency: int
    nvfp4: float
    bf16: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def noisy(self) -> bool:
        return max(self.ratios) > MAX_SPREAD * min(self.ratios)


class Prompts:
    """Prompts that never repeat: each is the same length with other ids in front."""

    def __init__(self, vocabulary: int) -> None:
        self._next = 0
        self._plain = vocabulary - FIRST_PLAIN_TOKEN

    def take(self, count: int) -> list[list[int]]:
        out = []
        for _ in range(count):
            # 7919 is prime, so neighbouring prompts differ from their first token on.
            out.append(
                [
                    FIRST_PLAIN_TOKEN + (self._next * 7919 + i * 31) % self._plain
                    for i in range(PROMPT_TOKENS)
                ]
            )
            self._next += 1
        return out


def measure(nvfp4: Engine, bf16: Engine, prompts: Prompts, repetitions: int) -> list[Row]:
    """Interleaved repetitions over every concurrency; the first round of each engine is not
    counted."""
    speeds: dict[int, dict[str, list[float]]] = {
        c: {nvfp4.name: [], bf16.name: []} for c in CONCURRENCIES
    }
    for repetition in range(-1, repetitions):
        print(f"repetition {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)
        for concurrency in CONCURRENCIES:
            batch = prompts.take(concurrency)
            order = (nvfp4, bf16) if repetition % 2 else (bf16, nvfp4)
            for engine in order:
                speed = engine.run(batch, OUTPUT_TOKENS)
                if repetition >= 0:
                    speeds[concurrency][engine.name].append(speed)
    return [
        Row(
            concurrency,
            statistics.median(found[nvfp4.name]),
            statistics.median(found[bf16.name]),
            [a / b for a, b in zip(found[nvfp4.name], found[bf16.name], strict=True)],
        )
        for concurrency, found in speeds.items()
    ]


def table(rows: list[Row]) -> str:
    lines = [
        f"{'concurrency':>11}  {'NVFP4 tok/s':>11}  {'bf16 tok/s':>10}  {'ratio':>6}  "
        f"{'lowest':>6}  "
        f"{'highest':>7}  verdict"
    ]
    for r in rows:
        verdict = "noise" if r.noisy else "pass" if r.ratio >= MIN_RATIO else "FAIL"
        lines.append(
            f"{r.concurrency:11d}  {r.nvfp4:11.1f}  {r.bf16:10.1f}  {r.ratio:6.3f}  "
            f"{min(r.ratios):6.3f}  {max(r.ratios):7.3f}  {verdict}"
        )
    return "\n".join(lines)


def markdown(rows: list[Row]) -> str:
    """The rows of the table in the docs."""
    lines = ["| concurrency | NVFP4 tokens/s | bf16 tokens/s | ratio |", "|---|---|---|---|"]
    lines += [f"| {r.concurrency} | {r.nvfp4:.0f} | {r.bf16:.0f} | {r.ratio:.2f} |" for r in rows]
    return "\n".join(lines)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="dialect-B checkpoint")
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--mode", choices=("w4a16", "w4a4", "reference"), default="w4a16")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        serve_lines(options.worker, options.profile)
        return 0
    # So that a SIGTERM stops the engines too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    if options.repetitions < 1:
        parser.error("--repetitions: at least 1")
    try:
        rows, vocabulary = run(options)
    except CannotMeasureError as error:
        print(f"throughput: could not measure: {error}", file=sys.stderr)
        return 2
    except Exception:  # 1 is kept for what was measured and found wanting
        print("throughput: could not measure:", file=sys.stderr)
        traceback.print_exc()
        return 2
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.mode} on {processor()}, {cores} cores: {PROMPT_TOKENS} prompt and "
        f"{OUTPUT_TOKENS} output tokens, {options.repetitions} interleaved repetitions, medians"
    )
    print(table(rows))
    if any(r.noisy for r in rows):
        print("throughput: could not measure: other work used the machine", file=sys.stderr)
        return 2
    print("\n" + markdown(rows))
    passed = all(r.ratio >= MIN_RATIO for r in rows)
    figures = {
        "processor": processor(), "cores": cores, "mode": options.mode, "vocabulary": vocabulary,
        "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS,
        "repetitions": options.repetitions, "min_ratio": MIN_RATIO, "passed": passed,
        "rows": [asdict(r) | {"ratio": r.ratio} for r in rows],
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if passed else 1


def run(options: argparse.Namespace) -> tuple[list[Row], int]:
    """Start an engine on the checkpoint and one on the bf16 derived from it; measure; stop both."""
    from assay_kernels.checkpoint import Dialect
    from assay_kernels.checkpoint.export import derive

    config = options.checkpoint / "config.json"
    if not config.is_file():
        raise CannotMeasureError(f"{options.checkpoint}: no config.json there")
    vocabulary = int(json.loads(config.read_text())["vocab_size"])
    with (
        tempfile.TemporaryDirectory(prefix="assay-throughput-") as work,
        contextlib.ExitStack() as stack,
    ):
        plain = Path(work, "checkpoint-bf16")
        derive(options.checkpoint, plain, Dialect.BF16)
        engines = []
        for name, checkpoint in (("NVFP4", options.checkpoint), ("bf16", plain)):
            log = Path(work, f"{name}.log")
            engine = Engine(name, checkpoint, options.profile, options.mode, log)
            stack.callback(engine.close)
            engines.append(engine)
        return measure(*engines, Prompts(vocabulary), options.repetitions), vocabulary


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
