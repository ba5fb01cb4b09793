"""What the machine at hand can do, and what stands in the way, in one line each."""

import errno
import os
import platform
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cpu:
    flags: frozenset[str]

    @classmethod
    def here(cls) -> "Cpu":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return cls(frozenset(line.partition(":")[2].split()))
        return cls(frozenset())

    def obstacle(self) -> str | None:
        """Why the CPU stack cannot run here; None when it can."""
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            return f"Linux on x86_64 is needed, this is {platform.system()} {platform.machine()}"
        if "avx2" not in self.flags:
            return "this CPU has no AVX2, which every kernel here needs"
        return None

    def describe(self, operators: str = "auto") -> str:
        """One line; `operators` is ASSAY_CPU_OPS, which may forbid what the CPU could do."""
        names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX512-BF16"}
        present = [name for flag, name in names.items() if flag in self.flags]
        if {"amx_tile", "amx_bf16"} <= self.flags:
            present.append("AMX tiles")
            if operators != "torch":
                return ", ".join(present)
        else:
            present.append("no AMX tiles")
        return f"{', '.join(present)}: V4's operators run in torch (slower)"


@dataclass(frozen=True)
class Gpus:
    names: tuple[str, ...]
    """As the driver says them: 'NVIDIA H200'."""

    @classmethod
    def here(cls, proc: Path = Path("/proc/driver/nvidia/gpus")) -> "Gpus":
        return cls(_from_nvidia_smi() or _from_proc(proc))

    def advice(self, profiles: Path) -> list[str]:
        """Lines that name the profile for these GPUs; empty without any."""
        if not self.names:
            return []
        (name, count), *_ = Counter(self.names).most_common(1)
        found = f"{count} x {name}"
        for model in ("B300", "GB200", "GB300", "GH200"):
            if model in name:
                return [f"gpu: {found}: not supported by this version"]
        family = next((m for m in ("B200", "H200", "H100") if m in name), None)
        if family is None:
            return [f"gpu: {found}: no profile fits; B200, H200 and H100 have kernels here"]
        size = 8 if count >= 8 else 1
        profile = profiles / f"{family.lower()}x{size}.yaml"
        if not profile.is_file():
            return [
                f"gpu: {found}: the profile for it is {profile.name}, which this version does not"
                " have yet; the GPU stays unused"
            ]
        compose = "compose.yaml"
        command = f"ASSAY_PROFILE={profile.stem} docker compose up"
        if not (profiles.parent.parent / compose).is_file():
            command += f" (this version has no {compose} yet)"
        return [f"gpu: {found}: profile {profile}; to serve on it: {command}"]


def _from_nvidia_smi() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if answer.returncode != 0:
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def _from_proc(folder: Path) -> tuple[str, ...]:
    names = []
    for information in sorted(folder.glob("*/information")):
        for line in information.read_text().splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return tuple(names)


def numa_nodes(status: Path = Path("/proc/self/status")) -> int:
    """Number of memory nodes that this process may use; vLLM gives each worker one."""
    for line in status.read_text().splitlines():
        if line.startswith("Mems_allowed_list:"):
            spans = [part.split("-") for part in line.partition(":")[2].strip().split(",")]
            return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    return 1


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One logical CPU for each core that this process may use."""
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, cpu)
    return sorted(cores.values())


def thread_binding(ranks: int, nodes: int, cores: list[int], cpus: list[int]) -> str | None:
    """VLLM_CPU_OMP_THREADS_BIND for more workers than NUMA nodes, which vLLM itself refuses to
    place: '0,1|2,3', a share of the cores (else of the CPUs) for each; None: vLLM can place them.
    """
    if ranks <= nodes:
        return None
    usable = cores if len(cores) >= ranks else cpus
    share = len(usable) // ranks
    if share == 0:
        return "nobind"
    shares = [usable[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return "|".join(",".join(map(str, one)) for one in shares)


def port_obstacle(host: str, port: int) -> str | None:
    """Why a server cannot listen there; None when it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is in use; choose another with --port (make: PORT=...)"
        return f"cannot listen on {host} port {port}: {error.strerror or error}"
    return None
