"""Proof that the plugin is active: a record per process, written by that process.

vLLM logs and swallows an import error of a plugin and then serves its own kernels. So the plugin's
silence has to be noticed from outside: each process that registers the plugin leaves
`$ASSAY_RUN_DIR/proof/PID.json`, the one that loads weights says there what it took, and the
launcher opens the door only when no vLLM process is missing. A record carries the start time of its
process, so one left by an earlier process with the same pid proves nothing.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from assay_kernels import __version__
from assay_kernels.launcher import procfs
from assay_kernels.selfcheck.report import Row

NVFP4 = "nvfp4"
"""A `how` that starts with this word says that a layer computes from NVFP4 weights."""


@dataclass(frozen=True)
class Summary:
    """What one worker did with the layers of its model."""

    arch: str
    """'cpu', 'sm_90' or 'sm_100', as profiles (ASSAY_ARCH) and load policies name it."""
    mode: str
    """Arithmetic: 'w4a16', 'w4a4' or 'reference'."""
    operators: str
    """Where V4's own operators come from: 'native' or 'torch'."""
    layers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, how) -> number of layers, as {('routed', 'nvfp4 by cpu w4a16'): 4}."""
    expected_nvfp4: int = 0
    """Number of its layers that the checkpoint's headers store as NVFP4."""
    checks: tuple[Row, ...] = ()
    """What the self-check found, by kind, shape and kernel."""

    def in_nvfp4(self) -> int:
        """Number of layers that the plugin serves from NVFP4 weights."""
        return sum(n for (_, how), n in self.layers.items() if how.startswith(NVFP4))

    def table(self) -> str:
        """One header line, then one aligned line per layer kind and how."""
        lines = [
            f"assay {__version__}: {self.arch}, {self.mode}, V4 operators: {self.operators},"
            f" {sum(self.layers.values())} layers, {self.in_nvfp4()} in NVFP4"
        ]
        width = max((len(kind) for kind, _ in self.layers), default=0)
        lines += [
            f"  {kind:<{width}}  {n:>5}  {how}" for (kind, how), n in sorted(self.layers.items())
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Proof:
    """One process's record."""

    pid: int
    start: int
    """Start of the process, in clock ticks since boot."""
    title: str
    """Title of the process when it wrote the record: 'VLLM::Worker_TP0'."""
    version: str
    stage: Literal["registered", "loaded"]
    summary: Summary | None = None

    @property
    def alive(self) -> bool:
        return procfs.start_ticks(self.pid) == self.start

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        if self.summary is not None:
            record["summary"] = {
                "arch": self.summary.arch,
                "mode": self.summary.mode,
                "operators": self.summary.operators,
                "layers": [
                    {"kind": kind, "how": how, "count": n}
                    for (kind, how), n in self.summary.layers.items()
                ],
                "expected_nvfp4": self.summary.expected_nvfp4,
                "checks": [asdict(row) for row in self.summary.checks],
            }
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Proof":
        summary = None
        if (s := record.get("summary")) is not None:
            layers = {(e["kind"], e["how"]): int(e["count"]) for e in s["layers"]}
            expected = int(s["expected_nvfp4"])
            checks = tuple(Row(**row) for row in s["checks"])
            summary = Summary(s["arch"], s["mode"], s["operators"], layers, expected, checks)
        return cls(**{name: record[name] for name in _PLAIN_FIELDS}, summary=summary)


_PLAIN_FIELDS = ("pid", "start", "title", "version", "stage")


def run_dir() -> Path:
    """Folder shared by the processes of one server: `$ASSAY_RUN_DIR`.

    When unset, the first process to ask makes a private one under the temp folder, hands it to its
    children through the environment, and removes it at its end.
    """
    if not os.environ.get("ASSAY_RUN_DIR"):
        made, owner = tempfile.mkdtemp(prefix="assay-"), os.getpid()
        os.environ["ASSAY_RUN_DIR"] = made
        atexit.register(_remove, made, owner)
    return Path(os.environ["ASSAY_RUN_DIR"])


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


_fork_hook = False


def record_registered() -> None:
    """Called by the plugin's entry point: this process runs the plugin."""
    global _fork_hook
    if not _fork_hook:
        # vLLM does not load plugins again in a forked worker, which inherits them.
        os.register_at_fork(after_in_child=_record)
        _fork_hook = True
    _record()


def record_loaded(summary: Summary) -> None:
    """Called after the weights are in place: what this process took, and how."""
    _record(summary)


def _record(summary: Summary | None = None) -> None:
    pid = os.getpid()
    start = procfs.start_ticks(pid)
    assert start is not None
    stage: Literal["registered", "loaded"] = "registered" if summary is None else "loaded"
    folder = run_dir() / "proof"
    if summary is None and _says_loaded(folder / f"{pid}.json", start):
        return
    _write(folder, Proof(pid, start, procfs.title(pid), __version__, stage, summary))


def _says_loaded(path: Path, start: int) -> bool:
    """Whether this very process has told its layers: registering again takes nothing back."""
    proof = _read(path)
    return proof is not None and proof.start == start and proof.stage == "loaded"


def _write(folder: Path, proof: Proof) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        json.dump(proof.to_json(), file)
    os.replace(temporary, folder / f"{proof.pid}.json")


def _read(path: Path) -> Proof | None:
    try:
        return Proof.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_all(folder: Path | None = None) -> list[Proof]:
    """Records of living processes in a run folder (default: this process's), by pid."""
    proofs = map(_read, ((folder or run_dir()) / "proof").glob("*.json"))
    return sorted((p for p in proofs if p is not None and p.alive), key=lambda p: p.pid)
