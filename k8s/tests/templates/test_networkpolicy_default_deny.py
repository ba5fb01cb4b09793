"""templates/networkpolicy-default-deny.yaml"""

from chart import of, one, pods, render


def test_every_pod_of_the_release_is_shut_off_first() -> None:
    spec = one(render(), "NetworkPolicy", "-default-deny")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert set(spec) == {"podSelector", "policyTypes"}
    for _, metadata, _ in pods(render(ci="everything")):
        assert spec["podSelector"]["matchLabels"].items() <= metadata["labels"].items()
    off = of(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy")
    assert off == []
