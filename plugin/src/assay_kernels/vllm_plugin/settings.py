"""What the environment may switch, read once and refused when misspelt."""

from __future__ import annotations

import os
from typing import cast, get_args

from assay_kernels.kernels.cpu.nvfp4 import Arithmetic

ARITHMETIC_VARIABLE = "ASSAY_ARITHMETIC"


def arithmetic() -> Arithmetic:
    """Arithmetic of the NVFP4 layers, from ``ASSAY_ARITHMETIC``; ``w4a16`` unless told.

    Raises ValueError that names the variable and the values it may have.
    """
    value = os.environ.get(ARITHMETIC_VARIABLE, "w4a16")
    if value not in get_args(Arithmetic):
        allowed = ", ".join(get_args(Arithmetic))
        raise ValueError(f"{ARITHMETIC_VARIABLE}={value!r}: must be one of {allowed}")
    return cast(Arithmetic, value)
