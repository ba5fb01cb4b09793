"""Writing the dialects: from plain weights, or from a dialect-B checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay_kernels.checkpoint.config import parse_config
from assay_kernels.checkpoint.dialect import PACKED_NVFP4, Dialect
from assay_kernels.checkpoint.errors import CheckpointError
from assay_kernels.checkpoint.names import Scheme, format_name, is_bare
from assay_kernels.checkpoint.spec import Kind, Plain, WeightSpec, mtp_specs, weight_specs
from assay_kernels.checkpoint.weights import (
    COMPRESSED_NVFP4,
    MODELOPT_NVFP4,
    Precision,
    Weight,
    as_fp8,
    as_mxfp4,
    as_nvfp4,
    encode_fp8,
    encode_mxfp4,
    encode_nvfp4,
    plain,
)
from assay_kernels.checkpoint.writer import SHARD_BYTES, write_checkpoint
from assay_kernels.numerics.fp8 import FP8_BLOCK
from assay_kernels.numerics.nvfp4 import BLOCK, global_scale

_WHOLE_MODEL: Mapping[Kind, Precision] = {
    kind: Precision.NVFP4 for kind in Kind if kind is not Kind.PLAIN
}

_FP8_BODY: Mapping[Kind, Precision] = {
    Kind.SHARED: Precision.FP8_BLOCK,
    Kind.ATTENTION: Precision.FP8_BLOCK,
    Kind.WO_A: Precision.FP8_BLOCK,
    Kind.INDEXER: Precision.FP8_BLOCK,
    Kind.MTP: Precision.FP8_BLOCK,
}

RECIPES: Mapping[Dialect, Mapping[Kind, Precision]] = {
    Dialect.NATIVE: {Kind.ROUTED: Precision.MXFP4, **_FP8_BODY},
    Dialect.A: {Kind.ROUTED: Precision.NVFP4, **_FP8_BODY},
    Dialect.B: _WHOLE_MODEL,
    Dialect.C: _WHOLE_MODEL,
    Dialect.BF16: {},
}
"""What each dialect stores quantised; kinds that are not listed stay plain."""

SCHEMES: Mapping[Dialect, Scheme] = {
    Dialect.NATIVE: Scheme.DEEPSEEK,
    Dialect.A: Scheme.DEEPSEEK,
    Dialect.B: Scheme.TRANSFORMERS,
    Dialect.C: Scheme.TRANSFORMERS,
    Dialect.BF16: Scheme.DEEPSEEK,
}

_PLAIN_DTYPES = {Plain.BF16: torch.bfloat16, Plain.FP32: torch.float32}


@dataclass(frozen=True)
class Marks:
    """What a quantization_config says beside its dialect, as stored names.

    unquantised: linear modules that are not quantised
    dynamic: NVFP4 modules without an input_scale, whose activations are scaled per token; ("*",)
        for all of them
    """

    unquantised: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()


DYNAMIC_MARK = "dynamic_input_modules"
"""Our field of quantization_config for `Marks.dynamic`. No loader's own field can say it module by
module: `input_activations.dynamic` of a config group holds for all its targets. Loaders ignore it.
"""


def _quantization_config(dialect: Dialect, marks: Marks) -> dict[str, Any] | None:
    four_bit = {"num_bits": 4, "type": "float", "group_size": BLOCK}
    if dialect in (Dialect.NATIVE, Dialect.A):
        result: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
        }
        if dialect is Dialect.A:
            result["moe_quant_algo"] = "NVFP4"
            if marks.unquantised:
                result["ignore"] = list(marks.unquantised)
    elif dialect is Dialect.B:
        group = {
            "weights": {**four_bit, "dynamic": False},
            "input_activations": {**four_bit, "dynamic": marks.dynamic == ("*",)},
            "targets": ["Linear"],
        }
        result = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": BLOCK,
            "config_groups": {"group_0": group},
            "ignore": list(marks.unquantised),
        }
    elif dialect is Dialect.C:
        scheme = {**four_bit, "strategy": "tensor_group", "symmetric": True}
        group = {
            "format": PACKED_NVFP4,
            "weights": {**scheme, "dynamic": False},
            "input_activations": {**scheme, "dynamic": "local"},
            "targets": ["Linear"],
        }
        result = {
            "quant_method": "compressed-tensors",
            "format": PACKED_NVFP4,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(marks.unquantised),
        }
    else:
        return None
    if marks.dynamic:
        result[DYNAMIC_MARK] = list(marks.dynamic)
    return result


def unquantised_linears(specs: Mapping[str, WeightSpec], dialect: Dialect) -> tuple[str, ...]:
    """Stored names of the linear modules that `dialect` leaves plain although a loader that
    quantises every linear would not; only dialects B and C have to list them."""
    if dialect not in (Dialect.B, Dialect.C):
        return ()
    return tuple(
        format_name(entry, None, SCHEMES[dialect])
        for entry, spec in specs.items()
        if spec.kind is Kind.PLAIN and len(spec.shape) == 2 and not is_bare(entry)
        if entry != "embed"
    )


def dialect_config(config: Mapping[str, Any], dialect: Dialect, marks: Marks) -> dict[str, Any]:
    """config.json of `dialect`: the model's own fields and that dialect's quantization_config."""
    result = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "expert_dtype")
    }
    quantization = _quantization_config(dialect, marks)
    if quantization is not None:
        result["quantization_config"] = quantization
    if dialect in (Dialect.NATIVE, Dialect.A):
        result["expert_dtype"] = "fp4"  # vLLM's name for "experts are not FP8"
    return result


def dynamic_marks(
    nvfp4: Sequence[str], scaled: Collection[str], dialect: Dialect
) -> tuple[str, ...]:
    """`Marks.dynamic` for the NVFP4 entries of which `scaled` have an input_scale."""
    without = [entry for entry in nvfp4 if entry not in scaled]
    if without and len(without) == len(nvfp4):
        return ("*",)
    return tuple(format_name(entry, None, SCHEMES[dialect]) for entry in without)


def _encode(weight: Weight, spec: WeightSpec, dialect: Dialect) -> dict[str, Tensor]:
    """Parameters of one weight as `dialect` stores it."""
    precision = RECIPES[dialect].get(spec.kind)
    if precision is Precision.NVFP4:
        encoding = COMPRESSED_NVFP4 if dialect is Dialect.C else MODELOPT_NVFP4
        return encode_nvfp4(as_nvfp4(weight), encoding)
    if precision is Precision.FP8_BLOCK:
        return encode_fp8(as_fp8(weight))
    if precision is Precision.MXFP4:
        return encode_mxfp4(as_mxfp4(weight))
    value = plain(weight)
    return {"weight": value if spec.plain is Plain.INT else value.to(_PLAIN_DTYPES[spec.plain])}


def _stored(
    weights: Iterable[tuple[str, Weight]], specs: Mapping[str, WeightSpec], dialect: Dialect
) -> Iterator[tuple[str, Tensor]]:
    for entry, weight in weights:
        for parameter, tensor in _encode(weight, specs[entry], dialect).items():
            suffix = None if is_bare(entry) else parameter
            yield format_name(entry, suffix, SCHEMES[dialect]), tensor


def _from_state_dict(
    state: Mapping[str, Tensor],
    specs: Mapping[str, WeightSpec],
    amax: Mapping[str, float],
    dialect: Dialect,
) -> Iterator[tuple[str, Weight]]:
    for entry, spec in specs.items():
        name = entry if is_bare(entry) else f"{entry}.weight"
        if name not in state:
            raise CheckpointError("state dict", name, "is missing")
        value = state[name]
        if tuple(value.shape) != spec.shape:
            rule = f"shape must be {list(spec.shape)}, is {list(value.shape)}"
            raise CheckpointError("state dict", name, rule)
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CheckpointError("state dict", name, "holds a NaN or an infinity")
        if RECIPES[dialect].get(spec.kind) is Precision.NVFP4:
            seen = amax.get(entry)
            scale = None if seen is None else global_scale(torch.tensor(float(seen)))
            yield entry, as_nvfp4(value, scale)
        else:
            yield entry, value


def export_checkpoint(
    directory: str | os.PathLike[str],
    dialect: Dialect,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    activation_amax: Mapping[str, float] | None = None,
    other_files: Iterable[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Quantise plain weights and write them as `dialect`.

    state: canonical tensor names -> fp32 or bf16 tensors; MTP layers are optional
    config: config.json of the model; a quantization_config in it is replaced
    activation_amax: entry -> largest magnitude of its input seen in calibration; an NVFP4 weight
        without one is written without input_scale and is scaled dynamically
    Raises CheckpointError naming a tensor that is missing, misshapen or not finite.
    """
    parsed = parse_config(config)
    specs = dict(weight_specs(parsed))
    if any(name.startswith("mtp.") for name in state):
        specs |= {entry: spec for entry, spec, required in mtp_specs(parsed) if required}
    amax = activation_amax or {}
    weights = _from_state_dict(state, specs, amax, dialect)
    recipe = RECIPES[dialect]
    nvfp4 = [e for e, spec in specs.items() if recipe.get(spec.kind) is Precision.NVFP4]
    marks = Marks(unquantised_linears(specs, dialect), dynamic_marks(nvfp4, amax, dialect))
    write_checkpoint(
        directory,
        _stored(weights, specs, dialect),
        dialect_config(config, dialect, marks),
        other_files=other_files,
        shard_bytes=shard_bytes,
    )


def derive(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dialect: Dialect,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """`assay_kernels.convert.convert` for a whole checkpoint in one go, with nothing to report.

    Raises FileExistsError if the destination already holds a checkpoint, CheckpointError if the
    source is not right.
    """
    from assay_kernels.convert import convert

    convert(source, destination, dialect, shard_bytes=shard_bytes)
