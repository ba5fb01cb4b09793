"""vLLM's processes against the plugin's proofs."""

import re
from dataclasses import dataclass
from typing import Literal

from assay_kernels import __version__
from assay_kernels.launcher import procfs
from assay_kernels.vllm_plugin.proof import Proof

Role = Literal["API server", "engine", "worker"]
_ROLES: dict[str, Role] = {"APIServer": "API server", "EngineCore": "engine", "Worker": "worker"}


@dataclass(frozen=True)
class Process:
    pid: int
    title: str
    role: Role
    loads_weights: bool

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pid})"


def of_vllm(root: int) -> list[Process]:
    """vLLM's processes from its first one, `root`, down; helpers without a vLLM title are left out.

    An engine with no worker below it runs the model itself.
    """
    below = procfs.descendants(root)
    titles = {pid: procfs.title(pid) for pid in below}
    roles = {pid: role for pid in below if (role := _role(titles[pid])) is not None}
    found = [Process(root, "vLLM API server", "API server", loads_weights=False)]
    for pid, role in roles.items():
        loads = role == "worker" or (
            role == "engine" and not any(roles.get(p) == "worker" for p in procfs.descendants(pid))
        )
        found.append(Process(pid, titles[pid], role, loads))
    return found


def _role(title: str) -> Role | None:
    match = re.match(r"VLLM::([A-Za-z]+)", title)
    return _ROLES.get(match[1]) if match else None


def unproven(processes: list[Process], proofs: list[Proof], quantised: bool) -> dict[int, str]:
    """pid -> what is wrong, for every process that has not proven that the plugin is active.

    `quantised`: whether the checkpoint has NVFP4 layers, of which a worker must serve some.
    """
    wrong: dict[int, str] = {}
    by_pid = {proof.pid: proof for proof in proofs}
    for process in processes:
        proof = by_pid.get(process.pid)
        if proof is None:
            wrong[process.pid] = f"{process} runs without the plugin"
        elif proof.version != __version__:
            wrong[process.pid] = f"{process} runs assay {proof.version}, not {__version__}"
        elif process.loads_weights and proof.summary is None:
            wrong[process.pid] = f"{process} loaded its weights without the plugin"
        elif process.loads_weights and quantised and not _has_nvfp4(proof):
            wrong[process.pid] = f"{process} serves no layer of a quantised model in NVFP4"
    if not any(process.loads_weights for process in processes):
        wrong[0] = "no process that holds the model was found under vLLM"
    return wrong


def _has_nvfp4(proof: Proof) -> bool:
    return proof.summary is not None and proof.summary.in_nvfp4() > 0
