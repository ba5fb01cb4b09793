"""The compressor, fed token by token and in chunks, against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from assay_kernels.kernels.cpu import v4_ops

from .layouts import attention_keys, index_keys, pooled_cache, quantised

STATE_BLOCK, CACHE_BLOCK = 4, 64


def config() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=64,
        head_dim=512,
        qk_rope_head_dim=64,
        compress_ratios=[0, 4, 128],
        num_hidden_layers=3,
        index_head_dim=128,
        index_n_heads=4,
        max_position_embeddings=1024,
    )


def compressor(kind: str) -> tuple[torch.nn.Module, int, int]:
    """(transformers' module with random weights, its head, its ratio)."""
    torch.manual_seed(1)
    module: torch.nn.Module
    if kind == "ratio 128":
        module, head, ratio = modeling.DeepseekV4HCACompressor(config()), 512, 128
    elif kind == "ratio 4":
        module, head, ratio = modeling.DeepseekV4CSACompressor(config()), 512, 4
    else:
        module, head, ratio = modeling.DeepseekV4Indexer(config()), 128, 4
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return module.eval(), head, ratio


def transformers_entries(module: torch.nn.Module, kind: str, hidden: Tensor, ratio: int) -> Tensor:
    """Compressed entries (windows, head) before any cache rounds them."""
    entries: list[Tensor] = []
    hook = modeling.apply_rotary_pos_emb

    def record(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        out = hook(x, cos, sin, unsqueeze_dim)
        if out.shape[-2] == hidden.shape[0] // ratio and out.shape[1] == 1:
            entries.append(out)
        return out

    modeling.apply_rotary_pos_emb = record
    try:
        positions = torch.arange(hidden.shape[0]).unsqueeze(0)
        if kind == "indexer":
            q = torch.zeros(1, hidden.shape[0], module.q_b_proj.in_features)
            module(hidden.unsqueeze(0), q, positions, None, 1)
        else:
            if kind == "ratio 4":
                module.indexer.forward = lambda *_: torch.full((1, hidden.shape[0], 1), -1)
            return module(hidden.unsqueeze(0), None, positions, None, 1)[0][0, 0]
    finally:
        modeling.apply_rotary_pos_emb = hook
    return entries[0][0, 0]


@pytest.mark.parametrize("chunk", [1, 7, 300])
@pytest.mark.parametrize("kind", ["ratio 4", "ratio 128", "indexer"])
@torch.no_grad()
def test_entries_equal_transformers(kind: str, chunk: int, generator: torch.Generator) -> None:
    """However the tokens are split into steps, the cache holds transformers' entries, rounded."""
    module, head, ratio = compressor(kind)
    tokens = 300
    hidden = torch.randn(tokens, 64, generator=generator)
    expected = transformers_entries(module, kind, hidden, ratio)

    rotary = modeling.DeepseekV4RotaryEmbedding(config())
    cos, sin = rotary(hidden, torch.arange(tokens).unsqueeze(0), "compress")
    angles = torch.cat([cos[0], sin[0]], -1).contiguous()
    overlap = 2 if ratio == 4 else 1
    kv, score = module.kv_proj(hidden), module.gate_proj(hidden)
    state = torch.full((tokens // STATE_BLOCK + 2, STATE_BLOCK, 2 * overlap * head), torch.nan)
    indexer = head == 128
    cache = pooled_cache(8, CACHE_BLOCK * (132 if indexer else 584), generator)
    store = (
        v4_ops.compress_norm_rope_store_indexer_cpu
        if indexer
        else v4_ops.compress_norm_rope_store_cpu
    )
    state_slots = torch.randperm(tokens + 4, generator=generator)[:tokens]
    entry_slots = torch.randperm(8 * CACHE_BLOCK, generator=generator)[: tokens // ratio]
    for begin in range(0, tokens, chunk):
        position = torch.arange(begin, min(begin + chunk, tokens))
        v4_ops.save_partial_states_cpu(
            kv[position],
            score[position],
            module.position_bias,
            position,
            state,
            state_slots[position],
        )
        window = position.unsqueeze(1) - overlap * ratio + 1 + torch.arange(overlap * ratio)
        gather = torch.where(window >= 0, state_slots[window.clamp_min(0)], -1)
        entry = (position // ratio).clamp_max(len(entry_slots) - 1)
        target = torch.where((position + 1) % ratio == 0, entry_slots[entry], -1)
        weight = module.kv_norm.weight.data
        store(state, gather, position, target, weight, 1e-6, angles, cache, CACHE_BLOCK, ratio)

    slots = entry_slots.tolist()
    if indexer:
        got, rounded = index_keys(cache, CACHE_BLOCK, slots), quantised(expected.double(), 128)
    else:
        got = attention_keys(cache, CACHE_BLOCK, slots)
        nope = quantised(expected[:, :448].double(), 64)
        rounded = torch.cat([nope, expected[:, 448:].bfloat16().double()], 1)
    # fp32 sums in another order move a value over a rounding edge now and then, by one fp8 step.
    differs = (got - rounded).abs() > 1e-6 * rounded.abs().amax(-1, keepdim=True)
    assert differs.double().mean() < 2e-3
    error = (got - rounded).norm(dim=-1) / rounded.norm(dim=-1)
    assert error.max() < 0.01


def test_padding_stores_no_state(generator: torch.Generator) -> None:
    state = torch.zeros(4, 4, 64)
    rows = torch.randn(2, 32, generator=generator)
    ape = torch.zeros(4, 32)
    slots = torch.tensor([-1, 5])
    v4_ops.save_partial_states_cpu(rows, rows, ape, torch.tensor([0, 1]), state, slots)
    assert torch.equal(state[1, 1], torch.cat([rows[1], rows[1]]))
    assert not state[1, 0].any()
    assert not state[3].any()
