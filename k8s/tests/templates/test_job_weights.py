"""templates/job-weights.yaml"""

from chart import SHA, container, env, of, one, pod_spec, refusal, render


def job(values: dict | None = None, **how: str) -> dict:
    return one([j for j in render(values, **how) if "-weights-" in j["metadata"]["name"]], "Job")


def test_it_fetches_one_pinned_revision_into_the_folder_that_is_served() -> None:
    found = container(pod_spec(job()), "weights")
    assert found["command"] == ["python", "-m", "assay_kernels.launcher.weights"]
    assert found["args"] == ["nvidia/DeepSeek-V4-Pro-NVFP4", SHA, f"/models/{SHA}"]
    assert "model.revision" in refusal({}, ci="")
    assert "revision" in refusal({"model": {"revision": "main"}})


def test_another_revision_or_setting_is_another_job() -> None:
    names = {
        job(values)["metadata"]["name"]
        for values in (
            {}, {"model": {"revision": "f" * 40}}, {"weights": {"download": {"endpoint": "https://a.example"}}},
            {"images": {"server": {"tag": "2"}}},
        )
    }  # fmt: skip
    assert len(names) == 4
    assert job({"canary": {"failAfter": 9}})["metadata"]["name"] in names  # nothing of the Job's


def test_the_token_is_a_file() -> None:
    spec = pod_spec(job({"weights": {"download": {"tokenSecret": "hub"}}}))
    found = container(spec, "weights")
    assert not any("TOKEN" in name for name in env(found))
    (volume,) = [v for v in spec["volumes"] if v["name"] == "hub"]
    assert volume["secret"]["items"] == [{"key": "token", "path": "hf_token"}]


def test_proxy_mirror_and_own_ca_reach_the_download() -> None:
    spec = pod_spec(job(ci="everything"))
    variables = env(container(spec, "weights"))
    assert variables["HTTPS_PROXY"] == "http://proxy.example.com:3128"
    assert variables["HF_ENDPOINT"] == "https://hub.example.com"
    assert variables["SSL_CERT_FILE"] == "/etc/assay/ca/ca.crt"


def test_only_what_may_end_otherwise_is_tried_again() -> None:
    spec = job()["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    # assay_kernels.launcher.weights ends with 2 for what can never be.
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_what_is_there_already_is_not_fetched() -> None:
    for ci in ("base", "cpu-miniature"):
        assert [j for j in of(render(ci=ci), "Job") if "weights" in j["metadata"]["name"]] == []
