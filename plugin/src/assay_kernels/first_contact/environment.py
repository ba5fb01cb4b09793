"""What the machine is."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch

from assay_kernels import __version__

PACKAGES = (
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flashinfer-python",
    "quack-kernels",
    "humming-kernels",
    "vllm",
)

ARCHITECTURES = {(10, 0): "sm_100", (9, 0): "sm_90"}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def architecture() -> str:
    """sm_100, sm_90 or cpu: which kernels this machine runs.

    Raises ValueError for a GPU that has no kernels here.
    """
    if not torch.cuda.is_available():
        return "cpu"
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        raise ValueError(
            f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}: "
            "there are kernels for sm_100 (B200) and sm_90 (H100, H200)"
        )
    return ARCHITECTURES[capability]


def describe() -> dict[str, Any]:
    """Versions, GPU and driver; nothing that identifies the host."""
    found: dict[str, Any] = {
        "assay-kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **{package: _version(package) for package in PACKAGES},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["capability"] = list(torch.cuda.get_device_capability())
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
            done = subprocess.run(query, capture_output=True, text=True, check=False)
            found["driver"] = done.stdout.strip()
    return found
