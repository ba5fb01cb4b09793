"""Security: what the chart renders, what it refuses, and whether these tests would notice."""

import copy
from typing import Any

import pytest
from chart import CI, containers, one, pods, refusal, render
from policy import violations

ONE_NODE = [ci for ci in CI if ci != "two-nodes"]


@pytest.mark.parametrize("ci", ONE_NODE)
def test_every_pod_on_one_node_is_restricted(ci: str) -> None:
    assert list(violations(render(ci=ci))) == []


def test_several_nodes_break_it_by_one_capability_and_only_if_asked() -> None:
    found = list(violations(render(ci="two-nodes")))
    assert found == [
        "LeaderWorkerSet/r-assay-server.leaderTemplate: server: adds IPC_LOCK",
        "LeaderWorkerSet/r-assay-server.workerTemplate: server: adds IPC_LOCK",
    ]
    assert (
        list(violations(render({"parallelism": {"rdma": {"ipcLock": False}}}, ci="two-nodes")))
        == []
    )


def test_a_host_path_is_the_named_exception() -> None:
    values = {"weights": {"source": "hostPath", "hostPath": {"path": "/data/v4"}}}
    assert "pod-security.kubernetes.io/enforce=privileged" in refusal(values)
    values["weights"]["hostPath"]["acknowledge"] = "the namespace is privileged"
    assert list(violations(render(values))) == [
        "Deployment/r-assay-server: volume weights is a hostPath"
    ]


def test_a_moving_tag_is_refused() -> None:
    for image in ("server", "gate"):
        assert f"images.{image}.tag: `latest`" in refusal({"images": {image: {"tag": "latest"}}})
    assert "images.server.tag: `latest`" in refusal(
        {"blueGreen": {"green": {"tag": "latest"}}}, ci="blue-green"
    )


@pytest.mark.parametrize("where", ["server", "canary", "gate", "weights.download"])
@pytest.mark.parametrize("limit", ["cpu", "memory", "ephemeral-storage"])
def test_a_missing_limit_is_refused(where: str, limit: str) -> None:
    values: dict[str, Any] = {"resources": {"limits": {limit: None}}}
    for part in reversed(where.split(".")):
        values = {part: values}
    assert f"{where}.resources.limits: {limit} is missing" in refusal(values)


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY", "DB_PASSWORD", "client_secret"])
def test_a_secret_in_the_clear_is_refused(name: str) -> None:
    assert f"server.extraEnv: {name} looks like a secret" in refusal(
        {"server": {"extraEnv": [{"name": name, "value": "x"}]}}
    )
    render(
        {
            "server": {
                "extraEnv": [
                    {"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
                ]
            }
        }
    )


def test_a_key_as_an_argument_is_refused() -> None:
    assert "--api-key is set by auth.existingSecret" in refusal(
        {"server": {"extraArgs": ["--api-key=x"]}}
    )


def test_keys_are_required_unless_switched_off_in_words() -> None:
    assert "auth.existingSecret" in refusal({"auth": {"existingSecret": ""}})
    for word in ("off", "false", "optional"):
        refusal({"auth": {"apiKeys": word}})
    render({"auth": {"apiKeys": "off: anybody may use the model", "existingSecret": ""}})


def test_openshift_s_own_uid_is_left_to_it() -> None:
    for _, _, spec in pods(render({"podSecurity": {"runAsUser": None, "fsGroup": None}})):
        assert not {"runAsUser", "fsGroup", "runAsGroup"} & set(spec["securityContext"])
        assert spec["securityContext"]["runAsNonRoot"] is True


def test_root_is_no_uid_to_run_as() -> None:
    assert "podSecurity" in refusal({"podSecurity": {"runAsUser": 0}})


def _break(change: str) -> list[dict[str, Any]]:
    objects = copy.deepcopy(render())
    spec = one(objects, "Deployment")["spec"]["template"]["spec"]
    first = containers(spec)[1]
    match change:
        case "privileged":
            first["securityContext"]["privileged"] = True
        case "host path":
            spec["volumes"].append({"name": "h", "hostPath": {"path": "/"}})
        case "latest":
            first["image"] = "assay-server:latest"
        case "untagged":
            first["image"] = "registry:5000/assay-server"
        case "limit":
            del first["resources"]["limits"]["memory"]
        case "token":
            first["env"].append({"name": "HF_TOKEN", "value": "hf_x"})
        case "argument":
            first["args"].append("--api-key=x")
        case "account":
            del spec["automountServiceAccountToken"]
        case "links":
            del spec["enableServiceLinks"]
        case "root":
            spec["securityContext"]["runAsUser"] = 0
        case "seccomp":
            del spec["securityContext"]["seccompProfile"]
        case "network":
            spec["hostNetwork"] = True
        case "escalation":
            del first["securityContext"]["allowPrivilegeEscalation"]
        case "capability":
            first["securityContext"]["capabilities"]["add"] = ["SYS_ADMIN"]
        case "writable":
            first["securityContext"]["readOnlyRootFilesystem"] = False
        case "endless":
            spec["volumes"].append({"name": "e", "emptyDir": {}})
    return objects


@pytest.mark.parametrize(
    "change",
    [
        "privileged",
        "host path",
        "latest",
        "untagged",
        "limit",
        "token",
        "argument",
        "account",
        "links",
        "root",
        "seccomp",
        "network",
        "escalation",
        "capability",
        "writable",
        "endless",
    ],
)
def test_the_policy_notices(change: str) -> None:
    assert list(violations(_break("nothing"))) == []
    assert len(list(violations(_break(change)))) == 1
