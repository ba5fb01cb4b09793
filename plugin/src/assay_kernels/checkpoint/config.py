"""The part of a DeepSeek V4 config.json that decides which tensors exist and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay_kernels.checkpoint.errors import CheckpointError, Fault
from assay_kernels.checkpoint.header import parse_json_object

CONFIG_FILE = "config.json"

CSA_RATIO = 4
"""Compressed sparse attention: overlapping windows and an indexer."""

HCA_RATIO = 128
"""Heavily compressed attention: plain windows, no indexer."""

_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}


@dataclass(frozen=True)
class V4Config:
    """Sizes as config.json names them; `compress_ratios` has one entry a layer, MTP layers last.

    raw: the whole config.json
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    index_n_heads: int
    index_head_dim: int
    hc_mult: int
    num_nextn_predict_layers: int
    num_hash_layers: int
    compress_ratios: tuple[int, ...]
    tie_word_embeddings: bool
    raw: Mapping[str, Any]

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """`quantization_config`, or None for an unquantised checkpoint."""
        value: Mapping[str, Any] | None = self.raw.get("quantization_config")
        return value


_SIZES = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "index_n_heads",
    "index_head_dim",
    "hc_mult",
)


def _fail(rule: str) -> CheckpointError:
    return CheckpointError(CONFIG_FILE, None, rule, Fault.CONFIG)


def _size(raw: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _fail(f"{key} must be an integer of at least {minimum}, is {value!r}")
    return value


def _compress_ratios(raw: Mapping[str, Any], layers: int, mtp_layers: int) -> tuple[int, ...]:
    """DeepSeek's config lists ratios, transformers' lists layer types."""
    ratios = raw.get("compress_ratios")
    if ratios is None and isinstance(raw.get("layer_types"), list):
        ratios = [_RATIO_OF_LAYER_TYPE.get(str(name)) for name in raw["layer_types"]]
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise _fail(f"compress_ratios or layer_types must cover {layers} layers")
    for ratio in ratios:
        if ratio not in _RATIO_OF_LAYER_TYPE.values() or isinstance(ratio, bool):
            raise _fail(f"compress ratios must be 0, 4 or 128, found {ratio!r}")
    padded = [*ratios, *[0] * mtp_layers][: layers + mtp_layers]
    return tuple(padded)


def _hash_layers(raw: Mapping[str, Any], layers: int) -> int:
    """The first layers route by a table of token ids (`num_hash_layers`, or `mlp_layer_types`)."""
    types = raw.get("mlp_layer_types")
    if "num_hash_layers" in raw or types is None:
        return min(_size(raw, "num_hash_layers", minimum=0), layers)
    if not isinstance(types, list) or len(types) < layers:
        raise _fail(f"mlp_layer_types must cover {layers} layers")
    count = sum(1 for name in types[:layers] if name == "hash_moe")
    if types[:layers] != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise _fail("mlp_layer_types must be hash_moe layers followed by moe layers")
    return count


def parse_config(raw: Mapping[str, Any]) -> V4Config:
    """Both forms in use: DeepSeek's own and the one that transformers writes."""
    if raw.get("model_type") != "deepseek_v4":
        raise _fail(f"model_type must be deepseek_v4, is {raw.get('model_type')!r}")
    sizes = {key: _size(raw, key) for key in _SIZES}
    mtp_layers = _size(raw, "num_nextn_predict_layers", default=0, minimum=0)
    if sizes["num_attention_heads"] * sizes["head_dim"] % sizes["o_groups"]:
        raise _fail("num_attention_heads * head_dim must be a multiple of o_groups")
    quantization = raw.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise _fail(f"quantization_config must be an object, is {quantization!r}")
    return V4Config(
        **sizes,
        num_nextn_predict_layers=mtp_layers,
        num_hash_layers=_hash_layers(raw, sizes["num_hidden_layers"]),
        compress_ratios=_compress_ratios(raw, sizes["num_hidden_layers"], mtp_layers),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        raw=raw,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object file, or CheckpointError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise CheckpointError(path.name, None, rule, Fault.UNREADABLE) from None
    return parse_json_object(text, path.name)


def read_raw_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint, its values unseen.

    Older ModelOpt exports keep the quantisation in a file of its own, hf_quant_config.json; it is
    taken as `quantization_config` where config.json has none.
    """
    raw = read_json(directory / CONFIG_FILE)
    separate = directory / "hf_quant_config.json"
    if raw.get("quantization_config") is None and separate.is_file():
        quantization = read_json(separate).get("quantization")
        if isinstance(quantization, dict):
            raw = {**raw, "quantization_config": {"quant_method": "modelopt", **quantization}}
    return raw
