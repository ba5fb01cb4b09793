"""templates/networkpolicy-group.yaml"""

from chart import of, one, render


def test_the_members_of_a_group_reach_each_other_on_every_port() -> None:
    spec = one(render(ci="two-nodes"), "NetworkPolicy", "-group")["spec"]
    assert spec["ingress"][0]["from"] == spec["egress"][0]["to"]
    assert "ports" not in spec["ingress"][0]
    (match,) = spec["podSelector"]["matchExpressions"]
    assert match["values"] == ["server", "engine"]
    assert of(render(), "NetworkPolicy", "-group") == []
