"""A baseline: what a release was measured at, and on what."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay_load.errors import InputError
from assay_load.gate.policy import METRIC_NAMES, Policy, value_of
from assay_load.report.result import RunResult
from assay_load.strict import Strict, parse


class Identity(Strict):
    """What was judged, where. None: not told."""

    commit: str | None = Field(description="Of this software")
    image: str | None
    model: str
    model_revision: str | None
    server: str | None = Field(description="The serving software's own version")
    arch: str | None
    profile: str
    hardware: str
    url: str


class Measured(Strict):
    """Repetitions of one workload."""

    digest: str = Field(description="Of the scaled workload and of its text")
    values: dict[str, list[float]] = Field(description="One value a repetition, by metric")


class Baseline(Strict):
    format: Literal["assay-gate-baseline/1"] = "assay-gate-baseline/1"
    recorded: float = Field(description="Seconds since the epoch")
    policy: str
    identity: Identity
    loads: dict[str, Measured]

    def write(self, path: Path) -> None:
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def read(path: Path) -> Baseline:
    """Raises InputError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    return parse(data, Baseline, str(path))


def measured(results: list[RunResult]) -> Measured:
    """Every metric that all the repetitions have."""
    values: dict[str, list[float]] = {}
    for metric in METRIC_NAMES:
        found = [value_of(metric, result.figures) for result in results]
        whole = [v for v in found if v is not None]
        if len(whole) == len(results):
            values[metric] = whole
    return Measured(digest=digest(results[0]), values=values)


def digest(result: RunResult) -> str:
    """Same digest, same work."""
    content = json.dumps([result.workload, result.corpus], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def mismatch(baseline: Baseline, policy: Policy, identity: Identity) -> str | None:
    """Why the baseline says nothing about this server; None if it does."""
    was = baseline.identity
    if was.hardware != identity.hardware:
        return f"the baseline is from other hardware: {was.hardware}, this is {identity.hardware}"
    if baseline.policy != policy.name:
        return f"the baseline is of the policy {baseline.policy}, this is {policy.name}"
    if was.model != identity.model:
        return f"the baseline is of the model {was.model}, this is {identity.model}"
    return None
