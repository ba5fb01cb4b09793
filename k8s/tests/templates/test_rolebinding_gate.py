"""templates/rolebinding-gate.yaml"""

from chart import one, render


def test_the_role_is_the_gate_s_alone() -> None:
    binding = one(render(), "RoleBinding")
    assert binding["roleRef"]["name"] == "r-assay-gate"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "r-assay-gate"}]
