"""templates/persistentvolumeclaim-weights.yaml"""

from chart import one, render


def test_it_outlives_the_release_and_holds_two_revisions() -> None:
    claim = one(render(), "PersistentVolumeClaim", "-weights")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"  # two of about 913 GB
    assert claim["spec"]["storageClassName"] == "local-nvme"


def test_each_colour_has_its_own() -> None:
    objects = render(ci="blue-green")
    for colour in ("blue", "green"):
        one(objects, "PersistentVolumeClaim", f"-weights-{colour}")
