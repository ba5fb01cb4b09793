"""What one run needs to know, and how it travels from master to workers."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from assay_load.errors import InputError
from assay_load.stream.client import Target
from assay_load.stream.transport import Address
from assay_load.workload.plan import Calibration
from assay_load.workload.schema import ClosedLoop, Open, Steps, Stop, Workload, load

KEY_VARIABLE = "ASSAY_API_KEY"
"""Where the bearer key is looked for, or in the file that `ASSAY_API_KEY_FILE` names: never on a
command line, where others can read it."""
BYPASS_KEY_VARIABLE = "ASSAY_BYPASS_KEY"


def secret(variable: str) -> str:
    """What a variable says, or the first key in the file that VARIABLE_FILE names; '' for neither.

    Raises InputError for a file that cannot be read.
    """
    if value := os.environ.get(variable, "").strip():
        return value
    if not (name := os.environ.get(f"{variable}_FILE", "").strip()):
        return ""
    try:
        lines = Path(name).read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(f"{variable}_FILE={name}: {error}") from error
    written = (line.strip() for line in lines)
    return next((line for line in written if line and not line.startswith("#")), "")


@dataclass(frozen=True)
class Settings:
    """A workload against a server. `workload` is already scaled."""

    url: str
    workload: Workload
    scale: str | None = None
    model: str | None = None
    """None: the first one that the server lists."""
    token_ids: bool = False
    raw: str | None = None
    """File for one JSON line a request; workers add their number to its name."""
    metrics_url: str | None = None
    """Page with the server's Prometheus series; None: `/metrics` of the server."""
    gpus: int = 0
    gpu_hour_price: float | None = None

    @classmethod
    def of(cls, url: str, workload: str, scale: str | None, **more: Any) -> Settings:
        """From a workload's name or path; raises InputError."""
        Address.of(url)
        return cls(url, load(workload, scale), scale, **more)

    def target(self, model: str) -> Target:
        headers = {}
        if key := secret(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        if key := secret(BYPASS_KEY_VARIABLE):
            headers["x-assay-key"] = key
        return Target(Address.of(self.url), model, headers, token_ids=self.token_ids)

    def with_users(self, users: int) -> Settings:
        """The same with another concurrency or pool, as Locust's `--users` asks; steps stay."""
        arrival = self.workload.arrival
        match arrival:
            case ClosedLoop():
                changed: Any = arrival.model_copy(update={"concurrency": users})
            case Open():
                changed = arrival.model_copy(update={"pool": users})
            case Steps():
                return self
        return replace(self, workload=self.workload.model_copy(update={"arrival": changed}))

    def with_seconds(self, seconds: float) -> Settings:
        """The same, ended by time, as Locust's `--run-time` asks."""
        if isinstance(self.workload.arrival, Steps):
            return self
        stop = Stop(seconds=float(seconds))
        return replace(self, workload=self.workload.model_copy(update={"stop": stop}))


@dataclass(frozen=True)
class Assignment:
    """What the master tells every worker at the start of a run."""

    nonce: str
    model: str
    calibration: Calibration
    workers: tuple[str, ...]
    """Client ids in the order in which they share the plan."""

    @staticmethod
    def new_nonce() -> str:
        return uuid.uuid4().hex[:8]

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Assignment:
        data = json.loads(text)
        calibration = Calibration(**data.pop("calibration"))
        return cls(calibration=calibration, workers=tuple(data.pop("workers")), **data)
