"""Compiled kernels as object files on disk: compiled once, loaded ever after.

The CUTLASS DSL is an optional extra under NVIDIA's licence; what needs it says so in one sentence
when it is not there. Nothing here needs a GPU until a kernel runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

FUNCTION = "kernel"


class CompilerMissingError(RuntimeError):
    """The CUTLASS DSL is not installed."""


def require_dsl(who: str) -> None:
    """Raise CompilerMissingError, naming the remedy, if the DSL cannot be imported.

    who: whose kernels need it, as in 'Hopper'.
    """
    try:
        import_module("cutlass.cute")
    except ImportError as error:
        raise CompilerMissingError(
            f"the {who} kernels need the CUTLASS DSL: pip install 'assay-kernels[cuda]' "
            f"(under NVIDIA's licence, for systems with NVIDIA GPUs): {error}"
        ) from error


def fingerprint(arch: str, *folders: Path) -> str:
    """Hash of what a compiled kernel depends on: the folders' sources, the DSL, the target."""
    digest = hashlib.sha256(arch.encode())
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        digest.update(f"{package}={metadata.version(package)}".encode())
    for folder in folders:
        for source in sorted(folder.glob("*.py")):
            digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """`ASSAY_KERNEL_CACHE`, or the user's cache folder."""
    root = os.environ.get("ASSAY_KERNEL_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "assay" / "kernels"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def load(path: Path, compile_kernel: Callable[[], Any]) -> Callable[..., None]:
    """The kernel in an object file, which is compiled first where it is not there.

    The file appears whole or not at all: a process killed while it writes leaves nothing that
    another would load. compile_kernel: gives what has `export_to_c`.
    """
    import cutlass.cute as cute

    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                handle, temporary = tempfile.mkstemp(suffix=".o", dir=folder)
                os.close(handle)
                try:
                    compile_kernel().export_to_c(temporary, function_name=FUNCTION)
                    os.replace(temporary, path)
                finally:
                    Path(temporary).unlink(missing_ok=True)
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    function: Callable[..., None] = module[FUNCTION]
    return function
