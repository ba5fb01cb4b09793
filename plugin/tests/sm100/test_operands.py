"""Operands as the kernels will read them, on the CPU: scales, order, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assay_kernels.kernels.interface import PackedWeight
from assay_kernels.kernels.sm100 import kernels as sm100
from assay_kernels.kernels.sm100.kernels import BlackwellKernels, PlainOperand
from assay_kernels.numerics import unswizzle_128x4


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> BlackwellKernels:
    """Preparing needs no compiler."""
    monkeypatch.setattr(sm100, "require_dsl", lambda: None)
    return BlackwellKernels()


def packed(n: int, k: int, scale: float | None, experts: int = 0) -> PackedWeight:
    lead = (experts,) if experts else ()
    return PackedWeight(
        torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8),
        torch.randint(0, 0x7F, (*lead, n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.rand(*lead, n) + 0.5,
        None if scale is None else torch.tensor(scale),
    )


@pytest.mark.parametrize("scale", [0.25, None, 0.0, float("nan"), float("inf"), -1.0])
def test_a_usable_static_scale_is_part_of_alpha_and_any_other_is_never_used(
    kernels: BlackwellKernels, scale: float | None
) -> None:
    weight = packed(256, 128, scale)
    operand = kernels.prepare(weight)
    usable = scale == 0.25
    assert operand.input_scale == (0.25 if usable else None)
    assert operand.alpha.equal(weight.alpha * (0.25 if usable else 1.0))


def test_gate_and_up_keep_their_own_codes_scales_and_alpha(kernels: BlackwellKernels) -> None:
    weight = packed(256, 128, None, experts=2)
    operand = kernels.prepare_gate_up(weight)
    codes = operand.codes.view(2, 256, 64)
    scales = unswizzle_128x4(operand.scales.view(2, -1), 256, 8)
    alpha = operand.alpha.view(2, 256)
    for row in range(256):
        block, half, i = row // 32, row % 32 // 16, row % 16
        source = 128 * half + 16 * block + i
        assert codes[:, row].equal(weight.codes[:, source])
        assert scales[:, row].equal(weight.block_scale.view(torch.uint8)[:, source])
        assert alpha[:, row].equal(weight.alpha[:, source])


def test_calls_that_no_kernel_serves_are_refused(kernels: BlackwellKernels) -> None:
    plain = kernels.prepare(packed(256, 128, 0.5))
    stack = kernels.prepare(packed(256, 128, 0.5, experts=2))
    gate_up = kernels.prepare_gate_up(packed(256, 128, 0.5))
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    calls: list[tuple[str, Any]] = [
        ("their own kernel", lambda: kernels.dense(x, stack)),
        ("their own kernel", lambda: kernels.dense(x, gate_up)),
        ("out_dtype", lambda: kernels.dense(x, plain, torch.float16)),
        ("prepare_gate_up", lambda: kernels.dense_swiglu(x, plain, 10.0)),
        ("swiglu_limit", lambda: kernels.dense_swiglu(x, gate_up, float("inf"))),
        (r"\[M, 128\]", lambda: kernels.dense(x[:, :64], plain)),
        ("bfloat16", lambda: kernels.dense(x.float(), plain)),
        ("whole stages", lambda: kernels.wo_a(x.view(2, 2, 128), stack)),
        ("stack of NVFP4", lambda: kernels.grouped_l2(x, PlainOperand(x), None)),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_the_router_is_answered_with_tiles(kernels: BlackwellKernels) -> None:
    ids = torch.tensor([[0, 3], [3, -1]])
    rows = kernels.route(ids, torch.ones(2, 2), 4, None)
    assert int(rows.tile_expert[-1]) == 2
    assert rows.place.tolist() == [[0, 128], [129, -1]]
