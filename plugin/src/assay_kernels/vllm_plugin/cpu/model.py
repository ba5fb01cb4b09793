"""DeepSeek V4 for vLLM's CPU backend, with NVFP4 in every layer that the checkpoint stores so.

vLLM builds the decoder from classes that its module names globally; ``replace_classes`` puts ours
in their place. They differ in what a quantisation method cannot reach: ``wo_a`` is read, not
called; the compressor's projections are built without a quantisation config; the shared
expert's clamp belongs into the first GEMM's epilogue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from vllm.models.deepseek_v4.cpu import model as stock
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention

from assay_kernels.vllm_plugin import standins
from assay_kernels.vllm_plugin.checking import check_model
from assay_kernels.vllm_plugin.kernel_choice import mode
from assay_kernels.vllm_plugin.layers import require_limit
from assay_kernels.vllm_plugin.loading import share_input_scales, vllm_weights
from assay_kernels.vllm_plugin.quant_config import AssayConfig
from assay_kernels.vllm_plugin.summary import record_loaded

logger = init_logger("vllm.assay")

ROPE_DIM = 64  # qk_rope_head_dim of every V4 model; vLLM's CPU operators know no other


class AssayMLP(stock.DeepseekV4MLP):
    """The shared expert: GEMM, clamp and SwiGLU in one kernel, then the down projection."""

    def __init__(self, *args: Any, swiglu_limit: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, swiglu_limit=swiglu_limit, **kwargs)
        self.swiglu_limit = require_limit(swiglu_limit, kwargs.get("prefix", "shared_experts"))

    def forward(self, x: Tensor) -> Tensor:
        """x [M, H] bf16 -> [M, H] bf16."""
        kernels = self.gate_up_proj.quant_method.kernels
        hidden = kernels.dense_swiglu(x, self.gate_up_proj.operand, self.swiglu_limit)
        out: Tensor = self.down_proj(hidden)[0]
        return out


class AssayCPUAttention(DeepseekV4CPUAttention):
    """V4 attention whose ``wo_a`` and compressors go through our kernels."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, **kwargs: Any) -> None:
        super().__init__(vllm_config, prefix, **kwargs)
        if self.compressor is not None:
            _quantise_compressor(self.compressor, vllm_config)
        if self.indexer is not None:
            _quantise_compressor(self.indexer.compressor, vllm_config)

    def _wrap_wo_a_process_weights_after_loading(self) -> None:
        """Nothing to wrap: our linear methods keep what ``wo_a`` needs."""

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        """o [M, heads, D] bf16 -> [M, H]: undo RoPE, project by group, then ``wo_b``."""
        num_tokens = o.shape[0]
        if get_forward_context().attn_metadata is None:  # warm-up run: o holds nothing
            return o.new_zeros(num_tokens, self.hidden_size)
        rotated = ops.inverse_gptj_rope_o_proj_cpu(
            o, positions, self.rotary_emb.cos_sin_cache, ROPE_DIM
        )
        grouped = rotated.reshape(num_tokens, self.n_local_groups, -1).to(torch.bfloat16)
        kernels = self.wo_a.quant_method.kernels
        z = kernels.wo_a(grouped, self.wo_a.operand)
        out: Tensor = self.wo_b(z.flatten(1))
        return out


def _quantise_compressor(compressor: DeepseekCompressor, vllm_config: VllmConfig) -> None:
    """Build the compressor's fused projection again, this time with the quantisation config."""
    width = compressor.coff * compressor.head_dim
    compressor.fused_wkv_wgate = MergedColumnParallelLinear(
        compressor.hidden_size,
        [width, width],
        bias=False,
        return_bias=False,
        quant_config=vllm_config.quant_config,
        disable_tp=True,
        prefix=f"{compressor.prefix}.fused_wkv_wgate",
    )


def replace_classes() -> None:
    """Make vLLM's decoder layer build our attention and shared expert."""
    stock.DeepseekV4CPUAttention = AssayCPUAttention
    stock.DeepseekV4MLP = AssayMLP


class AssayDeepseekV4ForCausalLM(stock.DeepseekV4ForCausalLM):
    """Registered as ``DeepseekV4ForCausalLM``; also serves a checkpoint that is not quantised."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        replace_classes()
        if vllm_config.quant_config is None:
            vllm_config.quant_config = AssayConfig()
        elif not isinstance(vllm_config.quant_config, AssayConfig):
            raise ValueError(
                f"{vllm_config.model_config.model}: quantization "
                f"{vllm_config.quant_config.get_name()!r} is not served on a CPU; "
                "NVFP4 in dialects A, B and C and plain bf16 are"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._vllm_config = vllm_config

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load from the checkpoint's folder: vLLM's own iterator knows no dialect."""
        next(iter(weights), None)  # starts the clock of vLLM's "Loading weights took"
        checkpoint = self._vllm_config.quant_config.checkpoint
        loaded = AutoWeightsLoader(self).load_weights(vllm_weights(checkpoint))
        missing = sorted(set(dict(self.named_parameters())) - set(loaded))
        if missing:
            raise ValueError(
                f"{checkpoint.directory}: no tensor for {missing[0]} ({len(missing)} in all)"
            )
        dynamic = share_input_scales(self)
        if self._vllm_config.quant_config.kernels.quantizes_activations:
            for name in dynamic:
                logger.warning("%s: no usable input_scale, activations are scaled per token", name)
        return set(loaded)

    def process_weights_after_loading(self) -> None:
        """Last hook before serving: check kernels and weights, say what was taken over, and how."""
        config = self._vllm_config.quant_config
        checkpoint = config.checkpoint
        operators = standins.install()
        logger.info("%s", operators.line)
        report = check_model(self, checkpoint, "cpu", torch.device("cpu"))
        origin = "torch" if "torch" in operators.operators.values() else "native"
        record_loaded(self, checkpoint, "cpu", mode(config.kernels), origin, report)
