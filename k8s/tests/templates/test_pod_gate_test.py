"""templates/pod-gate-test.yaml: `helm test`"""

from chart import container, of, one, render


def test_it_is_the_same_gate_without_a_token() -> None:
    objects = render()
    pod, job = one(objects, "Pod"), one(objects, "Job", "-gate")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert (
        container(pod["spec"], "gate")["args"]
        == container(job["spec"]["template"]["spec"], "gate")["args"]
    )
    assert "account" not in [v["name"] for v in pod["spec"]["volumes"]]
    assert of(render({"gate": {"enabled": False}}), "Pod") == []
