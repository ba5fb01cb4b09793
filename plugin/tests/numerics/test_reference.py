"""The reference against transformers' own modules and against loops, in W4A16 and W4A4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.numerics import NVFP4, dequantize, per_channel, quantize, quantize_activation

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

LIMIT = 2.0  # low enough that it clamps often


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape) * scale


def fuse(*parts: NVFP4) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block_scale, alpha) of partitions stacked along N, each with its own scale."""
    alpha = per_channel([p.global_scale for p in parts], [p.shape[0] for p in parts])
    codes = torch.cat([p.codes for p in parts])
    scales = torch.cat([p.block_scale.view(torch.uint8) for p in parts])
    return codes, scales.view(torch.float8_e4m3fn), alpha


def config() -> object:
    return transformers.DeepseekV4Config(
        vocab_size=32,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=LIMIT,
        compress_ratios=[0],
        qk_rope_head_dim=16,
        num_hash_layers=0,
    )


def test_dense_keeps_each_partitions_own_scale() -> None:
    x = random(5, 64).bfloat16()
    first, second = quantize(random(32, 64)), quantize(random(16, 64, scale=50.0))
    expected = torch.cat([x.float() @ dequantize(w).T for w in (first, second)], dim=1)
    torch.testing.assert_close(reference.dense(x, *fuse(first, second)), expected)


def test_dense_refuses_one_scale_for_a_whole_fused_matrix() -> None:
    codes, scales, _ = fuse(quantize(random(32, 64)))
    with pytest.raises(ValueError, match="one value per output channel"):
        reference.dense(random(5, 64), codes, scales, torch.ones(1))


def test_w4a4_static_takes_the_input_scale_from_alpha() -> None:
    x, weight, input_scale = random(5, 64), quantize(random(32, 64)), torch.tensor(0.002)
    activation = quantize_activation(x, input_scale)
    codes, scales, alpha = fuse(weight)
    x_seen = dequantize(quantize(x, input_scale))
    got = reference.dense(activation, codes, scales, alpha * input_scale)
    torch.testing.assert_close(got, x_seen @ dequantize(weight).T)


def test_w4a4_dynamic_applies_each_rows_own_scale() -> None:
    x = random(5, 64) * torch.tensor([[1e-3], [1.0], [30.0], [0.0], [5.0]])
    weight = quantize(random(32, 64))
    x_seen = torch.cat([dequantize(quantize(row[None])) for row in x])
    got = reference.dense(quantize_activation(x, None), *fuse(weight))
    torch.testing.assert_close(got, x_seen @ dequantize(weight).T)


def test_float64_is_accumulated_in_float64() -> None:
    x, weight = random(5, 64).bfloat16(), quantize(random(32, 64))
    exact = reference.compressor(x, *fuse(weight), dtype=torch.float64)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), reference.compressor(x, *fuse(weight)))


def test_shared_expert_equals_transformers_mlp() -> None:
    mlp = modeling.DeepseekV4MLP(config())
    w1, w3 = quantize(random(32, 64)), quantize(random(32, 64, scale=4.0))
    w2 = quantize(random(64, 32))
    with torch.no_grad():
        for layer, weight in ((mlp.gate_proj, w1), (mlp.up_proj, w3), (mlp.down_proj, w2)):
            layer.weight.copy_(dequantize(weight))
        x = random(7, 64)
        expected = mlp(x)
    hidden = reference.dense_swiglu(x, *fuse(w1, w3), LIMIT)
    torch.testing.assert_close(reference.dense(hidden, *fuse(w2)), expected, rtol=1e-4, atol=1e-3)


def test_swiglu_clamps_gate_above_only_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 9.0, -9.0])
    silu = torch.nn.functional.silu
    expected = [silu(torch.tensor(2.0)), silu(gate[1]), 2 * silu(gate[2]), -2 * silu(gate[3])]
    assert reference.swiglu(gate, up, LIMIT).tolist() == [float(v) for v in expected]


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_cannot_clamp_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="swiglu_limit"):
        reference.swiglu(torch.ones(1), torch.ones(1), limit)


def experts() -> tuple[NVFP4, NVFP4, Tensor]:
    """(w13, w2, alpha of w13) of six experts; w3 is much larger than w1."""
    w1, w3 = quantize(random(6, 32, 64)), quantize(random(6, 32, 64, scale=4.0))
    scales = torch.cat([w.block_scale.view(torch.uint8) for w in (w1, w3)], dim=1)
    w13 = NVFP4(
        torch.cat([w1.codes, w3.codes], dim=1), scales.view(torch.float8_e4m3fn), torch.ones(6)
    )
    alpha = torch.stack([w1.global_scale, w3.global_scale], dim=1).repeat_interleave(32, dim=1)
    return w13, quantize(random(6, 64, 32)), alpha


def routed(expert_map: Tensor | None, keep: list[int]) -> tuple[Tensor, Tensor]:
    """(reference, transformers) outputs of the routed experts held in `keep`."""
    w13, w2, alpha = experts()
    module = modeling.DeepseekV4Experts(config())
    module.config._experts_implementation = "eager"
    x, ids = random(9, 64), torch.stack([torch.randperm(6)[:3] for _ in range(9)])
    weights = torch.rand(9, 3)
    held = torch.tensor(keep)
    with torch.no_grad():
        module.gate_up_proj.copy_(dequantize(w13) * alpha.unsqueeze(-1))
        module.down_proj.copy_(dequantize(w2))
        here = torch.isin(ids, held)
        expected = module(x, ids, torch.where(here, weights, 0.0))
    hidden = reference.grouped_l1(
        x,
        ids,
        w13.codes[held],
        w13.block_scale[held],
        alpha[held],
        LIMIT,
        expert_map=expert_map,
    )
    alpha2 = w2.global_scale[held].unsqueeze(-1).expand(-1, 64)
    got = reference.grouped_l2(
        hidden, ids, weights, w2.codes[held], w2.block_scale[held], alpha2, expert_map=expert_map
    )
    return got, expected


def test_routed_experts_equal_transformers() -> None:
    got, expected = routed(None, [0, 1, 2, 3, 4, 5])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_expert_map_leaves_out_experts_of_other_ranks() -> None:
    got, expected = routed(torch.tensor([-1, 1, -1, 0, -1, 2]), [3, 1, 5])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_unused_slots_contribute_nothing() -> None:
    w13, _, alpha = experts()
    ids = torch.tensor([[0, -1, 3]])
    hidden = reference.grouped_l1(
        random(1, 64), ids, w13.codes, w13.block_scale, alpha, LIMIT, expert_map=torch.arange(6)
    )
    assert hidden[0, [0, 2]].any(dim=-1).all()
    assert not hidden[0, 1].any()


def test_grouped_layers_take_quantised_activations() -> None:
    w13, w2, alpha = experts()
    x, ids, weights = (
        random(4, 64),
        torch.tensor([[0, 5], [1, 2], [3, 3], [4, 0]]),
        torch.ones(4, 2),
    )
    activation = quantize_activation(x, None)
    seen = torch.cat([dequantize(quantize(row[None])) for row in x])
    got = reference.grouped_l1(activation, ids, w13.codes, w13.block_scale, alpha, LIMIT)
    expected = reference.grouped_l1(seen, ids, w13.codes, w13.block_scale, alpha, LIMIT)
    torch.testing.assert_close(got, expected)

    hidden = quantize_activation(got, None)
    assert hidden.row_scale is not None
    assert hidden.row_scale.shape == (4, 2)
    alpha2 = w2.global_scale.unsqueeze(-1).expand(-1, 64)
    out = reference.grouped_l2(hidden, ids, weights, w2.codes, w2.block_scale, alpha2)
    flat = torch.stack([dequantize(quantize(row[None]))[0] for row in got.flatten(0, 1)])
    same = reference.grouped_l2(
        flat.unflatten(0, (4, 2)), ids, weights, w2.codes, w2.block_scale, alpha2
    )
    torch.testing.assert_close(out, same)


def test_inverse_rope_equals_transformers_and_undoes_the_rotation() -> None:
    angle = random(5, 8)
    cos, sin = angle.cos(), angle.sin()
    x = random(5, 4, 32)
    expected = modeling.apply_rotary_pos_emb(x, cos, -sin)
    torch.testing.assert_close(reference.inverse_rope(x, cos, sin), expected)
    rotated = modeling.apply_rotary_pos_emb(x, cos, sin)
    torch.testing.assert_close(reference.inverse_rope(rotated, cos, sin), x)
    assert reference.inverse_rope(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_wo_a_equals_transformers_grouped_linear() -> None:
    weight = quantize(random(2 * 16, 64))
    linear = modeling.DeepseekV4GroupedLinear(64, 32, 2)
    x = random(5, 2, 64)
    with torch.no_grad():
        linear.weight.copy_(dequantize(weight))
        expected = linear(x)
    got = reference.wo_a(x, *fuse(weight))
    assert got.shape == (5, 2, 16)
    torch.testing.assert_close(got.flatten(1), expected.flatten(1), rtol=1e-4, atol=1e-4)
