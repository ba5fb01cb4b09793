"""The quantisation config that serves DeepSeek V4 in NVFP4, whatever dialect stores it.

What a module is stored as is read from the checkpoint's own headers, not from lists in
``config.json``: those name modules differently in each dialect, and a module that such a list
forgets would be built for the wrong storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.platforms import current_platform

from assay_kernels.checkpoint import (
    Checkpoint,
    CheckpointError,
    Dialect,
    Precision,
    declared_dialect,
    open_checkpoint,
)
from assay_kernels.kernels.interface import KernelSet
from assay_kernels.numerics import FP8_BLOCK
from assay_kernels.vllm_plugin import kernel_choice, modules
from assay_kernels.vllm_plugin.layers import (
    AssayModelOptNvFp4ExpertsMethod,
    NvFp4LinearMethod,
    PlainExpertsMethod,
    PlainLinearMethod,
)
from assay_kernels.vllm_plugin.loading import checkpoint_directory

NAME = "assay"


class AssayConfig(QuantizationConfig):
    """Chooses a method for each layer by what the checkpoint stores for it."""

    def __init__(
        self, kernels: KernelSet | None = None, marks: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._marks = marks or {}
        self._checkpoint: Checkpoint | None = None
        self._vllm_fp8: QuantizationConfig | None = None

    @classmethod
    def get_name(cls) -> str:
        """Name under which vLLM knows this config."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activations are bf16."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper (9.0) where there is a GPU; a CPU is not asked."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Nothing beside ``config.json``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AssayConfig:
        """The dict recognises the checkpoint, and serves vLLM's own FP8 layers; headers say the
        rest."""
        return cls(marks=config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim DeepSeek V4 checkpoints in a dialect of NVFP4, where our kernels serve them.

        Raises KernelChoiceError where the settings ask for what there is not.
        """
        if getattr(hf_config, "model_type", None) != "deepseek_v4":
            return None
        dialect = declared_dialect(hf_quant_cfg)
        if dialect not in (Dialect.A, Dialect.B, Dialect.C):
            return None
        return None if kernel_choice.chosen(dialect) == "library" else NAME

    @property
    def kernels(self) -> KernelSet:
        """The kernel set of this process, made on first use."""
        if self._kernels is None:
            self._kernels = kernel_choice.make(kernel_choice.chosen(self.checkpoint.dialect))
        return self._kernels

    @property
    def weight_block_size(self) -> list[int] | None:
        """[128, 128] where shared experts are FP8: vLLM pads those to whole blocks a rank."""
        if current_platform.is_cpu() or get_current_vllm_config_or_none() is None:
            return None  # vLLM also asks while it still puts its configuration together
        stored = self.checkpoint.precision("layers.0.ffn.shared_experts.w1")
        return [FP8_BLOCK, FP8_BLOCK] if stored == Precision.FP8_BLOCK else None

    @property
    def vllm_fp8(self) -> QuantizationConfig:
        """vLLM's own config for what is FP8 in the checkpoint, and for its draft layers."""
        if self._vllm_fp8 is None:
            from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

            marks = self._marks
            if self.checkpoint.dialect is not Dialect.A:
                marks = {
                    "quant_method": "fp8",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                }
            self._vllm_fp8 = DeepseekV4FP8Config.from_config(marks)
            self._vllm_fp8.packed_modules_mapping = self.packed_modules_mapping
        return self._vllm_fp8

    def in_nvfp4(self, prefix: str) -> bool:
        """Whether the linear layer that vLLM calls `prefix` is stored in NVFP4."""
        return self._storage(modules.partitions(prefix)) == Precision.NVFP4

    @property
    def checkpoint(self) -> Checkpoint:
        """Headers of the checkpoint being served, validated against its config."""
        if self._checkpoint is None:
            directory = checkpoint_directory(get_current_vllm_config().model_config)
            self._checkpoint = open_checkpoint(directory)
            limit = self._checkpoint.config.raw.get("swiglu_limit", "missing")
            if not isinstance(limit, int | float) or not 0 < limit < float("inf"):
                rule = f"swiglu_limit must be a positive number, is {limit}"
                raise CheckpointError("config.json", None, rule)
        return self._checkpoint

    def _storage(self, entries: Iterable[str]) -> Precision:
        """Storage shared by the checkpoint entries that vLLM fuses into one module."""
        stored = {name: self.checkpoint.precision(name) for name in entries}
        if len(set(stored.values())) != 1:
            first, usual = next(iter(stored.items()))
            other = next(name for name, what in stored.items() if what != usual)
            raise CheckpointError(
                self.checkpoint.directory.name,
                other,
                f"is {stored[other]}, but {first} is {usual}: matrices that vLLM fuses "
                "must be stored alike",
            )
        return next(iter(stored.values()))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Our method for every linear layer and every routed layer of the model; on a GPU for those
        in NVFP4, vLLM's own for the others."""
        if modules.is_draft(prefix, self.checkpoint):
            return self.vllm_fp8.get_quant_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, LinearBase) and not prefix.endswith((".weights_proj", ".gate")):
            return self._linear_method(layer, prefix)
        return None

    def _vllms(self, layer: nn.Module, prefix: str, storage: Precision) -> QuantizeMethodBase:
        if storage == Precision.FP8_BLOCK:
            return self.vllm_fp8.get_quant_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return UnquantizedLinearMethod()

    def _linear_method(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        kind = modules.kind(prefix)
        # The softmax over the compressor's gates follows at once: it takes fp32.
        out_dtype = torch.float32 if kind == "compressor" else torch.bfloat16
        storage = self._storage(modules.partitions(prefix))
        if storage == Precision.NVFP4:
            return NvFp4LinearMethod(self.kernels, prefix, out_dtype)
        if not current_platform.is_cpu():
            return self._vllms(layer, prefix, storage)
        return PlainLinearMethod(self.kernels, prefix, out_dtype, storage)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        storage = self._storage(modules.expert_matrices(prefix, layer.global_num_experts))
        if storage == Precision.NVFP4:
            return AssayModelOptNvFp4ExpertsMethod(self.kernels, prefix, layer.moe_config)
        if not current_platform.is_cpu():
            return self._vllms(layer, prefix, storage)
        return PlainExpertsMethod(self.kernels, prefix, layer.moe_config, storage)


def register() -> None:
    """Make vLLM know the config by its name; safe to call again."""
    register_quantization_config(NAME)(AssayConfig)
