"""templates/persistentvolumeclaim-cache.yaml"""

from chart import of, one, refusal, render


def test_compiled_kernels_outlive_a_pod() -> None:
    assert (
        one(render(), "PersistentVolumeClaim", "-cache")["spec"]["resources"]["requests"]["storage"]
        == "64Gi"
    )


def test_there_is_none_where_another_is_named_or_nothing_lasts() -> None:
    assert of(render(ci="everything"), "PersistentVolumeClaim", "-cache") == []
    assert of(render(ci="cpu-miniature"), "PersistentVolumeClaim", "-cache") == []


def test_several_pods_do_not_share_a_volume_of_one() -> None:
    values = {"replicas": 2, "weights": {"volume": {"accessModes": ["ReadWriteMany"]}}}
    assert "cache.persistent" in refusal(values)
