"""templates/prometheusrule-server.yaml; what the rules do is in test_rules.py"""

from chart import of, one, render


def test_rules_look_at_their_own_release_alone() -> None:
    rules = [r for g in one(render(), "PrometheusRule")["spec"]["groups"] for r in g["rules"]]
    for rule in rules:
        own = 'assay_release="ns/r-assay"' in rule["expr"] or 'namespace="ns"' in rule["expr"]
        assert own or "DCGM" in rule["expr"], rule


def test_objectives_reach_the_rules() -> None:
    values = {
        "objectives": {
            "ttftSeconds": 1.0,
            "ratio": 0.999,
            "errorRatio": 0.05,
            "tokensPerSecond": 777,
        }
    }
    text = str(one(render(values), "PrometheusRule"))
    assert 'le="1.0"' in text
    assert "> 0.0144 " in text
    assert "> 0.05" in text
    assert "< 777 " in text


def test_the_budget_is_the_one_budget() -> None:
    rules = {
        r.get("alert"): r
        for g in one(render({"startup": {"budgetSeconds": 1234}}), "PrometheusRule")["spec"][
            "groups"
        ]
        for r in g["rules"]
    }
    assert rules["AssayDoorClosed"]["for"] == "1534s"
    assert "> 1234 " in rules["AssayStartupOverBudget"]["expr"]


def test_they_can_be_left_out() -> None:
    assert of(render({"monitoring": {"rules": False}}), "PrometheusRule") == []
