"""templates/deployment-server.yaml: one node, one server."""

import math
import subprocess
from pathlib import Path

import pytest
import yaml
from chart import CI, ROOT, container, env, of, one, pod_spec, pods, refusal, render, server


def window(probe: dict) -> int:
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


@pytest.mark.parametrize(("budget", "period"), [(4500, 10), (601, 7), (60, 60), (14400, 1)])
def test_one_budget_sets_probe_engine_launcher_and_deadline(budget: int, period: int) -> None:
    objects = render({"startup": {"budgetSeconds": budget, "periodSeconds": period}})
    deployment, found = one(objects, "Deployment"), server(objects)
    assert env(found)["STARTUP_BUDGET"] == env(found)["VLLM_ENGINE_READY_TIMEOUT_S"] == str(budget)
    # The launcher gives up first, because it says why; kubelet at most a minute and a probe later.
    assert budget + 60 <= window(found["startupProbe"]) < budget + 60 + period
    download, pull = 14400, 900
    assert deployment["spec"]["progressDeadlineSeconds"] == download + budget + pull


def test_a_deadline_shorter_than_the_budget_is_refused() -> None:
    values = {"startup": {"budgetSeconds": 4500, "progressDeadlineSeconds": 19799}}
    assert "startup.progressDeadlineSeconds: 19799 is less than 19800" in refusal(values)
    values["startup"]["progressDeadlineSeconds"] = 19800
    assert one(render(values), "Deployment")["spec"]["progressDeadlineSeconds"] == 19800


@pytest.mark.parametrize("name", ["VLLM_ENGINE_READY_TIMEOUT_S", "STARTUP_BUDGET"])
def test_another_budget_by_the_back_door_is_refused(name: str) -> None:
    why = refusal({"server": {"extraEnv": [{"name": name, "value": "60"}]}})
    assert f"server.extraEnv: {name} is set by startup.budgetSeconds" in why


@pytest.mark.parametrize(("pre", "drain"), [(15, 120), (0, 1), (60, 600)])
def test_the_grace_covers_hook_drain_and_launcher(pre: int, drain: int) -> None:
    objects = render({"drain": {"preStopSeconds": pre, "seconds": drain}})
    spec, found = pod_spec(one(objects, "Deployment")), server(objects)
    assert found["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(pre)]
    assert f"--shutdown-timeout={drain}" in found["args"]
    # plugin/src/assay_kernels/launcher/settings.py: STOP_MARGIN_SECONDS
    assert spec["terminationGracePeriodSeconds"] >= pre + drain + 20 + 5


@pytest.mark.parametrize("ci", CI)
def test_a_pod_drains_as_long_as_its_profile_would(ci: str) -> None:
    """One number for compose, `make serve` and Kubernetes."""
    for name, _, spec in pods(render(ci=ci)):
        if name.startswith(("Deployment/", "LeaderWorkerSet/")) and "worker" not in name:
            found = container(spec, "server")
            name = env(found)["ASSAY_PROFILE"]
            if name.startswith("/"):  # a profile of the values' own
                continue
            profile = ROOT / "docker/profiles" / f"{name}.yaml"
            seconds = yaml.safe_load(profile.read_text())["shutdown-timeout"]
            assert f"--shutdown-timeout={seconds}" in found["args"], (ci, name)


def test_a_grace_that_would_cut_streams_is_refused() -> None:
    values = {"drain": {"preStopSeconds": 15, "seconds": 120, "graceSeconds": 154}}
    assert "drain.graceSeconds: 154 is less than 155" in refusal(values)
    values["drain"]["graceSeconds"] = 155
    spec = pod_spec(one(render(values), "Deployment"))
    assert spec["terminationGracePeriodSeconds"] == 155
    assert "--shutdown-timeout is set by drain.seconds" in refusal(
        {"server": {"extraArgs": ["--shutdown-timeout=1"]}}
    )
    assert "--shutdown-timeout is set by drain.seconds" in refusal(
        {"server": {"extraArgs": ["--shutdown_timeout", "1"]}}
    )


def test_liveness_takes_busy_for_busy() -> None:
    probe = server(render())["livenessProbe"]
    assert probe["timeoutSeconds"] >= 10
    assert probe["failureThreshold"] >= 3
    assert probe["httpGet"]["path"] == "/health"


def test_readiness_is_the_door_and_never_health() -> None:
    found = server(render())
    command = found["readinessProbe"]["exec"]["command"]
    assert command[-2:] == ["/run/assay/run/open", "http://127.0.0.1:8090/readyz"]
    assert env(found)["ASSAY_READY_SUITE"] == "canary"


def test_the_canary_shares_the_run_folder_and_has_no_say_in_readiness_by_dying() -> None:
    spec = pod_spec(one(render(), "Deployment"))
    canary = container(spec, "canary")
    assert "readinessProbe" not in canary
    assert canary["command"][1:] == ["/etc/assay/scripts/canary.sh", "/run/assay/bypass.key"]
    assert "--door=/run/assay/run" in canary["args"]
    for name in ("server", "canary"):
        mounts = {m["name"]: m["mountPath"] for m in container(spec, name)["volumeMounts"]}
        assert mounts["run"] == "/run/assay"
    assert env(container(spec, "server"))["ASSAY_STATE_DIR"] == "/run/assay"


def test_one_server_is_recreated_and_several_take_turns() -> None:
    assert one(render(), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    objects = render(ci="everything")
    strategy = one(objects, "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert "replicas" not in one(objects, "Deployment")["spec"]  # KEDA's to set


def test_everything_writable_is_a_volume_and_the_caches_are_one() -> None:
    objects = render()
    spec, found = pod_spec(one(objects, "Deployment")), server(objects)
    mounts = {m["mountPath"]: m for m in found["volumeMounts"]}
    caches = [
        v for k, v in env(found).items() if k.endswith(("_CACHE_HOME", "_CACHE_DIR", "_CACHE_ROOT"))
    ]
    caches.append(env(found)["HOME"])
    assert len(caches) == 7
    assert all(path.startswith("/var/cache/assay") for path in caches)
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert "persistentVolumeClaim" in volumes[mounts["/var/cache/assay"]["name"]]
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "32Gi",
    }
    assert volumes[mounts["/run/assay"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert mounts["/models"]["readOnly"] is True


def test_several_api_servers_meet_in_a_folder_that_each_start_finds_empty(tmp_path: Path) -> None:
    objects = render({"server": {"apiServers": 4}})
    spec, found = pod_spec(one(objects, "Deployment")), server(objects)
    assert "--api-server-count=4" in found["args"]
    folder = env(found)["PROMETHEUS_MULTIPROC_DIR"]
    (mount,) = [m for m in found["volumeMounts"] if m["mountPath"] == folder]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    assert "emptyDir" in volume
    # The command for real, with a folder and a program of the test's own.
    (tmp_path / "stale.db").touch()
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    shell, flag, script, name = found["command"]
    script = script.replace(folder, str(tmp_path / "metrics"))
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/stale.db").touch()
    done = subprocess.run(
        [shell, flag, script, name, "--a=b c"], capture_output=True, text=True, check=True,
        env={"PATH": f"{program.parent}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["-m", "assay_kernels.launcher.entrypoint", "--a=b c"]
    assert list((tmp_path / "metrics").iterdir()) == []
    # One API server keeps its metrics itself, and can say when it was started.
    assert "PROMETHEUS_MULTIPROC_DIR" not in env(server(render()))


def test_a_cache_that_does_not_last_is_limited() -> None:
    spec = pod_spec(one(render(ci="cpu-miniature"), "Deployment"))
    (cache,) = [v for v in spec["volumes"] if v["name"] == "cache"]
    assert cache["emptyDir"] == {"sizeLimit": "2Gi"}


def test_the_server_is_offline_and_reads_keys_from_files() -> None:
    found = server(render())
    assert env(found)["HF_HUB_OFFLINE"] == env(found)["TRANSFORMERS_OFFLINE"] == "1"
    (keys,) = [m for m in found["volumeMounts"] if m["name"] == "keys"]
    # No subPath: kubelet would never bring a new version.
    assert keys == {"name": "keys", "mountPath": "/etc/assay/keys", "readOnly": True}
    assert env(found)["ASSAY_API_KEYS_FILE"] == "/etc/assay/keys/api_keys"
    off = server(render({"auth": {"apiKeys": "off: anybody may use the model"}}))
    assert "keys" not in [m["name"] for m in off["volumeMounts"]]
    assert "ASSAY_API_KEYS_FILE" not in env(off)


def test_gpus_decide_where_it_runs() -> None:
    objects = render()
    assert server(objects)["resources"]["limits"]["nvidia.com/gpu"] == 8
    terms = pod_spec(one(objects, "Deployment"))["affinity"]["nodeAffinity"]
    (term,) = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-B200"]
    cpu = pod_spec(one(render(ci="cpu-miniature"), "Deployment"))
    assert "affinity" not in cpu
    assert "nvidia.com/gpu" not in container(cpu, "server")["resources"]["limits"]


def test_claimed_gpus_are_not_asked_for_twice() -> None:
    objects = render(ci="dra")
    spec, found = pod_spec(one(objects, "Deployment")), server(objects)
    assert "nvidia.com/gpu" not in found["resources"]["limits"]
    assert found["resources"]["claims"] == [{"name": "gpus"}]
    assert spec["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "r-assay-gpus"}]


def test_pods_wait_for_weights_that_are_still_fetched() -> None:
    spec = pod_spec(one(render(), "Deployment"))
    wait = container(spec, "wait-for-weights")
    assert wait["args"] == [env(container(spec, "server"))["ASSAY_MODEL"], "14400"]
    assert "initContainers" not in pod_spec(one(render(ci="base"), "Deployment"))


def test_new_scripts_or_profiles_make_new_pods() -> None:
    def sums(values: dict) -> str:
        template = one(render(values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/files"]

    assert sums({}) != sums({"profile": {"inline": "max-model-len: 1"}})


def test_each_colour_is_a_deployment_with_its_own_volumes() -> None:
    objects = render(ci="blue-green")
    blue, green = one(objects, "Deployment", "-blue"), one(objects, "Deployment", "-green")
    assert [server([d])["image"] for d in (blue, green)] == [
        "assay-server:0.1.0",
        "assay-server:0.2.0",
    ]
    claims = [
        {
            v["persistentVolumeClaim"]["claimName"]
            for v in pod_spec(d)["volumes"]
            if "persistentVolumeClaim" in v
        }
        for d in (blue, green)
    ]
    assert not claims[0] & claims[1]
    assert env(server([green]))["ASSAY_MODEL"].endswith("89abcdef0123456789abcdef0123456789abcdef")
    assert blue["spec"]["selector"] != green["spec"]["selector"]


def test_groups_of_nodes_are_no_deployment() -> None:
    assert of(render(ci="two-nodes"), "Deployment") == []


def test_the_miniature_starts_within_its_own_budget() -> None:
    found = server(render(ci="cpu-miniature"))
    assert window(found["startupProbe"]) == math.ceil((600 + 60) / 5) * 5
    assert "ASSAY_MODEL" not in env(found)  # the image knows
