"""The alerts, by promtool: each fires, does not fire, and resolves."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import BIN, one, render

CASES = yaml.safe_load((Path(__file__).parent / "rules/cases.yaml").read_text())
VALUES = {"monitoring": {"scope": "all"}, "objectives": {"tokensPerSecond": 2000}}


def groups(values: dict[str, Any] = VALUES) -> list[dict[str, Any]]:
    return list(one(render(values), "PrometheusRule")["spec"]["groups"])


def alerts() -> dict[str, dict[str, Any]]:
    return {r["alert"]: r for g in groups() for r in g["rules"] if "alert" in r}


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )


def write_rules(folder: Path) -> None:
    """Without annotations: promtool would want each of them repeated in every expectation."""
    for group in (found := groups()):
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": found}, width=10_000))


def minutes(text: str) -> int:
    return int(text.removesuffix("m"))


def expectation(alert: str, at: int, labels: dict[str, str] | None) -> dict[str, Any]:
    fired = (
        []
        if labels is None
        else [{"exp_labels": labels | {"severity": alerts()[alert]["labels"]["severity"]}}]
    )
    return {"eval_time": f"{at}m", "alertname": alert, "exp_alerts": fired}


def series(given: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in given.items()]


def cases() -> list[dict[str, Any]]:
    found = []
    for case in CASES:
        alert, fires = case["alert"], case["fires"]
        labels = case.get("labels", {"namespace": "ns", "pod": "p"})
        found.append({
            "name": f"{alert} fires and resolves",
            "interval": "1m",
            "input_series": series(fires["series"]),
            "alert_rule_test": [
                expectation(alert, minutes(fires["before"]), None),
                expectation(alert, minutes(fires["at"]), labels),
                expectation(alert, minutes(fires["resolved"]), None),
            ],
        })  # fmt: skip
        for quiet in case.get("silent", []):
            last = max(_length(values) for values in quiet["series"].values())
            found.append({
                "name": f"{alert} is silent: {quiet['why']}",
                "interval": "1m",
                "input_series": series(quiet["series"]),
                "alert_rule_test": [expectation(alert, at, None) for at in range(1, last, 7)],
            })  # fmt: skip
    return found


def _length(values: str) -> int:
    return sum(int(m[1]) + 1 for m in re.finditer(r"x(\d+)", values)) + values.count("stale")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rules")
    write_rules(made)
    return made


def test_promtool_accepts_the_rules(folder: Path) -> None:
    done = promtool(folder, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("test", cases(), ids=lambda t: t["name"])
def test_each_alert_does_what_it_says(test: dict[str, Any], folder: Path) -> None:
    file = folder / f"{abs(hash(test['name']))}.yaml"
    # The minute is the interval that the rules' thresholds are told in.
    file.write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    done = promtool(folder, "test", "rules", file.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_is_without_a_test() -> None:
    assert {c["alert"] for c in CASES} == set(alerts())
    assert all(c.get("silent") or c.get("name") for c in CASES)


def test_an_alert_test_can_fail(folder: Path) -> None:
    """promtool, as it is called here, notices an alert that does not fire."""
    test = dict(cases()[0], input_series=series({"up": "1x60"}))
    (folder / "wrong.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    assert promtool(folder, "test", "rules", "wrong.yaml").returncode == 1


def test_every_alert_says_what_and_why_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert set(rule["annotations"]) == {"summary", "why", "action"}, name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
