"""What the launcher says to whoever started it."""

from __future__ import annotations

import json
import shlex
import sys
import time

from assay_kernels import __version__
from assay_kernels.launcher import client, host, ready
from assay_kernels.launcher.settings import Settings
from assay_kernels.settings import cpu_operators
from assay_kernels.vllm_plugin import proof


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line per change."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.words = ""

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self.began)

    def show(self, words: str) -> None:
        if self.terminal:
            print(f"\r\033[K{self.seconds:>4} s  {words}", end="", flush=True)
        elif words != self.words:
            print(f"{self.seconds:>4} s  {words}", flush=True)
        self.words = words

    def clear(self) -> None:
        if self.terminal and self.words:
            print("\r\033[K", end="", flush=True)


def announce(settings: Settings) -> None:
    print(f"assay {__version__}: {settings.model}, profile {settings.profile}, log {settings.log}")
    operators = cpu_operators(settings.variables)
    print(f"cpu: {host.Cpu.here().describe(operators)}")
    if (binding := settings.thread_binding) is not None:
        print(f"cpu: more workers than NUMA nodes, so VLLM_CPU_OMP_THREADS_BIND={binding}")
    for line in host.Gpus.here().advice(settings.profile.parent):
        print(line)
    sys.stdout.flush()


def announce_ready(
    settings: Settings,
    url: str,
    seconds: int,
    proofs: list[proof.Proof],
    report: ready.Report | None,
) -> None:
    summaries = [p.summary for p in proofs if p.summary is not None]
    print(f"ready after {seconds} s; {len(proofs)} processes run the plugin")
    for table in dict.fromkeys(summary.table() for summary in summaries):
        print(table)
    if report is None:
        print(f"\nthe canary has opened the door: {url}/v1")
    else:
        print(f"\n  {report.words()}")
        if report.question:
            print(f"  Q: {report.question}\n  A: {report.answer}")
        print(f"\n{url}/v1   model: {report.model}")
        body = json.dumps(client.body(report.model, report.question or "Hello"))
        key = " -H 'Authorization: Bearer ...'" if settings.keys_file else ""
        print(
            f"curl -s {url}/v1/chat/completions{key}"
            f" -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )
    print("Ctrl-C stops it.", flush=True)
