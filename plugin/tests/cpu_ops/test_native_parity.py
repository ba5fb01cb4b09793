"""Operator by operator against vLLM's native library, on the same arguments.

Not in the test process's own library only: `install()` is never called here, so `torch.ops._C`
still holds the native operators. Each comparison prints one line (pytest -s shows the table).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from assay_kernels.kernels.cpu import v4_ops

from . import cases
from .layouts import attention_keys, index_keys

NativeOp = Callable[[str], Callable[..., Any]]


@dataclass(frozen=True)
class Tolerance:
    """Largest error allowed, relative to the largest value of the same row."""

    row: float
    why: str


BF16 = Tolerance(2**-7, "one bf16 step after sums in another order")
FP32 = Tolerance(2e-6, "sums in another order")
TOLERANCES = {
    "fused_qnorm_rope_kv_insert_cpu": Tolerance(2**-6, "bf16, and native flushes fp8 subnormals"),
    "inverse_gptj_rope_o_proj_cpu": FP32,
    "flash_mla_with_kvcache_cpu": Tolerance(0.02, "native rounds weights to bf16, exp to 20 bits"),
    "save_partial_states_cpu": FP32,
    "compress_norm_rope_store_cpu": Tolerance(0.07, "an fp8 step where a value was on its edge"),
    "compress_norm_rope_store_indexer_cpu": Tolerance(0.07, "an fp8 step, as above"),
    "fused_indexer_q_rope_quant_cpu": Tolerance(0.07, "an fp8 step, as above"),
    "fp8_paged_mqa_logits_cpu": Tolerance(1e-4, "native multiplies in bf16 pairs"),
    "hc_pre_fused_cpu": BF16,
    "hc_post_fused_cpu": BF16,
    "hc_head_fused_cpu": BF16,
    "biased_topk_cpu": Tolerance(2e-5, "native's exp keeps 20 bits"),
    "hash_topk_cpu": Tolerance(2e-5, "native's exp keeps 20 bits"),
}
TOKENS = (1, 5, 40)


def copied(arguments: list[Any]) -> list[Any]:
    """Own storage for every tensor, strides kept."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)

    return [copy(value) for value in arguments]


def results(name: str, arguments: list[Any], returned: Any) -> list[Tensor]:
    """What the operator returned and wrote, as comparable fp64 rows."""
    tensors = [returned] if isinstance(returned, Tensor) else list(returned or ())
    if name == "fused_qnorm_rope_kv_insert_cpu":
        cache, slots = arguments[3], arguments[4]
        tensors.append(attention_keys(cache, cases.BLOCK, slots[slots >= 0].tolist()))
    elif name == "flash_mla_with_kvcache_cpu":
        tensors.append(arguments[0])
    elif name == "save_partial_states_cpu":
        tensors.append(arguments[4])
    elif name.startswith("compress_norm_rope_store"):
        position, slots, cache = arguments[2], arguments[3], arguments[7]
        done = slots[(slots >= 0) & ((position + 1) % 4 == 0)].tolist()
        decode = index_keys if "indexer" in name else attention_keys
        if done:
            tensors.append(decode(cache, cases.COMPRESSED_BLOCK, done))
    elif name == "fused_indexer_q_rope_quant_cpu":
        # The query's scale sits in the weights: only their product is the result.
        scale = arguments[7] / arguments[4]
        tensors += [arguments[3].to(torch.float64) * scale.unsqueeze(-1), arguments[7]]
    elif name == "fp8_paged_mqa_logits_cpu":
        lengths = arguments[3]
        tensors = [row[:n] for row, n in zip(tensors[0], lengths.tolist(), strict=True)]
    return [t.to(torch.float64) for t in tensors]


def row_error(ours: Tensor, theirs: Tensor) -> float:
    if theirs.dim() == 0 or theirs.numel() == 0:
        return 0.0
    top = theirs.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((ours - theirs).abs() / top).max())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", [name for name in cases.CASES if name in TOLERANCES])
def test_agrees_with_native(name: str, tokens: int, native_op: NativeOp) -> None:
    """Values returned and memory written are the library's, within a stated reason."""
    operator = native_op(name)
    original = cases.arguments(name, tokens)
    theirs, ours = copied(original), copied(original)
    expected = results(name, theirs, operator(*theirs))
    got = results(name, ours, getattr(v4_ops, name)(*ours))
    assert len(expected) == len(got)
    errors = [row_error(a, b) for a, b in zip(got, expected, strict=True)]
    tolerance = TOLERANCES[name]
    print(f"> {name:<40} T={tokens:<3} max row error {max(errors, default=0.0):.2e}")
    assert max(errors, default=0.0) <= tolerance.row, tolerance.why


@pytest.mark.parametrize("tokens", TOKENS)
def test_leaves_other_cache_bytes_alone(tokens: int, native_op: NativeOp) -> None:
    """Only the slots named are written: the caches agree on which bytes changed."""
    for name, index in (
        ("fused_qnorm_rope_kv_insert_cpu", 3),
        ("compress_norm_rope_store_cpu", 7),
        ("compress_norm_rope_store_indexer_cpu", 7),
    ):
        operator = native_op(name)
        original = cases.arguments(name, tokens)
        theirs, ours = copied(original), copied(original)
        operator(*theirs)
        getattr(v4_ops, name)(*ours)
        # A byte both left alone is equal; a byte that one changed alone is a stray write.
        only_ours = (ours[index] != original[index]) & (theirs[index] == original[index])
        only_theirs = (theirs[index] != original[index]) & (ours[index] == original[index])
        written = theirs[index] != original[index]
        assert only_ours.sum() <= 0.02 * written.sum() + 4, name
        assert only_theirs.sum() <= 0.02 * written.sum() + 4, name


@pytest.mark.parametrize("tokens", TOKENS)
def test_topk_selects_what_native_selects(tokens: int, native_op: NativeOp) -> None:
    """The same scores; which of the keys tied at the threshold is chosen, native leaves open."""
    operator = native_op("topk_transform_512_cpu")
    original = cases.arguments("topk_transform_512_cpu", tokens)
    theirs, ours = copied(original), copied(original)
    operator(*theirs)
    v4_ops.topk_transform_512_cpu(*ours)
    scores = original[0]
    assert torch.equal((theirs[5] >= 0).sum(1), (ours[5] >= 0).sum(1))
    chosen = [
        scores.gather(1, side[5].long().clamp_min(0)).masked_fill(side[5] < 0, -1).sort(1).values
        for side in (theirs, ours)
    ]
    assert torch.equal(*chosen)
    short = (original[1] <= 512).nonzero().squeeze(1)  # everything is selected: no ties
    for index in (3, 5):
        assert torch.equal(theirs[index][short].sort(1).values, ours[index][short].sort(1).values)


@pytest.mark.parametrize("name", ["biased_topk_cpu", "hash_topk_cpu"])
def test_routes_to_the_same_experts(name: str, native_op: NativeOp) -> None:
    arguments = cases.arguments(name, 40)
    _, theirs = native_op(name)(*arguments)
    _, ours = getattr(v4_ops, name)(*arguments)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("rows", [1, 40])
def test_packed_products_agree(rows: int, native_op: NativeOp, generator: torch.Generator) -> None:
    """bmm_cpu and weight_packed_linear over weights packed by their own side."""
    weight = torch.randn(8, 128, 512, generator=generator).to(torch.bfloat16)
    x = torch.randn(8, rows, 512, generator=generator).to(torch.bfloat16)
    pack = native_op("convert_weight_packed")
    theirs, ours = (torch.empty(8, rows, 128, dtype=torch.bfloat16) for _ in range(2))
    native_op("bmm_cpu")(theirs, x, pack(weight), True, None)
    v4_ops.bmm_cpu(ours, x, v4_ops.convert_weight_packed(weight), True, None)
    assert row_error(ours.double(), theirs.double()) <= BF16.row
    native_op("weight_packed_linear")(theirs[0], x[0], pack(weight[0].contiguous()), None, True)
    v4_ops.weight_packed_linear(ours[0], x[0], weight[0], None, True)
    assert row_error(ours[0].double(), theirs[0].double()) <= BF16.row
