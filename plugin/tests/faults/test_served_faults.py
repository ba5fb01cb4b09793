"""The known faults as a user would meet them: the whole model served by vLLM on a checkpoint that
has one.

Each fault must show: the served model's mean KL to the healthy reference is at least ten times what
the healthy checkpoint's is. So whatever watches the served model (the battery, the gate) has
something to see; and a fault that ever stops showing, because a norm hides it or the miniature
changed, fails here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import agreement
from offline import CHECKPOINT, PROFILE

from .faulty import FAULTS, make_faulty

VISIBLE = 10.0
SEED = 4711
"""Not the default of `make agreement`: these are other texts."""
INDEXED_FROM = 2048
"""The indexer has a choice from 4 x index_topk tokens on; its fault is measured on what comes
after."""
FAST = ("nibbles",)
"""In `make test`; the others in `make test-full`."""


@dataclass(frozen=True)
class Healthy:
    texts: list[agreement.Text]
    references: list[Any]
    kl: np.ndarray[Any, Any]
    """Per position."""
    position: np.ndarray[Any, Any]
    """Where in its text each position is."""


def measure(checkpoint: Path, texts: list[agreement.Text], references: list[Any], out: Path) -> Any:
    agreement.run_worker(checkpoint, PROFILE, texts, "w4a16", out)
    kls = []
    for i, reference in enumerate(references):
        kl, _ = agreement.kl_and_top1(reference[:-1], np.load(out / f"prefill-{i}.npy"))
        kls.append(kl)
    return np.concatenate(kls)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    drawn = agreement.read_texts(CHECKPOINT, SEED, agreement.MIN_POSITIONS)
    texts = [agreement.Text(t.kind, t.ids, 0) for t in drawn]
    references = list(agreement.reference_distributions(CHECKPOINT, texts))
    kl = measure(CHECKPOINT, texts, references, tmp_path_factory.mktemp("healthy"))
    position = np.concatenate([np.arange(len(t.ids) - 1) for t in texts])
    assert np.isfinite(kl).all()
    return Healthy(texts, references, kl, position)


@pytest.mark.serve
@pytest.mark.parametrize(
    "fault", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS]
)
def test_a_fault_is_visible_in_the_served_model(
    fault: str, healthy: Healthy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = make_faulty(CHECKPOINT, tmp_path / "checkpoint", fault)
    kl = measure(faulty, healthy.texts, healthy.references, tmp_path / "served")
    where = healthy.position >= (INDEXED_FROM if fault == "indexer" else 0)
    usual, found = healthy.kl[where].mean(), kl[where].mean()
    with capsys.disabled():
        print(
            f"\n{fault:>13}: mean KL {found:9.5f}, healthy {usual:9.5f}, "
            f"{found / usual:8.1f} times, {where.sum()} positions"
        )
    assert found >= VISIBLE * usual
