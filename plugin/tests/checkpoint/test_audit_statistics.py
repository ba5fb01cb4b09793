"""Nibble order and swizzled scales: found where weights have structure, silent where not.

Seeds here are not those on which the thresholds were set; `benchmarks/audit_statistics.py` prints
the rates over hundreds of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay_kernels.audit import Report, all_rules, audit
from assay_kernels.audit.statistics import unswizzled
from assay_kernels.checkpoint import Dialect, convert_name, parse_name
from assay_kernels.checkpoint.export import export_checkpoint
from assay_kernels.checkpoint.names import Scheme
from assay_kernels.numerics import swizzle_128x4

SINGLE = "model.safetensors"
LIKE_THE_MINIATURE = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16}


def trained(state: dict[str, Tensor], seed: int, spread: float) -> dict[str, Tensor]:
    """Random weights with the structure that training gives: units have gains, and what feeds a
    unit is as large as what it feeds."""
    generator = torch.Generator().manual_seed(seed)
    result = dict(state)
    for name, value in state.items():
        if not name.endswith((".w1.weight", ".wo_a.weight", ".wq_a.weight")):
            continue
        gain = torch.exp(spread * torch.randn(value.shape[0], generator=generator))
        result[name] = (result[name].float() * gain[:, None]).bfloat16()
        for old, new in ((".w1.", ".w3."), (".w1.", ".w2."), ("wo_a", "wo_b"), ("wq_a", "wq_b")):
            other = name.replace(old, new)
            if other == name:
                continue
            side = gain[:, None] if new == ".w3." else gain
            result[other] = (result[other].float() * side).bfloat16()
    return result


@pytest.fixture(scope="session")
def structured(
    config: dict[str, Any], random_state: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Dialect, float], Path]:
    raw = {**config, **LIKE_THE_MINIATURE}
    root = tmp_path_factory.mktemp("structured")
    places = {}
    for dialect in (Dialect.A, Dialect.B, Dialect.C, Dialect.NATIVE):
        for spread in (0.0, 0.2):
            place = places[dialect, spread] = root / f"{dialect}-{spread}"
            state = trained(random_state(raw, 2024), 2025, spread)
            export_checkpoint(place, dialect, state, raw)
    return places


def meant(name: str, entry: str | None) -> bool:
    parsed = parse_name(name)
    return entry is None or (parsed is not None and parsed[0] == entry)


def swap_nibbles(tensors: dict[str, Tensor], entry: str | None = None) -> None:
    for name, value in tensors.items():
        packed = value.dtype in (torch.uint8, torch.int8) and value.dim() == 2
        if packed and meant(name, entry):
            codes = value.view(torch.uint8)
            tensors[name] = ((codes << 4) | (codes >> 4)).view(value.dtype)


def swizzle(tensors: dict[str, Tensor], entry: str | None = None) -> None:
    for name, value in tensors.items():
        fits = value.dim() == 2 and value.shape[0] % 128 == 0 and value.shape[1] % 4 == 0
        if name.endswith(".weight_scale") and fits and meant(name, entry):
            tensors[name] = swizzle_128x4(value).reshape(value.shape)


def damaged(source: Path, place: Path, edit: Any, *arguments: Any) -> Report:
    place.mkdir()
    tensors = load_file(source / SINGLE)
    edit(tensors, *arguments)
    save_file(tensors, place / SINGLE)
    (place / "config.json").write_bytes((source / "config.json").read_bytes())
    return audit(place, deep=True)


def faults(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings if finding.severity == "fault"}


def test_right_order_is_never_called_wrong(
    structured: dict[tuple[Dialect, float], Path],
) -> None:
    for (dialect, spread), place in structured.items():
        report = audit(place, deep=True)
        assert not faults(report), (dialect, spread)
        if dialect is not Dialect.NATIVE and not spread:
            assert set(report.undecided) == {"nibble-order", "scale-swizzled"}
        if spread and dialect is Dialect.B:
            assert not report.undecided


@pytest.mark.parametrize("dialect", [Dialect.A, Dialect.B, Dialect.C, Dialect.NATIVE])
def test_a_checkpoint_packed_high_nibble_first_is_found(
    structured: dict[tuple[Dialect, float], Path], tmp_path: Path, dialect: Dialect
) -> None:
    report = damaged(structured[dialect, 0.2], tmp_path / "bad", swap_nibbles)
    assert faults(report) == {"nibble-order"}
    assert all("by chance less than once in 10^" in str(f.confidence)
               for f in report.findings if f.rule == "nibble-order")  # fmt: skip
    others = [rule for rule in all_rules().values() if rule.id != "nibble-order"]
    assert not faults(audit(tmp_path / "bad", deep=True, rules=others))


@pytest.mark.parametrize("dialect", [Dialect.A, Dialect.B, Dialect.C])
def test_a_checkpoint_with_swizzled_scales_is_found(
    structured: dict[tuple[Dialect, float], Path], tmp_path: Path, dialect: Dialect
) -> None:
    report = damaged(structured[dialect, 0.2], tmp_path / "bad", swizzle)
    assert "scale-swizzled" in faults(report)
    assert faults(report) <= {"scale-swizzled", "nibble-order"}
    others = [rule for rule in all_rules().values() if rule.id != "scale-swizzled"]
    assert "scale-swizzled" not in faults(audit(tmp_path / "bad", deep=True, rules=others))


def test_one_matrix_among_good_ones_is_named(
    structured: dict[tuple[Dialect, float], Path], tmp_path: Path
) -> None:
    entry = "layers.2.attn.wo_a"
    stored = convert_name(f"{entry}.weight_scale", Scheme.TRANSFORMERS)
    report = damaged(structured[Dialect.B, 0.2], tmp_path / "bad", swizzle, entry)
    named = {f.tensor for f in report.findings if f.severity == "fault"}
    eligible = load_file(structured[Dialect.B, 0.2] / SINGLE)[stored].shape[0] % 128 == 0
    assert named == ({stored} if eligible else set())


def test_random_weights_are_left_undecided_and_not_guessed_at(
    structured: dict[tuple[Dialect, float], Path], tmp_path: Path
) -> None:
    for number, edit in enumerate((swap_nibbles, swizzle)):
        report = damaged(structured[Dialect.B, 0.0], tmp_path / f"bad{number}", edit)
        assert not faults(report)
        assert "no structure to tell by" in report.undecided["nibble-order"]


def test_the_tile_order_is_that_of_the_kernels() -> None:
    scale = torch.arange(128 * 12).reshape(128, 12).to(torch.uint8)
    stored = swizzle_128x4(scale).reshape(128, 12)
    assert torch.equal(torch.from_numpy(unswizzled(stored.numpy())), scale)
