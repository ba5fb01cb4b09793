"""Writes what follows from the chart, or says what is out of date:

    python k8s/generate [--check]

values.schema.json and the table of values come from the comments of values.yaml, the dashboards
from dashboards.py; base/ is what helm renders; rules/assay.rules.yaml are the rules for a
Prometheus outside Kubernetes; the table of alerts is the rules' annotations. helm must be in PATH,
or named by $HELM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import calculator  # noqa: E402
from dashboards import DASHBOARDS, dashboard  # noqa: E402
from values import Value, read, schema  # noqa: E402

K8S = Path(__file__).resolve().parents[1]
CHART = K8S / "chart"
BASE = K8S / "base"
README = K8S / "README.md"
GENERATED = "# Made by k8s/generate from k8s/chart. Change the chart.\n"
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
"""They would say that Helm manages what kustomize applies."""
FIRST = ("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "PersistentVolumeClaim", "Service")


def helm(*arguments: str) -> str:
    program = os.environ.get("HELM", "helm")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def render(release: str, *arguments: str) -> list[dict[str, Any]]:
    """The objects of a release, hooks left out."""
    text = helm("template", release, str(CHART), "--no-hooks", *arguments)
    return [d for d in yaml.safe_load_all(text) if d]


class Literal(yaml.SafeDumper):
    """Texts of several lines as blocks, to be read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Literal.add_representer(str, _text)


def dump(data: Any) -> str:
    class Plain(Literal):
        def ignore_aliases(self, _: Any) -> bool:
            return True

    return yaml.dump(data, Dumper=Plain, sort_keys=False, width=110, allow_unicode=True)


def without_helm(node: Any) -> Any:
    """The object without the labels and annotations that only Helm gives a meaning."""
    if isinstance(node, dict):
        return {k: without_helm(v) for k, v in node.items() if k not in HELM_LABELS}
    if isinstance(node, list):
        return [without_helm(v) for v in node]
    return node


def base_objects() -> list[dict[str, Any]]:
    """Release `assay`, with the values of ci/base.yaml."""
    return [without_helm(o) for o in render("assay", "--values", str(CHART / "ci/base.yaml"))]


def base_files() -> Iterator[tuple[Path, str]]:
    names = []
    for o in base_objects():
        name = f"{o['kind'].lower()}-{o['metadata']['name'].removeprefix('assay-')}.yaml"
        names.append((FIRST.index(o["kind"]) if o["kind"] in FIRST else len(FIRST), name))
        yield BASE / name, GENERATED + dump(o)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for _, name in sorted(names)],
    }
    yield BASE / "kustomization.yaml", GENERATED + dump(kustomization)


def rules() -> dict[str, Any]:
    """The rule file for one Prometheus that scrapes one server and its canary."""
    values = ["--values", str(CHART / "ci/base.yaml"), "--set", "monitoring.scope=all"]
    (rule,) = [o for o in render("assay", *values) if o["kind"] == "PrometheusRule"]
    return dict(rule["spec"])


def alerts() -> Iterator[dict[str, Any]]:
    for group in rules()["groups"]:
        yield from (rule for rule in group["rules"] if "alert" in rule)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def alert_table() -> str:
    lines = [
        "| alert | severity | fires when | why it matters | what to do |",
        "|---|---|---|---|---|",
    ]
    for rule in alerts():
        a = rule["annotations"]
        wait = f" (for {rule['for']})" if "for" in rule else ""
        row = [
            f"`{rule['alert']}`",
            rule["labels"]["severity"],
            a["summary"] + wait,
            a["why"],
            a["action"],
        ]
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    return "\n".join(lines)


def calculator_tables() -> str:
    """With the calculator's own defaults."""
    asked = calculator.parser().parse_args([])
    given = (asked.gpu_memory, asked.utilization, asked.spare, asked.tokens)
    models = calculator.MODELS.values()
    return "\n\n".join(calculator.table(m, calculator.rows(m, *given)) for m in models)


def value_table(values: list[Value]) -> str:
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value in values:
        if value.description:
            default = json.dumps(value.default, ensure_ascii=False)
            lines.append(f"| `{value.path}` | `{cell(default)}` | {cell(value.description)} |")
    return "\n".join(lines)


def into(text: str, mark: str, content: str) -> str:
    """`content` between <!-- mark --> and <!-- /mark -->."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{README.name}: {begin} ... {end} is missing")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def chart_files() -> dict[Path, str]:
    """What helm reads, so what has to be right before anything is rendered."""
    found = {
        CHART / f"dashboards/{n}.json": json.dumps(dashboard(n), indent=1) + "\n"
        for n in DASHBOARDS
    }
    values = schema(read(CHART / "values.yaml"))
    return found | {CHART / "values.schema.json": json.dumps(values, indent=1) + "\n"}


def files() -> dict[Path, str]:
    """Every other generated file and what it must hold."""
    values = read(CHART / "values.yaml")
    readme = into(README.read_text(), "values", value_table(values))
    readme = into(readme, "alerts", alert_table())
    readme = into(readme, "calculator", calculator_tables())
    return {
        README: readme,
        K8S / "rules/assay.rules.yaml": GENERATED + dump(rules()),
        **dict(base_files()),
    }


def write(wanted: dict[Path, str], check: bool) -> list[Path]:
    """Write what differs, unless it is only to be told."""
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for p in () if check else stale:
        p.parent.mkdir(exist_ok=True)
        p.write_text(wanted[p])
    return stale


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    stale = write(chart_files(), check)
    wanted = files()
    stale += write(wanted, check)
    surplus = sorted(set(BASE.glob("*")) - set(wanted))
    if check:
        for p in [*stale, *surplus]:
            print(f"{p.relative_to(K8S.parent)} is out of date: make k8s-generate", file=sys.stderr)
        return 1 if stale or surplus else 0
    for p in surplus:
        p.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
