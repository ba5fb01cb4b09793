"""The CPU miniature's pod, as helm renders it, on a container engine; a real Prometheus beside it.

Environment, as `docker/tests/run.sh` sets it: DOCKER, ASSAY_CPU_IMAGE, ASSAY_GATE_IMAGE,
PROMETHEUS_IMAGE; `make test-pod` brings helm too.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chart import one, pod_spec, render
from kubelet import DOCKER, Object, Pod
from monitoring import Prometheus, prometheus, scrape_configs

NAMESPACE, RELEASE = "llm", "mini"
STALLED_SECONDS = 45
IMAGES = {
    "server": os.environ.get("ASSAY_CPU_IMAGE", "assay-cpu:local"),
    "gate": os.environ.get("ASSAY_GATE_IMAGE", "assay-gate:local"),
}
PROMETHEUS_IMAGE = os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0")
OPEN_SECONDS = 600
"""startup.budgetSeconds of ci/cpu-miniature.yaml."""
MODEL = "assay-miniature"


def values(**more: Any) -> Object:
    images = {}
    for name, image in IMAGES.items():
        repository, _, tag = image.rpartition(":")
        images[name] = {"repository": repository, "tag": tag}
    return {"images": images, "liveness": {"stalledAfterSeconds": STALLED_SECONDS}, **more}


def rendered(**more: Any) -> list[Object]:
    return render(values(**more), ci="cpu-miniature", release=RELEASE, namespace=NAMESPACE)


def keys() -> dict[str, dict[str, str]]:
    """The Secret, as k8s/README.md has it made."""
    client, metrics = secrets.token_hex(32), secrets.token_hex(32)
    return {"assay-keys": {"api_keys": f"{client}\n{metrics}\n", "metrics_key": f"{metrics}\n"}}


def pod_of(objects: list[Object], name: str, claims: dict[str, Path] | None = None) -> Pod:
    maps = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "ConfigMap"}
    return Pod(pod_spec(one(objects, "Deployment")), maps, keys(), claims or {}, name)


class Client:
    """A client of the pod's API."""

    def __init__(self, pod: Pod) -> None:
        self.url = f"http://{pod.address}:8000"
        key = pod.secrets["assay-keys"]["api_keys"].split()[0]
        self.headers = {"Authorization": f"Bearer {key}"}

    def status(self, headers: dict[str, str] | None = None) -> int:
        """0: nobody listens."""
        try:
            return httpx.get(
                f"{self.url}/v1/models",
                headers=self.headers if headers is None else headers,
                timeout=20,
            ).status_code
        except httpx.HTTPError:
            return 0

    def ask(self, question: str = "What is the capital of France?") -> str:
        answer = httpx.post(
            f"{self.url}/v1/chat/completions", headers=self.headers, timeout=60,
            json={
                "model": MODEL, "max_tokens": 64, "temperature": 0,
                "messages": [{"role": "user", "content": question}],
                "chat_template_kwargs": {"thinking": False},
            },
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def stream(self, tokens: int) -> tuple[int, str]:
        """(chunks, how it ended: a finish reason and [DONE], or the error)."""
        chunks, finish, done = 0, "", False
        body = {
            "model": MODEL, "prompt": "Once upon a time", "max_tokens": tokens,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", headers=self.headers, json=body, timeout=120
            ) as answer:
                if answer.status_code != 200:
                    return 0, f"status {answer.status_code}"
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        chunks += 1
                        if '"finish_reason":"' in line.replace(" ", ""):
                            finish = "finished"
        except httpx.HTTPError as error:
            return chunks, repr(error)
        return chunks, finish if done else "no end"


@pytest.fixture(scope="session")
def engine() -> None:
    try:
        answer = subprocess.run([DOCKER, "info"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"no docker client: {error}")
    if answer.returncode:
        pytest.skip(f"no docker daemon: {answer.stderr.strip()[-200:]}")
    for image in IMAGES.values():
        if subprocess.run([DOCKER, "image", "inspect", image], capture_output=True).returncode:
            pytest.skip(f"no image {image}: `make test-pod` builds it")


@pytest.fixture(scope="session")
def objects() -> list[Object]:
    return rendered()


@pytest.fixture(scope="session")
def pod(engine: None, objects: list[Object]) -> Iterator[Pod]:
    with pod_of(objects, "pod").running() as pod:
        yield pod


@pytest.fixture(scope="session")
def client(pod: Pod) -> Client:
    return Client(pod)


def monitored(pod: Pod, objects: list[Object], folder: Path, name: str = "assay-prometheus") -> Any:
    configs = scrape_configs(one(objects, "PodMonitor"), pod, NAMESPACE, pod.secrets)
    return prometheus(PROMETHEUS_IMAGE, configs, one(objects, "PrometheusRule"), folder, name)


@pytest.fixture(scope="session")
def metrics(
    pod: Pod, objects: list[Object], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    for parent in folder.parents[:2]:
        parent.chmod(0o755)
    with monitored(pod, objects, folder) as found:
        yield found
