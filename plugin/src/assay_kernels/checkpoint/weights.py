"""A logical weight in memory, whatever dialect it came from, and how it is stored in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from assay_kernels.checkpoint.header import TensorInfo
from assay_kernels.numerics.fp8 import FP8_BLOCK, FP8Block, dequantize_fp8, quantize_fp8
from assay_kernels.numerics.mxfp4 import (
    MX_BLOCK,
    MXFP4,
    dequantize_mxfp4,
    quantize_mxfp4,
    to_nvfp4,
)
from assay_kernels.numerics.nvfp4 import BLOCK, NVFP4, dequantize, quantize


@dataclass(frozen=True, eq=False)
class NVFP4Weight(NVFP4):
    """NVFP4 plus the static activation scale.

    global_scale and input_scale are float32 scalars and multipliers in every dialect;
    input_scale None means that activations are scaled dynamically.
    """

    input_scale: Tensor | None = None


FP8BlockWeight = FP8Block
MXFP4Weight = MXFP4

Weight = NVFP4Weight | FP8BlockWeight | MXFP4Weight | Tensor


class Precision(StrEnum):
    NVFP4 = "nvfp4"
    FP8_BLOCK = "fp8_block"
    MXFP4 = "mxfp4"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    INT = "int"


PLAIN_PRECISION = {
    "BF16": Precision.BF16,
    "F16": Precision.FP16,
    "F32": Precision.FP32,
    "I32": Precision.INT,
    "I64": Precision.INT,
}


def plain(weight: Weight) -> Tensor:
    """The weight's values: fp32 from a quantised form, the tensor itself otherwise."""
    if isinstance(weight, NVFP4):
        return dequantize(weight)
    if isinstance(weight, FP8Block):
        return dequantize_fp8(weight)
    if isinstance(weight, MXFP4):
        return dequantize_mxfp4(weight)
    return weight


def as_nvfp4(weight: Weight, input_scale: Tensor | None = None) -> NVFP4Weight:
    """NVFP4 of any weight. NVFP4 stays as it is and MXFP4 converts exactly; others are rounded.

    Raises numerics.NotLosslessError for MXFP4 that NVFP4 cannot hold.
    """
    if isinstance(weight, NVFP4Weight):
        return weight
    packed = to_nvfp4(weight) if isinstance(weight, MXFP4) else quantize(plain(weight))
    return NVFP4Weight(packed.codes, packed.block_scale, packed.global_scale, input_scale)


def as_fp8(weight: Weight) -> FP8Block:
    """FP8 128x128 with power-of-two scales; FP8 stays as it is."""
    return weight if isinstance(weight, FP8Block) else quantize_fp8(plain(weight))


def as_mxfp4(weight: Weight) -> MXFP4:
    """MXFP4 of any weight, rounded; MXFP4 stays as it is."""
    return weight if isinstance(weight, MXFP4) else quantize_mxfp4(plain(weight))


@dataclass(frozen=True)
class Role:
    """One tensor of a stored weight: its possible parameter names, dtypes and its shape.

    shape: from the logical shape [N, K]; () also admits a one-element vector
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], tuple[int, ...]]
    optional: bool = False

    def fits(self, info: TensorInfo, logical: tuple[int, ...]) -> bool:
        """Whether `info` has this role's shape for a logical [N, K]."""
        expected = self.shape(*logical)
        return info.shape == expected or (expected == () and info.shape == (1,))


@dataclass(frozen=True)
class Encoding:
    """How a quantised matrix is laid out over tensors; roles by the field that they fill."""

    precision: Precision
    roles: dict[str, Role]


def _scalar(_rows: int, _cols: int) -> tuple[int, ...]:
    return ()


def _per(row_block: int, col_block: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda rows, cols: (-(-rows // row_block), -(-cols // col_block))


MODELOPT_NVFP4 = Encoding(
    Precision.NVFP4,
    {
        "codes": Role(("weight",), ("U8",), _per(1, 2)),
        "block_scale": Role(("weight_scale",), ("F8_E4M3",), _per(1, BLOCK)),
        "global_scale": Role(("weight_scale_2",), ("F32",), _scalar),
        "input_scale": Role(("input_scale",), ("F32",), _scalar, optional=True),
    },
)

# compressed-tensors divides by its global scales: they are the reciprocals of ModelOpt's.
COMPRESSED_NVFP4 = Encoding(
    Precision.NVFP4,
    {
        "codes": Role(("weight_packed",), ("U8",), _per(1, 2)),
        "block_scale": Role(("weight_scale",), ("F8_E4M3",), _per(1, BLOCK)),
        "global_scale": Role(("weight_global_scale",), ("F32",), _scalar),
        "input_scale": Role(("input_global_scale",), ("F32",), _scalar, optional=True),
    },
)

BLOCK_FP8 = Encoding(
    Precision.FP8_BLOCK,
    {
        "weight": Role(("weight",), ("F8_E4M3",), _per(1, 1)),
        "scale": Role(
            ("scale", "weight_scale_inv", "weight_scale"),
            ("F8_E8M0", "F32", "BF16"),
            _per(FP8_BLOCK, FP8_BLOCK),
        ),
    },
)

NATIVE_MXFP4 = Encoding(
    Precision.MXFP4,
    {
        "codes": Role(("weight",), ("I8", "U8"), _per(1, 2)),
        "scale": Role(("scale", "weight_scale"), ("F8_E8M0", "U8"), _per(1, MX_BLOCK)),
    },
)


def encode_nvfp4(weight: NVFP4Weight, encoding: Encoding) -> dict[str, Tensor]:
    """Parameters of an NVFP4 weight as dialects A and B (MODELOPT_NVFP4) or C store them."""
    fields = {
        "codes": weight.codes,
        "block_scale": weight.block_scale,
        "global_scale": weight.global_scale,
        "input_scale": weight.input_scale,
    }
    if encoding is COMPRESSED_NVFP4:
        for name in ("global_scale", "input_scale"):
            value = fields[name]
            fields[name] = None if value is None else value.reciprocal().reshape(1)
    return {
        encoding.roles[name].names[0]: value for name, value in fields.items() if value is not None
    }


def encode_fp8(weight: FP8Block) -> dict[str, Tensor]:
    """Parameters of an FP8 weight as DeepSeek stores them: UE8M0 where the scale is a power of
    two, else fp32."""
    ue8m0 = weight.scale.to(torch.float8_e8m0fnu)
    exact = torch.equal(ue8m0.float(), weight.scale)
    return {"weight": weight.weight, "scale": ue8m0 if exact else weight.scale}


def encode_mxfp4(weight: MXFP4) -> dict[str, Tensor]:
    """Parameters of an MXFP4 weight as DeepSeek's release stores them."""
    return {
        "weight": weight.codes.view(torch.int8),
        "scale": weight.scale.view(torch.float8_e8m0fnu),
    }
