"""The gate against a server that answers questions (assay-smoke's good one) at a known pace (the
paced server), with faults put in front: it passes, and fails for the stated reason."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from assay_load.errors import InputError
from assay_load.gate import policy

MODEL = "assay-faulty"
"""The name under which assay-smoke's own server serves."""
WORKLOAD = """\
name: probe
about: Enough answers of one length for a test.
arrival: {kind: closed-loop, concurrency: 8}
stop: {sessions: 40}
warmup: {sessions: 8}
classes:
  - name: probe
    input: {kind: constant, tokens: 32}
    output: {kind: constant, tokens: 20}
"""
POLICY = """\
name: test
about: A policy for a test.
profile: none
hardware: local-cpu
server: {{model: {model}}}
repetitions: 3
coherence:
  before: {{suite: miniature, tier: ready, checks: [known-answers]}}
  under_load:
    {{suite: miniature, tier: ready, checks: [known-answers], workload: {workload},
     concurrency: 24}}
  after: {{suite: miniature, tier: ready, checks: [known-answers]}}
loads:
  - workload: {workload}
    bounds:
      - {{metric: output_tokens_per_second, margin: {margin}}}
      - {{metric: tpot.p50, margin: {margin}}}
      - {{metric: ttft.p99, limit: 5000.0, source: "a test's"}}
"""


@dataclass
class Stand:
    """The good server, and what is needed to judge it."""

    good: str
    paced: str
    folder: Path
    policy: str
    speed_only: str
    """The same policy without the battery, where that is not what a test is about."""
    baseline: str


def gate(command: str, *arguments: str) -> tuple[int, str]:
    answer = subprocess.run(
        [sys.executable, "-m", "assay_load.gate.cli", command, *arguments],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return answer.returncode, answer.stdout + answer.stderr


def write_policy(folder: Path, speed_only: bool = False) -> str:
    (folder / "probe.yaml").write_text(WORKLOAD)
    text = POLICY.format(model=MODEL, workload=folder / "probe.yaml", margin=1.0)
    if speed_only:
        begin, end = text.index("coherence:"), text.index("loads:")
        text = text[:begin] + "coherence: null\n" + text[end:]
    path = folder / ("speed" if speed_only else "whole") / "test.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def stand(start_tool: Any, tmp_path_factory: pytest.TempPathFactory) -> Stand:
    folder = tmp_path_factory.mktemp("stand")
    coherent = start_tool("fault-server", "--mode", "good", module="assay_smoke")
    paced = start_tool("paced", "--model", MODEL, "--ttft", "0.05", "--rate", "100")
    good = start_tool("faulty", "--upstream", coherent.url, "--load-upstream", paced.url)
    made = Stand(
        good.url,
        paced.url,
        folder,
        write_policy(folder),
        write_policy(folder, True),
        str(folder / "baseline.json"),
    )
    code, output = gate(
        "baseline", "--policy", made.policy, "--url", good.url, "--write", made.baseline,
        "--out", str(folder / "b"), "--repetitions", "3",
    )  # fmt: skip
    assert code == 0, output
    return made


@pytest.fixture
def judge(stand: Stand, tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """`judge(url)` -> (exit code, output, gate.json)."""

    def run(url: str, *more: str, **changes: str) -> tuple[int, str, dict[str, Any]]:
        options = {"policy": stand.policy, "baseline": stand.baseline} | changes
        flags = [part for name, value in options.items() for part in (f"--{name}", value) if value]
        code, output = gate("run", "--url", url, "--out", str(tmp_path / "out"), *flags, *more)
        verdict = tmp_path / "out" / "gate.json"
        return code, output, json.loads(verdict.read_text()) if verdict.exists() else {}

    return run


def faulty(start_tool: Any, stand: Stand, *flags: str) -> str:
    """The good server behind a proxy with a fault."""
    return str(start_tool("faulty", "--upstream", stand.good, *flags).url)


def failed(verdict: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (c["part"], c["name"], c["outcome"]) for c in verdict["checks"] if c["outcome"] != "pass"
    ]


def test_a_good_server_passes_and_the_verdict_names_everything(
    judge: Any, stand: Stand, tmp_path: Path
) -> None:
    code, output, verdict = judge(
        stand.good, "--image", "registry/assay:1", "--model-revision", "abc123"
    )
    assert code == 0, output
    assert (verdict["verdict"], verdict["exit_code"]) == ("pass", 0)
    order = [(c["part"], c["name"]) for c in verdict["checks"]]
    wanted = [("coherence", "before"), ("probe", "requests"), ("coherence", "under_load"),
              ("coherence", "after"), ("server", "ran throughout")]  # fmt: skip
    assert [step for step in order if step in wanted] == wanted
    identity = verdict["identity"]
    assert identity["image"] == "registry/assay:1"
    assert identity["model_revision"] == "abc123"
    assert identity["model"] == MODEL
    assert identity["commit"]
    assert "cores" in identity["hardware"]
    relative = [b for b in verdict["bounds"] if b["margin"] is not None]
    assert all(0 < b["detectable"] < b["margin"] for b in relative)
    assert "could have been seen" in output
    text = (tmp_path / "out" / "gate.md").read_text()
    for value in (
        "PASS",
        "registry/assay:1",
        "abc123",
        MODEL,
        identity["hardware"],
        identity["commit"],
    ):
        assert value in text
    suite = ElementTree.parse(tmp_path / "out" / "gate.xml").getroot()
    assert suite.get("tests") == str(len(verdict["checks"]))
    assert suite.get("failures") == suite.get("errors") == "0"


def test_a_slowed_server_fails_by_its_speed_alone(
    judge: Any, start_tool: Any, stand: Stand
) -> None:
    code, output, verdict = judge(faulty(start_tool, stand, "--slow", "4.0"))
    assert code == 1, output
    assert {part for part, _, _ in failed(verdict)} == {"probe"}
    assert {name for _, name, _ in failed(verdict)} <= {"output_tokens_per_second", "tpot.p50"}
    assert "slower" in output


def test_an_incoherent_server_fails_before_any_load(
    judge: Any, start_tool: Any, stand: Stand
) -> None:
    code, output, verdict = judge(faulty(start_tool, stand, "--garble"))
    assert code == 1, output
    assert failed(verdict) == [("coherence", "before", "fail")]
    assert "known-answers" in output
    assert verdict["bounds"] == []


def test_corruption_under_load_alone_is_found(
    judge: Any, start_tool: Any, stand: Stand, tmp_path: Path
) -> None:
    # More streams than the battery or the workload has by itself, fewer than both together.
    code, output, verdict = judge(faulty(start_tool, stand, "--corrupt-above", "22"))
    assert code == 1, output
    assert failed(verdict) == [("coherence", "under_load", "fail")]


def test_a_restart_makes_the_run_invalid(judge: Any, start_tool: Any, stand: Stand) -> None:
    code, output, verdict = judge(faulty(start_tool, stand, "--restart-after", "100"))
    assert code == 2, output
    assert ("server", "ran throughout", "invalid") in failed(verdict)
    assert "the server restarted" in output


def test_one_dropped_stream_in_a_hundred_fails(judge: Any, start_tool: Any, stand: Stand) -> None:
    code, output, verdict = judge(faulty(start_tool, stand, "--drop-every", "100"))
    assert code == 1, output
    assert ("probe", "requests", "fail") in failed(verdict)
    assert "connection_closed" in output


def test_a_wrong_model_makes_the_run_invalid(judge: Any, start_tool: Any, stand: Stand) -> None:
    code, output, verdict = judge(faulty(start_tool, stand, "--model", "another"))
    assert code == 2, output
    assert failed(verdict) == [("server", "is the one meant", "invalid")]
    assert f"wrong model: the server serves another, not {MODEL}" in output


def test_no_baseline_means_never_measured_here(judge: Any, stand: Stand) -> None:
    code, output, _ = judge(stand.good, baseline="")
    assert code == 2, output
    assert "no bound was ever measured on this hardware" in output


def test_a_baseline_from_other_hardware_is_refused(judge: Any, stand: Stand) -> None:
    code, output, _ = judge(stand.good, "--hardware", "8xB300")
    assert code == 2, output
    assert "from other hardware" in output


def change_baseline(stand: Stand, folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    data = json.loads(Path(stand.baseline).read_text())
    change(data)
    path = folder / "changed.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_a_baseline_of_another_workload_is_refused(
    judge: Any, stand: Stand, tmp_path: Path
) -> None:
    def change(data: dict[str, Any]) -> None:
        data["loads"]["probe"]["digest"] = "0" * 16

    code, output, _ = judge(
        stand.good, policy=stand.speed_only, baseline=change_baseline(stand, tmp_path, change)
    )
    assert code == 2, output
    assert "another version of the workload" in output


def test_more_noise_than_the_margin_makes_the_run_invalid(
    judge: Any, stand: Stand, tmp_path: Path
) -> None:
    def change(data: dict[str, Any]) -> None:
        values = data["loads"]["probe"]["values"]
        for metric in ("output_tokens_per_second", "tpot.p50"):
            middle = values[metric][1]
            values[metric] = [0.5 * middle, middle, 2 * middle]

    code, output, _ = judge(
        stand.good, policy=stand.speed_only, baseline=change_baseline(stand, tmp_path, change)
    )
    assert code == 2, output
    assert "too noisy" in output


def test_a_bound_that_the_baseline_lacks_was_never_measured(
    judge: Any, stand: Stand, tmp_path: Path
) -> None:
    def change(data: dict[str, Any]) -> None:
        del data["loads"]["probe"]["values"]["ttft.p99"]

    code, output, verdict = judge(
        stand.good, policy=stand.speed_only, baseline=change_baseline(stand, tmp_path, change)
    )
    assert code == 2, output
    assert ("probe", "ttft.p99", "invalid") in failed(verdict)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "no-such"), "no policy 'no-such'"),
        (("--baseline", "/no/such.json"), "/no/such.json"),
        (("--url", "http://127.0.0.1:9"), "/v1/models"),
    ],
)
def test_what_cannot_be_judged_is_invalid_and_says_why(
    judge: Any, stand: Stand, arguments: tuple[str, str], said: str
) -> None:
    code, output, _ = judge(stand.good, *arguments)
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output


def test_an_incoherent_server_gives_no_baseline(
    start_tool: Any, stand: Stand, tmp_path: Path
) -> None:
    code, output = gate(
        "baseline", "--policy", stand.policy, "--url", faulty(start_tool, stand, "--garble"),
        "--write", str(tmp_path / "b.json"), "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 1, output
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("name", policy.shipped())
def test_shipped_policies_are_valid_and_say_where_limits_come_from(name: str) -> None:
    found = policy.load(name)
    assert found.unmeasured == (name != "miniature")
    for load in found.loads:
        for bound in load.bounds:
            assert bound.margin is not None or bound.source


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("repetitions: 3", "repetitions: 4", "must be odd"),
        ("repetitions: 3", "repetitions: 1", "at least 3"),
        ("margin: 1.0", "margin: 1.0, limit: 2.0", "exactly one of"),
        ("metric: tpot.p50", "metric: tpot.p51", "metric: unknown"),
        (', source: "a test\'s"', "", "source"),
        ("name: test", "name: test\ncolour: red", "colour: unknown key"),
        ("tier: ready", "tier: quick", "tier"),
    ],
)
def test_a_wrong_policy_is_one_error_that_names_the_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = Path(write_policy(tmp_path))
    text = textwrap.dedent(path.read_text())
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        policy.load(str(path))
    assert said in str(caught.value)
