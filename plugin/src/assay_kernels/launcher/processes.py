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

    `quantised`: whether the checkpoint's config says so: then a worker must serve NVFP4 layers. It
    must serve, from NVFP4, exactly as many as the checkpoint's headers demand.
    """
    wrong: dict[int, str] = {}
    by_pid = {proof.pid: proof for proof in proofs}
    for process in processes:
        proof = by_pid.get(process.pid)
        if proof is None:
            wrong[process.pid] = f"{process} runs without the plugin"
        elif proof.version != __version__:
            wrong[process.pid] = f"{process} runs assay {proof.version}, not {__version__}"
        elif not process.loads_weights:
            continue
        elif proof.summary is None:
            wrong[process.pid] = f"{process} loaded its weights without the plugin"
        elif quantised and proof.summary.expected_nvfp4 == 0:
            wrong[process.pid] = f"{process} holds no NVFP4 layer of a quantised model"
        elif proof.summary.in_nvfp4() != proof.summary.expected_nvfp4:
            wrong[process.pid] = (
                f"{process} serves {proof.summary.in_nvfp4()} layers in NVFP4, the checkpoint"
                f" stores {proof.summary.expected_nvfp4} so"
            )
    if not any(process.loads_weights for process in processes):
        wrong[0] = "no process that holds the model was found under vLLM"
    return wrong
