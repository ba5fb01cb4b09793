"""Which kernels serve NVFP4 layers here: the settings' wish, held against the hardware."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.platforms import current_platform

from assay_kernels.checkpoint import Dialect
from assay_kernels.kernels.interface import KernelSet
from assay_kernels.settings import Kernels, arithmetic, kernels, require

BY_CAPABILITY: Mapping[int, Kernels] = {9: "sm90", 10: "sm100"}
NEEDS_CAPABILITY = {name: major for major, name in BY_CAPABILITY.items()}


class KernelChoiceError(ValueError):
    """The settings ask for kernels that this hardware, or this checkpoint, cannot have."""


def arch() -> str:
    """'cpu', or 'sm_90' and the like: the name that profiles and policies use."""
    if current_platform.is_cpu():
        return "cpu"
    capability = current_platform.get_device_capability()
    return f"sm_{capability.major}{capability.minor}"


def chosen(dialect: Dialect) -> Kernels:
    """Never 'auto'; 'library' leaves every layer to vLLM. Raises KernelChoiceError."""
    wish = kernels()
    if current_platform.is_cpu():
        if wish in ("auto", "cpu"):
            return "cpu"
        if wish == "reference":
            return wish
        raise KernelChoiceError(f"ASSAY_KERNELS={wish}: on a CPU there are cpu and reference")
    if current_platform.is_rocm() or current_platform.is_xpu():
        return "library"  # not ours to serve
    major = current_platform.get_device_capability().major
    if wish == "library":
        if require():
            raise KernelChoiceError(
                "ASSAY_KERNELS=library leaves NVFP4 layers to vLLM, which ASSAY_REQUIRE=1 forbids"
            )
        if dialect is not Dialect.A:
            raise KernelChoiceError(
                f"ASSAY_KERNELS=library: vLLM cannot load a checkpoint of dialect {dialect}"
            )
        return wish
    if wish == "reference":
        return wish
    if wish == "auto":
        if major not in BY_CAPABILITY:
            raise KernelChoiceError(
                f"there are no kernels for {arch()}; ASSAY_KERNELS=reference serves it, slowly"
            )
        wish = BY_CAPABILITY[major]
    elif NEEDS_CAPABILITY.get(wish) != major:
        raise KernelChoiceError(f"ASSAY_KERNELS={wish}: this GPU is {arch()}")
    if wish == "sm100":
        raise KernelChoiceError(
            "Blackwell kernels have never run (`assay-kernels first-contact` runs them) and serve"
            " no layer yet; ASSAY_KERNELS=reference serves, slowly"
        )
    return wish


def make(choice: Kernels) -> KernelSet:
    """The kernel set of a choice. Raises KernelChoiceError where its arithmetic is another."""
    mode = arithmetic()
    if choice == "reference":
        from assay_kernels.kernels.tiled import ReferenceKernels

        return ReferenceKernels()
    if choice == "cpu":
        from assay_kernels.kernels.cpu.nvfp4 import CpuKernels

        return CpuKernels(mode)
    if choice == "sm90":
        if mode != "w4a16":
            raise KernelChoiceError(f"ASSAY_ARITHMETIC={mode}: Hopper kernels compute w4a16")
        from assay_kernels.kernels.sm90.kernels import HopperKernels

        return HopperKernels()
    raise KernelChoiceError(f"no kernel set for ASSAY_KERNELS={choice}")


def mode(kernel_set: KernelSet) -> str:
    """Arithmetic that a kernel set serves, as `assay_info` names it."""
    if "reference" in kernel_set.name:
        return "reference"
    return "w4a4" if kernel_set.quantizes_activations else "w4a16"
