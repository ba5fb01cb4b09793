"""Profiles and compose files, before anything is built. No daemon is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
PROFILES = sorted((REPO / "docker" / "profiles").glob("*.yaml"))
SOURCES = REPO / ".cache" / "vllm-0.33.0"
MARGIN_SECONDS = 20
"""launcher.settings.STOP_MARGIN_SECONDS."""


def parsed(folder: str) -> dict[str, dict[str, str]]:
    script = Path(__file__).with_name("parse_profile.py")
    answer = subprocess.run(
        [sys.executable, str(script), folder, *map(str, PROFILES)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    found: dict[str, dict[str, str]] = json.loads(answer.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_vllm_s_own_parser_takes_every_flag_of_every_profile(version: str) -> None:
    if version == "0.33.0":
        if not SOURCES.is_dir():
            pytest.skip(f"no {SOURCES}: the contract tests of the plugin fetch it")
        pytest.importorskip("orjson", reason="vllm 0.33's parser imports orjson")
    taken = parsed(str(SOURCES) if version == "0.33.0" else "")
    for profile in PROFILES:
        flags = yaml.safe_load(profile.read_text())
        for name, value in flags.items():
            # vLLM drops `flag: false` without a word: what is switched off is `no-flag: true`.
            assert value is not False, (profile, name)
            expected = False if name.startswith("no-") else value
            got = taken[str(profile)][name.removeprefix("no-").replace("-", "_")]
            if isinstance(expected, dict):
                assert all(str(part) in got for part in expected), (profile, name, got)
            else:
                assert got in (str(expected), f"['{expected}']"), (profile, name, got)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_flag_has_its_reason(profile: Path) -> None:
    explained = False
    for line in profile.read_text().splitlines():
        if line.startswith("#"):
            explained = True
        elif not line:
            explained = False
        else:
            assert explained, f"{profile.name}: {line} has no comment that says why"


def composed(name: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load((REPO / name).read_text())
    return found


@pytest.mark.parametrize(
    ("name", "profiles", "default"),
    [
        ("compose.yaml", ["b200x8", "b200x8-dep", "h200x8", "flash-b200x1", "flash-h200x2"], 340),
        ("compose.cpu.yaml", ["miniature-cpu"], 60),
    ],
)
def test_the_grace_of_a_stop_is_longer_than_every_drain(
    name: str, profiles: list[str], default: int
) -> None:
    server = composed(name)["services"]["server"]  # type: ignore[index]
    grace = int(re.sub(r"\D", "", server["stop_grace_period"].replace("${STOP_GRACE:-", "")))
    assert grace == default
    for profile in profiles:
        drain = yaml.safe_load((REPO / "docker/profiles" / f"{profile}.yaml").read_text())
        assert drain["shutdown-timeout"] + MARGIN_SECONDS < grace


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_every_one_shot_has_a_dependant_that_waits_for_its_success(name: str) -> None:
    services: dict[str, dict[str, object]] = composed(name)["services"]  # type: ignore[assignment]
    awaited = {
        needed
        for service in services.values()
        for needed, how in dict(service.get("depends_on") or {}).items()  # type: ignore[call-overload]
        if how["condition"] == "service_completed_successfully"
    }
    one_shots = {
        name
        for name, service in services.items()
        if not service.get("profiles") and "unless-stopped" not in str(service.get("restart"))
    }
    assert one_shots == awaited


def test_every_variable_of_compose_is_documented() -> None:
    documented = set(re.findall(r"^([A-Z_]+)=", (REPO / ".env.example").read_text(), re.M))
    used = set()
    for name in ("compose.yaml", "compose.cpu.yaml"):
        used |= set(re.findall(r"\$\{([A-Z_]+)", (REPO / name).read_text()))
    assert used == documented


def test_no_secret_is_an_argument_or_a_variable() -> None:
    """A name that holds KEY, TOKEN or PASSWORD may only be that of a file."""
    for name in ("compose.yaml", "compose.cpu.yaml"):
        for line in (REPO / name).read_text().splitlines():
            match = re.match(r"\s+([A-Z_]*(?:KEY|TOKEN|PASSWORD)[A-Z_]*): (.*)", line)
            assert match is None or match[1].endswith("FILE"), line


def test_secrets_are_made_for_their_owner_alone_and_never_anew(tmp_path: Path) -> None:
    script = REPO / "docker" / "make_secrets.sh"
    for _ in range(2):
        answer = subprocess.run([script], cwd=tmp_path, capture_output=True, text=True, check=True)
    folder = tmp_path / "secrets"
    key = (folder / "api_keys").read_text()
    assert len(key) > 30
    assert key not in answer.stdout
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert (tmp_path / ".env").read_text() == f"ASSAY_UID={os.getuid()}\n"
    subprocess.run([script], cwd=tmp_path, check=True, capture_output=True)
    assert (folder / "api_keys").read_text() == key


def mounts(service: str, name: str = "compose.yaml") -> dict[str, str]:
    """folder in the container -> what of the repository is there."""
    volumes = composed(name)["services"][service]["volumes"]  # type: ignore[index]
    return {v.split(":")[1]: v.split(":")[0] for v in volumes if v.startswith("./")}


def test_grafana_is_given_the_chart_s_dashboards_and_prometheus() -> None:
    """One source for both; no Grafana has loaded them (docs/containers.md)."""
    mounted = mounts("grafana")
    (provider,) = yaml.safe_load(
        (REPO / mounted["/etc/grafana/provisioning"] / "dashboards/assay.yml").read_text()
    )["providers"]
    folder = REPO / mounted[provider["options"]["path"]]
    assert folder == REPO / "k8s/chart/dashboards"
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert set(found) == {"operator", "release"}
    assert len({dashboard["uid"] for dashboard in found.values()}) == 2
    (source,) = yaml.safe_load(
        (REPO / mounted["/etc/grafana/provisioning"] / "datasources/prometheus.yml").read_text()
    )["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    address = re.match(r"http://([a-z]+):(\d+)$", source["url"])
    assert address is not None
    assert composed("compose.yaml")["services"][address[1]]["expose"] == [address[2]]  # type: ignore[index]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_prometheus_is_given_the_chart_s_rules_which_the_dashboards_need(name: str) -> None:
    mounted = mounts("prometheus", name)
    config = yaml.safe_load((REPO / mounted["/etc/prometheus/prometheus.yml"]).read_text())
    (pattern,) = config["rule_files"]
    folder, _, files = pattern.rpartition("/")
    assert [path.name for path in (REPO / mounted[folder]).glob(files)] == ["assay.rules.yaml"]
