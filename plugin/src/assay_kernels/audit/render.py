"""An audit for people: one line a finding, and the table of rules that the documents hold."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from assay_kernels.audit.rule import Finding, HeaderRule, Rule, Severity
from assay_kernels.audit.run import Report

_LIKE_IT = 3
_NUMBERS = re.compile(r"\d+")


def _shortened(findings: Iterable[Finding]) -> Iterator[str]:
    """Findings that differ in layer or expert only are shown a few times, then counted."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.rule, _NUMBERS.sub("*", finding.tensor)].append(finding)
    for group in groups.values():
        yield from map(str, group[:_LIKE_IT])
        if len(group) > _LIKE_IT:
            first = group[0]
            yield (
                f"{first.severity.upper():7} ... and {len(group) - _LIKE_IT} more of "
                f"{_NUMBERS.sub('*', first.tensor)}: {first.rule} (--all or --json lists them)"
            )


def text(report: Report, *, everything: bool = False) -> str:
    """The report, one line a finding."""
    what = "headers and data" if report.deep else "headers only (--deep reads the data)"
    dialect = report.dialect or "unknown"
    lines = [
        f"{report.directory}: dialect {dialect}, {report.tensors} tensors, "
        f"{report.nbytes / 1e9:.3f} GB, {what}",
        *(map(str, report.findings) if everything else _shortened(report.findings)),
        *(f"UNSURE  {rule}: {reason}" for rule, reason in report.undecided.items()),
    ]
    warnings = len(report.findings) - report.faults
    verdict = "this would turn to garbage" if report.faults else "nothing found that would hurt"
    lines.append(f"{report.faults} faults, {warnings} warnings: {verdict}")
    return "\n".join(lines)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("*", "\\*")


def _meaning(rule: Rule) -> str:
    return " ".join(inspect.cleandoc(rule.__doc__ or "").split("\n\n")[0].split())


def rule_table(rules: Iterable[Rule]) -> str:
    """All rules as Markdown, in the order of the registry."""
    lines = [
        "| rule | pass | finds | what it does to the output | what to do | public origin |",
        "|---|---|---|---|---|---|",
    ]
    for rule in rules:
        where = "headers" if isinstance(rule, HeaderRule) else "deep"
        severity = " (warning)" if rule.severity is Severity.WARNING else ""
        cells = (_meaning(rule), rule.effect, rule.action, rule.origin or "-")
        lines.append(f"| `{rule.id}`{severity} | {where} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)
