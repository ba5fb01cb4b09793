"""Every rendered object is what Kubernetes 1.28 to 1.37 expect, to the last key."""

import copy

import pytest
from chart import CI, HELMS, of, one, render, text
from manifests import load
from validate import VERSIONS, errors

NEEDS = {"dra": "1.34"}
"""ci values -> the oldest Kubernetes that has what they ask for."""


def number(version: str) -> int:
    return int(version.partition(".")[2])


@pytest.mark.parametrize("version", VERSIONS)
def test_all_ci_values_are_valid(version: str) -> None:
    found = [
        f"{ci}: {line}"
        for ci in CI
        if number(NEEDS.get(ci, "1.28")) <= number(version)
        for o in render(ci=ci)
        for line in errors(o, version)
    ]
    assert found == []


def test_nothing_is_skipped() -> None:
    assert tuple(f"1.{n}" for n in range(28, 38)) == VERSIONS
    kinds = {o["kind"] for ci in CI for o in render(ci=ci)}
    assert kinds >= {
        "PodMonitor",
        "PrometheusRule",
        "ScaledObject",
        "AnalysisTemplate",
        "LeaderWorkerSet",
        "HTTPRoute",
        "InferencePool",
        "ResourceClaimTemplate",
    }


@pytest.mark.parametrize("ci", CI)
def test_helm_3_and_4_render_the_same(ci: str) -> None:
    assert load(text(ci=ci, helm=HELMS[0])) == load(text(ci=ci, helm=HELMS[1]))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", ("spec", "template", "spec")),
        ("PodMonitor", ("spec",)),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0)),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0)),
        ("ScaledObject", ("spec", "triggers", 0)),
        (
            "ScaledObject",
            ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior", "scaleUp"),
        ),
        ("AnalysisTemplate", ("spec", "metrics", 0, "provider", "job", "spec", "template", "spec")),
        ("HTTPRoute", ("spec", "rules", 0)),
        ("InferencePool", ("spec",)),
    ],
)
def test_a_misspelt_key_is_noticed(kind: str, path: tuple) -> None:
    o = copy.deepcopy(one(render(ci="everything"), kind) if kind != "Job" else {})
    node = o
    for step in path:
        node = node[step]
    node["intervall"] = "15s"
    assert any("intervall" in line for line in errors(o, "1.35"))


def test_a_misspelt_key_of_a_group_s_pods_is_noticed() -> None:
    o = copy.deepcopy(one(render(ci="two-nodes"), "LeaderWorkerSet"))
    o["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["imagee"] = "x"
    assert any("imagee" in line for line in errors(o, "1.28"))


def test_a_kind_without_a_schema_is_an_error() -> None:
    o = copy.deepcopy(one(render(), "PodMonitor")) | {"kind": "PodMonitr"}
    assert errors(o, "1.35") == [
        "PodMonitr/r-assay-server: there is no schema of"
        " monitoring.coreos.com/v1 PodMonitr for Kubernetes 1.35"
    ]


def test_claimed_gpus_are_refused_by_an_older_kubernetes() -> None:
    (claim,) = of(render(ci="dra"), "ResourceClaimTemplate")
    assert "there is no schema" in errors(claim, "1.33")[0]
