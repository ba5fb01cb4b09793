"""A real Prometheus reads the pod as the PodMonitor says; rules and panels have answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pictures
import promql
import pytest
from chart import one
from conftest import NAMESPACE, OPEN_SECONDS, Client
from kubelet import Object, Pod
from monitoring import Prometheus, answerable

NOT_HERE = {
    "DCGM_": "no GPU, so no dcgm-exporter",
    "kube_": "no API server, so no kube-state-metrics",
    "kubelet_": "no kubelet, so nobody measures volumes",
    "vllm:spec_decode_": "the miniature has no draft layer",
}
"""Beginning of a metric -> why nobody exports it beside the miniature on a CPU."""
WHEN_WRONG = {
    'how=~".*reference.*",': "no layer has fallen back to the reference",
    'verdict="fail",': "no check has failed",
}
"""Matcher of series that a sound server has none of -> why; without it there must be some."""
WHEN_ALERTS_FIRE = "ALERTS"
"""Has series only while an alert is pending or fires: test_3_faults asks for it then."""


@pytest.fixture(scope="module")
def traffic(pod: Pod, client: Client, metrics: Prometheus) -> Iterator[float]:
    """Clients for longer than four scrapes, the panels' window; still there when tests ask."""
    pod.wait(lambda: pod.ready, OPEN_SECONDS)
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            client.ask()
            client.stream(40)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    seconds = float(os.environ.get("ASSAY_TRAFFIC_SECONDS", "75"))
    time.sleep(seconds)
    yield seconds
    ended.set()
    for thread in threads:
        thread.join(60)


def test_both_endpoints_are_read_under_the_release_s_label(
    pod: Pod, metrics: Prometheus, traffic: float
) -> None:
    up = {
        (row["metric"]["container"], row["metric"]["assay_release"]): row["value"][1]
        for row in metrics.query("up")
    }
    assert up == {("server", "llm/mini-assay"): "1", ("canary", "llm/mini-assay"): "1"}
    assert metrics.query(f'assay_info{{namespace="{NAMESPACE}",pod="{pod.name}"}}')


def why_not(expression: str) -> str:
    reasons = [
        reason
        for metric in promql.metrics(expression)
        for start, reason in NOT_HERE.items()
        if metric.startswith(start)
    ]
    return reasons[0] if reasons else ""


def wrong(metrics: Prometheus, name: str, expression: str) -> str:
    """What is not as it should be: no series, or some where none was expected."""
    if promql.metrics(expression) == {WHEN_ALERTS_FIRE}:
        return ""
    for matcher, reason in WHEN_WRONG.items():
        if matcher in expression and not metrics.query(expression):
            expression = expression.replace(matcher, "")
            name += f" ({reason})"
    found, reason = metrics.query(expression), why_not(expression)
    if bool(found) != bool(reason):
        return ""
    return f"{name}: {len(found)} series; {reason or 'no reason why not'}: {expression}"


def test_every_rule_s_expression_has_a_series_or_a_reason(
    metrics: Prometheus, objects: list[Object], traffic: float
) -> None:
    problems = []
    for group in one(objects, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            questions = (
                answerable(rule["expr"]) if "alert" in rule else [rule["expr"], rule["record"]]
            )
            problems += [wrong(metrics, name, question) for question in questions]
    assert not any(problems), "\n".join(filter(None, problems))


def test_prometheus_evaluates_every_rule_without_an_error(
    metrics: Prometheus, objects: list[Object], traffic: float
) -> None:
    rules = [r for g in metrics.get("rules")["groups"] for r in g["rules"]]
    expected = [r for g in one(objects, "PrometheusRule")["spec"]["groups"] for r in g["rules"]]
    assert len(rules) == len(expected)
    assert {(r["name"], r["health"], r.get("lastError", "")) for r in rules} == {
        (r["name"], "ok", "") for r in rules
    }
    # How fast it is depends on what else runs on this machine.
    assert {alert for alert in metrics.firing() if "Budget" not in alert} == set()


@pytest.mark.parametrize("dashboard", ["operator", "release"])
def test_every_panel_has_a_series_or_a_reason(
    metrics: Prometheus, traffic: float, dashboard: str
) -> None:
    problems = [
        wrong(metrics, panel["title"], pictures.filled(target["expr"]))
        for panel in pictures.panels(dashboard)
        for target in panel["targets"]
    ]
    assert not any(problems), "\n".join(filter(None, problems))


@pytest.mark.parametrize("dashboard", ["operator", "release"])
def test_the_dashboards_can_be_drawn_from_these_answers(
    metrics: Prometheus, traffic: float, tmp_path: Path, dashboard: str
) -> None:
    """`make pod-pictures` keeps them in docs/img."""
    folder = Path(os.environ.get("ASSAY_PICTURES") or tmp_path)
    target = folder / f"dashboard-{dashboard}.png"
    drawn = pictures.draw(metrics, dashboard, target, seconds=300)
    with_answers = [
        panel
        for panel in pictures.panels(dashboard)
        if any(not why_not(t["expr"]) and "ALERTS" not in t["expr"] for t in panel["targets"])
    ]
    assert drawn >= len(with_answers)
    assert target.stat().st_size > 20_000
