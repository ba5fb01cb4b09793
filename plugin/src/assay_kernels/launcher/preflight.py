"""Before vLLM is started: does this machine, this profile and this checkpoint go together?

Each obstacle is one line that names the rule and what to do. What a profile needs is read from the
profile itself (how many GPUs) and from its `.env` (`ASSAY_ARCH`, the architecture it is for).
`Machine` is what was found, so that the rules can be tried without the hardware.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 1024**3

CAPABILITIES = {"sm_100": "10.0", "sm_90": "9.0"}
"""Architectures with kernels here -> compute capability."""
EXAMPLES = {"sm_100": "B200", "sm_90": "H100 or H200"}
DRIVERS = {"cu12": (575, 51, 3), "cu130": (580,)}
"""Variant of the image -> oldest driver. CUDA 12.9's and 13.0's release notes, table 3."""
SHM_BYTES = {"cpu": GIB, "gpu": 16 * GIB}
"""/dev/shm that several workers need: NCCL fails with less (vLLM issue 1710)."""
SHM_BYTES_ALONE = 192 * 2**20
"""What vLLM 0.32 asks for with one worker is 160 MiB; Docker gives 64 MiB unless told."""
CACHE_BYTES = {"cpu": 64 * 2**20, "gpu": 10 * GIB}
"""Free disk for what is compiled at run time."""
OPEN_FILES = 4096
"""File descriptors: two for each of 16 x 128 streams."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Bytes."""
    capability: str
    driver: str


@dataclass(frozen=True)
class Machine:
    """What is there. Sizes in bytes; `open_files` and `locked_memory` as setrlimit counts them, -1
    for unlimited."""

    gpus: tuple[Gpu, ...] = ()
    nvlink: bool | None = None
    """None: could not be told."""
    shm: int = 0
    cache_free: int = 0
    cache_problem: str = ""
    open_files: int = -1
    locked_memory: int = -1

    @classmethod
    def here(cls, cache: Path, gpus: bool) -> Machine:
        """Looks at the GPUs only where a profile wants them."""
        problem, free = writable(cache)
        found = query_gpus() if gpus else ()
        return cls(
            found,
            has_nvlink() if len(found) > 1 else None,
            shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
            free,
            problem,
            raised_open_files(),
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        )


@dataclass(frozen=True)
class Wish:
    """What a profile asks for."""

    profile: str
    arch: str = "cpu"
    ranks: int = 1
    flags: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    """cu12 or cu130 in a CUDA image; empty elsewhere: no driver is asked for."""
    everywhere: int = 0
    """Workers on all nodes, where there are several; `ranks` are those on this one."""

    @property
    def place(self) -> str:
        return "cpu" if self.arch == "cpu" else "gpu"


def writable(cache: Path) -> tuple[str, int]:
    """(why nothing can be kept there, free bytes)."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache) as file:
            file.write(b"x" * 4096)
            file.flush()
        return "", shutil.disk_usage(cache).free
    except OSError as error:
        free = shutil.disk_usage(cache).free if cache.is_dir() else 0
        return error.strerror or str(error), free


def raised_open_files() -> int:
    """The limit of open files, after asking for as many as are allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def query_gpus() -> tuple[Gpu, ...]:
    fields = "name,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    rows = (line.split(", ") for line in _output(command).splitlines())
    return tuple(
        Gpu(row[0].strip(), int(float(row[1]) * 2**20), row[2].strip(), row[3].strip())
        for row in rows
        if len(row) == 4 and row[1].strip().replace(".", "").isdigit()
    )


def has_nvlink() -> bool | None:
    """Whether any NVLink of GPU 0 is up."""
    text = _output(["nvidia-smi", "nvlink", "--status", "--id=0"])
    return None if not text else re.search(r"Link \d+: [\d.]+ GB/s", text) is not None


def _output(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def obstacles(wish: Wish, machine: Machine) -> list[str]:
    """What stands in the way of vLLM, one line each; empty: nothing that can be told beforehand."""
    rules: tuple[Callable[[Wish, Machine], Iterator[str]], ...] = (
        _gpus, _driver, _shm, _cache, _limits, _flags,
    )  # fmt: skip
    return [line for rule in rules for line in rule(wish, machine)]


def warnings(wish: Wish, machine: Machine) -> list[str]:
    """What makes a server slow rather than impossible."""
    found = []
    if machine.nvlink is False:
        found.append(
            "the GPUs have no NVLink that is up: tensor parallelism will be several times slower;"
            " see `nvidia-smi nvlink --status` and the fabric manager"
        )
    if wish.place == "gpu" and machine.locked_memory != -1:
        found.append(
            f"memlock is limited to {machine.locked_memory} bytes: NCCL may not pin what it needs;"
            " set ulimits.memlock to -1"
        )
    return found


def _gpus(wish: Wish, machine: Machine) -> Iterator[str]:
    if wish.place == "cpu":
        return
    if len(machine.gpus) < wish.ranks:
        yield (
            f"profile {wish.profile} needs {wish.ranks} GPUs, {len(machine.gpus)} are visible:"
            " give the container all of them (compose: deploy.resources.reservations.devices;"
            " docker run: --gpus all) or take a profile for fewer"
        )
    for gpu in dict.fromkeys(machine.gpus):
        if gpu.capability != CAPABILITIES[wish.arch]:
            yield (
                f"profile {wish.profile} is for {wish.arch} ({EXAMPLES[wish.arch]}), this"
                f" machine has {gpu.name} (compute capability {gpu.capability}): take the profile"
                " for it, if there is one; B300, GB200 and Arm hosts are not supported yet"
            )


def _driver(wish: Wish, machine: Machine) -> Iterator[str]:
    oldest = DRIVERS.get(wish.variant)
    if oldest is None or not machine.gpus:
        return
    driver = machine.gpus[0].driver
    if tuple(int(part) for part in re.findall(r"\d+", driver)) < oldest:
        needed = f"{oldest[0]}.{oldest[1]:02}.{oldest[2]:02}" if len(oldest) > 1 else str(oldest[0])
        other = "; the cu12 image takes 575.51.03 and newer" if wish.variant == "cu130" else ""
        yield (
            f"NVIDIA driver {driver} is older than {needed}, which this {wish.variant} image needs:"
            f" update the driver{other}"
        )


def _shm(wish: Wish, machine: Machine) -> Iterator[str]:
    needed = SHM_BYTES[wish.place] if wish.ranks > 1 else SHM_BYTES_ALONE
    if machine.shm < needed:
        yield (
            f"/dev/shm has {_size(machine.shm)}, {wish.ranks} workers need {_size(needed)}: set"
            " shm_size (compose), --shm-size (docker run) or a Memory emptyDir (Kubernetes)"
        )


def _cache(wish: Wish, machine: Machine) -> Iterator[str]:
    needed = CACHE_BYTES[wish.place]
    if machine.cache_free < needed:
        yield (
            f"the disk of the cache has {_size(machine.cache_free)} free, {_size(needed)} are"
            " needed: free some, or put ASSAY_CACHE_DIR on another disk"
        )
    elif machine.cache_problem:
        yield (
            f"the cache cannot be written by uid {os.getuid()} ({machine.cache_problem}): give its"
            " folder to that uid, or to group 0 with write permission, or set ASSAY_CACHE_DIR"
        )


def _limits(wish: Wish, machine: Machine) -> Iterator[str]:
    if machine.open_files != -1 and machine.open_files < OPEN_FILES:
        yield (
            f"only {machine.open_files} files may be open, {OPEN_FILES} are needed: raise"
            " ulimits.nofile"
        )


def _flags(wish: Wish, machine: Machine) -> Iterator[str]:
    if wish.flags.get("linear-backend") == "marlin":
        yield (
            f"profile {wish.profile}: linear-backend marlin repacks wo_a, which V4 then reads raw:"
            " remove it (moe-backend marlin alone is fine)"
        )
    if wish.flags.get("moe-backend") == "deep_gemm_mega_moe":
        yield f"profile {wish.profile}: moe-backend deep_gemm_mega_moe cannot run NVFP4: remove it"


def model_obstacles(wish: Wish, machine: Machine, folder: Path) -> list[str]:
    """What the checkpoint's headers say against this profile. Reads no data: seconds for V4-Pro.

    The checkpoint has been opened before (`serve.check_headers`), so it can be read.
    """
    from assay_kernels.audit import Severity, audit
    from assay_kernels.checkpoint import open_checkpoint
    from assay_kernels.inspection import inspect

    checkpoint = open_checkpoint(folder)
    found = []
    if (mode := wish.flags.get("tokenizer-mode")) != "deepseek_v4":
        found.append(
            f"profile {wish.profile}: tokenizer-mode must be deepseek_v4, is {mode!r}: V4 has no"
            " chat template, and any other mode answers nonsense"
        )
    for name, parts in (
        ("num_attention_heads", checkpoint.config.num_attention_heads),
        ("o_groups", checkpoint.config.o_groups),
    ):
        if parts % (size := int(wish.flags.get("tensor-parallel-size", 1))):
            found.append(
                f"profile {wish.profile}: tensor-parallel-size {size} does not divide {name}"
                f" {parts} of {folder}: take a divisor"
            )
    faults = [f for f in audit(folder).findings if f.severity is Severity.FAULT]
    if faults:
        found.append(
            f"{folder} has {len(faults)} faults in its headers, the first: {faults[0].rule} in"
            f" {faults[0].tensor}; `assay-kernels audit {folder}` lists them and says what to do"
        )
    if wish.place == "gpu" and len(machine.gpus) >= wish.ranks:
        gigabytes = min(gpu.memory for gpu in machine.gpus) / 1e9
        gpus = max(wish.ranks, wish.everywhere)
        fit = inspect(checkpoint, architecture=wish.arch, gpus=gpus, gigabytes=gigabytes).fit
        if not fit.fits:
            found.append(
                f"{folder} does not fit {gpus} GPUs of {gigabytes:.0f} GB:"
                f" {fit.weights_per_gpu / 1e9:.0f} GB of weights on each; take more or larger GPUs"
            )
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"
