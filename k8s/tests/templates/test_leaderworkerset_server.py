"""templates/leaderworkerset-server.yaml: one server on several nodes."""

import re
import subprocess

import pytest
from chart import container, env, of, one, refusal, render


def group(values: dict | None = None) -> dict:
    return one(render(values, ci="two-nodes"), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]


def test_a_group_restarts_as_a_whole() -> None:
    assert group()["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group()["size"] == 2


def test_the_leader_alone_has_api_door_and_canary() -> None:
    leader, worker = (group()[k]["spec"] for k in ("leaderTemplate", "workerTemplate"))
    assert [c["name"] for c in leader["containers"]] == ["server", "canary"]
    assert [c["name"] for c in worker["containers"]] == ["server"]
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe"} & set(
        worker["containers"][0]
    )
    components = [
        group()[k]["metadata"]["labels"]["app.kubernetes.io/component"]
        for k in ("leaderTemplate", "workerTemplate")
    ]
    assert components == ["server", "engine"]


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_ranks_add_up(nodes: int) -> None:
    found = group({"parallelism": {"nodes": nodes}})
    leader = container(found["leaderTemplate"]["spec"], "server")
    assert f"--data-parallel-size={8 * nodes}" in leader["args"]
    assert "--data-parallel-size-local=8" in leader["args"]
    assert "--data-parallel-address=$(LWS_LEADER_ADDRESS)" in leader["args"]
    assert "--enable-expert-parallel" in leader["args"]


@pytest.mark.parametrize(("index", "rank"), [(1, 8), (3, 24)])
def test_a_worker_finds_its_first_rank(index: int, rank: int) -> None:
    """The command as kubelet hands it to the shell, with vLLM replaced by echo."""
    worker = container(group()["workerTemplate"]["spec"], "server")
    assert worker["command"] == ["sh", "-c"]
    (script,) = worker["args"]
    assert "$(" not in script.replace("$$(", "")  # kubelet would look for a variable of that name
    script = script.replace("$$", "$").replace("exec vllm", "echo vllm")
    done = subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": "/usr/bin:/bin",
            "LWS_WORKER_INDEX": str(index),
            "LWS_LEADER_ADDRESS": "leader.svc",
        },
    )
    words = done.stdout.split()
    assert words[:3] == ["vllm", "serve", env(worker)["ASSAY_MODEL"]]
    assert f"--data-parallel-start-rank={rank}" in words
    assert "--data-parallel-address=leader.svc" in words
    assert "--headless" in words
    assert "--config=/opt/assay/profiles/b200x8-dep.yaml" in words


def test_arguments_with_quotes_reach_a_worker_whole() -> None:
    argument = '--speculative-config={"method": "mtp"}'
    worker = container(
        group({"server": {"extraArgs": [argument]}})["workerTemplate"]["spec"], "server"
    )
    script = worker["args"][0].replace("$$", "$").replace("exec vllm", "printf '%s\\n' vllm")
    done = subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a"},
    )
    assert argument in done.stdout.splitlines()


def test_pinned_memory_is_the_one_exception_from_restricted() -> None:
    for role in ("leaderTemplate", "workerTemplate"):
        found = container(group()[role]["spec"], "server")
        assert found["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert found["resources"]["limits"]["rdma/hca"] == 1
    plain = group({"parallelism": {"rdma": {"ipcLock": False}}})
    assert (
        "add"
        not in container(plain["leaderTemplate"]["spec"], "server")["securityContext"][
            "capabilities"
        ]
    )


def test_nccl_and_nvshmem_use_the_fast_devices() -> None:
    variables = env(container(group()["leaderTemplate"]["spec"], "server"))
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "eth0"
    assert variables["NCCL_IB_HCA"] == variables["NVSHMEM_HCA_LIST"] == "mlx5"
    assert variables["VLLM_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.parametrize("flag", ["--headless", "--data-parallel-size=4", "--all2all-backend=x"])
def test_the_group_s_flags_are_the_chart_s(flag: str) -> None:
    assert f"{re.split('=', flag)[0]} is set by" in refusal(
        {"server": {"extraArgs": [flag]}}, ci="two-nodes"
    )


def test_a_group_needs_gpus_and_shared_weights() -> None:
    assert "gpu.count is 0" in refusal({"gpu": {"count": 0}}, ci="two-nodes")
    values = {"weights": {"volume": {"accessModes": ["ReadWriteOnce"]}}}
    assert "weights.volume.accessModes" in refusal(values, ci="two-nodes")
    assert of(render(), "LeaderWorkerSet") == []
