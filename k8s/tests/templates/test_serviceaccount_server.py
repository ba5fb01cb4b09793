"""templates/serviceaccount-server.yaml"""

from chart import one, pod_spec, render


def test_the_server_has_an_account_without_a_token() -> None:
    objects = render()
    assert one(objects, "ServiceAccount", "-server")["automountServiceAccountToken"] is False
    spec = pod_spec(one(objects, "Deployment"))
    assert spec["serviceAccountName"] == "r-assay-server"
    assert spec["automountServiceAccountToken"] is False
