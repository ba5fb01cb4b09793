"""No rule, panel or scaler asks for a metric that nobody exports."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql
import pytest
import yaml
from chart import CHART, ROOT, of, one, render

KNOWN = yaml.safe_load((Path(__file__).parent / "known_metrics.yaml").read_text())
CANARY = ROOT / "smoke_tests/src/assay_smoke/watch/exporter.py"
PLUGIN = ROOT / "plugin/src/assay_kernels/vllm_plugin/metrics.py"
HISTOGRAM = ("_bucket", "_count", "_sum")


def vllm_sources() -> list[Path]:
    """Where vLLM is unpacked: $ASSAY_VLLM_SOURCES, the development environment, the GPU target's
    copy."""
    given = [Path(p) for p in os.environ.get("ASSAY_VLLM_SOURCES", "").split(":") if p]
    usual = [ROOT / ".venv/lib/python3.11/site-packages/vllm", ROOT / ".cache/vllm-0.33.0/vllm"]
    return [p for p in (*given, *usual) if (p / "v1/metrics/loggers.py").exists()]


def dashboards() -> Iterator[tuple[str, str]]:
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']}", target["expr"]


def expressions() -> list[tuple[str, str]]:
    found = list(dashboards())
    objects = render(ci="everything")
    for group in one(objects, "PrometheusRule")["spec"]["groups"]:
        found += [(r.get("alert", r.get("record")), r["expr"]) for r in group["rules"]]
    for scaled in of(objects, "ScaledObject"):
        found += [("ScaledObject", t["metadata"]["query"]) for t in scaled["spec"]["triggers"]]
    return found


def recorded() -> set[str]:
    groups = one(render(ci="everything"), "PrometheusRule")["spec"]["groups"]
    return {r["record"] for g in groups for r in g["rules"] if "record" in r}


def of_vllm() -> set[str]:
    names = {f"vllm:{n}" for n in KNOWN["vllm"]["gauge"]}
    names |= {f"vllm:{n}_total" for n in KNOWN["vllm"]["counter"]}
    return names | {f"vllm:{n}{s}" for n in KNOWN["vllm"]["histogram"] for s in HISTOGRAM}


def of_plugin() -> set[str]:
    return set(re.findall(r'"(assay_[a-z_]+)"', PLUGIN.read_text()))


def of_canary() -> set[str]:
    """As assay_smoke_NAME: gauges by their name, counters with _total, histograms with their
    parts."""
    text = CANARY.read_text()
    gauges = set(re.findall(r'\bgauge\(\s*"([a-z0-9_]+)"', text))
    gauges |= set(re.findall(r'\bGauge\(\s*(?:PREFIX \+ )?"([a-z0-9_]+)"', text))
    counters = {f"{n}_total" for n in re.findall(r'\bcounter\("([a-z0-9_]+)"', text)}
    histograms = {
        n + s
        for n in re.findall(r'Histogram\(\s*PREFIX \+ "([a-z0-9_]+)"', text)
        for s in HISTOGRAM
    }
    assert all((gauges, counters, histograms))
    return {f"assay_smoke_{n}" for n in gauges | counters | histograms}


def used() -> set[str]:
    return {m for _, e in expressions() for m in promql.metrics(e)}


def test_every_metric_is_somebody_s() -> None:
    outside = {
        m
        for key in ("http", "dcgm", "kube_state_metrics", "kubelet", "prometheus")
        for m in KNOWN[key]
    }
    known: set[str] = of_vllm() | of_plugin() | outside | recorded()
    strangers = {m for m in used() - known if not m.startswith("assay_smoke_")}
    assert strangers == set()


def test_the_lists_hold_nothing_that_is_not_used() -> None:
    parts = {m.removesuffix(s) for m in used() for s in HISTOGRAM}
    for key in ("http", "dcgm", "kube_state_metrics", "kubelet"):
        assert set(KNOWN[key]) <= used()
    assert {m for m in of_vllm() if not m.endswith(HISTOGRAM)} <= used() | parts


@pytest.mark.skipif(not CANARY.exists(), reason="smoke_tests/ is not part of this checkout yet")
def test_the_canary_exports_what_is_asked_of_it() -> None:
    assert {m for m in used() if m.startswith("assay_smoke_")} <= of_canary()


@pytest.mark.skipif(not CANARY.exists(), reason="smoke_tests/ is not part of this checkout yet")
def test_the_canary_s_flags_exist() -> None:
    command = (CANARY.parents[1] / "cli.py").read_text()
    (deployment,) = of(render({"canary": {"closesDoor": False}}), "Deployment")
    (canary,) = [
        c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "canary"
    ]
    for argument in canary["args"]:
        assert f'"{argument.partition("=")[0]}"' in command, argument


@pytest.mark.skipif(
    not (ROOT / "loadtest").exists(), reason="loadtest/ is not part of this checkout yet"
)
def test_the_gate_s_flags_exist() -> None:
    command = (ROOT / "loadtest/src/assay_load/gate/cli.py").read_text()
    job = one(render(), "Job", "-gate")
    (gate,) = job["spec"]["template"]["spec"]["containers"]
    flags = [a for a in gate["args"][gate["args"].index("assay-gate") :] if a.startswith("--")]
    assert flags
    for argument in flags:
        assert f'"{argument.partition("=")[0]}"' in command, argument


ENTRYPOINT = ROOT / "plugin/src/assay_kernels/launcher/entrypoint.py"


@pytest.mark.skipif(
    not ENTRYPOINT.exists(), reason="the image's entrypoint is not part of this checkout yet"
)
def test_the_launcher_s_variables_exist() -> None:
    texts = "".join(p.read_text() for p in (ROOT / "plugin/src/assay_kernels").rglob("*.py"))
    (deployment,) = of(render(), "Deployment")
    (server,) = [
        c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "server"
    ]
    ours = [e["name"] for e in server["env"] if e["name"].startswith(("ASSAY_", "STARTUP_"))]
    # What the image names for a verdict is read by the gate.
    for name in {*ours} - {"ASSAY_IMAGE", "ASSAY_MODEL_REVISION"}:
        assert f'"{name}"' in texts, name


LAUNCHER = ROOT / "plugin/src/assay_kernels/launcher"


def constant(file: Path, name: str) -> str:
    match = re.search(rf"^{name} = (.+)$", file.read_text(), re.MULTILINE)
    assert match is not None, f"{file.name}: {name}"
    return match[1].strip('"')


def test_the_grace_knows_the_launcher_s_own_margin() -> None:
    margin = float(constant(LAUNCHER / "settings.py", "STOP_MARGIN_SECONDS"))
    template = (CHART / "templates/_drain.tpl").read_text()
    assert f'define "assay.launcherMargin" -}}}}{margin:.0f}{{{{- end' in template


@pytest.mark.skipif(
    not (LAUNCHER / "weights.py").exists(),
    reason="the launcher's download is not part of this checkout yet",
)
def test_the_stamp_that_pods_wait_for_is_the_download_s() -> None:
    stamp = constant(LAUNCHER / "weights.py", "STAMP")
    assert f"$folder/{stamp}" in (CHART / "files/wait_for_weights.sh").read_text()


@pytest.mark.skipif(
    not ENTRYPOINT.exists(),
    reason="the image's entrypoint is not part of this checkout yet",
)
def test_canary_and_probe_look_where_the_launcher_writes() -> None:
    settings = (LAUNCHER / "settings.py").read_text()
    assert '"bypass.key"' in settings
    assert '/ "run"' in settings
    assert '/ "open"' in (LAUNCHER / "server.py").read_text()


@pytest.mark.parametrize("kind", ["profiles", "policies", "suites"])
def test_named_data_exists(kind: str) -> None:
    """Profiles, policies and suites that ci values name, where their packages are at hand."""
    folder, key = {
        "profiles": (ROOT / "docker/profiles", ("profile", "name")),
        "policies": (ROOT / "loadtest/src/assay_load/policies", ("gate", "policy")),
        "suites": (ROOT / "smoke_tests/src/assay_smoke/suites", ("canary", "suite")),
    }[kind]
    there = {p.stem for p in folder.glob("*.yaml")}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    wanted = set()
    for path in (CHART / "ci").glob("*.yaml"):
        values: dict[str, Any] = yaml.safe_load(path.read_text())
        own = values.get(key[0], {})
        if not any(k.startswith("inline") for k in own):
            wanted.add(own.get(key[1], defaults[key[0]][key[1]]))
    if not there or there == {"miniature-cpu"}:
        pytest.skip(f"{folder.relative_to(ROOT)} is not part of this checkout yet")
    assert sorted(wanted - there) == []


@pytest.mark.skipif(
    not vllm_sources(), reason="vLLM's sources are not at hand (ASSAY_VLLM_SOURCES)"
)
@pytest.mark.parametrize("source", vllm_sources(), ids=str)
def test_vllm_exports_what_is_asked_of_it(source: Path) -> None:
    files = [source / "v1/metrics/loggers.py", source / "v1/spec_decode/metrics.py"]
    there = {m for f in files for m in re.findall(r'"(vllm:[a-z0-9_]+)"', f.read_text())}
    kinds = KNOWN["vllm"]
    assert {f"vllm:{n}" for names in kinds.values() for n in names} <= there


@pytest.mark.skipif(
    not vllm_sources(), reason="vLLM's sources are not at hand (ASSAY_VLLM_SOURCES)"
)
@pytest.mark.parametrize("source", vllm_sources(), ids=str)
def test_objectives_are_bounds_of_vllm_s_buckets(source: Path) -> None:
    """A quantile's bucket that does not exist would count nothing, for ever."""
    text = (source / "v1/metrics/buckets.py").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["objectives"][
        "properties"
    ]
    for name, key in (
        ("TIME_TO_FIRST_TOKEN", "ttftSeconds"),
        ("INTER_TOKEN_LATENCY", "itlSeconds"),
    ):
        match = re.search(rf"{name}_BUCKETS: tuple\[float, \.\.\.\] = \(([^)]*)\)", text)
        assert match is not None
        bounds = {float(b) for b in match[1].split(",") if b.strip()}
        assert set(schema[key]["enum"]) <= bounds


@pytest.mark.skipif(
    not vllm_sources(), reason="vLLM's sources are not at hand (ASSAY_VLLM_SOURCES)"
)
@pytest.mark.parametrize("source", vllm_sources(), ids=str)
def test_vllm_s_flags_and_variables_exist(source: Path) -> None:
    files = [
        source / "engine/arg_utils.py",
        *source.glob("entrypoints/**/cli_args.py"),
        source / "config/vllm.py",
    ]
    flags = "".join(p.read_text() for p in files)
    group = one(render(ci="two-nodes"), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    server = group["leaderTemplate"]["spec"]["containers"][0]
    worker = group["workerTemplate"]["spec"]["containers"][0]
    words = [*server["args"], *worker["args"][0].split()]
    for flag in {w.partition("=")[0] for w in words if w.startswith("--")} - {"--config"}:
        # Some stand there as the name of the field that they set.
        field = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in flags or re.search(rf"\b{field}\b", flags), flag
    environment = (source / "envs.py").read_text()
    for variable in server["env"]:
        if variable["name"].startswith("VLLM_"):
            assert f'"{variable["name"]}"' in environment, variable["name"]
