"""templates/serviceaccount-gate.yaml"""

from chart import of, one, render


def test_the_gate_s_account_mounts_nothing_by_itself() -> None:
    assert one(render(), "ServiceAccount", "-gate")["automountServiceAccountToken"] is False
    assert of(render({"gate": {"enabled": False}}), "ServiceAccount", "-gate") == []
