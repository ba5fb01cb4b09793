"""templates/podmonitor-server.yaml"""

from chart import container, one, pod_spec, render


def test_server_and_canary_are_scraped_by_their_port_names() -> None:
    objects = render()
    monitor = one(objects, "PodMonitor")["spec"]
    spec = pod_spec(one(objects, "Deployment"))
    ports = [p["name"] for name in ("server", "canary") for p in container(spec, name)["ports"]]
    assert [e["port"] for e in monitor["podMetricsEndpoints"]] == ports == ["http", "canary"]


def test_prometheus_shows_a_key_where_keys_are_asked_for() -> None:
    server, canary = one(render(), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert server["authorization"]["credentials"] == {"name": "assay-keys", "key": "metrics_key"}
    assert "authorization" not in canary
    off = render({"auth": {"apiKeys": "off: anybody may use the model"}})
    assert "authorization" not in one(off, "PodMonitor")["spec"]["podMetricsEndpoints"][0]


def test_series_say_which_release_they_are_of() -> None:
    for endpoint in one(render(), "PodMonitor")["spec"]["podMetricsEndpoints"]:
        (relabel,) = endpoint["relabelings"]
        assert (relabel["targetLabel"], relabel["replacement"]) == ("assay_release", "ns/r-assay")
