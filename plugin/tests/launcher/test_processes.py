"""What the launcher makes of processes and their proofs, without any process."""

import pytest

from assay_kernels import __version__
from assay_kernels.launcher import processes
from assay_kernels.vllm_plugin.proof import Proof, Summary

API_SERVER = processes.Process(10, "vLLM API server", "API server", loads_weights=False)
ENGINE = processes.Process(11, "VLLM::EngineCore", "engine", loads_weights=False)
WORKERS = [
    processes.Process(12 + rank, f"VLLM::Worker_TP{rank}", "worker", loads_weights=True)
    for rank in range(2)
]
ALL = [API_SERVER, ENGINE, *WORKERS]


def summary(served: int, expected: int) -> Summary:
    layers = {("routed", "nvfp4 by cpu w4a16"): served, ("wo_a", "plain bf16 by cpu w4a16"): 1}
    return Summary("cpu", "w4a16", "torch", layers, expected)


def proofs(of_workers: Summary | None = None, version: str = __version__) -> list[Proof]:
    registered = [Proof(p.pid, 1, p.title, version, "registered") for p in (API_SERVER, ENGINE)]
    loaded = of_workers or summary(4, 4)
    return registered + [Proof(p.pid, 1, p.title, version, "loaded", loaded) for p in WORKERS]


def test_every_process_with_its_proof_is_right() -> None:
    assert processes.unproven(ALL, proofs(), quantised=True) == {}


@pytest.mark.parametrize("missing", ALL, ids=str)
def test_a_missing_proof_alone_is_wrong(missing: processes.Process) -> None:
    others = [p for p in proofs() if p.pid != missing.pid]
    wrong = processes.unproven(ALL, others, quantised=True)
    assert wrong == {missing.pid: f"{missing} runs without the plugin"}


@pytest.mark.parametrize(
    ("served", "expected", "quantised", "right"),
    [
        (4, 4, True, True),
        (1, 4, True, False),
        (5, 4, True, False),
        (0, 0, True, False),
        (0, 0, False, True),
        (0, 4, False, False),
    ],
)
def test_a_worker_serves_exactly_the_layers_that_the_headers_demand(
    served: int, expected: int, quantised: bool, right: bool
) -> None:
    wrong = processes.unproven(ALL, proofs(summary(served, expected)), quantised)
    assert set(wrong) == (set() if right else {worker.pid for worker in WORKERS})


def test_another_version_of_the_plugin_is_wrong() -> None:
    assert len(processes.unproven(ALL, proofs(version="0.0.0"), quantised=True)) == len(ALL)


def test_a_server_without_any_worker_is_wrong() -> None:
    assert 0 in processes.unproven([API_SERVER], proofs(), quantised=True)
