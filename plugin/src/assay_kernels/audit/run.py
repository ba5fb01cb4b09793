"""Running an audit: headers, then data in parallel with bounded memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from assay_kernels.audit.block import Block, Weight
from assay_kernels.audit.data_rules import ManifestChecksum
from assay_kernels.audit.expect import corrected
from assay_kernels.audit.rule import (
    DeepRule,
    Finding,
    HeaderRule,
    Measurement,
    Rule,
    Severity,
    all_rules,
    select,
)
from assay_kernels.checkpoint.data import TensorReader
from assay_kernels.checkpoint.errors import CheckpointError, Fault
from assay_kernels.checkpoint.manifest import MANIFEST_FILE, file_sha256, read_manifest
from assay_kernels.checkpoint.reader import Module, Survey, survey_checkpoint, without_collection
from assay_kernels.progress import Progress, progress

REPORT_VERSION = 1


@dataclass
class Report:
    """What an audit found. undecided: statistical rule -> why it could not judge"""

    directory: Path
    dialect: str | None
    deep: bool
    tensors: int
    nbytes: int
    findings: list[Finding] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        return sum(1 for finding in self.findings if finding.severity is Severity.FAULT)

    @property
    def exit_code(self) -> int:
        """0: nothing, or warnings only; 1: faults."""
        return 1 if self.faults else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "version": REPORT_VERSION,
            "directory": str(self.directory),
            "dialect": self.dialect,
            "passes": ["headers", "deep"] if self.deep else ["headers"],
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "faults": self.faults,
            "warnings": len(self.findings) - self.faults,
            "findings": [finding.as_json() for finding in self.findings],
            "undecided": self.undecided,
        }


_UNREADABLE_DATA = frozenset({Fault.TRUNCATED, Fault.OVERLAP, Fault.HEADER, Fault.UNREADABLE})


def _blocks(survey: Survey, data: TensorReader) -> list[Block]:
    """Weights whose data can be read, grouped; a broken file's are left out."""
    broken = {f.file for f in survey.faults if f.fault in _UNREADABLE_DATA}
    groups: dict[str, list[Module]] = defaultdict(list)
    for module in survey.modules:
        if not any(info.file in broken for info in module.tensors.values()):
            groups[module.name.rpartition(".")[0]].append(module)
    config = survey.config
    vocabulary = config.vocab_size if config else 0
    experts = config.n_routed_experts if config else 0
    return [
        Block(prefix, [Weight(module, data) for module in modules], vocabulary, experts)
        for prefix, modules in groups.items()
    ]


Outcome = tuple[list[Finding], list[tuple[str, Measurement]]]


def _judge(block: Block, rules: list[DeepRule], bar: Progress) -> Outcome:
    findings: list[Finding] = []
    measured: list[tuple[str, Measurement]] = []
    for rule in rules:
        findings += rule.check(block)
        measured += [(rule.id, measurement) for measurement in rule.measure(block)]
    bar.advance(block.nbytes)
    block.weights.clear()  # what it read goes with it
    return findings, measured


def _in_order(tasks: Iterable[Callable[[], Outcome]], jobs: int) -> Iterator[Outcome]:
    """Results in the order of the tasks, a few of them in flight at a time."""
    tasks = iter(tasks)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        flying: list[Future[Outcome]] = [pool.submit(t) for t in islice(tasks, 4 * jobs)]
        try:
            while flying:
                yield flying.pop(0).result()
                flying += [pool.submit(task) for task in islice(tasks, 1)]
        finally:
            for future in flying:
                future.cancel()


def _checksum_tasks(
    survey: Survey, rules: Iterable[Rule], bar: Progress
) -> Iterator[Callable[[], Outcome]]:
    rule = next((r for r in rules if isinstance(r, ManifestChecksum)), None)
    try:
        manifest = read_manifest(survey.directory)
    except CheckpointError:
        return  # the header pass says so
    if rule is None or manifest is None:
        return
    for name, entry in manifest["files"].items():
        path = survey.directory / name
        if path.is_file() and path.stat().st_size == entry["bytes"]:

            def task(name: str = name, path: Path = path, entry: dict[str, Any] = entry) -> Outcome:
                return list(rule.judge(name, entry["sha256"], file_sha256(path, bar.advance))), []

            yield task


def _deep(survey: Survey, rules: list[Rule], jobs: int, report: Report) -> None:
    deep: list[DeepRule] = select(rules, DeepRule)
    measured: dict[str, list[Measurement]] = defaultdict(list)
    with TensorReader(survey.directory) as data:
        blocks = _blocks(survey, data)
        manifest = survey.directory / MANIFEST_FILE
        passes = 2 if manifest.is_file() else 1
        with progress("auditing", passes * sum(block.nbytes for block in blocks)) as bar:
            checksums = list(_checksum_tasks(survey, rules, bar))

            def tasks() -> Iterator[Callable[[], Outcome]]:
                yield from checksums
                for block in blocks:
                    yield partial(_judge, block, deep, bar)

            for findings, measurements in _in_order(tasks(), jobs):
                report.findings += findings
                for rule_id, measurement in measurements:
                    measured[rule_id].append(measurement)
        for rule in deep:
            report.findings += rule.conclude(survey, data, measured[rule.id])
            unsure = rule.undecided(measured[rule.id])
            if unsure:
                report.undecided[rule.id] = unsure


def _headers(
    directory: str | os.PathLike[str], chosen: list[Rule], deep: bool
) -> tuple[Survey, Report]:
    stored = survey_checkpoint(directory)
    # What follows from a wrong config value is one fault, not one for every tensor.
    raw = corrected(stored) if any(r.id == "config-shape" for r in chosen) else stored.raw_config
    survey = stored if raw == stored.raw_config else stored.under(raw)
    report = Report(
        Path(directory),
        None if survey.dialect is None else str(survey.dialect),
        deep,
        len(survey.infos),
        sum(info.nbytes for info in survey.infos),
    )
    header_rules: list[HeaderRule] = select(chosen, HeaderRule)
    for rule in header_rules:
        report.findings += rule.check(stored if rule.id == "config-shape" else survey)
    return survey, report


def audit(
    directory: str | os.PathLike[str],
    *,
    deep: bool = False,
    rules: Iterable[Rule] | None = None,
    jobs: int | None = None,
) -> Report:
    """Judge a checkpoint by its headers, and with `deep` by its data.

    rules: None takes all of them
    jobs: threads of the deep pass; None takes the number of CPUs
    Raises CheckpointError where there is no checkpoint to judge.
    """
    chosen = list(all_rules().values() if rules is None else rules)
    with without_collection():
        survey, report = _headers(directory, chosen, deep)
    if deep:
        _deep(survey, chosen, jobs or os.cpu_count() or 1, report)
    order = {rule.id: number for number, rule in enumerate(chosen)}
    report.findings.sort(key=lambda f: (f.severity is not Severity.FAULT, order[f.rule]))
    return report
