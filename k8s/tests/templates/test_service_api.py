"""templates/service-api.yaml"""

from chart import one, render


def test_it_is_not_called_vllm_and_leads_to_the_server() -> None:
    service = one(render(), "Service")
    assert service["metadata"]["name"] == "r-assay-api"
    assert service["spec"]["selector"] == {
        "app.kubernetes.io/name": "assay", "app.kubernetes.io/instance": "r",
        "app.kubernetes.io/component": "server",
    }  # fmt: skip


def test_the_active_colour_alone_gets_clients() -> None:
    for active in ("blue", "green"):
        service = one(render({"blueGreen": {"active": active}}, ci="blue-green"), "Service", "-api")
        assert service["spec"]["selector"]["assay/colour"] == active


def test_a_group_s_workers_get_none() -> None:
    selector = one(render(ci="two-nodes"), "Service")["spec"]["selector"]
    assert selector["app.kubernetes.io/component"] == "server"
