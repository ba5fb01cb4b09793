"""What a kernel's PTX and machine code say about it: read, never run.

Needs the wheels nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump besides the DSL.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from assay_kernels.kernels.sm100.compiler import ARCH, KernelKey, cache_folder, compile_kernel


@dataclass(frozen=True)
class InstructionDescriptor:
    """The fields of a block-scaled tcgen05.mma's descriptor (PTX ISA, `.kind::mxf4nvf4`)."""

    a_type: int  # 1: E2M1
    b_type: int
    m: int
    n: int
    ue8m0: bool  # scale type; False: UE4M3
    transposed: bool

    @classmethod
    def decode(cls, bits: int) -> InstructionDescriptor:
        return cls(
            a_type=bits >> 7 & 7,
            b_type=bits >> 10 & 3,
            m=(bits >> 27 & 3) << 7,
            n=(bits >> 17 & 63) << 3,
            ue8m0=bool(bits >> 23 & 1),
            transposed=bool(bits >> 15 & 3),
        )


@dataclass(frozen=True)
class SharedDescriptor:
    """The constant fields of a shared-memory descriptor (PTX ISA, tcgen05); offsets in bytes."""

    leading: int
    stride: int
    version: int
    swizzle: int  # 0: none, 2: 128 bytes

    @classmethod
    def decode(cls, bits: int) -> SharedDescriptor:
        return cls(
            leading=(bits >> 16 & 0x3FFF) * 16,
            stride=(bits >> 32 & 0x3FFF) * 16,
            version=bits >> 46 & 7,
            swizzle=bits >> 61 & 7,
        )


@dataclass(frozen=True)
class Evidence:
    name: str
    seconds: float
    registers: int
    stack: int
    local_accesses: int
    barriers: int
    opcodes: dict[str, int]
    ptx: str
    sass: str

    def as_json(self) -> dict[str, Any]:
        """Everything but the code itself."""
        return {k: v for k, v in asdict(self).items() if k not in ("ptx", "sass")}

    def mma_descriptors(self) -> set[InstructionDescriptor]:
        """The compiler chooses between a constant and the same with A negated (bit 13)."""
        pairs = re.findall(r"selp\.b32\s+%r\d+, (\d+), (\d+), %p\d+;", self.ptx)
        return {
            InstructionDescriptor.decode(int(plain))
            for negated, plain in pairs
            if int(negated) - int(plain) == 1 << 13
        }

    def shared_descriptors(self) -> set[SharedDescriptor]:
        constants = re.findall(r"or\.b64\s+%rd\d+, %rd\d+, (\d+);", self.ptx)
        return {SharedDescriptor.decode(int(bits)) for bits in constants if int(bits) >> 46 & 7}

    def scale_columns(self) -> list[int]:
        """Tensor-memory columns, from the allocation's first, that scales are copied to."""
        offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", self.ptx))
        targets = re.findall(r"tcgen05\.cp\S+32x128b\.warpx4\s+\[(%r\d+)\]", self.ptx)
        return [int(offsets[register]) for register in targets]

    def mma_scale_columns(self) -> list[tuple[int, int]]:
        """(first operand's, second operand's) scale columns of every MMA."""
        offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", self.ptx))
        found = re.findall(r"tcgen05\.mma\S+\s.*\[(%r\d+)\], \[(%r\d+)\], %p", self.ptx)
        return [(int(offsets[a]), int(offsets[b])) for a, b in found]

    def expected_bytes(self) -> set[int]:
        """Bytes that the full barriers are told to wait for."""
        values = dict(re.findall(r"mov\.(?:b32|u32)\s+(%r\d+), (\d+);", self.ptx))
        operands = re.findall(r"mbarrier\.arrive\.expect_tx\S+\s+%rd\d+, \[\S+\], (\S+);", self.ptx)
        return {int(values.get(operand, operand)) for operand in operands}

    def arrivals(self) -> list[int]:
        """Arrivals of each barrier, in the order of their initialisation."""
        values = dict(re.findall(r"mov\.(?:b32|u32)\s+(%r\d+), (\d+);", self.ptx))
        counts = re.findall(r"mbarrier\.init\S+\s+\[\S+\], (\S+);", self.ptx)
        return [int(values.get(count, count)) for count in counts]

    def synchronisation(self) -> list[str]:
        """What the code does to barriers and buffers, in its order, repetitions left out."""
        kinds: list[str] = []
        for match in re.finditer("|".join(_SYNCHRONISATION.values()), self.ptx):
            kind = next(k for k, p in _SYNCHRONISATION.items() if re.match(p, match[0]))
            if kind == "wait" or kind == "commit" or kinds[-1:] != [kind]:
                kinds.append(kind)
        return kinds


_SYNCHRONISATION = {
    "wait": r"mbarrier\.try_wait\.",
    "expect": r"mbarrier\.arrive\.expect_tx",
    "arrive": r"mbarrier\.arrive\.(?!expect)",
    "copy": r"cp\.async\.bulk\.tensor",
    "mma": r"tcgen05\.mma\.",
    "commit": r"tcgen05\.commit",
    "read": r"tcgen05\.ld\.",
}


def _tool(name: str) -> Path:
    package = import_module("nvidia.cu13")
    return Path(package.__path__[0]) / "bin" / name


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def gather(key: KernelKey, arch: str = ARCH) -> Evidence:
    """Compile for `arch` without a GPU and read the result.

    With `ASSAY_KERNEL_CACHE` set, what was read is kept there under the sources' fingerprint.
    """
    if not os.environ.get("ASSAY_KERNEL_CACHE"):
        return _gather(key, arch)
    path = cache_folder() / f"{key.name}.{arch}.json"
    if path.exists():
        return Evidence(**json.loads(path.read_text()))
    found = _gather(key, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(found)))
    os.replace(temporary, path)
    return found


def _gather(key: KernelKey, arch: str) -> Evidence:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.perf_counter()
        compiled = compile_kernel(key, dump=folder, arch=arch)
        seconds = time.perf_counter() - begin
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(compiled.__cubin__)
        sass = _output(_tool("nvdisasm"), "-c", cubin)
        usage = _output(_tool("cuobjdump"), "--dump-resource-usage", cubin)
        ptx = compiled.__ptx__
    resources = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    opcodes: dict[str, int] = {}
    for opcode in re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?([A-Z][A-Z0-9_.a-z]*)", sass, re.M
    ):
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
    return Evidence(
        name=key.name,
        seconds=round(seconds, 1),
        registers=int(resources["REG"]),
        stack=int(resources["STACK"]),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        barriers=len(re.findall(r"mbarrier\.init", ptx)),
        opcodes=opcodes,
        ptx=ptx,
        sass=sass,
    )
