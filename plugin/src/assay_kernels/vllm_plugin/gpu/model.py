"""DeepSeek V4 on vLLM's CUDA backend, with NVFP4 in every layer that the checkpoint stores so.

Everything that a quantisation method cannot reach is replaced in this module alone, and guarded by
the contract test: ``wo_a`` is read instead of called, the compressors' projections are built
without a quantisation config and multiplied by hand, the shared expert clamps outside its first
GEMM, and the loader knows one naming. Layers in FP8 and bf16 stay vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import (
    _FUSED_INV_ROPE_FP8_QUANT_KERNEL,
)
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from vllm.models.deepseek_v4.nvidia import model as stock
from vllm.platforms import current_platform
from vllm.utils.multi_stream_utils import execute_in_parallel

from assay_kernels.vllm_plugin.checking import check_model
from assay_kernels.vllm_plugin.gpu.warm_up import warm_up
from assay_kernels.vllm_plugin.kernel_choice import arch, mode
from assay_kernels.vllm_plugin.layers import AssayLinearMethod, require_limit
from assay_kernels.vllm_plugin.loading import share_input_scales, vllm_weights
from assay_kernels.vllm_plugin.quant_config import AssayConfig
from assay_kernels.vllm_plugin.summary import record_loaded

logger = init_logger("vllm.assay")

ROTARY_TILE = 128
"""Channels that the rotation's kernel handles at a time; it divides a head of 512."""

_select_stock_attention = stock._select_dsv4_attn_cls


def ours(layer: Any) -> bool:
    """Whether a linear layer holds an operand of our kernels."""
    return isinstance(layer.quant_method, AssayLinearMethod)


class AssayMLP(stock.DeepseekV4MLP):
    """The shared expert: GEMM, clamp and SwiGLU in one kernel, then the down projection."""

    def __init__(self, *args: Any, swiglu_limit: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, swiglu_limit=swiglu_limit, **kwargs)
        self.swiglu_limit = require_limit(swiglu_limit, kwargs.get("prefix", "shared_experts"))

    def forward(self, x: Tensor) -> Tensor:
        """x [M, H] bf16 -> [M, H] bf16."""
        if not ours(self.gate_up_proj):
            stock_output: Tensor = super().forward(x)
            return stock_output
        kernels = self.gate_up_proj.quant_method.kernels
        hidden = kernels.dense_swiglu(x, self.gate_up_proj.operand, self.swiglu_limit)
        out: Tensor = self.down_proj(hidden)[0]
        return out


class AssayAttention:
    """What our attention adds to whichever of vLLM's attention classes the configuration picks."""

    compressor: Any
    indexer: Any
    wo_a: Any
    wo_b: Any
    rotary_emb: Any
    aux_stream_list: Any
    ln_events: Any
    n_local_groups: int
    rope_head_dim: int
    _fused_wqa_wkv_gemm: Callable[[Tensor], Tensor]

    def __init__(self, vllm_config: VllmConfig, prefix: str, **kwargs: Any) -> None:
        super().__init__(vllm_config, prefix, **kwargs)  # type: ignore[call-arg]
        if self.compressor is not None:
            _quantise_compressor(self.compressor, vllm_config)
        if self.indexer is not None:
            _quantise_compressor(self.indexer.compressor, vllm_config)

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        """o [M, heads, D] bf16 -> [M, H]: undo RoPE, project by group, then ``wo_b``."""
        if not ours(self.wo_a):
            stock_output: Tensor = super()._o_proj(o, positions)  # type: ignore[misc]
            return stock_output
        grouped = rotated_back(
            o,
            positions,
            self.rotary_emb.cos_sin_cache,
            self.n_local_groups,
            self.rope_head_dim,
        )
        z = self.wo_a.quant_method.kernels.wo_a(grouped, self.wo_a.operand)
        out: Tensor = self.wo_b(z.flatten(1))
        return out

    def _run_parallel_input_projections(
        self, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The products that read the layer's input, each on a stream of its own where they are
        small: (q and kv, compressor's kv and gate, the indexer's, the indexer's weights)."""
        side_products: list[Callable[[], Tensor] | None] = [None, None, None]
        if self.compressor is not None:
            side_products[0] = lambda: kv_and_gate(self.compressor, hidden_states)
        if self.indexer is not None:
            side_products[1] = lambda: self.indexer.weights_proj(hidden_states)[0]
            side_products[2] = lambda: kv_and_gate(self.indexer.compressor, hidden_states)
        streams = self.aux_stream_list[:3] if self.aux_stream_list is not None else None
        qkv, (kv_gate, index_weights, index_kv_gate) = execute_in_parallel(
            lambda: self._fused_wqa_wkv_gemm(hidden_states),
            side_products,
            self.ln_events[0],
            self.ln_events[1:4],
            streams,
            enable=hidden_states.shape[0] <= envs.VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD,
        )
        return qkv, kv_gate, index_kv_gate, index_weights


def rotated_back(
    o: Tensor,  # [M, heads, D] bf16, heads and tokens at any stride
    positions: Tensor,  # int64 [M]
    cos_sin_cache: Tensor,  # fp32 [positions, rope]
    groups: int,
    rope: int,
) -> Tensor:
    """The attention's output without RoPE, [M, G, heads / G * D] bf16, contiguous.

    vLLM's kernel; its wrapper would lay the groups outermost, which our `wo_a` does not read.
    """
    tokens, heads, dim = o.shape
    out = torch.empty(tokens, groups, heads // groups * dim, dtype=o.dtype, device=o.device)
    if tokens:
        _FUSED_INV_ROPE_FP8_QUANT_KERNEL(
            o,
            positions,
            cos_sin_cache,
            out.transpose(0, 1),
            torch.empty(0, dtype=torch.float32, device=o.device),
            tokens,
            heads_per_group=heads // groups,
            quant_group_size=ROTARY_TILE,
            chunks_per_head=dim // ROTARY_TILE,
            nope_dim=dim - rope,
            half_rope=rope // 2,
            tma_aligned_scales=False,
            quantize=False,
            fp8_max=torch.finfo(torch.float8_e4m3fn).max,
            launch_pdl=current_platform.is_arch_support_pdl(),
            grid=(tokens, heads),
        )
    return out


def kv_and_gate(compressor: Any, hidden_states: Tensor) -> Tensor:
    """[M, H] bf16 -> fp32 [M, 2 * width]: what the softmax over the gates wants."""
    projection = compressor.fused_wkv_wgate
    if ours(projection):
        out: Tensor = projection(hidden_states)
        return out
    return torch.mm(hidden_states, projection.weight.T, out_dtype=torch.float32)


def _quantise_compressor(compressor: DeepseekCompressor, vllm_config: VllmConfig) -> None:
    """Build the compressor's fused projection again, with the quantisation config, where it is
    stored in NVFP4."""
    width = compressor.coff * compressor.head_dim
    prefix = f"{compressor.prefix}.fused_wkv_wgate"
    if not vllm_config.quant_config.in_nvfp4(prefix):
        return
    compressor.fused_wkv_wgate = MergedColumnParallelLinear(
        compressor.hidden_size,
        [width, width],
        bias=False,
        return_bias=False,
        quant_config=vllm_config.quant_config,
        disable_tp=True,
        prefix=prefix,
    )


@cache
def with_our_projections(attention: type) -> type:
    """vLLM's attention class with ours in front of it."""
    return type(f"Assay{attention.__name__}", (AssayAttention, attention), {})


def _select_attention(vllm_config: VllmConfig) -> type:
    """What the decoder layer asks: vLLM's choice, with our projections where the config is ours."""
    attention: type = _select_stock_attention(vllm_config)
    if not isinstance(vllm_config.quant_config, AssayConfig):
        return attention
    return with_our_projections(attention)


def replace_classes() -> None:
    """Make vLLM's decoder layer build our attention and shared expert."""
    stock._select_dsv4_attn_cls = _select_attention
    stock.DeepseekV4MLP = AssayMLP


class AssayDeepseekV4ForCausalLM(stock.DeepseekV4ForCausalLM):
    """Registered as ``DeepseekV4ForCausalLM``. A checkpoint that our config did not claim (native,
    bf16, another GPU) is served by vLLM's own classes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self._assay = isinstance(vllm_config.quant_config, AssayConfig)
        if self._assay:
            replace_classes()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._vllm_config = vllm_config

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load from the checkpoint's folder: vLLM's own iterator knows no dialect."""
        if not self._assay:
            stock_loaded: set[str] = super().load_weights(weights)
            return stock_loaded
        next(iter(weights), None)  # starts the clock of vLLM's "Loading weights took"
        checkpoint = self._vllm_config.quant_config.checkpoint
        loaded = AutoWeightsLoader(self).load_weights(vllm_weights(checkpoint, fp8_as_stored=True))
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
        """Last hook before serving: check kernels and weights, compile what is left, say what was
        taken over, and how."""
        super().process_weights_after_loading()
        if not self._assay:
            return
        config = self._vllm_config
        checkpoint = config.quant_config.checkpoint
        device = config.device_config.device
        report = check_model(self, checkpoint, arch(), device)
        warm_up(self, checkpoint, device, config.scheduler_config.max_num_batched_tokens)
        record_loaded(self, checkpoint, arch(), mode(config.quant_config.kernels), "native", report)
