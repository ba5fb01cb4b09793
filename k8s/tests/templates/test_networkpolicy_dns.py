"""templates/networkpolicy-dns.yaml"""

from chart import one, render


def test_names_are_resolved_over_both_protocols() -> None:
    spec = one(render(), "NetworkPolicy", "-dns")["spec"]
    (rule,) = spec["egress"]
    assert {(p["port"], p["protocol"]) for p in rule["ports"]} >= {(53, "UDP"), (53, "TCP")}
    assert rule["to"]
