"""Which of the supported checkpoint dialects a directory holds (design contract 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from assay_kernels.checkpoint.config import CONFIG_FILE
from assay_kernels.checkpoint.errors import CheckpointError, Fault
from assay_kernels.checkpoint.header import TensorInfo
from assay_kernels.numerics.fp8 import FP8_BLOCK
from assay_kernels.numerics.nvfp4 import BLOCK

PACKED_NVFP4 = "nvfp4-pack-quantized"
"""compressed-tensors' name of its NVFP4 format (`CompressionFormat`)."""

_QUANTISED_DTYPES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"})


class Dialect(StrEnum):
    """NATIVE: DeepSeek's release (MXFP4 or FP8 experts). A, B, C: see the design's contract 2.
    BF16: nothing quantised."""

    NATIVE = "native"
    A = "A"
    B = "B"
    C = "C"
    BF16 = "bf16"


# The tensor without which a dialect's mark in config.json is a lie.
_EVIDENCE = {
    Dialect.A: ".weight_scale_2",
    Dialect.B: ".weight_scale_2",
    Dialect.C: ".weight_global_scale",
}


def _fail(rule: str) -> CheckpointError:
    return CheckpointError(CONFIG_FILE, None, f"quantization_config: {rule}", Fault.MARK)


def _block_fp8(quantization: Mapping[str, Any]) -> Dialect:
    size = quantization.get("weight_block_size")
    if size != [FP8_BLOCK, FP8_BLOCK]:
        raise _fail(f"weight_block_size must be [{FP8_BLOCK}, {FP8_BLOCK}], is {size!r}")
    algorithm = quantization.get("moe_quant_algo")
    if algorithm is None:
        return Dialect.NATIVE
    if str(algorithm).upper() == "NVFP4":
        return Dialect.A
    raise _fail(f"moe_quant_algo must be NVFP4 or absent, is {algorithm!r}")


def _modelopt(quantization: Mapping[str, Any]) -> Dialect:
    algorithm = quantization.get("quant_algo")
    if str(algorithm).upper() != "NVFP4":
        raise _fail(f"quant_algo of a ModelOpt checkpoint must be NVFP4, is {algorithm!r}")
    group = quantization.get("group_size")
    if group not in (None, BLOCK):
        raise _fail(f"group_size must be {BLOCK}, is {group!r}")
    return Dialect.B


def _compressed_tensors(quantization: Mapping[str, Any]) -> Dialect:
    """A mixed checkpoint names its formats group by group."""
    groups = quantization.get("config_groups")
    formats = {quantization.get("format")}
    if isinstance(groups, dict):
        formats |= {group.get("format") for group in groups.values() if isinstance(group, dict)}
    if PACKED_NVFP4 not in formats:
        found = sorted(str(name) for name in formats)
        raise _fail(f"format of a compressed-tensors checkpoint must be {PACKED_NVFP4}, is {found}")
    return Dialect.C


_BY_METHOD = {
    "fp8": _block_fp8,
    "deepseek_v4_fp8": _block_fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
}


def detect_dialect(
    quantization: Mapping[str, Any] | None, tensors: Iterable[TensorInfo]
) -> Dialect:
    """The dialect by config.json's mark, confirmed by the tensors' headers.

    Raises CheckpointError for a mark that is not known or that the tensors contradict.
    """
    if quantization is None:
        for info in tensors:
            if info.dtype in _QUANTISED_DTYPES:
                raise CheckpointError(
                    info.file,
                    info.name,
                    f"is {info.dtype} but {CONFIG_FILE} has no quantization_config",
                    Fault.MARK,
                )
        return Dialect.BF16
    dialect = declared_dialect(quantization)
    evidence = _EVIDENCE.get(dialect)
    if evidence is not None and not any(info.name.endswith(evidence) for info in tensors):
        raise _fail(f"says dialect {dialect}, but no tensor name ends in {evidence}")
    return dialect


def declared_dialect(quantization: Mapping[str, Any]) -> Dialect:
    """The dialect that config.json's `quantization_config` claims, tensors unseen.

    Older ModelOpt exports nest their marks under "quantization" (hf_quant_config.json).
    Raises CheckpointError for a mark that is not known.
    """
    quantization = {**quantization.get("quantization", {}), **quantization}
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in _BY_METHOD:
        known = ", ".join(sorted(_BY_METHOD))
        raise _fail(f"quant_method must be one of {known}, is {method!r}")
    return _BY_METHOD[method](quantization)
