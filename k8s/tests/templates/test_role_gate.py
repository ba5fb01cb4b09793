"""templates/role-gate.yaml"""

from chart import one, render


def test_it_can_keep_verdicts_and_nothing_else() -> None:
    rules = one(render(), "Role")["rules"]
    granted = {
        (resource, verb, tuple(rule.get("resourceNames", ())))
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        ("configmaps", "get", ("r-assay-verdicts",)),
        ("configmaps", "patch", ("r-assay-verdicts",)),
        ("configmaps", "create", ()),
        ("events", "create", ()),
    }
    assert all(rule["apiGroups"] == [""] for rule in rules)
