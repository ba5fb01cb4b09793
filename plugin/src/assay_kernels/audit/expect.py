"""What config.json says of a checkpoint, read against what is stored."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from assay_kernels.checkpoint.config import V4Config
from assay_kernels.checkpoint.dialect import Dialect
from assay_kernels.checkpoint.export import RECIPES
from assay_kernels.checkpoint.header import TensorInfo
from assay_kernels.checkpoint.names import parse_name
from assay_kernels.checkpoint.reader import Module, Survey
from assay_kernels.checkpoint.spec import Kind
from assay_kernels.checkpoint.weights import Precision

_PACKED = ("U8", "I8")

# Which config value each side of a weight is, where one value alone decides it.
_SIDES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab_size", "hidden_size"),
    "head": ("vocab_size", "hidden_size"),
    "norm": ("hidden_size",),
    "attn_norm": ("hidden_size",),
    "ffn_norm": ("hidden_size",),
    "attn.wq_a": ("q_lora_rank", "hidden_size"),
    "attn.q_norm": ("q_lora_rank",),
    "attn.wq_b": (None, "q_lora_rank"),
    "attn.wkv": ("head_dim", "hidden_size"),
    "attn.kv_norm": ("head_dim",),
    "attn.wo_b": ("hidden_size", None),
    "attn.attn_sink": ("num_attention_heads",),
    "attn.compressor.norm": ("head_dim",),
    "attn.compressor.wkv": (None, "hidden_size"),
    "attn.compressor.wgate": (None, "hidden_size"),
    "attn.indexer.wq_b": (None, "q_lora_rank"),
    "attn.indexer.weights_proj": ("index_n_heads", "hidden_size"),
    "attn.indexer.compressor.norm": ("index_head_dim",),
    "attn.indexer.compressor.wkv": (None, "hidden_size"),
    "attn.indexer.compressor.wgate": (None, "hidden_size"),
    "ffn.gate": ("n_routed_experts", "hidden_size"),
    "ffn.gate.bias": ("n_routed_experts",),
    "ffn.gate.tid2eid": ("vocab_size", "num_experts_per_tok"),
    "ffn.experts.w1": ("moe_intermediate_size", "hidden_size"),
    "ffn.experts.w2": ("hidden_size", "moe_intermediate_size"),
    "ffn.experts.w3": ("moe_intermediate_size", "hidden_size"),
}

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Contradiction:
    """A config value that every tensor which could tell denies. tensor: one of them."""

    key: str
    configured: object
    stored: object
    tensor: TensorInfo


def _logical(info: TensorInfo) -> tuple[int, ...]:
    """Packed codes hold two values a byte."""
    if info.dtype in _PACKED and len(info.shape) == 2:
        return (info.shape[0], 2 * info.shape[1])
    return info.shape


def _votes(infos: list[TensorInfo]) -> dict[str, dict[int, list[TensorInfo]]]:
    votes: dict[str, dict[int, list[TensorInfo]]] = {}
    for info in infos:
        parsed = parse_name(info.name)
        if parsed is None or parsed[1] not in (None, "weight", "weight_packed"):
            continue
        entry = parsed[0]
        if entry.startswith("mtp."):
            continue
        general = _EXPERT.sub(".experts.", _LAYER.sub("", entry))
        shape = _logical(info)
        sides = _SIDES.get(general, ())
        if len(sides) != len(shape):
            continue
        for key, size in zip(sides, shape, strict=True):
            if key is not None:
                votes.setdefault(key, {}).setdefault(size, []).append(info)
    return votes


def _stored_ratios(infos: list[TensorInfo]) -> dict[int, tuple[int, TensorInfo]]:
    """layer -> (compress ratio by its position bias, the tensor)."""
    found = {}
    for info in infos:
        parsed = parse_name(info.name)
        if parsed is not None and parsed[0].endswith(".attn.compressor.ape"):
            match = _LAYER.match(parsed[0])
            if match is not None and len(info.shape) == 2:
                found[int(match.group(1))] = (info.shape[0], info)
    return found


@lru_cache(maxsize=2)
def contradictions(survey: Survey) -> tuple[Contradiction, ...]:
    """Config values that the tensors deny with one voice; a single odd tensor is its own fault."""
    return tuple(_contradictions(survey))


def _contradictions(survey: Survey) -> Iterator[Contradiction]:
    raw = survey.raw_config
    for key, sizes in _votes(survey.infos).items():
        configured = raw.get(key)
        tensors = [info for infos in sizes.values() for info in infos]
        unanimous = len(sizes) == 1 and len({info.name for info in tensors}) > 1
        stored = next(iter(sizes))
        if unanimous and isinstance(configured, int) and configured != stored:
            yield Contradiction(key, configured, stored, sizes[stored][0])
    layers: list[tuple[int, TensorInfo]] = []
    for info in survey.infos:
        parsed = parse_name(info.name)
        if parsed is not None and parsed[0].startswith("layers."):
            layers.append((int(parsed[0].split(".", 2)[1]), info))
    count = raw.get("num_hidden_layers")
    if layers and isinstance(count, int) and not survey.lost:
        last, info = max(layers, key=lambda item: item[0])
        if last + 1 != count:
            yield Contradiction("num_hidden_layers", count, last + 1, info)
    ratios = raw.get("compress_ratios")
    if isinstance(ratios, list):
        for layer, (stored_ratio, info) in sorted(_stored_ratios(survey.infos).items()):
            if layer < len(ratios) and ratios[layer] != stored_ratio and stored_ratio in (4, 128):
                key = f"compress_ratios[{layer}]"
                yield Contradiction(key, ratios[layer], stored_ratio, info)


def corrected(survey: Survey) -> Mapping[str, Any]:
    """config.json with the values that the tensors speak for."""
    raw = dict(survey.raw_config)
    for found in contradictions(survey):
        if found.key.startswith("compress_ratios["):
            ratios: list[Any] = list(raw["compress_ratios"])
            ratios[int(found.key[16:-1])] = found.stored
            raw["compress_ratios"] = ratios
        else:
            raw[found.key] = found.stored
    layers, listed = raw.get("num_hidden_layers"), raw.get("compress_ratios")
    if isinstance(listed, list) and isinstance(layers, int):
        raw["compress_ratios"] = listed + [0] * (layers - len(listed))
    return raw


def stored_module(module: Module) -> str:
    """The module's name as the file has it."""
    info = next(iter(module.tensors.values()))
    return info.name if "" in module.tensors else info.name.rpartition(".")[0]


class Ignored:
    """The modules that quantization_config says are not quantised: exact names, shell patterns
    (ModelOpt) and `re:` expressions (compressed-tensors)."""

    def __init__(self, config: V4Config) -> None:
        quantization = config.quantization or {}
        patterns: list[str] = []
        for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
            value = quantization.get(key)
            if isinstance(value, list):
                patterns += [pattern for pattern in value if isinstance(pattern, str)]
        plain = {p for p in patterns if not p.startswith("re:") and not set(p) & set("*?[")}
        others = [p for p in patterns if p not in plain]
        sources = [p[3:] if p.startswith("re:") else fnmatch.translate(p) for p in others]
        self._plain = plain
        self._expressions = []
        for source in sources:
            try:
                self._expressions.append(re.compile(source))
            except re.error:
                continue

    def __contains__(self, name: str) -> bool:
        if name in self._plain or any(e.match(name) for e in self._expressions):
            return True
        parent = name
        while "." in parent:
            parent = parent.rpartition(".")[0]
            if parent in self._plain:
                return True
        return False


def declared(
    config: V4Config, dialect: Dialect, module: Module, ignored: Ignored
) -> set[Precision]:
    """The precisions that config.json allows for a weight; empty where it does not say."""
    name = stored_module(module)
    plain = {Precision.BF16, Precision.FP16, Precision.FP32}
    if module.kind is Kind.PLAIN or dialect is Dialect.BF16:
        return set()
    mtp = module.name.startswith("mtp.")
    if dialect in (Dialect.NATIVE, Dialect.A):
        if module.kind is Kind.ROUTED:
            native = (
                Precision.FP8_BLOCK
                if config.raw.get("expert_dtype") == "fp8" and dialect is Dialect.NATIVE
                else Precision.MXFP4
            )
            if dialect is Dialect.NATIVE:
                return {native}
            # vLLM's DeepseekV4FP8Config matches `mtp.N.ffn.experts` against `ignore`.
            experts = name.rpartition(".")[0].rpartition(".")[0]
            skipped = name in ignored or experts in ignored
            return {native} if skipped and mtp else plain if skipped else {Precision.NVFP4}
        wanted = RECIPES[dialect].get(module.kind)
        if wanted is None:
            return plain
        return plain | {wanted} if name in ignored else {wanted}
    if name in ignored:
        return plain
    if dialect is Dialect.C and module.kind is not Kind.ROUTED:
        return {Precision.NVFP4, Precision.FP8_BLOCK}
    return {Precision.NVFP4}
