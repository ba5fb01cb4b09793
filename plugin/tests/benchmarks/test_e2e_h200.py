"""What `make e2e-h200` makes of its measurements; the measurements need an H200."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import e2e_h200


def test_an_interval_holds_its_mean_and_shrinks_with_the_spread() -> None:
    wide = e2e_h200.interval([90, 95, 100, 105, 110, 100, 100])
    narrow = e2e_h200.interval([99, 99.5, 100, 100.5, 101, 100, 100])
    assert wide[0] < narrow[0] < 100 < narrow[1] < wide[1]
    assert e2e_h200.interval([7.0, 7.0]) == (7.0, 7.0)


def row(backend: str, phase: str, batch: int, tokens: float) -> dict[str, Any]:
    return {
        "dialect": "A", "backend": backend, "phase": phase, "batch": batch,
        "tokens_per_s": tokens, "low": tokens - 1, "high": tokens + 1,
    }  # fmt: skip


def test_the_table_has_a_column_for_every_backend_and_a_gap_where_one_did_not_run() -> None:
    rows = [row("assay", "decode", 1, 400), row("humming", "decode", 1, 350)]
    table = e2e_h200.table([*rows, row("assay", "prefill", 4, 100_000)]).splitlines()
    assert table[0] == "| phase | batch | assay | humming | marlin |"
    assert table[2] == "| decode | 1 | 400 (399-401) | 350 (349-351) | – |"
    assert table[3] == "| prefill | 4 | 100,000 (99,999-100,001) | – | – |"


@pytest.mark.parametrize(("among", "share"), [([[1, 2], [1, 2]], 1.0), ([[1, 2], [1, 3]], 0.5)])
def test_answers_of_a_crowd_are_held_against_the_answer_alone(
    among: list[list[int]], share: float
) -> None:
    found = e2e_h200._share_of_equal([[7], [8]], [[9, 9], [1, 2]], [[8], [8]], among)
    assert found == share


def test_the_committed_result_says_what_it_was_measured_on() -> None:
    found = json.loads(e2e_h200.RESULT.read_text())
    assert found["environment"]["gpu"] == "NVIDIA H200"
    assert set(found["agreement"]) == {"B", "A", "bf16"}
    for dialect, served in found["agreement"].items():
        assert served["positions"] >= 2000
        if dialect != "bf16":
            assert all(row["kernel"] <= 1 >= row["weights"] for row in served["selfcheck"]["rows"])
