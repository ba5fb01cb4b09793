"""vLLM's own layer classes around the plugin's methods, filled through vLLM's own weight loaders:
the way that a checkpoint's bytes take to a kernel's output, without a model around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from assay_kernels.checkpoint import Dialect
from assay_kernels.kernels.cpu.nvfp4 import Arithmetic, CpuKernels
from assay_kernels.vllm_plugin.quant_config import AssayConfig

from . import oracle

INPUT_SCALE = 2.0**-4
HIDDEN = 256
LIMIT = 10.0


class StoredAsNvFp4:
    """Stands for an opened checkpoint in which everything is NVFP4."""

    directory = "test"
    dialect = Dialect.B
    config = SimpleNamespace(num_hidden_layers=2_000_000)

    def precision(self, entry: str) -> str:
        return "nvfp4"


def quant_config(arithmetic: Arithmetic) -> AssayConfig:
    config = AssayConfig(CpuKernels(arithmetic))
    config._checkpoint = StoredAsNvFp4()  # type: ignore[assignment]
    return config


@dataclass
class Matrix:
    """One NVFP4 matrix as a checkpoint stores it."""

    codes: oracle.Bytes
    block_scale: oracle.Bytes
    global_scale: float
    input_scale: float = INPUT_SCALE
    values: oracle.Real = field(init=False)

    def __post_init__(self) -> None:
        self.values = oracle.dequantise(self.codes, self.block_scale, self.global_scale)

    @classmethod
    def random(cls, rng: np.random.Generator, n: int, k: int, global_scale: float) -> Matrix:
        """Random codes and random normal positive scales between 2^-2 and 2^2: nothing is
        symmetric, nothing is one."""
        codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        scale = rng.integers(0x28, 0x48, (n, k // 16), dtype=np.uint8)
        return cls(codes, scale, global_scale)

    def tensors(self) -> dict[str, Tensor]:
        """By parameter name."""
        return {
            "weight": torch.from_numpy(self.codes.copy()),
            "weight_scale": torch.from_numpy(self.block_scale.copy()).view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(self.global_scale),
            "input_scale": torch.tensor(self.input_scale),
        }


def activation(rng: np.random.Generator, m: int, k: int = HIDDEN) -> Tensor:
    """(m, k) bf16 that NVFP4 holds exactly, at INPUT_SCALE as at a scale per row: every mode must
    then give the same.

    Each block of 16 has E2M1 values with a 6 among them, times a power of two.
    """
    codes = rng.integers(0, 16, (m, k // 16, 16), dtype=np.uint8)
    codes[..., 0] |= 7
    power = 2.0 ** rng.integers(-3, 3, (m, k // 16, 1))
    return torch.from_numpy((oracle.e2m1(codes) * power).reshape(m, k)).to(torch.bfloat16)


def linear(
    prefix: str,
    partitions: Sequence[Matrix],
    arithmetic: Arithmetic = "w4a16",
    without: tuple[str, int] | None = None,
) -> MergedColumnParallelLinear:
    """A fused layer, filled by partition; `without` leaves out one (parameter, partition)."""
    layer = MergedColumnParallelLinear(
        partitions[0].values.shape[1], [p.values.shape[0] for p in partitions], bias=False,
        return_bias=False, quant_config=quant_config(arithmetic), disable_tp=True,
        params_dtype=torch.bfloat16, prefix=prefix,
    )  # fmt: skip
    for index, matrix in enumerate(partitions):
        for name, tensor in matrix.tensors().items():
            if (name, index) != without:
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, index)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


Expert = dict[str, Matrix]
"""w1 (gate), w3 (up) and w2 (down) of one routed expert."""


def experts(
    stack: Sequence[Expert],
    arithmetic: Arithmetic = "w4a16",
    without: tuple[str, str, int] | None = None,
) -> Any:
    """Routed experts, filled by matrix; `without` leaves out one (matrix, parameter, expert)."""
    width, hidden = stack[0]["w1"].values.shape
    layer = FusedMoEFactory(
        num_experts=len(stack), top_k=6, hidden_size=hidden, intermediate_size=width,
        quant_config=quant_config(arithmetic),
        prefix=f"model.layers.{next(_numbers)}.ffn.experts",
        scoring_func="sqrtsoftplus", swiglu_limit=LIMIT, params_dtype=torch.bfloat16,
        router_logits_dtype=torch.float32,
    ).routed_experts  # fmt: skip
    for index, expert in enumerate(stack):
        for matrix, stored in expert.items():
            stem = "w2" if matrix == "w2" else "w13"
            for name, tensor in stored.tensors().items():
                if (matrix, name, index) != without:
                    full = f"{stem}_{name}"
                    parameter = getattr(layer, full)
                    loaded = parameter.weight_loader(
                        parameter,
                        tensor,
                        full,
                        shard_id=matrix,
                        expert_id=index,
                        return_success=True,
                    )
                    assert loaded, (full, matrix, index)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


_numbers = iter(range(1_000_000))  # vLLM wants every expert layer's prefix to be its own
