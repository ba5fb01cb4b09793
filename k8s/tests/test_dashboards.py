"""The dashboards' JSON: validated here, never loaded into a Grafana."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import BIN, CHART
from jsonschema import Draft202012Validator

FILES = sorted((CHART / "dashboards").glob("*.json"))
KINDS = ("row", "stat", "timeseries", "state-timeline", "table")
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": list(KINDS)},
        "title": {"type": "string", "minLength": 1},
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "additionalProperties": False,
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
        },
        "targets": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["refId", "expr", "datasource"],
                "properties": {
                    "refId": {"type": "string", "pattern": "^[A-Z]$"},
                    "expr": {"type": "string", "minLength": 1},
                },
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "uid": {"type": "string", "maxLength": 40, "pattern": "^[a-zA-Z0-9_-]+$"},
        "schemaVersion": {"const": 39},
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
    },
}
"""Of Grafana's dashboard JSON model (grafana.com/docs), what a panel cannot do without."""


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_has_what_grafana_reads(path: Path) -> None:
    assert [e.message for e in Draft202012Validator(SCHEMA).iter_errors(read(path))] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_panels_have_their_own_number_and_place(path: Path) -> None:
    panels = read(path)["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [
        (x, y)
        for p in panels
        for g in [p["gridPos"]]
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    ]
    assert len(cells) == len(set(cells))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_promtool_reads_every_expression(path: Path, tmp_path: Path) -> None:
    found = [t["expr"] for p in read(path)["panels"] for t in p.get("targets", [])]
    assert found
    rules = []
    for number, expr in enumerate(found):
        plain = (
            expr.replace("$__rate_interval", "5m").replace("$release", ".*").replace("$pod", ".*")
        )
        assert "$" not in plain
        rules.append({"record": f"panel:{number}", "expr": plain})
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}, width=10_000))
    done = subprocess.run(
        [str(BIN / "promtool"), "check", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_works_in_any_grafana_and_outside_kubernetes(path: Path) -> None:
    board = read(path)
    sources = {p["datasource"]["uid"] for p in board["panels"] if "datasource" in p}
    assert sources == {"${datasource}"}
    for variable in board["templating"]["list"][1:]:
        assert variable["allValue"] == ".*"  # an absent label matches it
