"""Kernels compiled for sm_90a without a GPU, and what their machine code must and must not hold.

Runs where the CUTLASS DSL is installed (`make test-gpu-compile` makes such an environment).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CUTLASS DSL (optional extra) is not installed")

from assay_kernels.kernels.sm90 import compiler
from assay_kernels.kernels.sm90.compiler import KernelKey, compile_kernel
from assay_kernels.kernels.sm90.config import GemmConfig

# The compiler's own advice and deprecations are not this test's subject.
pytestmark = pytest.mark.filterwarnings("ignore")

FEW = [
    KernelKey(GemmConfig.for_dense(6144, 7168, 1)),
    KernelKey(GemmConfig.for_dense(6144, 7168, 64)),
    KernelKey(GemmConfig.for_dense(7168, 3072, 4096)),
    KernelKey(GemmConfig.from_analytical_heuristic(768, 7168, 32), "swiglu"),
    KernelKey(GemmConfig.from_analytical_heuristic(2048, 7168, 16), "fp32"),
    KernelKey(GemmConfig.for_dense(8192, 1536, 128)),
    KernelKey(GemmConfig.from_analytical_heuristic(384, 4096, 256, 192)),
    KernelKey(GemmConfig.for_grouped(7168, 1500, 48), "swiglu", 64),
    KernelKey(GemmConfig.for_grouped(3072, 12000, 48, 7168), "combine", 64, True),
    KernelKey(None),
]
ALL = sorted(
    {
        *(
            KernelKey(GemmConfig.for_dense(n, k, m))
            for n, k in [(6144, 7168), (7168, 3072), (8192, 1536), (2048, 7168), (7168, 2048)]
            for m in (1, 16, 32, 64, 128, 256, 1024, 4096)
        ),
        *(
            KernelKey(
                GemmConfig.for_grouped(k, rows, experts, n),
                epilogue,
                64 if experts <= 64 else 256,
                epilogue == "combine",
            )
            for n, k in ((4096, 2048), (6144, 7168))
            for rows in (1, 6, 300, 600, 3000, 9000, 90000)
            for experts in (48, 256)
            for epilogue in ("swiglu", "combine")
        ),
    },
    key=lambda key: key.name,
)


def tool(name: str) -> Path:
    """A program of the nvidia-cuda-nvdisasm / -cuobjdump wheels."""
    root = pytest.importorskip("nvidia.cu13", reason=f"the {name} wheel is not installed")
    path = Path(root.__path__[0]) / "bin" / name
    if not path.exists():
        pytest.skip(f"the {name} wheel is not installed")
    return path


def inspect(key: KernelKey, folder: Path) -> None:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_kernel(key, dump=folder).__cubin__)
    sass = subprocess.run(
        [tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    usage = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", cubin],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert re.search(r"STACK:0\b", usage), usage
    assert not re.search(r"\b(LDL|STL)\b", sass), "local memory is used"
    if key.config is None:
        return
    assert "UBLKCP" in sass, "no bulk copy of packed weights"
    assert "UTMALDG" in sass, "no TMA load of tokens"
    if key.config.warp_mma:
        assert re.search(r"HMMA\.16816\.F32\.BF16", sass), "no mma.sync"
        return
    products = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16 R\d+, (\S+),", sass)
    assert products, "no wgmma"
    for tokens, operand in products:
        assert int(tokens) in key.config.widths
        assert re.fullmatch(r"R\d+", operand), f"A comes from {operand}, not from registers"
    assert {int(tokens) for tokens, _ in products} == set(key.config.widths)
    # Serialised wgmma waits for every product; one full wait ends a tile of each width.
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", sass)
    assert len(waits) <= len(key.config.widths), "the compiler serialised wgmma"
    # Turns: a warpgroup waits for its own and gives the next one theirs around every group.
    groups = key.config.k_blocks * key.config.tiles * 4 // key.config.group
    turns = len(re.findall(r"BAR\.ARV", sass))
    if key.config.alternate:
        assert turns >= groups, "no turns at the tensor cores"
    elif key.epilogue != "combine":  # whose sums are handed over by barriers too
        assert turns == 0, "turns at the tensor cores"


@pytest.mark.parametrize("key", FEW, ids=lambda key: key.name)
def test_machine_code_of_a_few_configurations(key: KernelKey, tmp_path: Path) -> None:
    inspect(key, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key", ALL, ids=lambda key: key.name)
def test_machine_code_of_all_configurations(key: KernelKey, tmp_path: Path) -> None:
    inspect(key, tmp_path)


class Interrupted:
    """A compiled kernel whose export stops half way."""

    def export_to_c(self, path: str, function_name: str) -> None:
        Path(path).write_bytes(b"half an obj")
        raise KeyboardInterrupt


def test_an_interrupted_export_leaves_nothing_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_kernel", lambda key: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        compiler.load_kernel(FEW[0])
    assert not list(tmp_path.rglob("*.o"))


def test_a_compiled_kernel_is_taken_from_the_disk_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_KERNEL_CACHE", str(tmp_path))
    key = KernelKey(None)
    compiler.load_kernel.cache_clear()
    compiler.load_kernel(key)
    assert [path.name for path in tmp_path.rglob("*.o")] == ["gather.o"]
    compiler.load_kernel.cache_clear()
    monkeypatch.setattr(compiler, "compile_kernel", lambda key: pytest.fail("compiled again"))
    compiler.load_kernel(key)
