"""What the environment may switch, read once and refused when misspelt.

Imports nothing heavy: the launcher reads it before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

Arithmetic = Literal["w4a16", "w4a4", "reference"]
CpuOperators = Literal["auto", "torch", "native"]
Kernels = Literal["auto", "sm100", "sm90", "cpu", "library", "reference"]
OnMismatch = Literal["fallback", "abort"]

ARITHMETIC_VARIABLE = "ASSAY_ARITHMETIC"
CPU_OPERATORS_VARIABLE = "ASSAY_CPU_OPS"
KERNELS_VARIABLE = "ASSAY_KERNELS"
ON_MISMATCH_VARIABLE = "ASSAY_ON_MISMATCH"
REQUIRE_VARIABLE = "ASSAY_REQUIRE"
SELFCHECK_TIMEOUT_VARIABLE = "ASSAY_SELFCHECK_TIMEOUT"

SELFCHECK_TIMEOUT_SECONDS = 300.0
"""For one step of the self-check. A step may compile a kernel, which takes seconds."""


def _choice(variables: Mapping[str, str], name: str, values: Any, default: str) -> str:
    value = variables.get(name, default)
    if value not in get_args(values):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(get_args(values))}")
    return value


def arithmetic(variables: Mapping[str, str] = os.environ) -> Arithmetic:
    """Arithmetic of the NVFP4 layers; ``w4a16`` unless told.

    Raises ValueError that names the variable and the values it may have.
    """
    return cast(Arithmetic, _choice(variables, ARITHMETIC_VARIABLE, Arithmetic, "w4a16"))


def cpu_operators(variables: Mapping[str, str] = os.environ) -> CpuOperators:
    """Where V4's operators come from on a CPU; ``auto`` asks it for AMX tiles. As above."""
    return cast(CpuOperators, _choice(variables, CPU_OPERATORS_VARIABLE, CpuOperators, "auto"))


def kernels(variables: Mapping[str, str] = os.environ) -> Kernels:
    """Which kernels serve NVFP4 layers; ``auto`` takes the hardware's. As above."""
    return cast(Kernels, _choice(variables, KERNELS_VARIABLE, Kernels, "auto"))


def on_mismatch(variables: Mapping[str, str] = os.environ) -> OnMismatch:
    """What follows a failed check: the next kernels in the chain, or the end. As above."""
    return cast(OnMismatch, _choice(variables, ON_MISMATCH_VARIABLE, OnMismatch, "fallback"))


def require(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether only kernels of this package may serve, its reference included; true unless told."""
    return _choice(variables, REQUIRE_VARIABLE, Literal["0", "1"], "1") == "1"


def selfcheck_timeout(variables: Mapping[str, str] = os.environ) -> float:
    """Seconds that one step of the self-check may take. Raises ValueError for what is no number
    above zero."""
    text = variables.get(SELFCHECK_TIMEOUT_VARIABLE, "") or str(SELFCHECK_TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{SELFCHECK_TIMEOUT_VARIABLE}={text!r}: must be seconds above 0")
    return seconds


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Where what is compiled while serving, and the self-check's report, are kept."""
    given = variables.get("ASSAY_CACHE_DIR") or variables.get("XDG_CACHE_HOME")
    return Path(given) if given else Path.home() / ".cache"
