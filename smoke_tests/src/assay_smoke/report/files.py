"""Reports as files, written whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from assay_smoke import files
from assay_smoke.battery import Report

# XML 1.0 has no way to write these characters (https://www.w3.org/TR/xml/#charsets).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(path: Path, text: str) -> None:
    """Replace the file by `text`; raises CouldNotRunError that names it."""
    files.replace(path, text.encode("utf-8", "backslashreplace"))


def write_json(report: Report, path: Path) -> None:
    write(path, json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def write_junit(report: Report, path: Path) -> None:
    """A test case per check: `fail` is a failure; what could not run, or had too few samples, is an
    error; `skip` is skipped."""
    verdicts = [r.outcome.verdict for r in report.results]
    suite = ElementTree.Element(
        "testsuite",
        name=f"assay-smoke.{report.suite}.{report.tier}",
        tests=str(len(verdicts)),
        failures=str(verdicts.count("fail")),
        errors=str(verdicts.count("error") + verdicts.count("unsure")),
        skipped=str(verdicts.count("skip")),
        time=f"{report.seconds:.3f}",
    )
    for result in report.results:
        outcome = result.outcome
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"assay-smoke.{report.suite}.{report.tier}",
            name=result.name, time=f"{result.seconds:.3f}",
        )  # fmt: skip
        tag = {"fail": "failure", "error": "error", "unsure": "error", "skip": "skipped"}
        if outcome.verdict in tag:
            found = ElementTree.SubElement(
                case, tag[outcome.verdict], message=_clean(outcome.reason)
            )
            found.text = _clean("\n".join(outcome.examples))
    ElementTree.indent(suite)
    write(path, ElementTree.tostring(suite, encoding="unicode", xml_declaration=False) + "\n")


def write_markdown(report: Report, path: Path) -> None:
    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

    lines = [
        f"### Coherence: {report.verdict}",
        "",
        f"Suite `{report.suite}`, tier `{report.tier}`, model `{cell(report.model)}`, server"
        f" {cell(report.server or 'unknown')}, seed {report.seed}; {report.generated_tokens} tokens"
        f" generated in {report.seconds:.1f} s.",
        "",
        "| check | verdict | what was seen |",
        "|---|---|---|",
    ]
    for result in report.results:
        outcome = result.outcome
        seen = outcome.reason
        if outcome.verdict != "pass" and outcome.examples:
            seen += f" ({outcome.examples[0]})"
        lines.append(f"| {result.name} | {outcome.verdict} | {cell(seen)} |")
    if report.error:
        lines += ["", f"Could not run to its end: {cell(report.error)}"]
    write(path, "\n".join(lines) + "\n")
