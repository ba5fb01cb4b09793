"""The performance model against what was measured on a Hopper GPU and published for Blackwell."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from assay_kernels.kernels.sm100.performance import blackwell, hopper
from assay_kernels.kernels.sm100.shapes import SHAPES, Shape

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200.json").read_text())["rows"]
MEASURED = [row for row in ROWS if row["kind"] == "dense" and row["impl"] == "ours"]


def test_measured_hopper_rows_are_predicted_within_a_third_and_a_ninth_in_the_mean() -> None:
    ratios = [hopper(r["n"], r["k"], r["m"]).us / r["us"] for r in MEASURED]
    assert len(ratios) == 45
    assert 0.70 < min(ratios) < max(ratios) < 1.21
    assert math.exp(sum(abs(math.log(q)) for q in ratios) / len(ratios)) < 1.12


def test_the_model_ranks_the_shapes_as_the_gpu_did() -> None:
    for m in {row["m"] for row in MEASURED}:
        rows = [row for row in MEASURED if row["m"] == m]
        for a in rows:
            for b in rows:
                if a["us"] > 1.3 * b["us"]:
                    first = hopper(a["n"], a["k"], m).us
                    assert first > hopper(b["n"], b["k"], m).us, (a, b)


# Published speed of light of a B200 for NVFP4 products (GPU MODE's NVFP4 problems): M, N, K, us.
ANCHORS = [(128, 7168, 16384, 8.99), (128, 4096, 7168, 2.35)]


@pytest.mark.parametrize(("m", "n", "k", "us"), ANCHORS)
def test_the_floor_is_the_published_speed_of_light(m: int, n: int, k: int, us: float) -> None:
    floor = blackwell(Shape("anchor", "-", n, k, "dense"), m).floor_us
    assert floor == pytest.approx(us, rel=0.08)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.model} {s.layer}")
def test_no_prediction_beats_its_floor_or_falls_with_more_tokens(shape: Shape) -> None:
    times = [blackwell(shape, m) for m in (64, 1024, 4096)]
    assert all(t.us > t.floor_us for t in times)
    assert [t.us for t in times] == sorted(t.us for t in times)
