"""DeepSeek V4 checkpoints: dialects, names, reading, writing. Needs torch and safetensors only."""

from assay_kernels.checkpoint.config import V4Config
from assay_kernels.checkpoint.dialect import Dialect, declared_dialect
from assay_kernels.checkpoint.errors import CheckpointError, CheckpointWarning
from assay_kernels.checkpoint.names import Scheme, convert_name, format_name, parse_name
from assay_kernels.checkpoint.reader import (
    Checkpoint,
    Module,
    dequantized_state_dict,
    open_checkpoint,
    scan_checkpoint,
    weights_iterator,
)
from assay_kernels.checkpoint.spec import Kind
from assay_kernels.checkpoint.weights import (
    FP8BlockWeight,
    MXFP4Weight,
    NVFP4Weight,
    Precision,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "Dialect",
    "FP8BlockWeight",
    "Kind",
    "MXFP4Weight",
    "Module",
    "NVFP4Weight",
    "Precision",
    "Scheme",
    "V4Config",
    "convert_name",
    "declared_dialect",
    "dequantized_state_dict",
    "format_name",
    "open_checkpoint",
    "parse_name",
    "scan_checkpoint",
    "weights_iterator",
]
