"""The verdict: pass, fail or invalid, with its reasons; JSON, JUnit and Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from pydantic import Field

from assay_load.gate.baseline import Identity
from assay_load.strict import Strict

Outcome = Literal["pass", "fail", "invalid"]
EXIT: dict[Outcome, int] = {"pass": 0, "fail": 1, "invalid": 2}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Check(Strict):
    """One thing that was looked at."""

    part: str = Field(description="server, coherence or the workload's name")
    name: str
    outcome: Outcome
    reason: str
    seconds: float = 0.0


class BoundFound(Strict):
    """A bound and what was measured."""

    load: str
    metric: str
    values: list[float]
    median: float
    limit: float | None
    margin: float | None
    source: str | None
    baseline: float | None = Field(description="The baseline's median")
    slowdown: float | None
    detectable: float | None = Field(
        description="The slow-down that these repetitions could have shown, given their noise"
    )


class Verdict(Strict):
    format: Literal["assay-gate/1"] = "assay-gate/1"
    verdict: Outcome
    exit_code: int
    policy: str
    unmeasured: bool = Field(description="The policy's authors never ran it on this hardware")
    started: float = Field(description="Seconds since the epoch")
    seconds: float
    identity: Identity
    checks: list[Check]
    bounds: list[BoundFound]

    @property
    def reasons(self) -> list[str]:
        return [f"{c.part}, {c.name}: {c.reason}" for c in self.checks if c.outcome != "pass"]


def combined(checks: list[Check]) -> Outcome:
    """An invalid run says nothing, whatever else was seen in it."""
    outcomes = {check.outcome for check in checks}
    if "invalid" in outcomes or not checks:
        return "invalid"
    return "fail" if "fail" in outcomes else "pass"


def write_all(verdict: Verdict, folder: Path) -> None:
    """gate.json, gate.xml and gate.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.json").write_text(verdict.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / "gate.xml").write_text(junit(verdict), encoding="utf-8")
    (folder / "gate.md").write_text(markdown(verdict), encoding="utf-8")


def junit(verdict: Verdict) -> str:
    """A test case a check: `fail` is a failure, `invalid` an error."""
    outcomes = [check.outcome for check in verdict.checks]
    suite = ElementTree.Element(
        "testsuite",
        name=f"assay-gate.{verdict.policy}",
        tests=str(len(outcomes)),
        failures=str(outcomes.count("fail")),
        errors=str(outcomes.count("invalid")),
        time=f"{verdict.seconds:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in verdict.identity.model_dump().items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value or ""))
    for check in verdict.checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"assay-gate.{check.part}", name=check.name,
            time=f"{check.seconds:.3f}",
        )  # fmt: skip
        if check.outcome != "pass":
            tag = "failure" if check.outcome == "fail" else "error"
            ElementTree.SubElement(case, tag, message=_clean(check.reason))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def markdown(verdict: Verdict) -> str:
    i = verdict.identity
    lines = [f"## Release gate `{verdict.policy}`: {verdict.verdict.upper()}", ""]
    if verdict.unmeasured:
        lines += ["The authors of this policy never ran it on this hardware.", ""]
    lines += [f"- {_cell(reason)}" for reason in verdict.reasons]
    if verdict.reasons:
        lines.append("")
    lines += ["| what | which |", "|---|---|"]
    rows = {
        "model": f"{i.model}, revision {i.model_revision or 'not told'}",
        "image": i.image or "not told",
        "server": i.server or "not told",
        "profile": i.profile,
        "hardware": i.hardware + (f" ({i.arch})" if i.arch else ""),
        "commit": i.commit or "not told",
    }
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    lines += ["", "| part | check | outcome | what was seen |", "|---|---|---|---|"]
    lines += [f"| {c.part} | {c.name} | {c.outcome} | {_cell(c.reason)} |" for c in verdict.checks]
    if verdict.bounds:
        lines += ["", *bounds_table(verdict.bounds)]
    return "\n".join(lines) + "\n"


def bounds_table(bounds: list[BoundFound]) -> list[str]:
    lines = [
        "| workload | metric | median | bound | baseline | slow-down | could have been seen |",
        "|---|---|---|---|---|---|---|",
    ]
    for b in bounds:
        bound = f"{b.limit:g}" if b.limit is not None else f"margin {b.margin:.0%}"
        base = "" if b.baseline is None else f"{b.baseline:.2f}"
        slow = "" if b.slowdown is None else f"{b.slowdown:+.1%}"
        seen = "" if b.detectable is None else f"{b.detectable:.1%}"
        lines.append(
            f"| {b.load} | {b.metric} | {b.median:.2f} | {bound} | {base} | {slow} | {seen} |"
        )
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
