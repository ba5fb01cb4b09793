"""What is compiled for sm_100a: keys, and the compiler's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from assay_kernels.kernels import objects
from assay_kernels.kernels.sm100.config import GemmConfig

Epilogue = Literal["bf16", "fp32", "swiglu", "requantise"]
Kind = Literal["gemm", "quantize", "finalise"]
ARCH = "sm_100a"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class KernelKey:
    """What is compiled: a product, the quantiser before it or the sum after it."""

    kind: Kind
    config: GemmConfig | None = None
    epilogue: Epilogue = "bf16"
    row_scaled: bool = False
    grouped: bool = False
    dynamic: bool = False

    @property
    def name(self) -> str:
        parts: list[str] = [self.kind if self.config is None else self.config.name]
        if self.config is not None:
            parts.insert(0, self.epilogue)
        parts += [flag for flag in ("row_scaled", "grouped", "dynamic") if getattr(self, flag)]
        return "_".join(parts)


def require_dsl() -> None:
    """Raise CompilerMissingError, naming the remedy, if the DSL cannot be imported."""
    objects.require_dsl("Blackwell")


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Hash of everything a compiled kernel depends on."""
    return objects.fingerprint(ARCH, HERE, HERE.parent / "shared")


def cache_folder() -> Path:
    """Where these sources' kernels are kept."""
    return objects.cache_folder() / fingerprint()


def compile_kernel(key: KernelKey, dump: Path | None = None, arch: str = ARCH) -> Any:
    """Compile on any host. The result has `export_to_c`.

    dump: an existing folder for the compiler's own files; the result then has `__ptx__` and
    `__cubin__` too. arch: sm_90a compiles the quantiser with its stand-in for E2M1 conversion.
    """
    require_dsl()
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32, Int32, Int64, Uint8
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from assay_kernels.kernels.sm100.finalise import Finalise
    from assay_kernels.kernels.sm100.gemm import OUT, Gemm
    from assay_kernels.kernels.sm100.quantize import Quantize

    def flat(dtype: Any, align: int = 16) -> Any:
        return make_fake_tensor(dtype, (cute.sym_int64(),), (1,), assumed_align=align)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    i, f = Int32(0), Float32(0)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    if dump is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {dump}"
    if key.kind == "quantize":
        kernel: Any = Quantize(key.dynamic, key.grouped, hardware=arch == ARCH)
        arguments = [flat(BFloat16), flat(Uint8), flat(Uint8), flat(Float32, 4), flat(Int32, 4)]
        arguments += [i, Int64(0), i, i, f, i]
    elif key.kind == "finalise":
        kernel = Finalise()
        arguments = [flat(Float32), flat(Int32, 4), flat(BFloat16), i, i, i, i]
    else:
        assert key.config is not None
        kernel = Gemm(key.config, key.epilogue, key.row_scaled, key.grouped)
        arguments = [flat(Uint8) for _ in range(4)]
        arguments += [flat(Float32), flat(Float32, 4), flat(OUT[key.epilogue]), flat(Uint8)]
        arguments += [flat(Int32, 4), i, i, i, i, i, f, f, i, i]
    return cute.compile(kernel, *arguments, stream, options=options)


@cache
def load_kernel(key: KernelKey) -> Callable[..., None]:
    """The compiled kernel, from this process, the disk, or the compiler, in that order.

    Call this before CUDA graphs are captured.
    """
    require_dsl()
    return objects.load(cache_folder() / f"{key.name}.o", lambda: compile_kernel(key))
