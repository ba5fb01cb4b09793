"""One resource a template, one test file a template."""

from pathlib import Path

import pytest
import yaml
from chart import CHART, CI, text

TEMPLATES = sorted(p for p in (CHART / "templates").glob("*.yaml"))


def test_every_template_has_its_test_and_every_test_its_template() -> None:
    tests = {
        p.stem.removeprefix("test_")
        for p in (Path(__file__).parent / "templates").glob("test_*.py")
    }
    assert tests == {p.stem.replace("-", "_") for p in TEMPLATES}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_a_template_renders_one_kind_and_is_named_for_it(template: Path) -> None:
    kinds: set[str] = set()
    for ci in CI:
        source, ours = "", []
        for line in text(ci=ci).splitlines():
            if line.startswith("# Source: "):
                source = line.rpartition("/")[2]
            elif line == "---":
                source = ""
            elif source == template.name:
                ours.append(line)
        kinds |= {yaml.safe_load("\n".join(part))["kind"] for part in _documents(ours)}
    assert {kind.lower() for kind in kinds} == {template.stem.partition("-")[0]}


def _documents(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("apiVersion:"):
            found.append([])
        if found:
            found[-1].append(line)
    return found
