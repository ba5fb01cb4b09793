"""vLLM's offline engine as the server would start it: same launch profile, same plugin, no HTTP.

Shared by `agreement.py`, `throughput.py` and the fault tests.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

REPO = Path(__file__).resolve().parents[2]
PROFILE = REPO / "docker" / "profiles" / "miniature-cpu.yaml"
CHECKPOINT = REPO / "models" / "miniature" / "checkpoint"
# As in the profile's .env: OpenMP reads it when torch is imported, so it is set before that.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


SERVER_ONLY = {"reasoning_parser", "reasoning_parser_plugin"}
"""Engine arguments that are about text, and want a tokenizer."""


def engine_arguments(profile: Path) -> dict[str, Any]:
    """What a `vllm serve --config` file says about the engine; what it says about the server is
    left out."""
    import yaml
    from vllm.engine.arg_utils import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)} - SERVER_ONLY
    settings = yaml.safe_load(profile.read_text()) or {}
    named = {str(key).replace("-", "_"): value for key, value in settings.items()}
    return {key: value for key, value in named.items() if key in known}


def start_engine(checkpoint: Path, profile: Path = PROFILE, **overrides: Any) -> LLM:
    """An engine in this very process (so that what a test replaces here is replaced in the model
    too).

    Prompts are token ids; no tokenizer is loaded.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    arguments = engine_arguments(profile) | {"model": str(checkpoint), "skip_tokenizer_init": True}
    # The async scheduler would only be a second thread here; a fixed seed keeps runs alike.
    return LLM(**(arguments | {"seed": 0, "disable_log_stats": True} | overrides))
