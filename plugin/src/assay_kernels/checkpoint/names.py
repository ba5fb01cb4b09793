"""Tensor names: DeepSeek's are canonical, transformers' are the other scheme.

A stored tensor belongs to an *entry*, the canonical name of one logical weight
(`layers.3.attn.wq_a`, `layers.3.attn.attn_sink`), and is one *parameter* of it (`weight`,
`weight_scale`, ...; None for an entry that is a bare tensor). Sources: the names in DeepSeek's
checkpoints and transformers' `modeling_deepseek_v4.py`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

PARAMETERS = frozenset(
    {
        "weight",
        "scale",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "input_scale",
        "weight_packed",
        "weight_global_scale",
        "input_global_scale",
    }
)


class Scheme(StrEnum):
    DEEPSEEK = "deepseek"
    TRANSFORMERS = "transformers"


# Inside a layer; `*` stands for an expert's number.
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.*.w1": "mlp.experts.*.gate_proj",
    "ffn.experts.*.w2": "mlp.experts.*.down_proj",
    "ffn.experts.*.w3": "mlp.experts.*.up_proj",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
}

# Spellings met in the wild that neither scheme uses: transformers 5.17-5.20's `save_pretrained`
# maps back to DeepSeek names but for this norm; older releases had no scorer; some exporters keep
# DeepSeek's expert names under transformers' prefix.
_LAYER_ALIASES = {
    "attn.norm": "attn.kv_norm",
    "self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj",
    "mlp.experts.*.w1": "ffn.experts.*.w1",
    "mlp.experts.*.w2": "ffn.experts.*.w2",
    "mlp.experts.*.w3": "ffn.experts.*.w3",
}

_TOP = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}

# An MTP layer is a layer plus these. transformers has no module for it, so its names stay
# DeepSeek's in either scheme.
_MTP_ONLY = (
    "e_proj",
    "h_proj",
    "enorm",
    "hnorm",
    "norm",
    "emb.tok_emb",
    "head",
    "hc_head_fn",
    "hc_head_base",
    "hc_head_scale",
)

_BARE_LEAVES = frozenset({"attn_sink", "ape", "bias", "tid2eid"})

_LAYER_TO_CANONICAL = {
    **{name: name for name in _LAYER},
    **{other: name for name, other in _LAYER.items()},
    **_LAYER_ALIASES,
}
_MTP_TO_CANONICAL = {**_LAYER_TO_CANONICAL, **{name: name for name in _MTP_ONLY}}
_TOP_TO_CANONICAL = {
    **{name: name for name in _TOP},
    **{other: name for name, other in _TOP.items()},
    **{f"model.{name}": name for name in _TOP},
}

_IN_LAYER = re.compile(r"(?:model\.)?(layers|mtp)\.(0|[1-9][0-9]*)\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"\.experts\.(0|[1-9][0-9]*)\.")


def is_bare(entry: str) -> bool:
    """Whether the entry is one tensor of its own rather than a module with a `weight`."""
    leaf = entry.rpartition(".")[2]
    return leaf in _BARE_LEAVES or leaf.startswith("hc_")


def _find(path: str, table: dict[str, str]) -> tuple[str, str | None] | None:
    """(canonical path, parameter). Bare tensors come first: `attn_hc.scale` is one of them."""
    if path in table and is_bare(table[path]):
        return table[path], None
    module, _, parameter = path.rpartition(".")
    if parameter in PARAMETERS and module in table and not is_bare(table[module]):
        return table[module], parameter
    return None


def _generalise(path: str) -> tuple[str, str]:
    """(path with `*` for the expert's number, the number or "")."""
    expert = _EXPERT.search(path)
    if expert is None:
        return path, ""
    return f"{path[: expert.start(1)]}*{path[expert.end(1) :]}", expert.group(1)


# A V4-Pro has 280,000 names, and every rule of an audit asks for them again.
@lru_cache(maxsize=2**19)
def parse_name(stored: str) -> tuple[str, str | None] | None:
    """Stored name in any scheme -> (entry, parameter), or None if it is no V4 tensor."""
    match = _IN_LAYER.fullmatch(stored)
    if match is None:
        return _find(stored, _TOP_TO_CANONICAL)
    group, layer, path = match.groups()
    if "*" in path:
        return None
    general, expert = _generalise(path)
    found = _find(general, _LAYER_TO_CANONICAL if group == "layers" else _MTP_TO_CANONICAL)
    if found is None:
        return None
    inner, parameter = found
    return f"{group}.{layer}.{inner.replace('*', expert)}", parameter


def _transformers_entry(entry: str) -> str:
    match = _IN_LAYER.fullmatch(entry)
    if match is None:
        return _TOP[entry]
    group, layer, path = match.groups()
    if group == "mtp":
        return entry
    general, expert = _generalise(path)
    return f"model.layers.{layer}.{_LAYER[general].replace('*', expert)}"


def format_name(entry: str, parameter: str | None, scheme: Scheme) -> str:
    """(entry, parameter) -> the stored name under `scheme`; the inverse of `parse_name`.

    Raises KeyError for an entry that V4 does not have.
    """
    name = _transformers_entry(entry) if scheme is Scheme.TRANSFORMERS else entry
    return name if parameter is None else f"{name}.{parameter}"


def convert_name(stored: str, scheme: Scheme) -> str:
    """Stored name in any scheme -> the same tensor's name under `scheme`.

    Raises KeyError if it is no V4 tensor.
    """
    parsed = parse_name(stored)
    if parsed is None:
        raise KeyError(stored)
    return format_name(*parsed, scheme)
