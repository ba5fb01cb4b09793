"""k8s/README.md: its commands render, its names exist, its figures follow from the chart."""

import re
import shlex
import subprocess

import pytest
import yaml
from chart import BIN, HELMS, ROOT, one, render

README = ROOT / "k8s/README.md"
TEXT = README.read_text()
VALUE_FLAGS = ("--set", "--values")
OPTIONS = {
    "install": {"--namespace"},
    "upgrade": {"--namespace", "--timeout", "--wait", "--rollback-on-failure", "--reuse-values"},
    "test": {"--namespace", "--timeout", "--logs"},
}
SWITCHES = {"--wait", "--rollback-on-failure", "--reuse-values", "--logs"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands() -> list[list[str]]:
    joined = "\n".join(blocks("sh")).replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.strip()]


def helm_commands() -> list[list[str]]:
    return [c for c in commands() if c[0] == "helm"]


def split(command: list[str]) -> tuple[list[str], list[str]]:
    """(values' flags, other words) of a helm command."""
    values, others, words = [], [], iter(command[2:])
    for word in words:
        if word in VALUE_FLAGS:
            values += [word, next(words)]
        elif word in SWITCHES:
            others.append(word)
        elif word.startswith("--"):
            others.append(word)
            next(words)
    return values, others


def test_the_page_has_commands() -> None:
    assert len(commands()) >= 15
    assert {c[0] for c in commands()} == {"kubectl", "helm", "openssl", "ASSAY_API_KEY=$(head"}


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("command", helm_commands(), ids=" ".join)
def test_helm_takes_each_command_s_values(command: list[str], helm: str) -> None:
    values, others = split(command)
    assert set(others) <= OPTIONS[command[1]]
    if command[1] == "upgrade":  # --reuse-values: what the install said
        values = split(helm_commands()[0])[0] + _earlier(command) + values
    if command[1] != "test":
        done = subprocess.run(
            [str(BIN / helm), "template", command[2], "k8s/chart", *values],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def _earlier(command: list[str]) -> list[str]:
    found: list[str] = []
    for other in helm_commands():
        if other is command or other == command:
            return found
        if other[1] == "upgrade":
            found += split(other)[0]
    return found


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("command", helm_commands(), ids=" ".join)
def test_helm_knows_each_command_s_flags(command: list[str], helm: str) -> None:
    """--help lists them. --rollback-on-failure is Helm 4's name for --atomic."""
    listed = subprocess.run(
        [str(BIN / helm), command[1], "--help"], capture_output=True, text=True
    ).stdout
    for option in split(command)[1]:
        name = "--atomic" if (helm, option) == ("helm3", "--rollback-on-failure") else option
        assert re.search(rf"{name}\b", listed), option


def test_kustomize_takes_the_base() -> None:
    (apply,) = [c for c in commands() if c[:3] == ["kubectl", "apply", "-k"]]
    done = subprocess.run(
        [str(BIN / "kubectl"), "kustomize", apply[3]], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0


def test_what_kubectl_is_asked_for_exists() -> None:
    names = {o["metadata"]["name"] for o in render(release="v4", ci="blue-green")} | {
        "v4-assay-verdicts"
    }
    mentioned = set(re.findall(r"\bv4-assay-[a-z]+(?:-[a-z]+)*\b", TEXT)) - {"v4-assay-weights"}
    assert len(mentioned) >= 4
    assert mentioned <= names


def test_the_secret_has_the_entries_that_are_read() -> None:
    objects = render(release="v4")
    (secret,) = [c for c in commands() if c[3:6] == ["create", "secret", "generic"]]
    entries = {w.removeprefix("--from-file=") for w in secret if w.startswith("--from-file=")}
    key = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["authorization"][
        "credentials"
    ]["key"]
    assert entries == {"api_keys", key}


def test_the_minutes_are_the_chart_s() -> None:
    gate = one(render(), "Job", "-gate")["spec"]["activeDeadlineSeconds"]
    assert f"helm test v4 --namespace llm --logs --timeout {gate // 60}m" in TEXT
    assert set(re.findall(r"--wait --timeout (\d+)m", TEXT)) == {str(gate // 60 + 1)}
    values = yaml.safe_load((ROOT / "k8s/chart/values.yaml").read_text())
    outage = 2 * values["startup"]["budgetSeconds"] + values["gate"]["timeoutSeconds"]
    assert f"up to {outage // 60} minutes" in TEXT


def test_yaml_on_the_page_is_yaml() -> None:
    assert all(isinstance(yaml.safe_load(block), dict) for block in blocks("yaml"))
    assert blocks("yaml")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    path, _, anchor = link.partition("#")
    if not path.startswith("http"):
        assert (README.parent / path).exists() if path else True
        headings = [
            re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-")
            for h in re.findall(r"^#+ (.*)$", TEXT, re.M)
        ]
        assert not anchor or anchor in headings


def test_the_versions_named_are_the_ones_used() -> None:
    for program, pattern in (("helm3", "helm {}"), ("helm4", "and {},"), ("kubectl", "kubectl {}")):
        arguments = ["version", "--client"] if program == "kubectl" else ["version", "--short"]
        said = subprocess.run(
            [str(BIN / program), *arguments], capture_output=True, text=True
        ).stdout
        version = re.search(r"v(\d+\.\d+\.\d+)", said)
        assert version is not None
        assert pattern.format(version[1]) in TEXT


def test_files_named_on_the_page_exist() -> None:
    for name in re.findall(r"`(k8s/[\w./-]+)`", TEXT):
        assert (ROOT / name).exists(), name
    ci = {p.name for p in (ROOT / "k8s/chart/ci").iterdir()}
    for name in re.findall(r"`(?:k8s/chart/ci/)?([a-z0-9-]+\.yaml)`", TEXT):
        assert name in ci, name


def test_values_named_on_the_page_exist() -> None:
    values = yaml.safe_load((ROOT / "k8s/chart/values.yaml").read_text())
    prose = re.sub(r"<!-- values -->.*<!-- /values -->", "", TEXT, flags=re.DOTALL)
    roots = "|".join(k for k in values if isinstance(values[k], dict))
    for path in re.findall(rf"`((?:{roots})(?:\.\w+)+)", prose):
        node = values
        for key in path.split("."):
            assert isinstance(node, dict), path
            assert key in node, path
            node = node[key]
