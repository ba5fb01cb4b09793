"""The self-check before serving (design contract 4): every kernel and every weight, on the hardware
and the checkpoint at hand.

*Kernels*: each distinct kind and shape of layer, at 1, 7, 64 and 129 rows, against fp32 on values
that are computed from the shard's bytes, by the rule of `numerics.error`. *Weights*: 64 output
channels of every matrix of every layer and expert, through the kernel, against the same. Both
twice, bit for bit, and on a GPU inside a captured graph too. Nothing here knows vLLM.
"""

from assay_kernels.selfcheck.deadline import Deadline
from assay_kernels.selfcheck.report import Report, Row
from assay_kernels.selfcheck.run import SelfCheckError, run
from assay_kernels.selfcheck.shards import Part, ShardReader
from assay_kernels.selfcheck.subject import ExpertsSubject, LinearSubject, Subject

__all__ = [
    "Deadline",
    "ExpertsSubject",
    "LinearSubject",
    "Part",
    "Report",
    "Row",
    "SelfCheckError",
    "ShardReader",
    "Subject",
    "run",
]
