"""What the Hopper kernels refuse, and the sentence they refuse it with; no GPU, no compiler."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from assay_kernels.kernels.interface import PackedWeight
from assay_kernels.kernels.objects import CompilerMissingError
from assay_kernels.kernels.sm90.compiler import require_dsl
from assay_kernels.kernels.sm90.kernels import HopperKernels, check_activation

HAS_DSL = importlib.util.find_spec("cutlass") is not None


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (bf16(4, 64), "must be \\[M, 128\\]"),
        (bf16(2, 4, 128), "must be \\[M, 128\\]"),
        (torch.zeros(4, 128), "must be bfloat16"),
        (bf16(128, 4).T, "contiguous rows"),
        (bf16(4, 132)[:, :128], "start on 16 bytes"),
        (bf16(4, 1).expand(4, 128), "contiguous rows"),
        (bf16(4 * 128 + 1)[1:].view(4, 128), "start on 16 bytes"),
    ],
)
def test_an_activation_that_tma_cannot_read_is_refused(x: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_activation(x, 128)


def test_strided_rows_that_tma_can_read_are_taken() -> None:
    check_activation(bf16(4, 256)[:, :128], 128)
    check_activation(bf16(0, 128), 128)


@pytest.mark.skipif(HAS_DSL, reason="the CUTLASS DSL is installed")
def test_a_missing_compiler_is_named_with_its_remedy() -> None:
    with pytest.raises(CompilerMissingError, match=r"pip install 'assay-kernels\[cuda\]'"):
        require_dsl()


@pytest.mark.skipif(not HAS_DSL, reason="the CUTLASS DSL (optional extra) is not installed")
def test_weights_and_limits_that_do_not_fit_are_refused() -> None:
    kernels = HopperKernels()

    def packed(n: int, k: int) -> PackedWeight:
        return PackedWeight(
            torch.zeros(n, k // 2, dtype=torch.uint8),
            torch.ones(n, k // 16).to(torch.float8_e4m3fn),
            torch.ones(n),
            None,
        )

    with pytest.raises(ValueError, match="multiple of 64"):
        kernels.prepare(packed(96, 128))
    plain, gated = kernels.prepare(packed(128, 128)), kernels.prepare_gate_up(packed(128, 128))
    with pytest.raises(ValueError, match="prepare_gate_up"):
        kernels.dense_swiglu(bf16(1, 128), plain, 10.0)
    with pytest.raises(ValueError, match="swiglu_limit"):
        kernels.dense_swiglu(bf16(1, 128), gated, float("inf"))
    with pytest.raises(ValueError, match="use dense_swiglu"):
        kernels.dense(bf16(1, 128), gated)
    with pytest.raises(ValueError, match="stack of NVFP4 experts"):
        kernels.grouped_l2(bf16(1, 128), plain, None)  # type: ignore[arg-type]
    assert kernels.dense(bf16(0, 128), plain).shape == (0, 128)
