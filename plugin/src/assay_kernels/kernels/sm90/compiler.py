"""What is compiled for sm_90a: keys, and the compiler's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from assay_kernels.kernels import objects
from assay_kernels.kernels.sm90.config import GemmConfig

Epilogue = Literal["bf16", "fp32", "swiglu", "combine"]
ARCH = "sm_90a"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class KernelKey:
    """What is compiled: a product of one configuration, or the gather before a grouped one."""

    config: GemmConfig | None
    epilogue: Epilogue = "bf16"
    experts: int = 0
    after_router: bool = False

    @property
    def name(self) -> str:
        if self.config is None:
            return "gather"
        grouped = f"_e{self.experts}{'r' if self.after_router else ''}" if self.experts else ""
        return f"{self.epilogue}{grouped}_{self.config.name}"


def require_dsl() -> None:
    """Raise CompilerMissingError, naming the remedy, if the DSL cannot be imported."""
    objects.require_dsl("Hopper")


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Hash of everything a compiled kernel depends on."""
    return objects.fingerprint(ARCH, HERE, HERE.parent / "shared")


def cache_folder() -> Path:
    """Where these sources' kernels are kept."""
    return objects.cache_folder() / fingerprint()


def compile_kernel(key: KernelKey, dump: Path | None = None) -> Any:
    """Compile for sm_90a on any host. The result has `export_to_c`.

    dump: an existing folder for the compiler's own files; the result then has `__cubin__` too.
    """
    require_dsl()
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from assay_kernels.kernels.sm90.gather import Gather
    from assay_kernels.kernels.sm90.gemm import Gemm

    def flat(dtype: Any, align: int) -> Any:
        return make_fake_tensor(dtype, (cute.sym_int64(),), (1,), assumed_align=align)

    def matrix(dtype: Any) -> Any:
        return make_fake_tensor(
            dtype,
            (cute.sym_int32(), cute.sym_int32(divisibility=8)),
            (cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )

    def short() -> Any:
        return make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    zero = Int32(0)
    options = f"--enable-tvm-ffi --gpu-arch {ARCH}"
    if dump is not None:
        options += f" --keep-cubin --dump-dir {dump}"
    if key.config is None:
        return cute.compile(
            Gather(), matrix(BFloat16), matrix(BFloat16), short(), short(), short(),
            matrix(BFloat16), zero, zero, stream, options=options,
        )  # fmt: skip
    gemm = Gemm(key.config, key.epilogue, key.experts, key.after_router)
    weights = (flat(Int32, 16), flat(Int32, 16), flat(Float32, 16))
    out = matrix(Float32 if key.epilogue == "fp32" else BFloat16)
    if not key.experts:
        return cute.compile(
            gemm, *weights, matrix(BFloat16), out, zero, zero, zero, Float32(0), zero, zero,
            stream, options=options,
        )  # fmt: skip
    return cute.compile(
        gemm.grouped, *weights, matrix(BFloat16), out, short(), flat(Int32, 4), flat(Float32, 4),
        flat(Int32, 4), flat(Float32, 16), flat(Int32, 4), zero, zero, Float32(0), zero, zero,
        stream, options=options,
    )  # fmt: skip


@cache
def load_kernel(key: KernelKey) -> Callable[..., None]:
    """The compiled kernel, from this process, the disk, or the compiler, in that order.

    Call this before CUDA graphs are captured.
    """
    require_dsl()
    return objects.load(cache_folder() / f"{key.name}.o", lambda: compile_kernel(key))
