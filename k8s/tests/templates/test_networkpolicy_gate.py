"""templates/networkpolicy-gate.yaml"""

from chart import of, one, render


def test_the_gate_reaches_the_server_and_the_api_server() -> None:
    server, api = one(render(), "NetworkPolicy", "assay-gate")["spec"]["egress"]
    assert server["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert [p["port"] for p in api["ports"]] == [443, 6443]
    assert of(render({"gate": {"enabled": False}}), "NetworkPolicy", "assay-gate") == []
