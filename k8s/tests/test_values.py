"""values.schema.json and the rules between values."""

import subprocess
from typing import Any

import pytest
import yaml
from chart import BIN, CHART, CI, HELMS, refusal, render


def leaves(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(node, dict) and node:
        return [path, *(leaf for k, v in node.items() for leaf in leaves(v, (*path, k)))]
    return []


FREEFORM = ("resources", "annotations", "labels", "dashboardLabels", "nodeSelector")
MAPS = [
    p
    for p in leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    if not set(p) & set(FREEFORM)
]


@pytest.mark.parametrize("path", MAPS, ids=lambda p: ".".join(p) or "top")
@pytest.mark.parametrize("helm", HELMS)
def test_an_unknown_key_is_refused_wherever_it_stands(path: tuple[str, ...], helm: str) -> None:
    values: dict[str, Any] = {"replicaz": 1}
    for key in reversed(path):
        values = {key: values}
    assert "replicaz" in refusal(values, helm=helm)


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": "two"},
        {"startup": {"budgetSeconds": 59}},
        {"startup": {"budgetSeconds": 15000}},
        {"drain": {"seconds": 0}},
        {"gpu": {"count": -1}},
        {"weights": {"source": "s3"}},
        {"weights": {"subPath": "/absolute"}},
        {"objectives": {"ttftSeconds": 2.0}},
        {"objectives": {"ratio": 1}},
        {"images": {"server": {"digest": "sha256:short"}}},
        {"parallelism": {"nodes": 0}},
        {"server": {"extraArgs": ["it's"]}},
        {"profile": {"name": "Upper"}},
        {"monitoring": {"interval": "15"}},
        {"blueGreen": {"active": "red"}},
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_refused(values: dict[str, Any]) -> None:
    assert "values don't meet the specifications" in refusal(values)


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("ci", CI)
def test_lint_has_nothing_to_say(ci: str, helm: str) -> None:
    done = subprocess.run(
        [str(BIN / helm), "lint", "--strict", str(CHART), "--values", str(CHART / f"ci/{ci}.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"blueGreen": {"active": "green", "green": {"enabled": False}}}, "green is not enabled"),
        ({"weights": {"source": "claim", "claim": {"name": "c"}}}, "a volume of its own"),
        ({"replicas": 2}, "one replica of each colour"),
        (
            {
                "parallelism": {"nodes": 2},
                "weights": {"volume": {"accessModes": ["ReadWriteMany"]}},
                "cache": {"persistent": False},
            },
            "not together with parallelism.nodes",
        ),
        ({"cache": {"existingClaim": "shared"}}, "a cache of its own"),
    ],
)
def test_colours_go_with_little_else(values: dict[str, Any], rule: str) -> None:
    assert rule in refusal(values, ci="blue-green")


def test_a_parent_chart_may_hand_down_globals() -> None:
    render({"global": {"anything": True}})


def test_the_notes_say_what_a_failed_upgrade_costs() -> None:
    done = subprocess.run(
        [
            str(BIN / "helm4"),
            "install",
            "r",
            str(CHART),
            "--dry-run=client",
            "--values",
            str(CHART / "ci/cpu-miniature.yaml"),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"helm renders notes with an API server only: {done.stderr.strip()[:200]}")
    # Two loads of 600 s and the gate's 900 s.
    assert "up to 35 minutes" in done.stdout
    # The wait for weights (none), image (900 s), start (600 s) and gate (900 s), and a minute.
    assert "--timeout 41m --rollback-on-failure" in done.stdout
