"""Arguments for each operator in vLLM's own shapes: for the comparison with the native library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .layouts import cos_sin, pooled_cache

HEADS, HEAD, BLOCK, COMPRESSED_BLOCK, PAGES = 8, 512, 256, 64, 12
Arguments = list[Any]


def _bf16(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)


def attention_cache(generator: torch.Generator, block: int) -> Tensor:
    """A cache of plausible keys: any fp8 code but NaN, scales near 1, finite rope."""
    cache = pooled_cache(PAGES, block * 584, generator)
    rows = cache[:, : block * 576].unflatten(1, (block, 576))
    codes = torch.randint(0, 255, (PAGES, block, 448), generator=generator)
    rows[..., :448] = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
    rope = torch.randn(PAGES, block, 64, generator=generator).to(torch.bfloat16)
    rows[..., 448:] = rope.view(torch.uint8)
    scales = torch.randint(115, 122, (PAGES, block, 8), generator=generator, dtype=torch.uint8)
    cache[:, block * 576 :] = scales.flatten(1)
    return cache


def index_cache(generator: torch.Generator) -> Tensor:
    """Indexer pages of 64 keys."""
    cache = pooled_cache(PAGES, COMPRESSED_BLOCK * 132, generator)
    keys = torch.randn(PAGES, COMPRESSED_BLOCK * 128, generator=generator) * 50
    cache[:, : COMPRESSED_BLOCK * 128] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.exp2(torch.randint(-8, 2, (PAGES, COMPRESSED_BLOCK), generator=generator))
    cache[:, COMPRESSED_BLOCK * 128 :] = scales.to(torch.float32).view(torch.uint8)
    return cache


def positions(generator: torch.Generator, tokens: int) -> Tensor:
    return torch.randint(0, 2000, (tokens,), generator=generator)


def distinct_slots(generator: torch.Generator, tokens: int, total: int) -> Tensor:
    slots = torch.randperm(total, generator=generator)[:tokens]
    slots[1::5] = -1  # padding
    return slots


def fused_qnorm_rope_kv_insert_cpu(g: torch.Generator, tokens: int) -> Arguments:
    slots = distinct_slots(g, tokens, PAGES * BLOCK)
    cache = attention_cache(g, BLOCK)
    q, kv = _bf16(g, tokens, HEADS, HEAD, scale=3), _bf16(g, tokens, HEAD)
    return [q, kv, positions(g, tokens), cache, slots, cos_sin(2000, g), HEADS, 1e-6, BLOCK]


def inverse_gptj_rope_o_proj_cpu(g: torch.Generator, tokens: int) -> Arguments:
    return [_bf16(g, tokens, HEADS, HEAD), positions(g, tokens), cos_sin(2000, g), 64]


def flash_mla_with_kvcache_cpu(g: torch.Generator, tokens: int) -> Arguments:
    window = torch.stack([torch.randperm(PAGES * BLOCK, generator=g)[:128] for _ in range(tokens)])
    total = PAGES * COMPRESSED_BLOCK
    compressed = torch.stack([torch.randperm(total, generator=g)[:512] for _ in range(tokens)])
    lengths = torch.randint(0, 513, (tokens, 1), generator=g)
    compressed[torch.arange(512) >= lengths] = -1
    window[torch.arange(128) >= (lengths % 127) + 1] = -1
    out = torch.empty(tokens, HEADS, HEAD, dtype=torch.bfloat16)
    caches = attention_cache(g, BLOCK), attention_cache(g, COMPRESSED_BLOCK)
    sink = torch.randn(HEADS, generator=g)
    q = _bf16(g, tokens, HEADS, HEAD)
    return [out, q, caches[0], window, BLOCK, caches[1], compressed, COMPRESSED_BLOCK, sink, 0.044]


def save_partial_states_cpu(g: torch.Generator, tokens: int) -> Arguments:
    both = torch.randn(tokens, 2048, generator=g)
    kv, score = both.split([1024, 1024], -1)
    state = torch.randn(40, 4 * 2048 + 64, generator=g)[:, : 4 * 2048].unflatten(1, (4, 2048))
    ape = torch.randn(4, 1024, generator=g)
    return [kv, score, ape, positions(g, tokens), state, distinct_slots(g, tokens, 160)]


def _compress(g: torch.Generator, tokens: int, head: int, cache: Tensor) -> Arguments:
    state = torch.randn(40, 4 * 4 * head + 64, generator=g)[:, : 16 * head].unflatten(1, (4, -1))
    position = torch.randint(0, 500, (tokens,), generator=g) * 4 + 3
    position[::3] += 1  # does not complete a window
    slots = torch.randint(0, 160, (tokens, 8), generator=g)
    slots[::2, :4] = -1  # the first window of a sequence has no older half
    target = distinct_slots(g, tokens, PAGES * COMPRESSED_BLOCK)
    weight = torch.rand(head, generator=g) + 0.5
    return [
        state,
        slots,
        position,
        target,
        weight,
        1e-6,
        cos_sin(2100, g),
        cache,
        COMPRESSED_BLOCK,
        4,
    ]


def compress_norm_rope_store_cpu(g: torch.Generator, tokens: int) -> Arguments:
    return _compress(g, tokens, HEAD, attention_cache(g, COMPRESSED_BLOCK))


def compress_norm_rope_store_indexer_cpu(g: torch.Generator, tokens: int) -> Arguments:
    return _compress(g, tokens, 128, index_cache(g))


def fused_indexer_q_rope_quant_cpu(g: torch.Generator, tokens: int) -> Arguments:
    q = _bf16(g, tokens, 32, 128).to(torch.float32)
    fp8 = torch.empty(tokens, 32, 128, dtype=torch.float8_e4m3fn)
    weights = torch.randn(tokens, 32, generator=g)
    out = torch.empty(tokens, 32)
    return [positions(g, tokens), q, cos_sin(2000, g), fp8, weights, 128**-0.5, 32**-0.5, out]


def fp8_paged_mqa_logits_cpu(g: torch.Generator, tokens: int) -> Arguments:
    q = torch.randn(tokens, 32, 128, generator=g).to(torch.float8_e4m3fn)
    lengths = torch.randint(1, 601, (tokens,), generator=g, dtype=torch.int32)
    # Two requests of a prefill when there are many tokens, one request a token otherwise.
    tables = torch.stack([torch.randperm(PAGES, generator=g)[:10] for _ in range(tokens)]).int()
    if tokens > 8:
        tables[:] = tables[torch.arange(tokens) // (tokens // 2 + 1)]
    return [
        q,
        index_cache(g),
        torch.randn(tokens, 32, generator=g),
        lengths,
        tables,
        COMPRESSED_BLOCK,
        640,
    ]


def topk_transform_512_cpu(g: torch.Generator, tokens: int) -> Arguments:
    # Rounded, so that ties at the threshold are certain.
    scores = torch.randn(tokens, 900, generator=g).relu().mul(8).round().div(8)
    lengths = torch.randint(0, 901, (tokens,), generator=g, dtype=torch.int32)
    tables = torch.stack([torch.randperm(16, generator=g) for _ in range(tokens)]).int()
    page, raw = torch.empty(2, tokens, 512, dtype=torch.int32).unbind(0)
    return [scores, lengths, tables, page, COMPRESSED_BLOCK, raw]


def _gates(g: torch.Generator, rows: int, scales: int) -> list[Tensor]:
    fn = torch.randn(rows, 1024, generator=g) * 0.05
    return [fn, torch.rand(scales, generator=g) + 0.5, torch.randn(rows, generator=g)]


def hc_pre_fused_cpu(g: torch.Generator, tokens: int) -> Arguments:
    return [_bf16(g, tokens, 4, 256), *_gates(g, 24, 3), 4, 20, 1e-6, 1e-6]


def hc_post_fused_cpu(g: torch.Generator, tokens: int) -> Arguments:
    gates = torch.rand(tokens, 4, generator=g), torch.rand(tokens, 4, 4, generator=g)
    return [_bf16(g, tokens, 256), _bf16(g, tokens, 4, 256), *gates]


def hc_head_fused_cpu(g: torch.Generator, tokens: int) -> Arguments:
    return [_bf16(g, tokens, 4, 256), *_gates(g, 4, 1), 1e-6, 1e-6]


def biased_topk_cpu(g: torch.Generator, tokens: int) -> Arguments:
    logits = torch.randn(tokens, 64, generator=g) * 3
    bias = torch.randn(64, generator=g)
    return [logits, logits, bias, 6, True, "sqrtsoftplus", 0, 1.5, True]


def hash_topk_cpu(g: torch.Generator, tokens: int) -> Arguments:
    table = torch.stack([torch.randperm(64, generator=g)[:6] for _ in range(tokens)]).int()
    return [torch.randn(tokens, 64, generator=g) * 3, table, 6, "sqrtsoftplus", 0, 64, 1.5]


CASES: dict[str, Callable[[torch.Generator, int], Arguments]] = {
    make.__name__: make
    for make in (
        fused_qnorm_rope_kv_insert_cpu,
        inverse_gptj_rope_o_proj_cpu,
        flash_mla_with_kvcache_cpu,
        save_partial_states_cpu,
        compress_norm_rope_store_cpu,
        compress_norm_rope_store_indexer_cpu,
        fused_indexer_q_rope_quant_cpu,
        fp8_paged_mqa_logits_cpu,
        topk_transform_512_cpu,
        hc_pre_fused_cpu,
        hc_post_fused_cpu,
        hc_head_fused_cpu,
        biased_topk_cpu,
        hash_topk_cpu,
    )
}


def arguments(name: str, tokens: int) -> Arguments:
    """The same arguments for the same (name, tokens), in any process."""
    return CASES[name](torch.Generator().manual_seed(tokens), tokens)
