"""Hyper-connections against transformers' modules in fp64 arithmetic where rounding matters."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from assay_kernels.kernels.cpu import v4_ops

from . import cases

CONFIG = DeepseekV4Config(hidden_size=256, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6)


# 1 and 3: numpy; 100: torch.
@pytest.mark.parametrize("tokens", [1, 3, 100])
@torch.no_grad()
def test_pre_equals_transformers(tokens: int) -> None:
    x, fn, scale, base, *rest = cases.arguments("hc_pre_fused_cpu", tokens)
    module = modeling.DeepseekV4HyperConnection(CONFIG)
    module.fn.data, module.scale.data, module.base.data = fn, scale, base
    post, comb, collapsed = module(x.unsqueeze(0))
    got, got_post, got_comb = v4_ops.hc_pre_fused_cpu(x, fn, scale, base, *rest)
    torch.testing.assert_close(got_post, post[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_comb, comb[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.float(), collapsed[0].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 17, 100])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_sinkhorn_equals_the_plain_iteration(
    spread: float, tokens: int, generator: torch.Generator
) -> None:
    """Flat matrices settle at once, steep ones not in 20 rounds: the early exit may not show."""
    logits = torch.randn(tokens, 4, 4, generator=generator) * spread
    comb = logits.double().softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    got = v4_ops._sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(got.double(), comb, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 40])
def test_post_mixes_streams(tokens: int) -> None:
    x, residual, post, comb = cases.arguments("hc_post_fused_cpu", tokens)
    got = v4_ops.hc_post_fused_cpu(x, residual, post, comb)
    # transformers: post * out + comb^T @ residual
    expected = post.double().unsqueeze(-1) * x.double().unsqueeze(1)
    expected += torch.matmul(comb.double().transpose(1, 2), residual.double())
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("tokens", [1, 40])
@torch.no_grad()
def test_head_equals_transformers(tokens: int) -> None:
    x, fn, scale, base, *eps = cases.arguments("hc_head_fused_cpu", tokens)
    module = modeling.DeepseekV4HyperHead(CONFIG)
    module.hc_fn.data, module.hc_scale.data, module.hc_base.data = fn, scale, base
    expected = module(x.unsqueeze(0))[0]
    got = v4_ops.hc_head_fused_cpu(x, fn, scale, base, *eps)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)
