"""The laptop stack as a newcomer brings it up."""

import json
import subprocess

import httpx
import yaml

from .conftest import DOCKER, HERE, REPO, Stack

GATE = ["--policy", "/policy.yaml", "--hardware", "test", "--url", "http://server:8000"]


def test_up_returns_once_the_door_is_open(stack: Stack) -> None:
    assert stack.status() == 200
    assert "Paris" in stack.ask()


def test_the_server_runs_as_nobody_on_a_read_only_disk(stack: Stack) -> None:
    code = "import os; print(os.getuid(), os.getgid(), os.access('/opt/assay/models', os.W_OK))"
    assert stack.python(code).split() == ["10001", "0", "False"]
    host = stack.inspect()["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]


def test_only_the_api_is_published_and_on_this_machine_alone(stack: Stack) -> None:
    ports = stack.inspect()["NetworkSettings"]["Ports"]
    assert [b["HostIp"] for p in ports.values() for b in p or []] == ["127.0.0.1"]
    assert stack.inspect("canary")["NetworkSettings"]["Ports"] == {}


def test_every_line_of_the_log_is_json_and_no_prompt_is_in_it(stack: Stack) -> None:
    stack.ask("Does the word periwinkle stay private?")
    lines = stack.log().splitlines()
    records = [json.loads(line) for line in lines]
    assert {"time", "level", "process", "message"} <= set(records[-1])
    assert {"launcher", "APIServer", "EngineCore"} <= {record["process"] for record in records}
    assert not [line for line in lines if "periwinkle" in line]


def test_prometheus_reads_the_server_and_its_canary(stack: Stack) -> None:
    assert stack.scraped({"vllm", "canary"}) == {"vllm": "1", "canary": "1"}
    query = {"query": "assay_layers"}
    page = httpx.get(f"{stack.prometheus}/api/v1/query", params=query, timeout=20).json()
    assert page["data"]["result"]


def test_prometheus_has_taken_every_rule(stack: Stack) -> None:
    rules = yaml.safe_load((REPO / "k8s/rules/assay.rules.yaml").read_text())["groups"]
    page = httpx.get(f"{stack.prometheus}/api/v1/rules", timeout=20).json()
    taken = [rule for group in page["data"]["groups"] for rule in group["rules"]]
    assert len(taken) == sum(len(group["rules"]) for group in rules)
    assert {rule.get("lastError", "") for rule in taken} == {""}


def gate(stack: Stack, *arguments: str) -> tuple[int, str]:
    command = [DOCKER, "compose", "-p", stack.project, "--env-file", str(stack.env)]
    command += [part for file in stack.files for part in ("-f", file)] + ["run", "--rm", "-T"]
    command += ["-v", f"{HERE / 'policy.yaml'}:/policy.yaml:ro", "gate", "assay-gate", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPO)
    return answer.returncode, answer.stdout + answer.stderr


def test_the_gate_has_no_verdict_without_a_baseline_and_passes_with_one(stack: Stack) -> None:
    exit_code, said = gate(stack, "run", *GATE, "--out", "/results/none")
    assert exit_code == 2, said
    assert "no bound was ever measured on this hardware" in said
    base = ["--out", "/results/base", "--write", "/results/baseline.json", "--repetitions", "3"]
    exit_code, said = gate(stack, "baseline", *GATE, *base)
    assert exit_code == 0, said
    exit_code, said = gate(
        stack, "run", *GATE, "--out", "/results/gate", "--baseline", "/results/baseline.json"
    )
    assert exit_code == 0, said
