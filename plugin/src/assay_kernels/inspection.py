"""What a checkpoint is made of, which kernel will run each part, and whether it fits:
`assay-kernels inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from assay_kernels.checkpoint.config import CSA_RATIO, HCA_RATIO, V4Config
from assay_kernels.checkpoint.reader import Checkpoint, Module
from assay_kernels.checkpoint.spec import Kind
from assay_kernels.checkpoint.weights import Precision

ARCHITECTURES = ("sm_100", "sm_90", "cpu")

# vLLM's KV formats for V4 (deepseek_v4/attention.py): 448 B fp8 + 128 B bf16 rope + 8 B scale a
# token, and 128 B fp8 + 4 B scale a token in the indexer's cache.
KV_BYTES, INDEX_BYTES = 584, 132
SLIDING_WINDOW = 128

RESERVED = 0.10
"""Share of a GPU's memory that weights and KV do not get: activations, graphs, workspace."""

_NVFP4_KERNELS: Mapping[Kind, str] = {
    Kind.ROUTED: "grouped_l1 + grouped_l2",
    Kind.SHARED: "dense_swiglu + dense",
    Kind.ATTENTION: "dense",
    Kind.WO_A: "wo_a",
    Kind.COMPRESSOR: "compressor",
    Kind.INDEXER: "dense",
    Kind.INDEXER_COMPRESSOR: "compressor",
    Kind.MTP: "dense",
}

_SPLIT_BY_HEADS = ("attn.wq_b", "attn.wo_a", "attn.wo_b", "attn.attn_sink")


@dataclass(frozen=True)
class Component:
    """A kind of weight in one precision."""

    component: str
    dtype: str
    kernel: str
    weights: int
    nbytes: int
    nbytes_per_gpu: int


@dataclass(frozen=True)
class Fit:
    """Whether it fits `gpus` GPUs of `gigabytes` GB, and with how much KV.

    weights_per_gpu, kv_per_gpu: bytes. kv_tokens: tokens of one long context that the KV holds;
    kv_bytes_per_token: of all layers, windows not counted, which do not grow with the context
    """

    gpus: int
    gigabytes: float
    fits: bool
    weights_per_gpu: int
    kv_per_gpu: int
    kv_bytes_per_token: float
    kv_tokens: int


@dataclass(frozen=True)
class Inspection:
    dialect: str
    architecture: str
    components: list[Component]
    nbytes: int
    fit: Fit

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _kernel(module: Module, architecture: str) -> str:
    if module.precision is Precision.NVFP4:
        activations = "W4A4" if architecture == "sm_100" else "W4A16"
        return f"assay {_NVFP4_KERNELS[module.kind]} ({architecture}, {activations})"
    if module.precision is Precision.MXFP4:
        return "not served: convert to A, B or C"
    if module.precision is Precision.FP8_BLOCK:
        return "vLLM FP8 128x128" if architecture != "cpu" else "vLLM CPU FP8"
    if module.kind is Kind.PLAIN:
        return "vLLM"
    return "vLLM unquantised"


def _per_gpu(module: Module, gpus: int) -> int:
    """Bytes on one GPU under tensor and expert parallelism: experts, heads, the shared expert and
    the vocabulary are divided, everything else is on every GPU."""
    if module.name in ("embed", "head") or module.kind in (Kind.ROUTED, Kind.SHARED):
        return -(-module.nbytes // gpus)
    if module.kind is not Kind.INDEXER and module.name.endswith(_SPLIT_BY_HEADS):
        return -(-module.nbytes // gpus)
    return module.nbytes


def kv_bytes_per_token(config: V4Config) -> float:
    """Bytes that one more token of context adds on each GPU, all layers; the KV has one head and is
    on every GPU."""
    total = 0.0
    for ratio in config.compress_ratios[: config.num_hidden_layers]:
        if ratio == CSA_RATIO:
            total += (KV_BYTES + INDEX_BYTES) / CSA_RATIO
        elif ratio == HCA_RATIO:
            total += KV_BYTES / HCA_RATIO
    return total


def _fit(checkpoint: Checkpoint, weights: int, gpus: int, gigabytes: float) -> Fit:
    per_token = kv_bytes_per_token(checkpoint.config)
    room = int(gigabytes * 1e9 * (1 - RESERVED)) - weights
    windows = SLIDING_WINDOW * KV_BYTES * checkpoint.config.num_hidden_layers
    tokens = int((room - windows) / per_token) if per_token and room > windows else 0
    fits = room > windows
    return Fit(gpus, gigabytes, fits, weights, max(room, 0), round(per_token, 2), tokens)


def inspect(
    checkpoint: Checkpoint, *, architecture: str = "sm_100", gpus: int = 8, gigabytes: float = 192
) -> Inspection:
    """Per component: dtype, kernel, bytes; and whether `gpus` GPUs of `gigabytes` GB hold it."""
    rows: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for module in checkpoint.modules().values():
        kind = "mtp" if module.name.startswith("mtp.") else str(module.kind)
        key = (kind, str(module.precision), _kernel(module, architecture))
        count, nbytes, share = rows.get(key, (0, 0, 0))
        rows[key] = (count + 1, nbytes + module.nbytes, share + _per_gpu(module, gpus))
    components = [Component(*key, *value) for key, value in rows.items()]
    components.sort(key=lambda row: (-row.nbytes, row.component))
    nbytes = sum(row.nbytes for row in components)
    per_gpu = sum(row.nbytes_per_gpu for row in components)
    fit = _fit(checkpoint, per_gpu, gpus, gigabytes)
    return Inspection(str(checkpoint.dialect), architecture, components, nbytes, fit)


def text(inspection: Inspection) -> str:
    """The table, one aligned line a component."""
    lines = [
        f"dialect {inspection.dialect}, {inspection.nbytes / 1e9:.3f} GB, "
        f"{inspection.architecture}",
        f"{'component':<20}{'dtype':<11}{'weights':>8}{'GB':>10}{'GB/GPU':>9}  kernel",
    ]
    for row in inspection.components:
        lines.append(
            f"{row.component:<20}{row.dtype:<11}{row.weights:>8}{row.nbytes / 1e9:>10.3f}"
            f"{row.nbytes_per_gpu / 1e9:>9.3f}  {row.kernel}"
        )
    fit = inspection.fit
    verdict = (
        f"fits: {fit.kv_per_gpu / 1e9:.1f} GB a GPU for KV, "
        f"{fit.kv_bytes_per_token:.0f} B a token, {fit.kv_tokens:,} tokens of context in all"
        if fit.fits
        else "does not fit"
    )
    lines.append(
        f"{fit.gpus} GPUs of {fit.gigabytes:g} GB: {fit.weights_per_gpu / 1e9:.1f} GB of weights "
        f"each ({RESERVED:.0%} kept free): {verdict}"
    )
    return "\n".join(lines)
