"""Query and key preparation, and attention over the paged caches, against fp64 formulae."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from assay_kernels.kernels.cpu import v4_ops

from . import cases
from .layouts import E4M3, attention_keys, cos_sin, quantised

BLOCK, COMPRESSED = cases.BLOCK, cases.COMPRESSED_BLOCK


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """transformers' rotation. x: (T, H, D) fp64; angles: (T, 64)."""
    return apply_rotary_pos_emb(x.transpose(0, 1), angles[:, :32], angles[:, 32:], 0).transpose(
        0, 1
    )


def test_every_fp8_code_decodes_exactly() -> None:
    """All 254 numbers, the fourteen subnormals and both zeros included."""
    codes = torch.tensor([c for c in range(256) if c % 128 != 127], dtype=torch.uint8)
    assert torch.equal(v4_ops.fp8_to_float(codes).double() * 256, E4M3[codes.long()])


def test_scale_is_the_next_power_of_two() -> None:
    """Powers of two stay; anything above, by one bit, goes to the next."""
    exact = torch.exp2(torch.arange(-13, 10).float())
    above = torch.nextafter(exact, torch.tensor(math.inf))
    for scale, expected in ((exact, exact), (above, 2 * exact)):
        code, inverse = v4_ops.ue8m0_round_up(scale)
        assert torch.equal(torch.exp2(code.float() - 127), expected)
        assert torch.equal(inverse, 1 / expected)


@pytest.mark.parametrize("padded", [cases.HEADS, 16])
def test_queries_are_normalised_and_rotated(padded: int) -> None:
    arguments = cases.arguments("fused_qnorm_rope_kv_insert_cpu", 7)
    q, positions, angles = arguments[0], arguments[2], arguments[5]
    arguments[6] = padded
    got = v4_ops.fused_qnorm_rope_kv_insert_cpu(*arguments)
    x = q.double()
    expected = rotated(
        x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), angles[positions].double()
    )
    assert got.shape == (7, padded, 512)
    torch.testing.assert_close(got[:, : cases.HEADS].double(), expected, rtol=2**-8, atol=2**-9)
    assert not got[:, cases.HEADS :].any()


def test_keys_land_in_their_slots() -> None:
    """Rotated, rounded as the published layout says; nothing but the named slots changes."""
    arguments = cases.arguments("fused_qnorm_rope_kv_insert_cpu", 20)
    _, kv, positions, cache, slots, angles = arguments[:6]
    before = cache.clone()
    v4_ops.fused_qnorm_rope_kv_insert_cpu(*arguments)
    keep = slots >= 0
    keys = rotated(kv.double().unsqueeze(1), angles[positions].double()).squeeze(1)[keep]
    expected = torch.cat([quantised(keys[:, :448], 64), keys[:, 448:].bfloat16().double()], 1)
    got = attention_keys(cache, BLOCK, slots[keep].tolist())
    assert torch.equal(got[:, :448], expected[:, :448])
    torch.testing.assert_close(got[:, 448:], expected[:, 448:], rtol=2**-7, atol=1e-6)
    changed = (cache != before).flatten().nonzero().squeeze(1)
    page, byte = changed // cache.shape[1], changed % cache.shape[1]
    offset = torch.where(byte < BLOCK * 576, byte // 576, (byte - BLOCK * 576) // 8)
    assert set((page * BLOCK + offset).tolist()) <= set(slots[keep].tolist())


def test_padding_alone_writes_nothing() -> None:
    arguments = cases.arguments("fused_qnorm_rope_kv_insert_cpu", 3)
    arguments[4] = torch.full((3,), -1)
    before = arguments[3].clone()
    v4_ops.fused_qnorm_rope_kv_insert_cpu(*arguments)
    assert torch.equal(arguments[3], before)


def test_output_rotation_is_undone(generator: torch.Generator) -> None:
    x = torch.randn(5, 8, 512, generator=generator).bfloat16()
    angles = cos_sin(100, generator)
    positions = torch.tensor([0, 3, 99, 4, 4])
    got = v4_ops.inverse_gptj_rope_o_proj_cpu(x, positions, angles, 64)
    conjugate = angles[positions] * torch.tensor([1.0] * 32 + [-1.0] * 32)
    torch.testing.assert_close(
        got.double(), rotated(x.double(), conjugate.double()), rtol=1e-6, atol=1e-6
    )


def attention(arguments: list[Tensor]) -> Tensor:
    """Softmax attention of each token over its valid keys and the sink, fp64."""
    _, q, window, window_slots, _, compressed, compressed_slots, _, sink, scale = arguments
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        first = [s for s in window_slots[t].tolist() if s >= 0]
        second = [s for s in compressed_slots[t].tolist() if s >= 0]
        parts = []
        if first:
            parts.append(attention_keys(window, BLOCK, first))
        if second:
            parts.append(attention_keys(compressed, COMPRESSED, second))
        if not parts:
            continue
        keys = torch.cat(parts)
        scores = torch.cat([q[t].double() @ keys.T * scale, sink.double().unsqueeze(1)], 1)
        out[t] = scores.softmax(-1)[:, :-1] @ keys
    return out


def poison_unused(arguments: list[Tensor]) -> None:
    """NaN bytes in every slot that no token names: a zero weight times NaN is NaN."""
    for cache, slots, block in (
        (arguments[2], arguments[3], BLOCK),
        (arguments[5], arguments[6], COMPRESSED),
    ):
        used = torch.zeros(cache.shape[0] * block, dtype=torch.bool)
        used[slots[slots >= 0]] = True
        rows = cache[:, : block * 576].unflatten(1, (block, 576))
        rows[~used.view(-1, block)] = 255


@pytest.mark.parametrize("tokens", [1, 3, 33, 150])
def test_attention_equals_softmax_over_the_named_keys(tokens: int) -> None:
    """Both paths (gathered and dense), unused slots full of NaN."""
    arguments = cases.arguments("flash_mla_with_kvcache_cpu", tokens)
    poison_unused(arguments)
    arguments[3] = arguments[3].contiguous()
    v4_ops.flash_mla_with_kvcache_cpu(*arguments)
    expected = attention(arguments)
    error = (arguments[0].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    rounding = (expected.bfloat16().double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error <= 1.25 * rounding.clamp_min(2**-10)).all()


@pytest.mark.parametrize("tokens", [2, 200])
def test_a_prefill_shares_its_keys(tokens: int) -> None:
    """Sliding windows of one request, which the dense path computes over their union."""
    arguments = cases.arguments("flash_mla_with_kvcache_cpu", tokens)
    last = torch.arange(tokens).unsqueeze(1) + 100
    window = last - 127 + torch.arange(128)
    arguments[3] = (
        torch.where(window >= 0, window, -1).sort(1, descending=False).values.flip(1).contiguous()
    )
    compressed = torch.arange(512).expand(tokens, -1)
    arguments[6] = torch.where(compressed < (last + 1) // 4, compressed, -1).contiguous()
    poison_unused(arguments)
    v4_ops.flash_mla_with_kvcache_cpu(*arguments)
    expected = attention(arguments)
    torch.testing.assert_close(arguments[0].double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_token_without_keys_gets_zeros(tokens: int) -> None:
    """Padding tokens must not come out as NaN."""
    arguments = cases.arguments("flash_mla_with_kvcache_cpu", tokens)
    arguments[3][1] = -1
    arguments[6][1] = -1
    v4_ops.flash_mla_with_kvcache_cpu(*arguments)
    assert not arguments[0][1].any()
    assert arguments[0][0].isfinite().all()


def test_layers_without_compressed_keys() -> None:
    arguments = cases.arguments("flash_mla_with_kvcache_cpu", 3)
    arguments[6] = arguments[6][:, :0]
    v4_ops.flash_mla_with_kvcache_cpu(*arguments)
    torch.testing.assert_close(arguments[0].double(), attention(arguments), rtol=2**-7, atol=2**-7)
