"""What the environment may switch, read once and refused when misspelt.

Imports nothing heavy: the launcher reads it before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

Arithmetic = Literal["w4a16", "w4a4", "reference"]
CpuOperators = Literal["auto", "torch", "native"]

ARITHMETIC_VARIABLE = "ASSAY_ARITHMETIC"
CPU_OPERATORS_VARIABLE = "ASSAY_CPU_OPS"


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
