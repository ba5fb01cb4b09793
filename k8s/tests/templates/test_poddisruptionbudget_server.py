"""templates/poddisruptionbudget-server.yaml"""

from chart import of, one, render

SHARED = {"weights": {"volume": {"accessModes": ["ReadWriteMany"]}}, "cache": {"persistent": False}}


def test_one_replica_has_none_or_its_node_could_never_be_drained() -> None:
    assert of(render(), "PodDisruptionBudget") == []


def test_of_several_one_may_go() -> None:
    budget = one(render({"replicas": 2} | SHARED), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_groups_have_none() -> None:
    assert of(render({"replicas": 2}, ci="two-nodes"), "PodDisruptionBudget") == []
