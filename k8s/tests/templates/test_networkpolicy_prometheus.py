"""templates/networkpolicy-prometheus.yaml"""

from chart import of, one, render


def test_prometheus_reaches_the_metrics_of_server_and_canary() -> None:
    (rule,) = one(render(), "NetworkPolicy", "-prometheus")["spec"]["ingress"]
    assert [p["port"] for p in rule["ports"]] == [8000, 8090]
    assert of(render({"networkPolicy": {"prometheus": []}}), "NetworkPolicy", "-prometheus") == []
