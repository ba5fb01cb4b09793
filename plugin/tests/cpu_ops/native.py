"""Which of the native library's V4 operators run on this host, found out without dying of it.

Run as a script (from the folder above, `python -m cpu_ops.native`) it tries each operator in a
fork and prints a JSON object name -> null or the reason why not. An operator compiled for
instructions that the CPU lacks kills its process, so none is called in the test process untried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

MATRICES = ("convert_weight_packed", "bmm_cpu", "weight_packed_linear")


def try_all() -> dict[str, str | None]:
    """Name -> None if it ran, else why not."""
    import torch
    from vllm.platforms import current_platform

    from . import cases

    current_platform.import_kernels()
    torch.set_num_threads(1)  # a forked child has no thread pool

    def attempt(name: str) -> None:
        if name in MATRICES:
            weight = torch.ones(2, 64, 64, dtype=torch.bfloat16)
            packed = torch.ops._C.convert_weight_packed(weight)
            if name == "bmm_cpu":
                for rows in (1, 64):
                    x = torch.ones(2, rows, 64, dtype=torch.bfloat16)
                    torch.ops._C.bmm_cpu(torch.empty_like(x), x, packed, True, None)
            elif name == "weight_packed_linear":
                packed = torch.ops._C.convert_weight_packed(weight[0].contiguous())
                for rows in (1, 64):
                    x = torch.ones(rows, 64, dtype=torch.bfloat16)
                    torch.ops._C.weight_packed_linear(torch.empty_like(x), x, packed, None, True)
            return
        for tokens in (1, 40):
            getattr(torch.ops._C, name)(*cases.arguments(name, tokens))

    verdicts: dict[str, str | None] = {}
    for name in (*MATRICES, *cases.CASES):
        if not hasattr(torch.ops._C, name):
            verdicts[name] = "vLLM's library for this CPU does not have it"
            continue
        child = os.fork()
        if child == 0:
            try:
                attempt(name)
            except BaseException as error:
                print(f"{name}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            verdicts[name] = f"killed by {signal.Signals(os.WTERMSIG(status)).name} on this CPU"
        else:
            verdicts[name] = "raised an error" if os.WEXITSTATUS(status) else None
    return verdicts


def probe() -> dict[str, str | None]:
    """`try_all` in a process of its own."""
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", f"{here.name}.native"],
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    verdicts: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    return verdicts


if __name__ == "__main__":
    print(json.dumps(try_all()))
