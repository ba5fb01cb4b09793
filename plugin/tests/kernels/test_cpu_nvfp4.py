"""The CPU kernels against the fp32 reference, judged as contract 1 says.

Partitions differ in global scale by large factors, so that a kernel which takes one partition's
scale for another's, or the largest for all, cannot pass.
"""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.kernels.cpu.nvfp4 import Arithmetic, CpuKernels, HalfMatrix, PlainOperand
from assay_kernels.kernels.interface import Groups, PackedWeight
from assay_kernels.numerics import (
    NVFP4,
    dequantize,
    judge_bf16,
    judge_fp32,
    per_channel,
    quantize,
    quantize_activation,
)

LIMIT = 10.0
ROWS = [1, 7, 64, 129]


def matrix(generator: torch.Generator, *shape: int, scale: float = 0.05) -> NVFP4:
    return quantize(torch.randn(*shape, generator=generator) * scale)


def fused(generator: torch.Generator, rows: list[int], k: int, scales: list[float]) -> PackedWeight:
    parts = [matrix(generator, n, k, scale=s) for n, s in zip(rows, scales, strict=True)]
    return PackedWeight(
        torch.cat([p.codes for p in parts]),
        torch.cat([p.block_scale for p in parts]),
        per_channel([p.global_scale for p in parts], rows),
        input_scale=None,
    )


def activation(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("m", ROWS)
def test_dense_keeps_each_partitions_scale(generator: torch.Generator, m: int) -> None:
    weight = fused(generator, [256, 512], 256, [0.02, 0.5])
    kernels = CpuKernels("w4a16")
    x = activation(generator, m, 256)
    out = kernels.dense(x, kernels.prepare(weight))
    expected = reference.dense(x, weight.codes, weight.block_scale, weight.alpha)
    verdict = judge_bf16(out, expected, [256, 512])
    assert verdict.passed, verdict


def test_fp16_weights_hold_every_code_times_every_block_scale() -> None:
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = torch.outer(scales, torch.cat([codes, -codes]))
    identity = torch.eye(products.shape[1])
    held = HalfMatrix(products.float())(identity)
    assert torch.equal(held.T.double(), products)


@pytest.mark.parametrize("taken", ["the other's", "the largest"])
def test_the_judge_sees_a_shared_global_scale(generator: torch.Generator, taken: str) -> None:
    weight = fused(generator, [256, 512], 256, [0.02, 0.5])
    alpha = weight.alpha.max().expand_as(weight.alpha)
    if taken == "the other's":
        alpha = torch.cat([weight.alpha[256:512], weight.alpha[256:]])
    kernels = CpuKernels("w4a16")
    x = activation(generator, 7, 256)
    wrong = kernels.dense(x, kernels.prepare(dataclasses.replace(weight, alpha=alpha)))
    expected = reference.dense(x, weight.codes, weight.block_scale, weight.alpha)
    assert not judge_bf16(wrong, expected, [256, 512]).passed


@pytest.mark.parametrize("m", ROWS)
def test_compressor_returns_fp32(generator: torch.Generator, m: int) -> None:
    weight = fused(generator, [1024, 1024], 256, [0.05, 0.4])
    kernels = CpuKernels("w4a16")
    x = activation(generator, m, 256)
    out = kernels.dense(x, kernels.prepare(weight), torch.float32)
    assert out.dtype == torch.float32
    expected = reference.compressor(
        x, weight.codes, weight.block_scale, weight.alpha, dtype=torch.float64
    )
    verdict = judge_fp32(out, expected, [1024, 1024])
    assert verdict.passed, verdict


@pytest.mark.parametrize("m", ROWS)
def test_dense_swiglu_clamps(generator: torch.Generator, m: int) -> None:
    weight = fused(generator, [128, 128], 256, [0.4, 1.6])
    kernels = CpuKernels("w4a16")
    x = activation(generator, m, 256)
    out = kernels.dense_swiglu(x, kernels.prepare(weight), LIMIT)
    expected = reference.dense_swiglu(x, weight.codes, weight.block_scale, weight.alpha, LIMIT)
    verdict = judge_bf16(out, expected)
    assert verdict.passed, verdict
    unclamped = kernels.dense_swiglu(x, kernels.prepare(weight), 1e30)
    assert not judge_bf16(unclamped, expected).passed


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_does_not_clamp_is_refused(generator: torch.Generator, limit: float) -> None:
    weight = fused(generator, [128, 128], 256, [0.4, 1.6])
    kernels = CpuKernels("w4a16")
    with pytest.raises(ValueError, match="swiglu_limit"):
        kernels.dense_swiglu(activation(generator, 1, 256), kernels.prepare(weight), limit)


def experts(generator: torch.Generator, e: int, h: int, i: int) -> tuple[PackedWeight, ...]:
    gate, up = matrix(generator, e, i, h, scale=0.05), matrix(generator, e, i, h, scale=0.9)
    down = matrix(generator, e, h, i)
    w13 = PackedWeight(
        torch.cat([gate.codes, up.codes], dim=1),
        torch.cat([gate.block_scale, up.block_scale], dim=1),
        torch.stack([gate.global_scale, up.global_scale], 1).repeat_interleave(i, dim=1),
        None,
    )
    alpha2 = down.global_scale.unsqueeze(1).expand(-1, h)
    return w13, PackedWeight(down.codes, down.block_scale, alpha2, None)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("local", ["all", "half", "skewed", "unused slots", "half, unused"])
def test_routed_experts(generator: torch.Generator, m: int, local: str) -> None:
    e, h, i, top_k = 16, 64, 32, 6
    w13, w2 = experts(generator, e, h, i)
    ids = torch.stack([torch.randperm(e, generator=generator)[:top_k] for _ in range(m)])
    if "unused" in local:
        ids[:, 2] = -1
    if local == "skewed":  # every token takes the same experts, the others stay empty
        ids = ids[:1].expand(m, -1).contiguous()
    expert_map = None
    if "half" in local:
        expert_map = torch.full((e,), -1)
        expert_map[4:12] = torch.arange(8)
        w13, w2 = (
            PackedWeight(w.codes[4:12], w.block_scale[4:12], w.alpha[4:12], None) for w in (w13, w2)
        )
    weights = torch.rand(m, top_k, generator=generator)
    x = activation(generator, m, h)
    kernels = CpuKernels("w4a16")
    groups = Groups.from_router(ids, weights, w13.codes.shape[0], expert_map)

    rows = kernels.grouped_l1(x, kernels.prepare(w13), groups, LIMIT)
    expected = reference.grouped_l1(
        x, ids, w13.codes, w13.block_scale, w13.alpha, LIMIT, expert_map=expert_map
    )
    slots = (ids[groups.tokens] == _global(groups.experts, expert_map).unsqueeze(1)).long()
    expected_rows = expected[groups.tokens, slots.argmax(dim=1)]
    verdict = judge_bf16(rows, expected_rows)
    assert verdict.passed, verdict

    out = kernels.grouped_l2(rows, kernels.prepare(w2), groups)
    hidden = torch.zeros(m, top_k, i, dtype=torch.bfloat16)
    hidden[groups.tokens, slots.argmax(dim=1)] = rows
    expected = reference.grouped_l2(
        hidden, ids, weights, w2.codes, w2.block_scale, w2.alpha, expert_map=expert_map
    )
    verdict = judge_bf16(out, expected)
    assert verdict.passed, verdict


def _global(local: Tensor, expert_map: Tensor | None) -> Tensor:
    if expert_map is None:
        return local
    return (expert_map.unsqueeze(0) == local.unsqueeze(1)).long().argmax(dim=1)


def test_no_local_expert_gives_zeros(generator: torch.Generator) -> None:
    w13, w2 = experts(generator, 4, 64, 32)
    kernels = CpuKernels("w4a16")
    expert_map = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3])
    ids, weights = torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    groups = Groups.from_router(ids, weights, 4, expert_map)
    rows = kernels.grouped_l1(activation(generator, 1, 64), kernels.prepare(w13), groups, LIMIT)
    assert torch.equal(
        kernels.grouped_l2(rows, kernels.prepare(w2), groups),
        torch.zeros(1, 64, dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("arithmetic", ["w4a16", "reference"])
def test_wo_a_projects_each_group_with_its_own_weight(
    generator: torch.Generator, m: int, arithmetic: Arithmetic
) -> None:
    groups, rank, k = 8, 128, 512
    weight = fused(generator, [groups * rank], k, [0.05])
    x = activation(generator, m, groups, k)
    kernels = CpuKernels(arithmetic)
    stack = PackedWeight(
        *(
            rows.unflatten(0, (groups, rank))
            for rows in (weight.codes, weight.block_scale, weight.alpha)
        ),
        input_scale=None,
    )
    out = kernels.wo_a(x, kernels.prepare(stack))
    expected = reference.wo_a(x, weight.codes, weight.block_scale, weight.alpha)
    verdict = judge_bf16(out.flatten(1), expected.flatten(1), [rank] * groups)
    assert verdict.passed, verdict


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("static", [True, False])
def test_w4a4_emulation_quantises_the_input(
    generator: torch.Generator, m: int, static: bool
) -> None:
    weight = fused(generator, [256, 512], 256, [0.02, 0.5])
    x = activation(generator, m, 256)
    scale = (x.float().abs().max() / (6 * 448)) if static else None
    weight = dataclasses.replace(weight, input_scale=scale)
    kernels = CpuKernels("w4a4")
    out = kernels.dense(x, kernels.prepare(weight))
    alpha = weight.alpha if scale is None else weight.alpha * scale
    expected = reference.dense(
        quantize_activation(x, scale), weight.codes, weight.block_scale, alpha
    )
    verdict = judge_bf16(out, expected, [256, 512])
    assert verdict.passed, verdict
    w4a16 = reference.dense(x, weight.codes, weight.block_scale, weight.alpha)
    assert not judge_bf16(out, w4a16, [256, 512]).passed, "the input was not quantised"


def test_w4a4_quantises_a_routed_input_once_a_token(generator: torch.Generator) -> None:
    e, h, i = 8, 64, 32
    w13, _ = experts(generator, e, h, i)
    x = activation(generator, 5, h)
    ids = torch.stack([torch.randperm(e, generator=generator)[:3] for _ in range(5)])
    groups = Groups.from_router(ids, torch.ones(5, 3), e, None)
    kernels = CpuKernels("w4a4")
    rows = kernels.grouped_l1(x, kernels.prepare(w13), groups, LIMIT)
    quantised = quantize_activation(x, None)
    expected = reference.grouped_l1(quantised, ids, w13.codes, w13.block_scale, w13.alpha, LIMIT)
    slots = (ids[groups.tokens] == groups.experts.unsqueeze(1)).long().argmax(dim=1)
    verdict = judge_bf16(rows, expected[groups.tokens, slots])
    assert verdict.passed, verdict


def test_reference_mode_dequantises_whole_weights(generator: torch.Generator) -> None:
    weight = matrix(generator, 128, 64)
    kernels = CpuKernels("reference")
    operand = kernels.prepare(
        PackedWeight(weight.codes, weight.block_scale, weight.global_scale.expand(128), None)
    )
    assert isinstance(operand, PlainOperand)
    assert torch.equal(operand.wide, dequantize(weight))
