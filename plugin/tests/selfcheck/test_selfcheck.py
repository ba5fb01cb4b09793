"""The self-check passes sound kernels and weights, catches every known fault, and does what the
policy says about it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay_kernels import reference, selfcheck
from assay_kernels.kernels.cpu.nvfp4 import CpuKernels
from assay_kernels.kernels.interface import Groups, KernelSet, PackedWeight
from assay_kernels.kernels.tiled import ReferenceKernels
from assay_kernels.selfcheck import calls
from assay_kernels.selfcheck.inputs import sampled_channels

from .conftest import EXPERTS, World

# --- sound kernels pass --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernels", [CpuKernels("w4a16"), CpuKernels("reference")], ids=lambda kernels: kernels.name
)
def test_a_sound_layer_passes(world: World, kernels: KernelSet) -> None:
    report = world.check(world.layer(1, kernels))
    assert not report.replaced
    assert {row.impl for row in report.rows} == {kernels.name}
    assert all(0 < row.kernel <= 1 and 0 < row.weights <= 1 for row in report.rows)
    assert report.matrices == 8 + 3 + 3 * EXPERTS


def test_torchs_default_type_does_not_matter(world: World) -> None:
    """vLLM loads a model with bf16 as the default."""
    layers = world.layer(1, CpuKernels())
    torch.set_default_dtype(torch.bfloat16)
    try:
        report = world.check(layers)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert not report.replaced


@pytest.mark.parametrize("scale", [None, 2.0**-5, 0.013])
def test_quantised_activations_are_judged_as_such(world: World, scale: float | None) -> None:
    kernels = CpuKernels("w4a4")
    static = None if scale is None else torch.tensor(scale)
    report = world.check(
        [
            world.linear(["layers.1.attn.wq_b"], kernels, input_scale=static),
            world.experts(1, kernels, input_scale13=static, input_scale2=static),
        ]
    )
    assert not report.replaced


def test_the_reference_passes_its_own_check(world: World) -> None:
    report = world.check(world.layer(1, ReferenceKernels()), fallbacks=[])
    assert all(row.ratio <= 1 for row in report.rows)


def test_experts_of_other_ranks_are_left_out(world: World) -> None:
    held = tuple(range(16, 32))
    place = torch.full((EXPERTS,), -1)
    place[list(held)] = torch.arange(len(held))
    report = world.check(
        [world.experts(1, CpuKernels(), global_ids=held, expert_map=place)], policy="abort"
    )
    assert report.matrices == 3 * len(held)


def test_a_share_of_a_split_matrix_is_read_as_the_rank_holds_it(world: World) -> None:
    """Rank 1 of 2: the second half of the inputs, or of the channels, computed by hand."""
    whole = world.reader.values(world.linear(["layers.1.attn.wo_b"], CpuKernels()).parts[0])
    n, k = whole.shape
    part = selfcheck.Part("layers.1.attn.wo_b", n // 2, n // 2, k // 2, k // 2)
    assert torch.equal(world.reader.values(part), whole[n // 2 :, k // 2 :])
    channels = torch.tensor([0, 1, 5, n // 2 - 1])
    assert torch.equal(world.reader.values(part, channels), whole[n // 2 + channels, k // 2 :])


def test_sampled_channels_come_from_every_quarter() -> None:
    for size in (64, 128, 6144, 7168):
        chosen = sampled_channels("a name", size)
        assert len(set(chosen.tolist())) == 64
        assert chosen.min() >= 0
        assert chosen.max() < size
        assert {int(c) * 4 // size for c in chosen} == {0, 1, 2, 3}
    assert not torch.equal(sampled_channels("a", 7168), sampled_channels("b", 7168))


# --- known faults, each in a kernel or in loaded weights -----------------------------------------


class Faulty(CpuKernels):
    """Real kernels with one fault put around them."""


class WrongAlpha(Faulty):
    """The first partition's global scale for all of a fused matrix."""

    def prepare(self, weight: PackedWeight) -> Any:
        return super().prepare(replace(weight, alpha=weight.alpha[..., :1].expand_as(weight.alpha)))


class SwappedNibbles(Faulty):
    def prepare(self, weight: PackedWeight) -> Any:
        return super().prepare(replace(weight, codes=(weight.codes >> 4) | (weight.codes << 4)))


class StalePadding(Faulty):
    """Rows past the last whole eight come from what an earlier call left in a scratch buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch: dict[int, Tensor] = {}

    def dense(self, x: Tensor, operand: Any, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        old = self.scratch.setdefault(x.shape[1], torch.zeros(256, x.shape[1], dtype=x.dtype))
        whole = len(x) // 8 * 8
        stale = torch.cat([x[:whole], old[whole : len(x)]])
        old[: len(x)] = x
        return super().dense(stale, operand, out_dtype)


class StaleOnce(Faulty):
    """The first call of a size is right; later ones see what it left."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def dense(self, x: Tensor, operand: Any, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        self.calls += 1
        out = super().dense(x, operand, out_dtype)
        # One unit in the last place of one value: too little for any bound.
        if self.calls % 2 == 0:
            out.view(torch.int16)[0, 0] ^= 1
        return out


class DroppedClamp(Faulty):
    def dense_swiglu(self, x: Tensor, operand: Any, limit: float) -> Tensor:
        return super().dense_swiglu(x, operand, 1e6)

    def grouped_l1(self, x: Tensor, operand: Any, groups: Groups, limit: float) -> Tensor:
        return super().grouped_l1(x, operand, groups, 1e6)


class ClampOfUpOnly(Faulty):
    def dense_swiglu(self, x: Tensor, operand: Any, limit: float) -> Tensor:
        gate, up = self._dense(x, operand, torch.float32).chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate) * up.clamp(-limit, limit)
        return act.to(torch.bfloat16)


class OffByOneGroup(Faulty):
    """Every expert's last row goes to the next one."""

    def grouped_l1(self, x: Tensor, operand: Any, groups: Groups, limit: float) -> Tensor:
        return super().grouped_l1(x, operand, replace(groups, ends=self.shifted(groups)), limit)

    def grouped_l2(self, h: Tensor, operand: Any, groups: Groups) -> Tensor:
        return super().grouped_l2(h, operand, replace(groups, ends=self.shifted(groups)))

    def shifted(self, groups: Groups) -> Tensor:
        ends = (groups.ends - 1).clamp(min=0)
        ends[-1] = groups.ends[-1]
        return ends


class NotANumber(Faulty):
    """One element, in a row that only some sizes have."""

    def dense(self, x: Tensor, operand: Any, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        out = super().dense(x, operand, out_dtype)
        if len(out) > 128:
            out[128, 3] = float("nan")
        return out


class RouterWeightsLost(Faulty):
    def grouped_l2(self, h: Tensor, operand: Any, groups: Groups) -> Tensor:
        ones = torch.ones_like(groups.weights)
        return super().grouped_l2(h, operand, replace(groups, weights=ones))


class Raises(Faulty):
    def dense(self, x: Tensor, operand: Any, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def fused(world: World, kernels: KernelSet) -> selfcheck.Subject:
    return world.linear(["layers.1.attn.wq_a", "layers.1.attn.wkv"], kernels)


def shared(world: World, kernels: KernelSet) -> selfcheck.Subject:
    entries = [f"layers.1.ffn.shared_experts.{w}" for w in ("w1", "w3")]
    return world.linear(entries, kernels, "dense_swiglu", limit=10.0)


def wo_a(world: World, kernels: KernelSet) -> selfcheck.Subject:
    return world.linear(["layers.1.attn.wo_a"], kernels, "wo_a", groups=8)


def compressor(world: World, kernels: KernelSet) -> selfcheck.Subject:
    entries = [f"layers.1.attn.compressor.{w}" for w in ("wkv", "wgate")]
    return world.linear(entries, kernels, "compressor")


def routed(world: World, kernels: KernelSet) -> selfcheck.Subject:
    return world.experts(1, kernels)


KERNEL_FAULTS: list[tuple[Callable[[], KernelSet], Callable[[World, KernelSet], Any]]] = [
    *[(WrongAlpha, layer) for layer in (fused, shared, compressor, routed)],
    *[(SwappedNibbles, layer) for layer in (fused, shared, compressor, routed, wo_a)],
    *[(StalePadding, layer) for layer in (fused, compressor)],
    (StaleOnce, fused),
    *[(DroppedClamp, layer) for layer in (shared, routed)],
    (ClampOfUpOnly, shared),
    (OffByOneGroup, routed),
    *[(NotANumber, layer) for layer in (fused, compressor)],
    (RouterWeightsLost, routed),
    (Raises, fused),
]


@pytest.mark.parametrize(
    ("fault", "layer"), KERNEL_FAULTS, ids=[f"{f.__name__}-{s.__name__}" for f, s in KERNEL_FAULTS]
)
def test_a_faulty_kernel_is_replaced_by_the_reference(
    world: World, fault: Callable[[], KernelSet], layer: Callable[[World, KernelSet], Any]
) -> None:
    subject = layer(world, fault())
    report = world.check([subject])
    assert len(report.replaced) == 1
    assert report.replaced[0].startswith(f"{subject.name} by cpu w4a16: ")
    assert report.replaced[0].endswith("; replaced by reference")
    assert [(row.impl, row.layers) for row in report.rows] == [("reference", 1)]
    assert report.rows[0].ratio <= 1
    assert isinstance(subject.method.kernels, ReferenceKernels)


def other_experts_weights(world: World) -> selfcheck.Subject:
    """Expert 7 computes with expert 8's matrices."""
    subject = world.experts(1, CpuKernels())
    for name in ("operand13", "operand2"):
        operand = getattr(subject.layer, name)
        matrices, alpha = list(operand.matrices), operand.alpha.clone()
        matrices[7], alpha[7] = operand.matrices[8], operand.alpha[8]
        setattr(subject.layer, name, replace(operand, matrices=tuple(matrices), alpha=alpha))
    return subject


def swapped_experts(world: World) -> selfcheck.Subject:
    """Experts 7 and 8 have each other's second matrix only."""
    subject = world.experts(1, CpuKernels())
    operand = subject.layer.operand2
    order = [*range(7), 8, 7, *range(9, EXPERTS)]
    subject.layer.operand2 = replace(
        operand, matrices=tuple(operand.matrices[i] for i in order), alpha=operand.alpha[order]
    )
    return subject


def neighbours_scales(world: World) -> selfcheck.Subject:
    """Layer 1's codes with layer 3's block scales."""
    kernels = CpuKernels()
    subject = world.linear(["layers.1.attn.wq_b"], kernels)
    own = world.reader.packed(subject.parts[0])
    other = world.reader.packed(replace(subject.parts[0], entry="layers.3.attn.wq_b"))
    alpha = own.global_scale.expand(len(own.codes))
    subject.layer.operand = kernels.prepare(PackedWeight(own.codes, other.block_scale, alpha, None))
    return subject


def neighbours_global_scale(world: World) -> selfcheck.Subject:
    """One partition's global scale is another layer's."""
    subject: Any = fused(world, CpuKernels())
    other = world.reader.packed(replace(subject.parts[1], entry="layers.2.attn.wkv"))
    alpha = subject.layer.operand.alpha.clone()
    rows = subject.parts[0].rows
    assert alpha[0, rows] != other.global_scale
    alpha[0, rows:] = other.global_scale
    subject.layer.operand = replace(subject.layer.operand, alpha=alpha)
    return subject


WEIGHT_FAULTS = [
    other_experts_weights,
    swapped_experts,
    neighbours_scales,
    neighbours_global_scale,
]


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
@pytest.mark.parametrize("checked_first", [True, False])
def test_wrong_weights_are_found_in_whichever_layer_they_are(
    world: World, fault: Callable[[World], Any], checked_first: bool
) -> None:
    """Kernels are checked on one layer of a shape, weights on all; only the wrong layer falls back.

    checked_first: whether the faulty layer is the one that its kernel is checked on.
    """
    wrong = fault(world)
    kernels = CpuKernels()
    sound: Any
    if isinstance(wrong, selfcheck.ExpertsSubject):
        sound = [world.experts(n, kernels) for n in (2, 3)]
    else:
        entries = [part.entry.replace("layers.1", "layers.3") for part in wrong.parts]
        sound = [world.linear(entries, kernels)]
    report = world.check([wrong, *sound] if checked_first else [*sound, wrong])
    assert [sentence.partition(" by ")[0] for sentence in report.replaced] == [wrong.name]
    assert {row.impl: row.layers for row in report.rows} == {
        "cpu w4a16": len(sound),
        "reference": 1,
    }


def test_one_expert_among_many_is_named(world: World) -> None:
    sound = world.experts(2, CpuKernels())
    report = world.check([sound, swapped_experts(world)])
    assert "layers.1.ffn.experts.7, w2" in report.replaced[0]


# --- policies ------------------------------------------------------------------------------------


def test_abort_stops_at_the_first_failure_and_names_the_layer(world: World) -> None:
    subject = fused(world, WrongAlpha())
    with pytest.raises(
        selfcheck.SelfCheckError, match=r"model\.layers\.1\.attn\.wq_a by cpu w4a16: .*abort"
    ):
        world.check([subject], policy="abort")
    assert isinstance(subject.method.kernels, WrongAlpha)


def test_where_nothing_passes_the_layer_is_named(world: World) -> None:
    with pytest.raises(selfcheck.SelfCheckError, match=r"attn\.wq_a by .*no other kernel is left"):
        world.check([fused(world, WrongAlpha())], fallbacks=[SwappedNibbles()])


def test_the_chain_is_followed_in_its_order(world: World) -> None:
    subject = fused(world, WrongAlpha())
    report = world.check([subject], fallbacks=[SwappedNibbles(), ReferenceKernels()])
    assert len(report.replaced) == 2
    assert subject.kernels.name == "reference"


def test_a_kernels_fault_takes_every_layer_of_its_shape(world: World) -> None:
    kernels = WrongAlpha()
    layers = [
        world.linear([f"layers.{n}.attn.wq_a", f"layers.{n}.attn.wkv"], kernels) for n in range(3)
    ]
    report = world.check(layers)
    assert [(row.impl, row.layers) for row in report.rows] == [("reference", 3)]


HUNG = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_support import build
world, kernels = build()
class Hung(kernels):
    def dense(self, *arguments):
        time.sleep(600)
subject = world.linear(["layers.1.attn.wq_b"], Hung())
print("checking", flush=True)
world.check([subject], seconds=1.0)
"""

SUPPORT = """
import importlib.util, sys
def build():
    spec = importlib.util.spec_from_file_location("conftest", {conftest!r})
    module = importlib.util.module_from_spec(spec)
    sys.modules["conftest"] = module
    spec.loader.exec_module(module)
    from assay_kernels.kernels.cpu.nvfp4 import CpuKernels
    checkpoint = module.open_checkpoint(module.MINIATURE)
    return module.World(checkpoint, module.ShardReader(checkpoint)), CpuKernels
"""


def test_a_hung_kernel_ends_its_process_and_names_the_layer(tmp_path: Path) -> None:
    conftest = str(Path(__file__).with_name("conftest.py"))
    (tmp_path / "test_support.py").write_text(SUPPORT.format(conftest=conftest))
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert time.monotonic() - began < 100
    assert ended.returncode == 70
    assert "checking" in ended.stdout
    assert (
        "SelfCheckError: model.layers.1.attn.wq_b: dense at 129 rows by cpu w4a16" in ended.stderr
    )
    assert "did not come back within 1 s" in ended.stderr


def test_a_step_in_time_leaves_nothing_behind() -> None:
    expired: list[str] = []
    deadline = selfcheck.Deadline(0.05, expired.append)
    with deadline.step("quick"):
        pass
    time.sleep(0.1)
    assert not expired
    with deadline.step("slow"):
        time.sleep(0.1)
    assert expired == ["slow: did not come back within 0.05 s, so nothing is served"]


# --- report --------------------------------------------------------------------------------------


def test_the_report_tells_kinds_kernels_and_failures(world: World, tmp_path: Path) -> None:
    report = world.check([fused(world, WrongAlpha()), routed(world, CpuKernels())])
    lines = report.table().splitlines()
    assert lines[0].startswith("self-check on cpu: 2 layers, 194 matrices, ")
    assert lines[1].split() == ["kind", "shape", "by", "layers", "kernel", "weights"]
    assert any(line.split()[0] == "routed" and "cpu w4a16" in line for line in lines)
    assert lines[-1].startswith("  FAILED model.layers.1.attn.wq_a by cpu w4a16: dense at 129 rows")
    report.write(tmp_path / "new folder" / "report.json")
    stored = json.loads((tmp_path / "new folder" / "report.json").read_text())
    assert stored["rows"][0]["kind"] == "routed"
    assert stored["arch"] == "cpu"
    assert len(stored["replaced"]) == 1


def test_equal_numbers_with_other_bits_differ() -> None:
    zeros = torch.zeros(3)
    assert not calls.same_bits(zeros, -zeros)
    nan = torch.full((3,), float("nan"))
    assert calls.same_bits(nan, nan.clone())


# --- the reference kernel set --------------------------------------------------------------------


def test_the_reference_decodes_tile_by_tile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that do not divide the channels give what one tile gives."""
    subject: Any = fused(world, ReferenceKernels())
    x = torch.randn(5, subject.k).to(torch.bfloat16)
    whole = subject.run(x)
    monkeypatch.setattr("assay_kernels.kernels.tiled.TILE_VALUES", 100 * subject.k)
    seen = []
    right = reference.dense  # an independent path to the same numbers
    packed = [world.reader.packed(part) for part in subject.parts]
    for p in packed:
        alpha = p.global_scale.expand(len(p.codes))
        seen.append(right(x, p.codes, p.block_scale, alpha))
    assert torch.equal(subject.run(x), whole)
    assert torch.equal(torch.cat(seen, dim=1).to(torch.bfloat16), whole)
    assert max(w.shape[0] for _, w in subject.layer.operand.tiles(0)) == 100
