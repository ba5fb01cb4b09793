"""The documented tables are what the script writes from what was compiled."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from assay_kernels.kernels.sm100.shapes import all_keys

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sm100_table.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sm100_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_generated_from_the_recorded_evidence() -> None:
    table = script()
    results = json.loads(table.RESULTS.read_text())
    text = table.DOCS.read_text()
    assert table.tables(results) == text.split(table.BEGIN)[1].split(table.END)[0].strip("\n")


def test_recorded_kernels_are_of_the_shape_table_and_do_not_spill() -> None:
    kernels = json.loads(script().RESULTS.read_text())["kernels"]
    assert set(kernels) <= {key.name for key in all_keys()}
    for found in kernels.values():
        assert found["stack"] == found["local_accesses"] == 0
