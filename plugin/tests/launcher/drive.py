"""`assay-kernels` with the fake in vLLM's place, and less patience."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from assay_kernels import cli
from assay_kernels.launcher import serve, server, settings

FAKE = Path(__file__).with_name("fake_vllm.py")


def with_the_fake(wished: settings.Settings) -> int:
    return serve.serve(replace(wished, vllm=(sys.executable, str(FAKE))))


if __name__ == "__main__":
    settings.STOP_MARGIN_SECONDS = float(os.environ.get("FAKE_GRACE", "20"))
    server.RANK_SECONDS = 2.0
    cli.serve = with_the_fake
    sys.exit(cli.main())
