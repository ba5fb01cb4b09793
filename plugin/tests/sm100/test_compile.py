"""Kernels compiled for sm_100a without a GPU, and what their code must and must not hold.

Runs where the CUTLASS DSL is installed (`make test-gpu-compile` makes such an environment).
"""

from __future__ import annotations

import re
from functools import cache

import pytest

pytest.importorskip("cutlass", reason="the CUTLASS DSL (optional extra) is not installed")
pytest.importorskip("nvidia.cu13", reason="the disassembler wheels are not installed")

from assay_kernels.kernels.sm100.compiler import KernelKey
from assay_kernels.kernels.sm100.config import TILE_K, GemmConfig
from assay_kernels.kernels.sm100.evidence import (
    Evidence,
    InstructionDescriptor,
    SharedDescriptor,
    gather,
)
from assay_kernels.kernels.sm100.pipeline import Protocol, epilogue_role, load_role, mma_role
from assay_kernels.kernels.sm100.shapes import all_keys

# The compiler's own advice and deprecations are not this test's subject.
pytestmark = pytest.mark.filterwarnings("ignore")

MMA = r"tcgen05\.mma\.cta_group::(\d)\.kind::mxf4nvf4\.block_scale\.block16"
FEW = [
    KernelKey("quantize"),
    KernelKey("quantize", dynamic=True, grouped=True),
    KernelKey("finalise"),
    KernelKey("gemm", GemmConfig.for_dense(6144, 7168, 1)),
    KernelKey("gemm", GemmConfig.for_dense(2048, 7168, 64), "fp32", row_scaled=True),
    KernelKey("gemm", GemmConfig.for_dense(7168, 3072, 4096)),
    KernelKey("gemm", GemmConfig.for_dense(768, 7168, 64, swiglu=True), "requantise"),
    KernelKey("gemm", GemmConfig.for_grouped(), "requantise", grouped=True),
    KernelKey("gemm", GemmConfig.for_grouped(), "fp32", row_scaled=True, grouped=True),
]


@cache
def evidence(key: KernelKey) -> Evidence:
    return gather(key)


def has(found: Evidence, opcode: str) -> bool:
    return any(name.startswith(opcode) for name in found.opcodes)


def check(key: KernelKey) -> None:
    found = evidence(key)
    assert found.stack == 0, f"{found.stack} bytes of stack"
    assert found.local_accesses == 0, "local memory is used"
    assert found.registers <= 168
    quantises = key.kind == "quantize" or key.epilogue == "requantise"
    assert has(found, "F2FP.SATFINITE.E2M1") == quantises, "E2M1 conversion"
    assert has(found, "F2FP.SATFINITE.E4M3") == quantises, "E4M3 conversion"
    if key.config is not None:
        check_product(key.config, found)


def modelled(protocol: Protocol) -> list[str]:
    """The kinds of steps of the three roles, one after the other, repetitions left out."""
    kinds: list[tuple[str, str]] = []
    for role in (
        load_role(protocol, 0, 1, 1),
        mma_role(protocol, 1, 1),
        epilogue_role(protocol, 0, 1, 1),
    ):
        for step in role:
            kind = (step.kind, step.barrier[0] if step.barrier else "")
            if step.kind != "leave":
                kinds.append(kind)
    return [kind for i, (kind, name) in enumerate(kinds) if (kind, name) != kinds[i - 1]]


def check_product(config: GemmConfig, found: Evidence) -> None:
    pair = ".2CTA" if config.ctas == 2 else ""
    steps = TILE_K // 64
    # Four block-scaled MMAs a stage, their scales by tcgen05.cp, everything else by TMA.
    assert re.findall(MMA, found.ptx) == [str(config.ctas)] * steps
    assert found.opcodes[f"UTCOMMA{pair}.4X"] == steps
    assert found.opcodes[f"UTMALDG.2D{pair}"] == 2, "TMA loads of codes"
    assert found.opcodes[f"UTMALDG.3D{pair}"] == 2, "TMA loads of scales"
    assert sum(c for o, c in found.opcodes.items() if o.startswith("UTCCP")) == steps * (
        1 + config.b_scale_tiles
    )
    assert has(found, "UTCBAR.2CTA.MULTICAST" if config.ctas == 2 else "UTCBAR"), "commit"
    assert has(found, "LDTM"), "accumulators"

    # What the tile shape implies for the descriptors.
    assert found.mma_descriptors() == {
        InstructionDescriptor(1, 1, config.tile_m, config.tile_n, ue8m0=False, transposed=False)
    }
    codes = SharedDescriptor(leading=16, stride=8 * TILE_K // 2, version=1, swizzle=2)
    # Eight rows of 16 bytes; one such column is all there is, so the leading offset is unused.
    scales = SharedDescriptor(leading=16, stride=128, version=1, swizzle=0)
    assert found.shared_descriptors() == {codes, scales}

    # Every tile of scales goes to columns of its own, behind the accumulators, and each MMA reads
    # those of its step.
    first = config.acc_stages * config.acc_columns
    assert sorted(found.scale_columns()) == list(range(first, first + config.scale_columns, 4))
    assert found.mma_scale_columns() == [
        (first + 4 * step, first + 4 * (steps + step * config.b_scale_tiles))
        for step in range(steps)
    ]
    assert first + config.scale_columns <= config.columns <= 512
    assert f"{config.columns}" in re.findall(r"mov\.b32\s+%r\d+, (\d+);", found.ptx)

    # Barriers, their arrivals, the bytes that the full ones wait for, and what every role does in
    # which order: as in the model that is searched.
    protocol = Protocol.of(config)
    assert found.barriers == config.barriers
    assert found.arrivals() == protocol.barrier_arrivals()
    assert found.expected_bytes() == {protocol.expected_bytes}
    assert found.synchronisation() == modelled(protocol)
    assert config.smem_bytes <= 227 * 1024


@pytest.mark.parametrize("key", FEW, ids=lambda key: key.name)
def test_machine_code_of_a_few_kernels(key: KernelKey) -> None:
    check(key)


@pytest.mark.slow
@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.name)
def test_machine_code_of_every_kernel(key: KernelKey) -> None:
    check(key)


def test_the_quantiser_compiles_for_hopper_without_the_e2m1_instruction() -> None:
    found = gather(KernelKey("quantize", dynamic=True), arch="sm_90a")
    assert not has(found, "F2FP.SATFINITE.E2M1")
    assert has(found, "F2FP.SATFINITE.E4M3")
    assert found.stack == 0
