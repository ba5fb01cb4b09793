"""A real Prometheus that scrapes a pod as the rendered PodMonitor says, with the rendered rules.

The operator's part, made here: endpoints become scrape configurations, with the labels that it adds
(namespace, pod, container), and a PrometheusRule becomes a rule file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from kubelet import Object, Pod, address, docker, known

EVALUATION = "5s"


def scrape_configs(
    monitor: Object, pod: Pod, namespace: str, secrets: Mapping[str, Mapping[str, str]]
) -> list[Object]:
    found = []
    for number, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"]):
        known(
            endpoint,
            {"port", "path", "interval", "scrapeTimeout", "authorization", "relabelings"},
            "podMetricsEndpoint",
        )
        (owner,) = [
            c
            for c in pod.containers.values()
            if endpoint["port"] in [p["name"] for p in c.spec.get("ports", [])]
        ]
        config: Object = {
            "job_name": f"podMonitor/{namespace}/{monitor['metadata']['name']}/{number}",
            "metrics_path": endpoint["path"],
            "scrape_interval": endpoint["interval"],
            "scrape_timeout": endpoint["scrapeTimeout"],
            "static_configs": [
                {
                    "targets": [f"{pod.address}:{owner.port(endpoint['port'])}"],
                    "labels": {"namespace": namespace, "pod": pod.name, "container": owner.name},
                }
            ],
            "relabel_configs": [
                {re.sub(r"[A-Z]", lambda m: f"_{m[0].lower()}", k): v for k, v in r.items()}
                for r in endpoint.get("relabelings", [])
            ],
        }
        if authorization := endpoint.get("authorization"):
            reference = authorization["credentials"]
            config["authorization"] = {
                "type": authorization["type"],
                "credentials": secrets[reference["name"]][reference["key"]].strip(),
            }
        found.append(config)
    return found


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        page = answer.json()
        assert page["status"] == "success", (path, parameters, page)
        return page["data"]

    def query(self, expression: str) -> list[Object]:
        found: list[Object] = self.get("query", query=expression)["result"]
        return found

    def range(self, expression: str, seconds: float, step: float) -> list[Object]:
        now = time.time()
        found: list[Object] = self.get(
            "query_range", query=expression, start=now - seconds, end=now, step=step
        )["result"]
        return found

    def firing(self) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}


@contextmanager
def prometheus(
    image: str, configs: list[Object], rule: Object, folder: Path, name: str = "assay-prometheus"
) -> Iterator[Prometheus]:
    config = {
        "global": {"scrape_interval": "15s", "evaluation_interval": EVALUATION},
        "rule_files": ["/etc/assay/rules.yml"],
        "scrape_configs": configs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}))
    folder.chmod(0o755)
    docker("rm", "--force", name, check=False)
    docker(
        "run", "--detach", "--name", name, "-v", f"{folder}:/etc/assay:ro", image,
        "--config.file=/etc/assay/prometheus.yml", "--storage.tsdb.path=/prometheus",
    )  # fmt: skip
    try:
        url = f"http://{address(name)}:9090"
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/-/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, docker("logs", name)
            time.sleep(0.5)
        yield Prometheus(url)
    finally:
        docker("rm", "--force", name, check=False)


def answerable(expression: str) -> list[str]:
    """An alert's expression as questions that have an answer while nothing is wrong.

    A comparison says 0 or 1 (`bool`) in place of leaving everything out, and both sides of `unless`
    are asked.
    """
    parts = re.split(r"\bunless\s+on\s*\([^)]*\)", expression)
    return [outside_matchers(part).strip() for part in parts]


def outside_matchers(expression: str) -> str:
    pieces = re.split(r"(\{[^}]*\})", expression)
    return "".join(
        piece if piece.startswith("{") else re.sub(r"(==|!=|>=|<=|>|<)", r"\1 bool", piece)
        for piece in pieces
    )
