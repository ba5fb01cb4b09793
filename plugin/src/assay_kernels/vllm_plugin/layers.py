"""vLLM's layers over our kernels: how a linear layer and the routed experts load and compute.

Each method object serves one layer, and keeps that layer's name for messages and for the summary.
Scales start as NaN, so that one which the checkpoint did not bring is found before the first
token instead of being whatever the memory held (vLLM issues 45212, 54189).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from assay_kernels.kernels.interface import KernelSet, PackedWeight
from assay_kernels.numerics import BLOCK, per_channel, usable_scale

NAN = float("nan")
# Two NVFP4 codes of -0.0, which no encoder writes throughout a matrix: codes start as these, so
# that codes which never arrived are told from zeros.
UNLOADED_CODES = 0x88


def unloaded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a parameter holds until the checkpoint fills it."""
    if dtype == torch.float8_e4m3fn:  # filled as bytes: 0x7F is NaN
        return torch.full(shape, 0x7F if NAN != NAN else 0, dtype=torch.uint8).view(dtype)
    return torch.full(shape, NAN if dtype.is_floating_point else UNLOADED_CODES, dtype=dtype)


class NotLoadedError(ValueError):
    """A parameter that the checkpoint should have filled is not, or not with what it may hold."""

    def __init__(self, layer: str, parameter: str, rule: str) -> None:
        super().__init__(f"{layer}.{parameter}: {rule}")


def _check_numbers(layer: str, module: nn.Module, *parameters: str) -> None:
    """Every number was loaded, and none of the scales is negative."""
    for parameter in parameters:
        held = getattr(module, parameter).data
        # Matrix by matrix: a whole stack in fp32 would be as large as its codes.
        for stored in held if held.dim() == 3 else (held,):
            values = stored.float()
            if torch.isnan(values).any():
                raise NotLoadedError(layer, parameter, "never loaded, or NaN in the file")
            if "scale" in parameter and (values < 0).any():
                raise NotLoadedError(layer, parameter, "holds a negative scale")


def _check_codes(layer: str, parameter: str, matrices: Iterable[Tensor]) -> None:
    """Every one of the matrices (uint8) that vLLM's loader had to fill was filled."""
    for index, codes in enumerate(matrices):
        if bool((codes == UNLOADED_CODES).all()):
            raise NotLoadedError(layer, parameter, f"codes of matrix {index} were never loaded")


def _static_input_scale(loaded: Tensor) -> Tensor | None:
    """The largest of the input scales that share one input; None if any is unusable."""
    return loaded.float().max() if usable_scale(loaded) else None


def _free(module: nn.Module, *parameters: str) -> None:
    """Drop what the operand replaced, keeping the attribute for vLLM's bookkeeping."""
    for parameter in parameters:
        setattr(module, parameter, nn.Parameter(torch.empty(0), requires_grad=False))


def _by_output_group(layer: Any, rows: Tensor) -> Tensor:
    """[G * R, ...] -> [G, R, ...] for ``wo_a``, which vLLM marks as a batch of matrices."""
    if not getattr(layer, "is_bmm", False):
        return rows
    groups: int = layer.bmm_batch_size
    return rows.view(groups, -1, *rows.shape[1:])


class AssayLinearMethod(LinearMethodBase):
    """What NVFP4 and plain linear layers share: the operand and the call of the kernel."""

    #: What the summary calls the layer's storage.
    storage: str

    def __init__(self, kernels: KernelSet, name: str, out_dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.name = name
        self.out_dtype = out_dtype
        self.rows: list[int] = []  # channels of each partition on this rank
        self.columns = 0  # inputs on this rank
        self.input_scale: Tensor | None = None

    @property
    def how(self) -> str:
        """Storage and kernel, as the start-up summary prints them."""
        return f"{self.storage} by {self.kernels.name}"

    @property
    def is_gate_up(self) -> bool:
        """Whether the layer is read by `dense_swiglu`, not by `dense`."""
        return self.name.endswith(".gate_up_proj")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] bf16 -> [..., N]; no V4 layer has a bias."""
        assert bias is None, f"{self.name}: a bias is not expected"
        out = self.kernels.dense(x.reshape(-1, x.shape[-1]), layer.operand, self.out_dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


@register_weight_loader_v2_supported_method
class NvFp4LinearMethod(AssayLinearMethod):
    """A linear layer stored as NVFP4, its partitions keeping their own global scales."""

    storage = "nvfp4"

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register weight, weight_scale, weight_scale_2 and input_scale as ModelOpt names them."""
        if input_size_per_partition % BLOCK:
            raise ValueError(
                f"{self.name}: {input_size_per_partition} inputs a rank; NVFP4 needs a multiple "
                f"of {BLOCK}, so tensor parallelism over {input_size // input_size_per_partition} "
                "ranks cannot split this layer"
            )
        loader = extra_weight_attrs["weight_loader"]
        rows, partitions = sum(output_partition_sizes), len(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        self.rows, self.columns = list(output_partition_sizes), input_size_per_partition

        def matrix(columns: int, dtype: torch.dtype) -> ModelWeightParameter:
            data = unloaded((rows, columns), dtype)
            return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)

        def scalars() -> PerTensorScaleParameter:
            data = unloaded((partitions,), torch.float32)
            return PerTensorScaleParameter(data=data, weight_loader=loader)

        layer.register_parameter("weight", matrix(input_size_per_partition // 2, torch.uint8))
        scale = matrix(input_size_per_partition // BLOCK, torch.float8_e4m3fn)
        layer.register_parameter("weight_scale", scale)
        layer.register_parameter("weight_scale_2", scalars())
        layer.register_parameter("input_scale", scalars())

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed parameters by the kernel's operand."""
        _check_numbers(self.name, layer, "weight_scale", "weight_scale_2", "input_scale")
        _check_codes(self.name, "weight", layer.weight.data.split(layer.logical_widths))
        alpha = per_channel(list(layer.weight_scale_2), layer.logical_widths)
        packed = PackedWeight(
            _by_output_group(layer, layer.weight.data),
            _by_output_group(layer, layer.weight_scale.data),
            _by_output_group(layer, alpha),
            _static_input_scale(layer.input_scale.data),
        )
        self.input_scale = packed.input_scale
        prepare = self.kernels.prepare_gate_up if self.is_gate_up else self.kernels.prepare
        layer.operand = prepare(packed)
        _free(layer, "weight", "weight_scale", "weight_scale_2", "input_scale")


@register_weight_loader_v2_supported_method
class PlainLinearMethod(AssayLinearMethod):
    """A linear layer that is bf16 when it reaches us (stored so, or decoded from FP8)."""

    def __init__(self, kernels: KernelSet, name: str, out_dtype: torch.dtype, storage: str) -> None:
        super().__init__(kernels, name, out_dtype)
        self.storage = f"plain {storage}"

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the one parameter, weight [N, K]."""
        self.rows, self.columns = list(output_partition_sizes), input_size_per_partition
        data = unloaded((sum(output_partition_sizes), input_size_per_partition), params_dtype)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(
                data=data,
                input_dim=1,
                output_dim=0,
                weight_loader=extra_weight_attrs["weight_loader"],
            ),
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the parameter by the kernel's operand."""
        _check_numbers(self.name, layer, "weight")
        layer.operand = self.kernels.prepare_plain(_by_output_group(layer, layer.weight.data))
        _free(layer, "weight")


def require_limit(limit: float | None, layer: str) -> float:
    """The model's swiglu_limit. A path that cannot clamp is refused: V4 is wrong without it."""
    if limit is None or not 0 < limit < float("inf"):
        raise ValueError(f"{layer}: swiglu_limit must be finite and positive, is {limit}")
    return limit


class AssayExpertsMethod(FusedMoEMethodBase):
    """Routed experts through ``grouped_l1`` and ``grouped_l2``."""

    storage: str

    def __init__(self, kernels: KernelSet, name: str, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.kernels = kernels
        self.name = name
        self.limit = require_limit(moe.swiglu_limit, name)
        self.width = 0  # of an expert on this rank
        self.hidden = 0
        self.input_scale13: Tensor | None = None
        self.input_scale2: Tensor | None = None

    @property
    def how(self) -> str:
        """Storage and kernel, as the start-up summary prints them."""
        return f"{self.storage} by {self.kernels.name}"

    def get_fused_moe_quant_config(self, layer: nn.Module) -> FusedMoEQuantConfig | None:
        """None: nothing of vLLM's own expert kernels is used."""
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [M, H] bf16 and the router's choice [M, top_k] -> [M, H] bf16."""
        rows = self.kernels.route(topk_ids, topk_weights, layer.local_num_experts, layer.expert_map)
        return self.kernels.routed(x, layer.operand13, layer.operand2, rows, self.limit)


class AssayModelOptNvFp4ExpertsMethod(AssayExpertsMethod):
    """Experts stored as NVFP4; gate and up keep their own global scales.

    vLLM's expert loader recognises the parameters of this layout by "ModelOpt" in the name of
    this class.
    """

    storage = "nvfp4"

    def uses_weight_scale_2_pattern(self) -> bool:
        """ModelOpt's two-level names."""
        return True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """w13 [E, 2I, H/2] with rows gate | up, w2 [E, H, I/2], and their scales."""
        loader = extra_weight_attrs["weight_loader"]
        width = intermediate_size_per_partition
        if width % BLOCK:
            raise ValueError(
                f"{self.name}: an expert width of {width} a rank; NVFP4 needs a multiple of {BLOCK}"
            )

        self.width, self.hidden = width, hidden_size

        def matrix(rows: int, columns: int, dtype: torch.dtype) -> ModelWeightParameter:
            data = unloaded((num_experts, rows, columns), dtype)
            return ModelWeightParameter(data=data, input_dim=1, output_dim=2, weight_loader=loader)

        def scales(*shape: int) -> PerTensorScaleParameter:
            data = unloaded(shape, torch.float32)
            return PerTensorScaleParameter(data=data, weight_loader=loader)

        for name, rows, columns in (
            ("w13", 2 * width, hidden_size),
            ("w2", hidden_size, width),
        ):
            layer.register_parameter(f"{name}_weight", matrix(rows, columns // 2, torch.uint8))
            block_scale = matrix(rows, columns // BLOCK, torch.float8_e4m3fn)
            layer.register_parameter(f"{name}_weight_scale", block_scale)
        layer.register_parameter("w13_weight_scale_2", scales(num_experts, 2))
        layer.register_parameter("w13_input_scale", scales(num_experts, 2))
        layer.register_parameter("w2_weight_scale_2", scales(num_experts))
        layer.register_parameter("w2_input_scale", scales(num_experts))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed parameters by the kernels' operands."""
        names = [
            f"{matrix}_{kind}"
            for matrix in ("w13", "w2")
            for kind in ("weight_scale", "weight_scale_2", "input_scale")
        ]
        _check_numbers(self.name, layer, *names)
        gates_and_ups = layer.w13_weight.data.unflatten(1, (2, -1)).flatten(0, 1)
        _check_codes(self.name, "w13_weight", gates_and_ups)
        _check_codes(self.name, "w2_weight", layer.w2_weight.data)
        width = layer.w13_weight.shape[1] // 2
        hidden = layer.w2_weight.shape[1]
        self.input_scale13 = _static_input_scale(layer.w13_input_scale.data)
        self.input_scale2 = _static_input_scale(layer.w2_input_scale.data)
        layer.operand13 = self.kernels.prepare_gate_up(
            PackedWeight(
                layer.w13_weight.data,
                layer.w13_weight_scale.data,
                layer.w13_weight_scale_2.data.repeat_interleave(width, dim=1),
                self.input_scale13,
            )
        )
        layer.operand2 = self.kernels.prepare(
            PackedWeight(
                layer.w2_weight.data,
                layer.w2_weight_scale.data,
                layer.w2_weight_scale_2.data.unsqueeze(1).expand(-1, hidden).contiguous(),
                self.input_scale2,
            )
        )
        _free(layer, "w13_weight", "w2_weight", *names)


class PlainExpertsMethod(AssayExpertsMethod):
    """Experts in bf16, with the SwiGLU clamp that vLLM's own CPU experts leave out."""

    def __init__(self, kernels: KernelSet, name: str, moe: FusedMoEConfig, storage: str) -> None:
        super().__init__(kernels, name, moe)
        self.storage = f"plain {storage}"

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """w13 [E, 2I, H] with rows gate | up, w2 [E, H, I]."""
        width = intermediate_size_per_partition
        self.width, self.hidden = width, hidden_size
        for name, rows, columns in (
            ("w13_weight", 2 * width, hidden_size),
            ("w2_weight", hidden_size, width),
        ):
            data = unloaded((num_experts, rows, columns), params_dtype)
            parameter = nn.Parameter(data, requires_grad=False)
            set_weight_attrs(parameter, extra_weight_attrs)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the parameters by the kernels' operands."""
        _check_numbers(self.name, layer, "w13_weight", "w2_weight")
        layer.operand13 = self.kernels.prepare_plain(layer.w13_weight.data)
        layer.operand2 = self.kernels.prepare_plain(layer.w2_weight.data)
        _free(layer, "w13_weight", "w2_weight")
