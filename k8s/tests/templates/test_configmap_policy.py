"""templates/configmap-policy.yaml"""

from chart import container, of, one, pod_spec, render


def test_an_inline_policy_is_the_one_that_judges() -> None:
    objects = render(ci="everything")
    assert one(objects, "ConfigMap", "-policy")["data"] == {"own.yaml": "name: own\n"}
    gate = container(pod_spec(one(objects, "Job", "-gate")), "gate")
    assert "--policy=/etc/assay/policy/own.yaml" in gate["args"]


def test_a_shipped_policy_goes_by_its_name() -> None:
    objects = render()
    assert of(objects, "ConfigMap", "-policy") == []
    assert "--policy=8xB200" in container(pod_spec(one(objects, "Job", "-gate")), "gate")["args"]
