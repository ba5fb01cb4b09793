"""Routing and routed experts against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from assay_kernels.kernels.cpu import experts, v4_ops

LIMIT = 10.0
CONFIG = DeepseekV4Config(
    hidden_size=64,
    moe_intermediate_size=32,
    n_routed_experts=16,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    swiglu_limit=LIMIT,
    vocab_size=50,
)


@torch.no_grad()
def test_biased_routing_equals_transformers(generator: torch.Generator) -> None:
    router = modeling.DeepseekV4TopKRouter(CONFIG)
    router.weight.data.normal_(generator=generator)
    router.e_score_correction_bias.normal_(generator=generator)
    x = torch.randn(20, 64, generator=generator)
    logits, weights, ids = router(x)
    bias = router.e_score_correction_bias
    got, got_ids = v4_ops.biased_topk_cpu(
        logits, logits, bias, 6, True, "sqrtsoftplus", 0, 1.5, True
    )
    order, got_order = ids.argsort(1), got_ids.argsort(1)
    assert torch.equal(ids.gather(1, order), got_ids.long().gather(1, got_order))
    torch.testing.assert_close(got.gather(1, got_order), weights.gather(1, order))


@torch.no_grad()
def test_hash_routing_equals_transformers(generator: torch.Generator) -> None:
    router = modeling.DeepseekV4HashRouter(CONFIG)
    router.weight.data.normal_(generator=generator)
    router.tid2eid.copy_(
        torch.stack([torch.randperm(16, generator=generator)[:6] for _ in range(50)])
    )
    x, tokens = torch.randn(20, 64, generator=generator), torch.arange(20) * 2
    logits, weights, ids = router(x, tokens)
    table = router.tid2eid[tokens].int()
    got, got_ids = v4_ops.hash_topk_cpu(logits, table, 6, "sqrtsoftplus", 0, 16, 1.5)
    assert torch.equal(got_ids.long(), ids)
    torch.testing.assert_close(got, weights)


def layer(generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights, w13, w2; gate and up large enough that the clamp works on many."""
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(16, generator=generator)[:6] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, 6, generator=generator)
    w13 = torch.randn(16, 64, 64, generator=generator).bfloat16()
    w2 = (torch.randn(16, 64, 32, generator=generator) / 8).bfloat16()
    return x, ids, weights, w13, w2


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@torch.no_grad()
def oracle(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """transformers' experts in fp64."""
    module = modeling.DeepseekV4Experts(CONFIG).double()
    module.limit = limit
    module.gate_up_proj.data, module.down_proj.data = w13.double(), w2.double()
    out: Tensor = module(x.double(), ids.long(), weights.double())
    return out


# One token, sorted groups, more tokens than experts; bf16 weights and their fp32 copies.
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 16, 70])
def test_experts_equal_transformers(
    tokens: int, prepared: bool, generator: torch.Generator
) -> None:
    x, ids, weights, w13, w2 = layer(generator, tokens)
    expected = oracle(x, ids, weights, w13, w2, LIMIT)
    if prepared:
        w13, w2 = experts.prepare(w13), experts.prepare(w2)
    got = experts.routed_experts(x, ids, weights, w13, w2, swiglu_limit=LIMIT)
    assert got.dtype == torch.bfloat16
    assert relative(got, expected) < 2**-8 * 1.25


def test_the_clamp_is_seen(generator: torch.Generator) -> None:
    """Dropping it, or clamping gate from below too, is far outside the tolerance above."""
    x, ids, weights, w13, w2 = layer(generator, 16)
    expected = oracle(x, ids, weights, w13, w2, LIMIT)
    got = experts.routed_experts(x, ids, weights, w13, w2, swiglu_limit=None)
    assert relative(got, expected) > 0.05
    assert relative(got, oracle(x, ids, weights, w13, w2, 1e9)) < 2**-8 * 1.25


@pytest.mark.parametrize("tokens", [1, 16])
def test_alpha_scales_channels_before_the_activation(
    tokens: int, generator: torch.Generator
) -> None:
    """Unscaled weights with alpha in the epilogue equal scaled weights."""
    x, ids, weights, w13, w2 = layer(generator, tokens)
    alpha13 = torch.rand(16, 64, generator=generator) + 0.5
    alpha2 = torch.rand(16, 64, generator=generator) + 0.5
    scaled13 = w13.double() * alpha13.double().unsqueeze(-1)
    scaled2 = w2.double() * alpha2.double().unsqueeze(-1)
    expected = oracle(x, ids, weights, scaled13, scaled2, LIMIT)
    for weight13, weight2 in ((w13, w2), (experts.prepare(w13), experts.prepare(w2))):
        got = experts.routed_experts(x, ids, weights, weight13, weight2, alpha13, alpha2, LIMIT)
        assert relative(got, expected) < 2**-8 * 1.25


@pytest.mark.parametrize("tokens", [1, 16])
def test_experts_of_other_ranks_add_nothing(tokens: int, generator: torch.Generator) -> None:
    x, ids, weights, w13, w2 = layer(generator, tokens)
    expert_map = torch.full((16,), -1, dtype=torch.int32)
    expert_map[8:] = torch.arange(8, dtype=torch.int32)
    masked = torch.where(ids >= 8, weights, 0.0)
    expected = oracle(x, ids, masked, w13, w2, LIMIT)
    local = experts.prepare(w13[8:]), experts.prepare(w2[8:])
    got = experts.routed_experts(x, ids, weights, *local, swiglu_limit=LIMIT, expert_map=expert_map)
    assert (got.double() - expected).norm() <= 2**-8 * 1.25 * expected.norm()


def test_linear_applies_alpha_in_fp32(generator: torch.Generator) -> None:
    x = torch.randn(2, 3, 64, generator=generator).bfloat16()
    weight = torch.randn(32, 64, generator=generator).bfloat16()
    alpha = torch.rand(32, generator=generator)
    expected = x.double() @ weight.double().T * alpha.double()
    for w in (weight, experts.prepare(weight)):
        out = experts.linear(x, w, alpha, torch.float32)
        assert ((out.double() - expected).norm() / expected.norm()) < 5e-7
        assert experts.linear(x, w).dtype == torch.bfloat16
