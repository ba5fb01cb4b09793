"""templates/scaledobject-server.yaml"""

from chart import of, one, refusal, render


def test_it_scales_on_queue_and_kv_use_of_its_own_release() -> None:
    found = one(render(ci="everything"), "ScaledObject")["spec"]
    assert found["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "r-assay-server",
    }
    queries = [t["metadata"]["query"] for t in found["triggers"]]
    assert [
        "vllm:num_requests_waiting" in queries[0],
        "vllm:kv_cache_usage_perc" in queries[1],
    ] == [True] * 2
    assert all('assay_release="ns/r-assay"' in q for q in queries)


def test_groups_scale_by_group() -> None:
    found = one(render({"autoscaling": {"enabled": True}}, ci="two-nodes"), "ScaledObject")["spec"]
    assert found["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_it_is_opt_in_and_refuses_a_range_upside_down() -> None:
    assert of(render(), "ScaledObject") == []
    assert "autoscaling.maxReplicas" in refusal(
        {"autoscaling": {"maxReplicas": 1}}, ci="everything"
    )
