"""templates/networkpolicy-gate-to-server.yaml"""

from chart import one, render


def test_the_gate_s_pods_are_let_in() -> None:
    objects = render()
    (rule,) = one(objects, "NetworkPolicy", "-gate-to-server")["spec"]["ingress"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"]
    labels = one(objects, "Job", "-gate")["spec"]["template"]["metadata"]["labels"]
    assert wanted.items() <= labels.items()
