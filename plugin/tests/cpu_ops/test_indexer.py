"""The indexer's queries, scores and selection against transformers' scorer and plain sorting."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from assay_kernels.kernels.cpu import v4_ops

from . import cases
from .layouts import index_keys


def test_queries_times_weights_are_the_unquantised_ones() -> None:
    """The query's scale moves into the head weight: relu(q . k) * w is unchanged by it."""
    arguments = cases.arguments("fused_indexer_q_rope_quant_cpu", 9)
    positions, q, angles, codes, weights, softmax_scale, head_scale, out = arguments
    v4_ops.fused_indexer_q_rope_quant_cpu(*arguments)
    angle = angles[positions].double()
    expected = apply_rotary_pos_emb(q.double().transpose(0, 1), angle[:, :32], angle[:, 32:], 0)
    scale = (out / (weights * softmax_scale * head_scale)).double()
    assert torch.equal(
        torch.exp2(scale.log2().round()), scale.float().double().log2().round().exp2()
    )
    got = codes.double() * scale.unsqueeze(-1)
    # e4m3 has three mantissa bits: half a step is 1/16; subnormals are absolute.
    error = (got - expected.transpose(0, 1)).abs()
    assert (error <= expected.transpose(0, 1).abs() / 15 + scale.unsqueeze(-1) * 2**-9).all()
    top = codes.double().abs().amax(-1)
    assert ((top > 224 - 16) & (top <= 448)).all(), (
        "the scale is the smallest power of two that fits"
    )


@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_scores_equal_the_formula(tokens: int) -> None:
    """Sum over heads of weight * relu(q . k), for decode (own tables) and prefill (shared ones)."""
    arguments = cases.arguments("fp8_paged_mqa_logits_cpu", tokens)
    q, cache, weight, lengths, tables, block, _ = arguments
    got = v4_ops.fp8_paged_mqa_logits_cpu(*arguments)
    for t in range(tokens):
        slots = [int(tables[t, i // block]) * block + i % block for i in range(int(lengths[t]))]
        keys = index_keys(cache, block, slots)
        expected = (q[t].double() @ keys.T).relu().T @ weight[t].double()
        error = (got[t, : len(slots)].double() - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max()


def test_no_tokens_and_no_keys() -> None:
    arguments = cases.arguments("fp8_paged_mqa_logits_cpu", 2)
    arguments[3] = torch.zeros(2, dtype=torch.int32)
    assert v4_ops.fp8_paged_mqa_logits_cpu(*arguments).shape == (2, 640)
    arguments[3] = torch.tensor([0, 5], dtype=torch.int32)
    assert v4_ops.fp8_paged_mqa_logits_cpu(*arguments)[1, :5].isfinite().all()


def test_selection_is_the_512_best_with_ties_to_the_smaller_index() -> None:
    arguments = cases.arguments("topk_transform_512_cpu", 30)
    scores, lengths, tables, pages, block, raw = arguments
    scores[:, 700] = -0.0  # equal to the zeros around it
    v4_ops.topk_transform_512_cpu(*arguments)
    for t in range(30):
        n = int(lengths[t])
        order = sorted(range(n), key=lambda i: (-float(scores[t, i]), i))[:512]
        chosen = raw[t][raw[t] >= 0].tolist()
        assert sorted(chosen) == sorted(order)
        slots = [int(tables[t, i // block]) * block + i % block for i in raw[t].tolist() if i >= 0]
        assert pages[t][pages[t] >= 0].tolist() == slots
        assert ((raw[t] < 0) == (pages[t] < 0)).all()
