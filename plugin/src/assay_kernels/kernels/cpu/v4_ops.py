"""DeepSeek V4's CPU operators in torch, for hosts whose vLLM library lacks or cannot run them.

Each public function has the signature of the `_C::` operator of its name in vLLM 0.32 / 0.33, so
that `vllm_plugin.standins` can register it as that operator. They run in every decode step, where
the cost is the number of torch calls, not arithmetic: hence one gather per cache and no loop over
tokens. Byte layouts and rounding rules are those of vLLM's `fp8_ds_mla` cache:

    attention page    block_size x (448 fp8 e4m3 | 64 bf16), then block_size x (7 UE8M0 | 1 unused)
    indexer page      block_size x 128 fp8 e4m3, then block_size x 1 fp32 scale

A page may be longer than that (pages are pooled between layers), so the row stride is always read.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

NOPE = 448
ROPE = 64
HEAD = NOPE + ROPE
TILE = 64  # fp8 elements that share one UE8M0 scale
TILES = NOPE // TILE
ROW_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = TILES + 1
INDEX_HEAD = 128
FP8_MAX = 448.0
MIN_SCALE = 1e-4  # floor in vLLM's kernels: under a scale (attention), under amax (indexer)
TOPK = 512

# Up to this many tokens each token gathers its own keys; above, neighbouring tokens of a prefill
# share nearly all their keys, and one dense product over the union is several times cheaper.
GATHER_TOKENS = 32
GATHER_ROWS = 768
DENSE_CHUNK = 64
# numpy's calls cost half of torch's on tiny matrices; torch wins once there are many of them.
NUMPY_TOKENS = 64
# Sinkhorn sums that move less than this have reached the fixed point as far as fp32 goes.
SETTLED = 1e-7


# ------------------------------------------------------------------------------------ fp8, UE8M0


def fp8_to_float(codes: Tensor) -> Tensor:
    """(...,) uint8 e4m3fn codes -> fp32 values / 256, exact (the two NaN codes become +-480 / 256).

    torch converts fp8 one element at a time; moving the bits into fp16's exponent field is ten
    times faster, subnormals included. The caller folds the missing 2^8 into a scale.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    return bits.view(torch.float16).to(torch.float32)


def ue8m0_round_up(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Positive normal fp32 -> (int32 UE8M0 codes of the next power of two, its fp32 reciprocal)."""
    code = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    return code, ((254 - code) << 23).view(torch.float32)


def _rotate(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> None:
    """GPT-J (interleaved pairs) rotation of x's last dimension, in place.

    x: (T, ..., 2R) fp32, last dimension contiguous; cos_sin: (T, 2R) fp32, cosines then sines.
    """
    half = cos_sin.shape[-1] // 2
    angle = torch.complex(cos_sin[:, :half], cos_sin[:, half:])
    if inverse:
        angle = angle.conj()
    pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)))
    pairs.mul_(angle if x.dim() == 2 else angle.unsqueeze(1))


# --------------------------------------------------------------------------------- paged storage


def _rows(cache: Tensor, slots: Tensor, block_size: int, row_bytes: int, start: int) -> Tensor:
    """Gather rows out of the pages: (N,) slots -> (N, row_bytes // 8) int64.

    cache: (pages, >= bytes) uint8, any row stride. Rows of a page sit `row_bytes` apart from byte
    `start` on. index_select over a view whose rows overlap copies whole rows; indexing by
    (page, offset) would go element by element, ten times slower.
    """
    stride = cache.stride(0)
    step = math.gcd(stride, row_bytes, start or row_bytes)
    span = (cache.shape[0] - 1) * stride + cache.shape[1]
    assert step % 8 == 0, "cache rows must be aligned to 8 bytes"
    words = cache.as_strided((span // 8 * 8,), (1,)).view(torch.int64)
    view = words.as_strided(
        ((span - row_bytes) // step + 1, row_bytes // 8), (step // 8, 1), words.storage_offset()
    )
    page = torch.div(slots, block_size, rounding_mode="floor")
    index = page.mul_((stride - block_size * row_bytes) // step)
    index.add_(slots, alpha=row_bytes // step)
    if start:
        index.add_(start // step)
    return view.index_select(0, index)


def _store(cache: Tensor, slots: Tensor, block_size: int, *columns: tuple[int, Tensor]) -> None:
    """Write to slots (N,) >= 0 of a paged cache, in place.

    columns: (first byte in the page, rows (N, bytes) uint8, bytes a multiple of 4) each.
    """
    page = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots - page * block_size
    words = cache.view(torch.int32)
    for start, rows in columns:
        view = words.as_strided(
            (words.shape[0], block_size, rows.shape[1] // 4),
            (words.stride(0), rows.shape[1] // 4, 1),
            words.storage_offset() + start // 4,
        )
        view[page, offset] = rows.view(torch.int32)


def _store_attention_rows(
    cache: Tensor, slots: Tensor, block_size: int, nope: Tensor, rope: Tensor
) -> None:
    """Quantise and store. nope: (N, 448) fp32 (bf16 values); rope: (N, 64) bf16; slots >= 0."""
    count = nope.shape[0]
    tiles = nope.view(count, TILES, TILE)
    code, inverse = ue8m0_round_up((tiles.abs().amax(-1) / FP8_MAX).clamp_min_(MIN_SCALE))
    row = torch.empty(count, ROW_BYTES, dtype=torch.uint8)
    fp8 = row.view(torch.float8_e4m3fn)[:, :NOPE].unflatten(-1, (TILES, TILE))
    fp8.copy_(tiles * inverse.unsqueeze(-1))
    row.view(torch.bfloat16)[:, NOPE // 2 :] = rope
    scales = torch.zeros(count, SCALE_BYTES, dtype=torch.uint8)
    scales[:, :TILES] = code
    _store(cache, slots, block_size, (0, row), (block_size * ROW_BYTES, scales))


def _attention_rows(cache: Tensor, slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(N,) slots -> undecoded rows (N, 72) and their scales (N, 1), int64."""
    return (
        _rows(cache, slots, block_size, ROW_BYTES, 0),
        _rows(cache, slots, block_size, SCALE_BYTES, block_size * ROW_BYTES),
    )


def _decode_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """Undecoded rows (N, 72) and scales (N, 1), int64 -> (N, 512) fp32 keys."""
    count = rows.shape[0]
    keys = torch.empty(count, HEAD)
    # 2^8 is what fp8_to_float leaves out. A scale byte of 0 is a zero scale, not 2^-127.
    factor = (scales.view(torch.uint8)[:, :TILES].to(torch.int32) << 23).view(torch.float32)
    nope = fp8_to_float(rows.view(torch.uint8)[:, :NOPE]).view(count, TILES, TILE)
    torch.mul(
        nope, factor.mul_(256.0).unsqueeze(-1), out=keys.as_strided(nope.shape, (HEAD, TILE, 1))
    )
    keys[:, NOPE:] = rows.view(torch.bfloat16)[:, NOPE // 2 :]
    return keys


# --------------------------------------------------------------------------- attention, KV insert


def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    swa_kv_cache_2d: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
) -> Tensor:
    """Per-head RMSNorm (no weight) and RoPE of q; RoPE, quantisation and paged insert of kv.

    q: (T, H, 512) bf16; kv: (>= N, 512) bf16; positions: (T,) int64; swa_kv_cache_2d: attention
    pages, changed in place; slot_mapping: (N,) int64, negative = skip; cos_sin_cache: (P, 64) fp32.
    Returns (T, q_head_padded, 512) bf16, padded heads zero.
    """
    tokens, heads, _ = q.shape
    inserted = slot_mapping.shape[0]
    # kv rides along as one more head, whose norm is left alone.
    x = torch.empty(tokens, heads + 1, HEAD)
    x[:, :heads] = q
    x[:inserted, heads] = kv[:inserted]
    factor = torch.linalg.vecdot(x, x).div_(HEAD).add_(eps).rsqrt_()
    factor[:, heads] = 1.0
    x.mul_(factor.unsqueeze(-1))
    _rotate(x[..., NOPE:], cos_sin_cache.index_select(0, positions))
    rounded = x.to(q.dtype)

    keys = rounded[:inserted, heads]
    if bool((slot_mapping < 0).any()):
        keep = (slot_mapping >= 0).nonzero().squeeze(1)
        keys, slot_mapping = keys.index_select(0, keep), slot_mapping.index_select(0, keep)
    if slot_mapping.numel():
        _store_attention_rows(
            swa_kv_cache_2d,
            slot_mapping,
            cache_block_size,
            keys[:, :NOPE].to(torch.float32),
            keys[:, NOPE:],
        )
    out = rounded[:, :heads]
    if q_head_padded > heads:
        out = torch.nn.functional.pad(out, (0, 0, 0, q_head_padded - heads))
    return out


def inverse_gptj_rope_o_proj_cpu(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, rope_dim: int
) -> Tensor:
    """Undo the query's rotation on the attention output. o: (T, H, D) bf16 -> (T, H, D) fp32."""
    out = o.to(torch.float32)
    if out is o:
        out = o.clone()
    _rotate(
        out[..., o.shape[-1] - rope_dim :], cos_sin_cache.index_select(0, positions), inverse=True
    )
    return out


def _used_columns(slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drop the columns behind the last one that any row uses.

    (T, K) slots, -1 = none -> (T, K' <= K) slots with 0 for none, and a bool mask or None if all
    entries are real.
    """
    valid = slots >= 0
    used = valid.any(0).nonzero()
    width = int(used[-1]) + 1 if used.numel() else 0
    slots, valid = slots[:, :width], valid[:, :width]
    if bool(valid.all()):
        return slots, None
    return slots.clamp_min(0), valid


def _attend(q: Tensor, keys: Tensor, bias: Tensor | None, sink: Tensor, scale: float) -> Tensor:
    """Softmax attention with a sink. q: (B, M, 512), keys: (B, N, 512), bias: (B, M or 1, N) of 0 /
    -inf or None, sink: (B, M, 1); all fp32 -> (B, M, 512)."""
    if bias is None:
        scores = torch.bmm(q, keys.mT).mul_(scale)
    else:
        scores = torch.baddbmm(bias, q, keys.mT, alpha=scale)
    # The sink is one more key with a zero value; it also keeps a row without keys finite (zero).
    weights = torch.cat([scores, sink], -1).softmax(-1)
    return torch.bmm(weights[..., :-1], keys)


def flash_mla_with_kvcache_cpu(
    out: Tensor,
    q: Tensor,
    window_cache_2d: Tensor,
    window_slots: Tensor,
    window_block_size: int,
    compressed_cache_2d: Tensor,
    compressed_slots: Tensor,
    compressed_block_size: int,
    attn_sink: Tensor,
    scale: float,
) -> None:
    """Sparse MQA attention over the keys that each token names, with a sink per head.

    out, q: (T, H, 512) bf16, out written; *_slots: (T, K) int64, -1 = none, distinct within a row;
    *_cache_2d: attention pages; attn_sink: (H,) fp32. A token without any key gets zeros.
    """
    caches = [(window_cache_2d, window_slots, window_block_size)]
    if compressed_slots.shape[1]:
        caches.append((compressed_cache_2d, compressed_slots, compressed_block_size))
    if q.shape[0] <= GATHER_TOKENS:
        _attend_gathered(out, q, caches, attn_sink, scale)
    else:
        _attend_dense(out, q, caches, attn_sink, scale)


def _attend_gathered(
    out: Tensor,
    q: Tensor,
    caches: list[tuple[Tensor, Tensor, int]],
    sink: Tensor,
    scale: float,
) -> None:
    """Decode: each token gathers its own keys. out, q: (T, H, 512) bf16."""
    tokens, heads, _ = q.shape
    used = [(cache, *_used_columns(slots), size) for cache, slots, size in caches]
    used = [part for part in used if part[1].shape[1]]
    if not used:
        out.zero_()
        return
    queries = q.to(torch.float32)
    bias = None
    if any(valid is not None for _, _, valid, _ in used):
        missing = torch.cat(
            [
                torch.zeros(slots.shape, dtype=torch.bool) if valid is None else ~valid
                for _, slots, valid, _ in used
            ],
            1,
        )
        bias = torch.zeros(missing.shape).masked_fill_(missing, -math.inf).unsqueeze(1)
        bias = bias.expand(tokens, heads, -1)
    sinks = sink.view(1, heads, 1).expand(tokens, -1, -1)
    # As many tokens at a time as keep their decoded keys in a core's cache.
    step = max(1, GATHER_ROWS // sum(slots.shape[1] for _, slots, _, _ in used))
    for begin in range(0, tokens, step):
        part = slice(begin, min(begin + step, tokens))
        count = part.stop - begin
        rows: list[Tensor] = []
        scales: list[Tensor] = []
        for cache, slots, valid, size in used:
            row, byte = _attention_rows(cache, slots[part].reshape(-1), size)
            if valid is not None:
                # They may hold anything, and a zero weight times NaN is NaN.
                row.mul_(valid[part].reshape(-1, 1))
                byte.mul_(valid[part].reshape(-1, 1))
            rows.append(row.view(count, -1, ROW_BYTES // 8))
            scales.append(byte.view(count, -1, 1))
        row = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        byte = scales[0] if len(scales) == 1 else torch.cat(scales, 1)
        keys = _decode_rows(row.view(-1, ROW_BYTES // 8), byte.view(-1, 1)).view(count, -1, HEAD)
        out[part] = _attend(
            queries[part], keys, None if bias is None else bias[part], sinks[part], scale
        )


def _attend_dense(
    out: Tensor,
    q: Tensor,
    caches: list[tuple[Tensor, Tensor, int]],
    sink: Tensor,
    scale: float,
) -> None:
    """Prefill: chunks of neighbouring tokens attend densely to the union of their keys."""
    tokens, heads, _ = q.shape
    # Every key is decoded once; `index` then names decoded keys, `count` meaning none.
    decoded: list[Tensor] = []
    indices: list[Tensor] = []
    for cache, slots, block_size in caches:
        unique, index = _compact(slots)
        decoded.append(_decode_rows(*_attention_rows(cache, unique, block_size)))
        indices.append(index)
    for begin in range(0, tokens, DENSE_CHUNK):
        end = min(begin + DENSE_CHUNK, tokens)
        rows = end - begin
        keys: list[Tensor] = []
        biases: list[Tensor] = []
        for values, index in zip(decoded, indices, strict=True):
            used, local = _compact(index[begin:end])
            bias = torch.full((rows, used.shape[0] + 1), -math.inf)
            bias.scatter_(1, torch.where(local < 0, used.shape[0], local), 0.0)
            keys.append(values.index_select(0, used))
            biases.append(bias[:, :-1])
        union = torch.cat(keys)
        if union.shape[0] > 4 * sum(index.shape[1] for index in indices):
            # Tokens of unrelated requests share nothing: gathering per token costs less.
            for part in range(begin, end, GATHER_TOKENS):
                stop = min(part + GATHER_TOKENS, end)
                nearby = [(cache, slots[part:stop], size) for cache, slots, size in caches]
                _attend_gathered(out[part:stop], q[part:stop], nearby, sink, scale)
            continue
        bias = torch.cat(biases, 1).unsqueeze(1).expand(-1, heads, -1).reshape(1, rows * heads, -1)
        flat = q[begin:end].to(torch.float32).view(1, rows * heads, HEAD)
        result = _attend(flat, union.unsqueeze(0), bias, sink.repeat(rows).view(1, -1, 1), scale)
        out[begin:end] = result.view(rows, heads, HEAD)


def _compact(slots: Tensor) -> tuple[Tensor, Tensor]:
    """(T, K) ids, -1 = none -> distinct ids (U,), and (T, K) positions in them, -1 = none.

    In the order of first appearance: ids are pages of the KV cache, and sums that ran in the order
    of pages would make an answer depend on which ones a request happened to get. By marking rather
    than sorting: ids lie in a narrow range, and there are millions of them.
    """
    valid = slots >= 0
    high = int(slots.max()) + 1
    if high <= 0:
        return slots.new_empty(0), slots
    low = int(torch.where(valid, slots, high).min())
    shifted = torch.where(valid, slots - low, high - low).reshape(-1)
    never = shifted.numel()
    first = torch.full((high - low + 1,), never)
    first.scatter_reduce_(0, shifted, torch.arange(never), "amin")
    first[-1] = never
    seen = (first < never).nonzero().squeeze(1)
    unique = seen[first[seen].argsort()]
    rank = torch.full_like(first, -1)
    rank[unique] = torch.arange(unique.numel())
    return unique + low, rank.index_select(0, shifted).view(slots.shape)


# ------------------------------------------------------------------------------------- compressor


def save_partial_states_cpu(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Store each token's compressor state: its kv, and its score with the position bias added.

    kv, score: (T, W) fp32, rows may be strided; ape: (ratio, W) fp32; positions, slot_mapping: (T,)
    int64, slot < 0 = skip; state_cache: (pages, block, 2 W) fp32, changed in place.
    """
    row = torch.cat([kv, score + ape.index_select(0, positions % ape.shape[0])], 1)
    if bool((slot_mapping < 0).any()):
        keep = (slot_mapping >= 0).nonzero().squeeze(1)
        row, slot_mapping = row.index_select(0, keep), slot_mapping.index_select(0, keep)
    block = state_cache.shape[1]
    page = torch.div(slot_mapping, block, rounding_mode="floor")
    state_cache[page, slot_mapping - page * block] = row


def _pool_window(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin_cache: Tensor,
    ratio: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Softmax-pool, RMSNorm and rotation angles of the tokens that complete a window.

    Returns (N, head) fp32 normed entries before RoPE, (N,) target slots and (N, 64) cos | sin; None
    when no token completes a window, which is three decode steps out of four at ratio 4.
    """
    done = ((positions + 1) % ratio == 0) & (kv_slot_mapping >= 0)
    which = done.nonzero().squeeze(1)
    if which.numel() == 0:
        return None
    head = weight.shape[0]
    width = state_cache.shape[2] // 2
    block = state_cache.shape[1]
    slots = gather_slots.index_select(0, which)
    window = slots.shape[1]
    valid = slots >= 0
    safe = slots.clamp_min(0)
    page = torch.div(safe, block, rounding_mode="floor")
    offset = safe - page * block
    kv: list[Tensor] = []
    score: list[Tensor] = []
    # With overlapping windows the older half reads channels [0, head), the newer [head, 2 head).
    for begin in range(0, window, ratio):
        part = slice(begin, begin + ratio)
        shift = head if begin else 0
        kv.append(state_cache[..., shift : shift + head][page[:, part], offset[:, part]])
        shift += width
        score.append(state_cache[..., shift : shift + head][page[:, part], offset[:, part]])
    values = kv[0] if len(kv) == 1 else torch.cat(kv, 1)
    scores = score[0] if len(score) == 1 else torch.cat(score, 1)
    if not bool(valid.all()):
        absent = ~valid.unsqueeze(-1)
        scores.masked_fill_(absent, -math.inf)
        values.masked_fill_(absent, 0.0)
    pooled = (scores.softmax(1) * values).sum(1)
    normed = pooled * pooled.square().mean(-1, keepdim=True).add_(eps).rsqrt_() * weight
    position = positions.index_select(0, which)
    cos_sin = cos_sin_cache.index_select(0, position - position % ratio)
    return normed, kv_slot_mapping.index_select(0, which), cos_sin


def compress_norm_rope_store_cpu(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """Compress finished windows into attention-cache entries.

    state_cache: (pages, block, 2 W) fp32; gather_slots: (T, window) int64 state slots, -1 = before
    the sequence; positions, kv_slot_mapping: (T,) int64; rms_norm_weight: (512,) fp32;
    cos_sin_cache: (P, 64) fp32; kv_cache_2d: attention pages, changed in place.
    """
    pooled = _pool_window(
        state_cache,
        gather_slots,
        positions,
        kv_slot_mapping,
        rms_norm_weight,
        rms_norm_eps,
        cos_sin_cache,
        compress_ratio,
    )
    if pooled is None:
        return
    normed, slots, cos_sin = pooled
    nope = normed[:, :NOPE].to(torch.bfloat16).to(torch.float32)
    _rotate(normed[:, NOPE:], cos_sin)
    rope = normed[:, NOPE:].to(torch.bfloat16)
    _store_attention_rows(kv_cache_2d, slots, kv_cache_block_size, nope, rope)


def compress_norm_rope_store_indexer_cpu(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """The same for the indexer's keys: head 128, one power-of-two fp32 scale per key."""
    pooled = _pool_window(
        state_cache,
        gather_slots,
        positions,
        kv_slot_mapping,
        rms_norm_weight,
        rms_norm_eps,
        cos_sin_cache,
        compress_ratio,
    )
    if pooled is None:
        return
    normed, slots, cos_sin = pooled
    _rotate(normed[:, INDEX_HEAD - ROPE :], cos_sin)
    keys = normed.to(torch.bfloat16).to(torch.float32)
    amax = keys.abs().amax(-1, keepdim=True).clamp_min_(MIN_SCALE)
    code, inverse = ue8m0_round_up(amax / FP8_MAX)
    codes = (keys * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = (code << 23).view(torch.uint8)
    scale_start = kv_cache_block_size * INDEX_HEAD
    _store(kv_cache_2d, slots, kv_cache_block_size, (0, codes), (scale_start, scale))


# ---------------------------------------------------------------------------------------- indexer


def fused_indexer_q_rope_quant_cpu(
    positions: Tensor,
    index_q: Tensor,
    index_q_cos_sin_cache: Tensor,
    index_q_fp8: Tensor,
    index_weights: Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_weights_out: Tensor,
) -> None:
    """RoPE and fp8 quantisation of the indexer's queries; their scales go into the head weights.

    index_q: (T, H, 128) fp32; index_q_fp8: (T, H, 128) e4m3, written; index_weights: (T, H) fp32;
    index_weights_out: (T, H) fp32, written.
    """
    q = index_q.clone()
    rope = q[..., q.shape[-1] - index_q_cos_sin_cache.shape[-1] :]
    _rotate(rope, index_q_cos_sin_cache.index_select(0, positions))
    rope.copy_(rope.to(torch.bfloat16))
    amax = q.abs().amax(-1).clamp_min_(MIN_SCALE)
    code, inverse = ue8m0_round_up(amax / FP8_MAX)
    index_q_fp8.copy_(q.mul_(inverse.unsqueeze(-1)).to(torch.float8_e4m3fn))
    factor = index_weights_softmax_scale * index_weights_head_scale
    torch.mul(index_weights * factor, (code << 23).view(torch.float32), out=index_weights_out)


def fp8_paged_mqa_logits_cpu(
    q_fp8: Tensor,
    kvcache_fp8: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    block_size: int,
    max_seq_len: int,
) -> Tensor:
    """Indexer scores: sum over heads of weight * relu(q . k), against each token's first keys.

    q_fp8: (T, H, 128) e4m3; kvcache_fp8: indexer pages; weight: (T, H) fp32; seq_lens: (T,) keys of
    each token; page_table: (T, pages). Returns (T, max_seq_len) fp32; entries past seq_lens are
    undefined, as in the operator replaced.
    """
    tokens, heads, dim = q_fp8.shape
    logits = torch.empty(tokens, max_seq_len)
    longest = min(int(seq_lens.max()), max_seq_len) if tokens else 0
    if longest == 0:
        return logits
    pages = -(-longest // block_size)
    q = fp8_to_float(q_fp8.view(torch.uint8))
    weight = (weight * 65536.0).unsqueeze(1)  # 2^8 each from q and k
    offsets = torch.arange(longest)
    tables, counts = torch.unique_consecutive(page_table[:, :pages], dim=0, return_counts=True)
    if 2 * tables.shape[0] > tokens:  # decode: every token has a table of its own
        slots = _page_slots(page_table[:, :pages], offsets, block_size)
        # Pages behind a request's own length may be padding: read slot 0 there.
        slots.masked_fill_(offsets >= seq_lens.unsqueeze(1), 0)
        for begin in range(0, tokens, GATHER_TOKENS):
            part = slice(begin, begin + GATHER_TOKENS)
            keys, scale = _load_index_keys(kvcache_fp8, slots[part].reshape(-1), block_size)
            dots = torch.bmm(q[part], keys.view(-1, longest, dim).mT).relu_()
            scored = torch.bmm(weight[part], dots).squeeze(1)
            torch.mul(scored, scale.view(-1, longest), out=logits[part, :longest])
        return logits
    # Prefill: the tokens of a request share its table, so its keys are decoded once.
    stop = 0
    for table, count in zip(tables, counts.tolist(), strict=True):
        first, stop = stop, stop + count
        length = min(int(seq_lens[first:stop].max()), max_seq_len)
        slots = _page_slots(table.unsqueeze(0), offsets[:length], block_size).view(-1)
        keys, scale = _load_index_keys(kvcache_fp8, slots, block_size)
        for begin in range(first, stop, DENSE_CHUNK):
            end = min(begin + DENSE_CHUNK, stop)
            dots = torch.mm(q[begin:end].view(-1, dim), keys.mT).relu_()
            scored = torch.bmm(weight[begin:end], dots.view(end - begin, heads, -1)).squeeze(1)
            torch.mul(scored, scale, out=logits[begin:end, :length])
    return logits


def _page_slots(tables: Tensor, offsets: Tensor, block_size: int) -> Tensor:
    """(R, pages) page ids, (L,) token offsets -> (R, L) slots."""
    page = torch.div(offsets, block_size, rounding_mode="floor")
    return tables.index_select(1, page).to(torch.int64) * block_size + offsets % block_size


def _load_index_keys(cache: Tensor, slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(N,) slots -> (N, 128) fp32 keys / 256 without their scale, and (N,) fp32 scales."""
    codes = _rows(cache, slots, block_size, INDEX_HEAD, 0).view(torch.uint8)
    view = cache.as_strided(
        (cache.shape[0], block_size, 4),
        (cache.stride(0), 4, 1),
        cache.storage_offset() + block_size * INDEX_HEAD,
    ).view(torch.float32)
    page = torch.div(slots, block_size, rounding_mode="floor")
    return fp8_to_float(codes), view[page, slots - page * block_size, 0]


def topk_transform_512_cpu(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None = None,
) -> None:
    """The 512 best keys of each token, -1 where there are fewer; ties go to the smaller index.

    scores: (T, S) fp32; seq_lens: (T,); page_tables: (T, pages); out_page_indices (slots) and
    out_raw_indices (positions): (T, >= 512) int32, written. The order within a row is free.
    """
    tokens, width = scores.shape
    if tokens == 0:
        return
    length = seq_lens.to(torch.int64).clamp(0, width).unsqueeze(1)
    longest = int(length.max())
    arange = torch.arange(max(longest, TOPK))
    raw = arange[:TOPK].masked_fill(arange[:TOPK] >= length, -1)
    long_rows = (length.squeeze(1) > TOPK).nonzero().squeeze(1)
    if long_rows.numel():
        # One int64 key orders by score, then by smaller index: topk alone breaks ties at random,
        # and ReLU makes exact ties (zeros) common.
        bits = scores[:, :longest].index_select(0, long_rows).add_(0.0).view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
        key = (ordered << 32) + (0x7FFFFFFF - arange[:longest])
        key.masked_fill_(arange[:longest] >= length.index_select(0, long_rows), -(2**63))
        raw[long_rows] = key.topk(TOPK, dim=1, sorted=False).indices
    safe = raw.clamp_min(0)
    page = torch.div(safe, page_size, rounding_mode="floor")
    slots = page_tables.to(torch.int64).gather(1, page) * page_size + safe - page * page_size
    out_page_indices[:, :TOPK] = slots.masked_fill_(raw < 0, -1)
    if out_raw_indices is not None:
        out_raw_indices[:, :TOPK] = raw


# ------------------------------------------------------------------------------ hyper-connections


def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """(T, n, n) fp32 -> row softmax, then alternating column / row normalisation, fp32.

    comb = diag(1 / R) K diag(1 / C) with K = softmax + eps, so one normalisation is a product with
    K: the row sums of comb are (K / C) / R, and dividing by (row sum + eps) makes R into
    K (1 / C) + eps R. That is two calls a step instead of four, on vectors instead of matrices.
    """
    kernel = logits.softmax(-1).add_(eps)
    tokens, n, _ = kernel.shape
    if tokens > NUMPY_TOKENS:
        kernel = kernel / (kernel.sum(1, keepdim=True) + eps)
        for _ in range(iterations - 1):
            kernel.div_(kernel.sum(2, keepdim=True).add_(eps))
            kernel.div_(kernel.sum(1, keepdim=True).add_(eps))
        return kernel
    matrix = kernel.numpy()
    # The last n columns hold eps, and the states' last n rows the previous sums, so that eps R
    # rides along in the same product.
    both = np.empty((2, tokens, n, 2 * n), np.float32)
    both[0, :, :, :n] = matrix
    both[1, :, :, :n] = matrix.transpose(0, 2, 1)
    both[..., n:] = _scaled_identity(n, eps)
    by_row, by_column = both
    row_state, column_state = np.ones((2, tokens, 2 * n, 1), np.float32)
    inverse_c, rows = row_state[:, :n], row_state[:, n:]
    inverse_r, columns = column_state[:, :n], column_state[:, n:]
    np.matmul(by_column, column_state, out=columns)
    np.reciprocal(columns, out=inverse_c)
    for iteration in range(1, iterations):
        np.matmul(by_row, row_state, out=rows)
        np.reciprocal(rows, out=inverse_r)
        settling = iteration % 4 == 0 and columns.copy()
        np.matmul(by_column, column_state, out=columns)
        np.reciprocal(columns, out=inverse_c)
        if settling is not False and (np.abs(settling - columns) <= SETTLED * columns).all():
            break
    return torch.from_numpy(matrix * inverse_r * inverse_c.transpose(0, 2, 1))


@functools.cache
def _scaled_identity(n: int, eps: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.eye(n, dtype=np.float32) * np.float32(eps)


def hc_pre_fused_cpu(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates of a hyper-connection, and the layer's input.

    x: (T, n, d) bf16 residual streams; hc_fn: ((2 + n) n, n d) fp32; hc_scale: (3,); hc_base:
    ((2 + n) n,). Returns (T, d) in x's dtype, post (T, n) fp32, comb (T, n, n) fp32.
    """
    tokens, n, width = x.shape
    streams = x.to(torch.float32)
    flat = streams.view(tokens, n * width)
    inverse_rms = torch.linalg.vecdot(flat, flat).div_(n * width).add_(rms_eps).rsqrt_()
    scale = hc_scale.index_select(0, _gate_of(n))
    mixes = torch.mm(flat, hc_fn.t()).mul_(inverse_rms.unsqueeze(1)).mul_(scale).add_(hc_base)
    gates = mixes[:, : 2 * n].sigmoid()
    comb = _sinkhorn(mixes[:, 2 * n :].reshape(tokens, n, n), sinkhorn_iters, hc_eps)
    pre = gates[:, :n].add(hc_eps).unsqueeze(1)
    return torch.bmm(pre, streams).squeeze(1).to(x.dtype), gates[:, n:] * 2.0, comb


@functools.cache
def _gate_of(n: int) -> Tensor:
    """Which of the three scales each of the (2 + n) n mixes takes: pre, post or comb."""
    return torch.tensor([0] * n + [1] * n + [2] * (n * n))


def hc_post_fused_cpu(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New residual streams: out[h] = post[h] * x + sum_i comb[i, h] * residual[i].

    x: (T, d) bf16; residual: (T, n, d) bf16; post: (T, n) fp32; comb: (T, n, n) fp32.
    """
    source = torch.cat([residual, x.unsqueeze(1)], 1).to(torch.float32)
    mix = torch.cat([comb, post.unsqueeze(1)], 1)
    return torch.bmm(mix.mT, source).to(x.dtype)


def hc_head_fused_cpu(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_eps: float, norm_eps: float
) -> Tensor:
    """Reduce the residual streams to one before the final norm. x: (T, n, d) -> (T, d)."""
    tokens, n, width = x.shape
    streams = x.to(torch.float32)
    flat = streams.view(tokens, n * width)
    inverse_rms = flat.square().mean(1, keepdim=True).add_(norm_eps).rsqrt_()
    gate = torch.mm(flat, hc_fn.t()).mul_(inverse_rms).mul_(hc_scale).add_(hc_base)
    gate = gate.sigmoid_().add_(hc_eps).unsqueeze(1)
    return torch.bmm(gate, streams).squeeze(1).to(x.dtype)


# ---------------------------------------------------------------------------------------- routing


def _scores(logits: Tensor, scoring_func: str) -> Tensor:
    logits = logits.to(torch.float32)
    if scoring_func == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt_()
    if scoring_func == "sigmoid":
        return logits.sigmoid()
    if scoring_func == "softmax":
        return logits.softmax(-1)
    raise ValueError(f"unsupported scoring_func: {scoring_func}")


def biased_topk_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[Tensor, Tensor]:
    """Experts by biased score, weights by the unbiased one.

    gating_output: (T, E); correction_bias: (E,). Returns (T, topk) fp32 weights, best biased score
    first, and (T, topk) int32 expert ids.
    """
    if num_fused_shared_experts:
        raise NotImplementedError("shared experts are never fused into routing on CPU")
    scores = _scores(gating_output, scoring_func)
    ids = (scores + correction_bias).topk(topk, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
        if apply_routed_scaling_factor_on_output:
            weights.mul_(routed_scaling_factor or 0.0)
    return weights, ids.to(torch.int32)


def hash_topk_cpu(
    gating_output: Tensor,
    tid2eid: Tensor,
    topk: int,
    scoring_func: str,
    num_fused_shared_experts: int,
    num_experts: int,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Experts from a table of token ids. tid2eid: (T, topk) int32, already indexed by token."""
    if num_fused_shared_experts:
        raise NotImplementedError("shared experts are never fused into routing on CPU")
    assert gating_output.shape[1] == num_experts
    weights = _scores(gating_output, scoring_func).gather(1, tid2eid.to(torch.int64))
    if scoring_func != "softmax":
        weights = weights * (routed_scaling_factor / weights.sum(1, keepdim=True))
    return weights, tid2eid.clone()


# ------------------------------------------------------------------------------------- matrices


def has_fast_bf16() -> bool:
    """Whether torch multiplies bf16 matrices with this CPU's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def convert_weight_packed(weight: Tensor) -> Tensor:
    """The AMX library interleaves here; in torch a packed weight is the weight itself, or its fp32
    copy where bf16 products would be emulated (a fourth of fp32's speed on AVX2)."""
    if weight.dtype == torch.bfloat16 and not has_fast_bf16():
        return weight.to(torch.float32)
    return weight


def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    """out[b] = mat1[b] @ mat2[b]^T. out: (B, M, N), mat1: (B, M, K), mat2: (B, N, K), packed."""
    if scale is not None:
        raise NotImplementedError("bmm_cpu with an fp8 scale is not used by DeepSeek V4")
    out.copy_(torch.bmm(mat1.to(mat2.dtype), mat2.mT))


def weight_packed_linear(
    out: Tensor, mat1: Tensor, mat2: Tensor, bias: Tensor | None, is_vnni: bool
) -> None:
    """out = mat1 @ mat2^T + bias. mat1: (M, K), mat2: (N, K) packed, bias: (N,) fp32."""
    result = torch.mm(mat1.to(mat2.dtype), mat2.t())
    out.copy_(result if bias is None else result.to(torch.float32) + bias)
