"""templates/job-switch.yaml"""

from chart import container, env, of, one, pod_spec, render


def test_before_an_upgrade_the_active_colour_s_verdict_is_asked_for() -> None:
    job = one(render({"blueGreen": {"active": "green"}}, ci="blue-green"), "Job", "-switch")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    found = container(pod_spec(job), "switch")
    assert found["args"] == ["check"]


def test_it_asks_for_the_very_verdict_that_the_gate_left_when_the_colour_was_idle() -> None:
    before = one(render({"blueGreen": {"active": "blue"}}, ci="blue-green"), "Job", "-gate")
    after = one(render({"blueGreen": {"active": "green"}}, ci="blue-green"), "Job", "-switch")
    left = env(container(pod_spec(before), "gate"))
    asked = env(container(pod_spec(after), "switch"))
    assert (left["VERDICTS"], left["IDENTITY"]) == (asked["VERDICTS"], asked["IDENTITY"])


def test_a_server_that_passed_alone_counts_as_blue() -> None:
    alone = one(render({"images": {"server": {"tag": "0.1.0"}}}), "Job", "-gate")
    values = {
        "blueGreen": {
            "enabled": True,
            "blue": {"tag": "0.1.0"},
            "green": {"enabled": True, "tag": "2"},
        }
    }
    switch = one(render(values), "Job", "-switch")
    left, asked = (
        env(container(pod_spec(alone), "gate")),
        env(container(pod_spec(switch), "switch")),
    )
    assert (left["VERDICTS"], left["IDENTITY"]) == (asked["VERDICTS"], asked["IDENTITY"])


def test_one_node_has_nothing_to_switch() -> None:
    assert of(render(), "Job", "-switch") == []
