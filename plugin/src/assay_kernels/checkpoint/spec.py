"""Which weights a DeepSeek V4 has, with their shapes and kinds. Derived from the config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from assay_kernels.checkpoint.config import CSA_RATIO, V4Config


class Kind(StrEnum):
    """What a weight is for; it decides which kernel runs it and what each dialect stores."""

    ROUTED = "routed"
    SHARED = "shared"
    ATTENTION = "attention"
    WO_A = "wo_a"
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    INDEXER_COMPRESSOR = "indexer_compressor"
    MTP = "mtp"
    PLAIN = "plain"


class Plain(StrEnum):
    """How a weight is stored when it is not quantised."""

    BF16 = "bf16"
    FP32 = "fp32"
    INT = "int"


@dataclass(frozen=True)
class WeightSpec:
    """shape is logical: [N, K] for a matrix."""

    kind: Kind
    shape: tuple[int, ...]
    plain: Plain = Plain.BF16


def _plain(*shape: int, dtype: Plain = Plain.BF16) -> WeightSpec:
    return WeightSpec(Kind.PLAIN, shape, dtype)


def _compressor(
    prefix: str, kind: Kind, ratio: int, head_dim: int, hidden: int
) -> dict[str, WeightSpec]:
    # Ratio-4 windows overlap: each token feeds its own window and the next one.
    width = 2 * head_dim if ratio == CSA_RATIO else head_dim
    return {
        f"{prefix}.wkv": WeightSpec(kind, (width, hidden)),
        f"{prefix}.wgate": WeightSpec(kind, (width, hidden)),
        f"{prefix}.ape": _plain(ratio, width, dtype=Plain.FP32),
        f"{prefix}.norm": _plain(head_dim),
    }


def _attention(config: V4Config, ratio: int) -> dict[str, WeightSpec]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rank, o_width = config.q_lora_rank, config.o_groups * config.o_lora_rank
    heads_width = config.num_attention_heads * head_dim
    specs = {
        "attn.wq_a": WeightSpec(Kind.ATTENTION, (q_rank, hidden)),
        "attn.wkv": WeightSpec(Kind.ATTENTION, (head_dim, hidden)),
        "attn.wq_b": WeightSpec(Kind.ATTENTION, (heads_width, q_rank)),
        "attn.wo_a": WeightSpec(Kind.WO_A, (o_width, heads_width // config.o_groups)),
        "attn.wo_b": WeightSpec(Kind.ATTENTION, (hidden, o_width)),
        "attn.q_norm": _plain(q_rank),
        "attn.kv_norm": _plain(head_dim),
        "attn.attn_sink": _plain(config.num_attention_heads, dtype=Plain.FP32),
    }
    if ratio:
        specs |= _compressor("attn.compressor", Kind.COMPRESSOR, ratio, head_dim, hidden)
    if ratio == CSA_RATIO:
        index_width = config.index_n_heads * config.index_head_dim
        specs["attn.indexer.wq_b"] = WeightSpec(Kind.INDEXER, (index_width, q_rank))
        specs["attn.indexer.weights_proj"] = _plain(config.index_n_heads, hidden)
        specs |= _compressor(
            "attn.indexer.compressor",
            Kind.INDEXER_COMPRESSOR,
            ratio,
            config.index_head_dim,
            hidden,
        )
    return specs


def _mlp(kind: Kind, width: int, hidden: int) -> dict[str, WeightSpec]:
    return {
        "w1": WeightSpec(kind, (width, hidden)),
        "w2": WeightSpec(kind, (hidden, width)),
        "w3": WeightSpec(kind, (width, hidden)),
    }


def _layer(config: V4Config, layer: int) -> dict[str, WeightSpec]:
    """Weights of one layer, names relative to it; MTP layers count after the others."""
    hidden, streams = config.hidden_size, config.hc_mult
    inter = config.moe_intermediate_size
    specs = {"attn_norm": _plain(hidden), "ffn_norm": _plain(hidden)}
    specs |= _attention(config, config.compress_ratios[layer])
    for block in ("attn", "ffn"):
        mixes = (2 + streams) * streams
        specs[f"hc_{block}_fn"] = _plain(mixes, streams * hidden, dtype=Plain.FP32)
        specs[f"hc_{block}_base"] = _plain(mixes, dtype=Plain.FP32)
        specs[f"hc_{block}_scale"] = _plain(3, dtype=Plain.FP32)
    specs["ffn.gate"] = _plain(config.n_routed_experts, hidden)
    if layer < config.num_hash_layers:
        table = _plain(config.vocab_size, config.num_experts_per_tok, dtype=Plain.INT)
        specs["ffn.gate.tid2eid"] = table
    else:
        specs["ffn.gate.bias"] = _plain(config.n_routed_experts, dtype=Plain.FP32)
    shared = _mlp(Kind.SHARED, inter * config.n_shared_experts, hidden)
    specs |= {f"ffn.shared_experts.{name}": spec for name, spec in shared.items()}
    routed = _mlp(Kind.ROUTED, inter, hidden)
    for expert in range(config.n_routed_experts):
        specs |= {f"ffn.experts.{expert}.{name}": spec for name, spec in routed.items()}
    return specs


def _hc_head(config: V4Config) -> dict[str, WeightSpec]:
    streams = config.hc_mult
    return {
        "hc_head_fn": _plain(streams, streams * config.hidden_size, dtype=Plain.FP32),
        "hc_head_base": _plain(streams, dtype=Plain.FP32),
        "hc_head_scale": _plain(1, dtype=Plain.FP32),
    }


def weight_specs(config: V4Config) -> Iterator[tuple[str, WeightSpec]]:
    """Every entry of the main model, in the order of the forward pass."""
    yield "embed", _plain(config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        for name, spec in _layer(config, layer).items():
            yield f"layers.{layer}.{name}", spec
    yield from _hc_head(config).items()
    yield "norm", _plain(config.hidden_size)
    if not config.tie_word_embeddings:
        yield "head", _plain(config.vocab_size, config.hidden_size)


def mtp_specs(config: V4Config) -> Iterator[tuple[str, WeightSpec, bool]]:
    """(entry, spec, required) of the MTP layers; a checkpoint may leave out MTP as a whole.

    The embedding and head are the main model's unless the layer brings its own.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    for index in range(config.num_nextn_predict_layers):
        specs = _layer(config, config.num_hidden_layers + index) | _hc_head(config)
        for name in ("e_proj", "h_proj"):
            specs[name] = WeightSpec(Kind.MTP, (hidden, hidden))
        for name in ("enorm", "hnorm", "norm"):
            specs[name] = _plain(hidden)
        for name, spec in specs.items():
            yield f"mtp.{index}.{name}", spec, True
        for name in ("emb.tok_emb", "head"):
            yield f"mtp.{index}.{name}", _plain(vocab, hidden), False
