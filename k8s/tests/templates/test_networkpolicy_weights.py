"""templates/networkpolicy-weights.yaml"""

from chart import of, one, render


def test_the_download_alone_leaves_the_cluster() -> None:
    spec = one(render(), "NetworkPolicy", "-weights")["spec"]
    assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "weights"
    assert [p["port"] for p in spec["egress"][0]["ports"]] == [443]
    (proxied,) = one(render(ci="everything"), "NetworkPolicy", "-weights")["spec"]["egress"]
    assert [p["port"] for p in proxied["ports"]] == [3128]
    assert of(render(ci="base"), "NetworkPolicy", "-weights") == []
