"""The known ways to serve garbage, one layer at a time, from a checkpoint's bytes to the kernel's
output.

Every fault has two tests. The first one shows that the product's path is right, by the judge of
contract 1 against an oracle that shares no code with it. The second one breaks the product's path
in that very way and shows that the judge sees it: so the first cannot pass on a broken product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay_kernels.kernels.cpu import nvfp4 as cpu
from assay_kernels.kernels.cpu.nvfp4 import Arithmetic
from assay_kernels.kernels.interface import Groups, PackedWeight
from assay_kernels.numerics import Verdict, judge_bf16, judge_fp32
from assay_kernels.vllm_plugin import layers as product

from . import oracle
from .layers import HIDDEN, LIMIT, Expert, Matrix, activation, experts, linear

pytestmark = pytest.mark.usefixtures("vllm_world")

MODES: tuple[Arithmetic, ...] = ("w4a16", "w4a4", "reference")
ROWS = (1, 7, 64, 129)
"""What the self-check uses: one row, few, a full tile, a tile and one."""
SMALL, LARGE = 2.0**-9, 2.0**-7
"""Global scales of the two partitions of a pair: a factor of four, as between the miniature's w1
and w3."""


@dataclass(frozen=True)
class Pair:
    """Two matrices that vLLM fuses into one layer, with the miniature's widths."""

    prefix: str
    widths: tuple[int, int]
    judge: Callable[[Tensor, Tensor, Sequence[int]], Verdict] = judge_bf16


PAIRS = {
    "wq_a | wkv": Pair("model.layers.0.attn.fused_wqa_wkv", (256, 512)),
    "gate | up": Pair("model.layers.0.ffn.shared_experts.gate_up_proj", (128, 128)),
    "compressor kv | gate, ratio 4": Pair(
        "model.layers.1.attn.compressor.fused_wkv_wgate", (1024, 1024), judge_fp32
    ),
    "compressor kv | gate, ratio 128": Pair(
        "model.layers.2.attn.compressor.fused_wkv_wgate", (512, 512), judge_fp32
    ),
    "indexer compressor kv | gate": Pair(
        "model.layers.1.attn.indexer.compressor.fused_wkv_wgate", (256, 256), judge_fp32
    ),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
every_mode = pytest.mark.parametrize("mode", MODES)
either_order = pytest.mark.parametrize(
    "scales", [(SMALL, LARGE), (LARGE, SMALL)], ids=["small first", "large first"]
)


def fused_verdicts(pair: Pair, mode: Arithmetic, scales: tuple[float, float]) -> list[Verdict]:
    """The judge's words on a fused layer at every row count."""
    rng = np.random.default_rng(5)
    parts = [Matrix.random(rng, n, HIDDEN, s) for n, s in zip(pair.widths, scales, strict=True)]
    layer = linear(pair.prefix, parts, mode)
    weight = torch.from_numpy(np.concatenate([p.values for p in parts]))
    out = []
    for rows in ROWS:
        x = activation(rng, rows)
        out.append(pair.judge(layer(x), x.double() @ weight.T, pair.widths))
    return out


def shared_expert_verdicts(mode: Arithmetic) -> list[Verdict]:
    """The same on the first layer of the shared expert with its clamp and SwiGLU."""
    rng = np.random.default_rng(6)
    gate, up = (Matrix.random(rng, 128, HIDDEN, 4 * s) for s in (SMALL, LARGE))
    layer = linear("model.layers.0.ffn.shared_experts.gate_up_proj", [gate, up], mode)
    out = []
    for rows in ROWS:
        x = activation(rng, rows)
        expected = _swiglu(x, gate, up)
        actual = layer.quant_method.kernels.dense_swiglu(x, layer.operand, LIMIT)
        out.append(judge_bf16(actual, torch.from_numpy(expected)))
    return out


def _swiglu(x: Tensor, gate: Matrix, up: Matrix) -> oracle.Real:
    values = x.double().numpy()
    return oracle.swiglu(values @ gate.values.T, values @ up.values.T, LIMIT)


def routed_verdicts(mode: Arithmetic) -> list[Verdict]:
    """The same on the routed experts, both layers, each fed the exact (rounded) input."""
    rng = np.random.default_rng(7)
    width, count, top_k = 128, 8, 6
    stack: list[Expert] = [
        {
            # Every expert has global scales of its own, gate and up a factor of four apart.
            "w1": Matrix.random(rng, width, HIDDEN, SMALL * (1 + e / 8)),
            "w3": Matrix.random(rng, width, HIDDEN, LARGE * (1 + e / 8)),
            "w2": Matrix.random(rng, HIDDEN, width, SMALL * (2 - e / 8)),
        }
        for e in range(count)
    ]
    layer = experts(stack, mode)
    kernels = layer.quant_method.kernels
    out = []
    for rows in ROWS:
        x = activation(rng, rows)
        ids = np.stack([rng.permutation(count)[:top_k] for _ in range(rows)])
        weights = rng.random((rows, top_k), dtype=np.float32)
        groups = Groups.from_router(torch.from_numpy(ids), torch.from_numpy(weights), count, None)
        hidden = kernels.grouped_l1(x, layer.operand13, groups, LIMIT)
        expected = _routed_l1(x, stack, groups)
        out.append(judge_bf16(hidden, torch.from_numpy(expected)))
        h = activation(rng, len(groups.tokens), width)
        total = np.zeros((rows, HIDDEN))
        for r, (t, e) in enumerate(zip(groups.tokens, groups.experts, strict=True)):
            total[t] += float(groups.weights[r]) * (stack[e]["w2"].values @ h[r].double().numpy())
        out.append(
            judge_bf16(kernels.grouped_l2(h, layer.operand2, groups), torch.from_numpy(total))
        )
    return out


def _routed_l1(x: Tensor, stack: Sequence[Expert], groups: Any) -> oracle.Real:
    rows = x.double().numpy()[groups.tokens]
    out = np.empty((len(rows), stack[0]["w1"].values.shape[0]))
    for r, e in enumerate(groups.experts.tolist()):
        gate, up = (stack[e][name].values @ rows[r] for name in ("w1", "w3"))
        out[r] = oracle.swiglu(gate, up, LIMIT)
    return out


def assert_right(verdicts: list[Verdict]) -> None:
    assert all(v.passed for v in verdicts), "\n".join(map(str, verdicts))


def assert_caught(verdicts: list[Verdict]) -> None:
    """The judge refuses every row count, and by a margin that no rounding explains."""
    assert all(not v.passed and v.ratio > 3 for v in verdicts), "\n".join(map(str, verdicts))


# --- one global scale for a fused pair ------------------------------------------------------------


@every_pair
@either_order
@every_mode
def test_each_partition_keeps_its_own_global_scale(
    pair: Pair, mode: Arithmetic, scales: tuple[float, float]
) -> None:
    assert_right(fused_verdicts(pair, mode, scales))


def largest_for_all(scales: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """What vLLM's own ModelOpt linears do (vLLM issue 47515)."""
    return torch.stack(list(scales)).max().repeat(sum(rows))


def first_for_all(scales: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return scales[0].repeat(sum(rows))


@every_pair
@either_order
@every_mode
@pytest.mark.parametrize("mutation", [largest_for_all, first_for_all])
def test_one_global_scale_for_a_fused_pair_is_caught(
    pair: Pair, mode: Arithmetic, scales: tuple[float, float], mutation: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(product, "per_channel", mutation)
    assert_caught(fused_verdicts(pair, mode, scales))


@every_mode
def test_shared_expert_is_right(mode: Arithmetic) -> None:
    assert_right(shared_expert_verdicts(mode))


@every_mode
@pytest.mark.parametrize("mutation", [largest_for_all, first_for_all])
def test_one_global_scale_for_the_shared_experts_gate_and_up_is_caught(
    mode: Arithmetic, mutation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "per_channel", mutation)
    assert_caught(shared_expert_verdicts(mode))


@every_mode
def test_routed_experts_are_right(mode: Arithmetic) -> None:
    assert_right(routed_verdicts(mode))


@every_mode
def test_the_gates_global_scale_for_up_is_caught_in_routed_experts(
    mode: Arithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's own ModelOpt experts do (vLLM issue 54974)."""
    method = product.AssayModelOptNvFp4ExpertsMethod
    right = method.process_weights_after_loading

    def gate_for_up(self: Any, layer: Any) -> None:
        layer.w13_weight_scale_2.data[:, 1] = layer.w13_weight_scale_2.data[:, 0]
        right(self, layer)

    monkeypatch.setattr(method, "process_weights_after_loading", gate_for_up)
    first_layer = routed_verdicts(mode)[0::2]
    assert_caught(first_layer)


# --- nibbles, block scales, clamp -----------------------------------------------------------------


def swapped(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    return (codes >> 4) | (codes << 4), block_scale


def all_ones(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes, torch.ones_like(block_scale.float()).to(torch.float8_e4m3fn)


@every_mode
@pytest.mark.parametrize("mutation", [swapped, all_ones])
@pytest.mark.parametrize(
    "verdicts",
    [
        *[lambda mode, p=p: fused_verdicts(p, mode, (SMALL, LARGE)) for p in PAIRS.values()],
        shared_expert_verdicts,
        routed_verdicts,
    ],
    ids=[*PAIRS, "shared expert", "routed experts"],
)
def test_swapped_nibbles_and_lost_block_scales_are_caught(
    mode: Arithmetic, mutation: Any, verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights only: swapped alike in weights and activations, nibbles cancel out.
    right = cpu.CpuKernels.prepare

    def prepare(self: cpu.CpuKernels, weight: PackedWeight) -> cpu.CpuOperand:
        codes, block_scale = mutation(weight.codes, weight.block_scale)
        return right(self, replace(weight, codes=codes, block_scale=block_scale))

    monkeypatch.setattr(cpu.CpuKernels, "prepare", prepare)
    assert_caught(verdicts(mode))


@every_mode
@pytest.mark.parametrize("verdicts", [shared_expert_verdicts, lambda m: routed_verdicts(m)[0::2]])
def test_a_dropped_clamp_is_caught(
    mode: Arithmetic, verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu.reference, "swiglu", lambda gate, up, limit: torch.nn.functional.silu(gate) * up
    )
    assert_caught(verdicts(mode))


# --- scales that never came -----------------------------------------------------------------------

SCALES = ("weight_scale", "weight_scale_2")
every_scale = pytest.mark.parametrize("scale", SCALES)


def fused_without(scale: str, partition: int) -> None:
    rng = np.random.default_rng(8)
    pair = PAIRS["wq_a | wkv"]
    parts = [Matrix.random(rng, n, HIDDEN, SMALL) for n in pair.widths]
    linear(pair.prefix, parts, without=(scale, partition))


def experts_without(matrix: str, scale: str) -> None:
    rng = np.random.default_rng(9)
    stack: list[Expert] = [
        {
            "w1": Matrix.random(rng, 128, HIDDEN, SMALL),
            "w3": Matrix.random(rng, 128, HIDDEN, LARGE),
            "w2": Matrix.random(rng, HIDDEN, 128, SMALL),
        }
        for _ in range(8)
    ]
    experts(stack, without=(matrix, scale, 5))


@pytest.mark.parametrize("scale", [*SCALES, "weight"])
@pytest.mark.parametrize("partition", [0, 1])
def test_what_was_never_loaded_stops_the_start(scale: str, partition: int) -> None:
    with pytest.raises(product.NotLoadedError, match=f"fused_wqa_wkv.{scale}"):
        fused_without(scale, partition)


@pytest.mark.parametrize("scale", [*SCALES, "weight"])
@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
def test_what_was_never_loaded_stops_the_start_of_experts(matrix: str, scale: str) -> None:
    stem = "w2" if matrix == "w2" else "w13"
    with pytest.raises(product.NotLoadedError, match=f"experts.{stem}_{scale}"):
        experts_without(matrix, scale)


@every_scale
def test_without_the_nan_that_marks_it_a_missing_scale_would_start(
    scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the two tests above rest on the product's own marking (vLLM issues 45212 and
    54189)."""
    monkeypatch.setattr(product, "NAN", 0.0)
    fused_without(scale, 1)
    experts_without("w3", scale)
