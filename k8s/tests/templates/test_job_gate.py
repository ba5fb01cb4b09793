"""templates/job-gate.yaml"""

from chart import container, env, of, one, pod_spec, render


def test_it_judges_after_install_and_upgrade_once() -> None:
    job = one(render(), "Job", "-gate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
    # The first install of all is what a baseline is measured on.
    first = one(render({"gate": {"baselineConfigMap": ""}}), "Job", "-gate")
    assert first["metadata"]["annotations"]["helm.sh/hook"] == "post-upgrade"
    assert job["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
    assert job["spec"]["backoffLimit"] == 0


def test_it_waits_as_long_as_a_start_may_take_and_ends_in_time() -> None:
    job = one(render(), "Job", "-gate")
    wait = int(container(pod_spec(job), "gate")["args"][3])
    assert wait == 14400 + 900 + 4500
    assert job["spec"]["activeDeadlineSeconds"] == wait + 3600


def test_it_runs_assay_gate_on_the_service() -> None:
    gate = container(pod_spec(one(render(), "Job", "-gate")), "gate")
    assert gate["args"][:3] == ["run", "/results", "http://r-assay-api:8000"]
    assert gate["args"][5:] == [
        "assay-gate", "run", "--policy=8xB200", "--url=http://r-assay-api:8000",
        "--hardware=8xB200", "--out=/results", "--baseline=/etc/assay/baseline/baseline.json",
    ]  # fmt: skip


def test_with_colours_it_judges_the_idle_one() -> None:
    gate = container(pod_spec(one(render(ci="blue-green"), "Job", "-gate")), "gate")
    assert "--url=http://r-assay-preview:8000" in gate["args"]
    assert env(gate)["ASSAY_IMAGE"] == "assay-server:0.2.0"


def test_its_token_is_projected_for_it_alone() -> None:
    spec = pod_spec(one(render(), "Job", "-gate"))
    assert spec["automountServiceAccountToken"] is False
    (account,) = [v for v in spec["volumes"] if v["name"] == "account"]
    assert account["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"] == 3600


def test_a_verdict_is_about_what_is_served() -> None:
    def identity(values: dict) -> str:
        return env(container(pod_spec(one(render(values), "Job", "-gate")), "gate"))["IDENTITY"]

    same = identity({})
    assert len(same) == 12
    assert (
        identity({"canary": {"failAfter": 5}, "replicas": 1, "monitoring": {"rules": False}})
        == same
    )
    for values in (
        {"images": {"server": {"tag": "9"}}}, {"model": {"revision": "f" * 40}},
        {"profile": {"name": "b200x8-dep"}}, {"server": {"extraArgs": ["--max-num-seqs=1"]}},
        {"gate": {"policy": "other"}}, {"gpu": {"products": ["NVIDIA-H200"]}},
    ):  # fmt: skip
        assert identity(values) != same, values


def test_it_can_be_left_to_helm_test() -> None:
    assert of(render({"gate": {"afterUpgrade": False}}), "Job", "-gate") == []
