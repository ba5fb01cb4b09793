"""The self-check of a loaded vLLM model: settings in, report to log, disk and proof."""

from __future__ import annotations

import platform
from typing import Any

import torch
from vllm.logger import init_logger

from assay_kernels import __version__, selfcheck, settings
from assay_kernels.checkpoint import Checkpoint
from assay_kernels.kernels.interface import KernelSet
from assay_kernels.kernels.tiled import ReferenceKernels
from assay_kernels.vllm_plugin.subjects import subjects

logger = init_logger("vllm.assay")


def fallbacks() -> list[KernelSet]:
    """What may take a failed kernel's place, in order. vLLM's own kernels are not among them: they
    serve whole models (ASSAY_KERNELS=library), not layers."""
    return [ReferenceKernels()]


def environment(device: torch.device) -> dict[str, str]:
    """What the outcome may depend on, for who reads the report elsewhere."""
    found = {"assay": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
        }
    return found


def check_model(
    model: Any, checkpoint: Checkpoint, arch: str, device: torch.device
) -> selfcheck.Report:
    """Check every layer that our methods serve; raises SelfCheckError where one cannot be served.

    The report goes to the log and to `assay/selfcheck-rankN.json` in the cache folder.
    """
    found = list(subjects(model, checkpoint, device))
    report = selfcheck.run(
        found,
        selfcheck.ShardReader(checkpoint),
        fallbacks=fallbacks(),
        policy=settings.on_mismatch(),
        deadline=selfcheck.Deadline(settings.selfcheck_timeout()),
        arch=arch,
        environment=environment(device),
    )
    log = logger.warning if report.replaced else logger.info
    log("%s", report.table())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = settings.cache_folder() / "assay" / f"selfcheck-rank{rank}.json"
    try:
        report.write(path)
    except OSError as error:
        logger.warning("the self-check's report could not be written to %s: %s", path, error)
    return report
