"""templates/networkpolicy-clients.yaml"""

from chart import one, render


def test_clients_reach_the_api_port_of_the_server_alone() -> None:
    spec = one(render(), "NetworkPolicy", "-clients")["spec"]
    assert spec["ingress"] == [
        {"from": [{"podSelector": {}}], "ports": [{"port": 8000, "protocol": "TCP"}]}
    ]
    assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server"
