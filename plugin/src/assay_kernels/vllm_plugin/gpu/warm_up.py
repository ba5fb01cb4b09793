"""Every kernel that serving can ask for, compiled before the door opens.

Which kernel a layer takes depends on its shape and on how many tokens a step has. So each distinct
layer runs once at every row count from which another kernel may serve it.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from vllm.logger import init_logger

from assay_kernels.checkpoint import Checkpoint
from assay_kernels.selfcheck import ExpertsSubject, LinearSubject, Subject
from assay_kernels.vllm_plugin.subjects import subjects

logger = init_logger("vllm.assay")

SIZES = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)


def sizes(most: int) -> list[int]:
    """Row counts to run at, up to what one step may hold; neighbours too, where tiles end."""
    each = {n for size in SIZES for n in (size, size + 1) if n <= most}
    return sorted(each | {most})


def warm_up(model: nn.Module, checkpoint: Checkpoint, device: torch.device, most: int) -> None:
    """Run each distinct layer that our methods serve at every size."""
    began = time.monotonic()
    done: set[tuple[str, str, str]] = set()
    for subject in subjects(model, checkpoint, device):
        key = (subject.kind, subject.shape, subject.kernels.name)
        if key not in done:
            done.add(key)
            for rows in sizes(most):
                _run(subject, rows)
    torch.cuda.synchronize(device)
    logger.info("%d kinds of layers warmed up in %.1f s", len(done), time.monotonic() - began)


def _run(subject: Subject, rows: int) -> None:
    device = subject.device
    if isinstance(subject, LinearSubject):
        shape = (subject.groups, subject.k) if subject.op == "wo_a" else (subject.k,)
        subject.run(torch.zeros(rows, *shape, dtype=torch.bfloat16, device=device))
        return
    assert isinstance(subject, ExpertsSubject)
    x = torch.zeros(rows, subject.hidden, dtype=torch.bfloat16, device=device)
    slots = torch.arange(rows * subject.top_k, device=device).view(rows, subject.top_k)
    ids = (slots % subject.num_global).int()
    subject.both(x, subject.route(ids, torch.ones_like(ids, dtype=torch.float32)))
