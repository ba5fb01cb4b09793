"""templates/httproute-api.yaml"""

from chart import of, one, refusal, render

ROUTE = {"route": {"enabled": True, "parentRefs": [{"name": "g"}]}}


def test_the_api_alone_is_routed_and_streams_are_not_cut() -> None:
    (rule,) = one(render(ROUTE), "HTTPRoute")["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["backendRefs"] == [{"name": "r-assay-api", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}


def test_with_a_pool_it_leads_to_the_pool() -> None:
    (rule,) = one(render(ci="everything"), "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"][0]["kind"] == "InferencePool"


def test_a_route_needs_a_gateway() -> None:
    assert "route.parentRefs" in refusal({"route": {"enabled": True}})
    assert of(render(), "HTTPRoute") == []
