"""What a set of NVFP4 kernels offers, whatever the hardware.

A layer hands over its packed weights once, after loading (:meth:`KernelSet.prepare`), and
gets an opaque operand back, in the order and type its hardware wants; every later call takes
that operand. Per-channel multipliers travel beside the codes instead of inside the block
scales, so that two matrices fused into one keep their own global scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedWeight:
    """NVFP4 weights as a checkpoint stores them: one matrix, or a stack of experts or groups."""

    codes: Tensor  # uint8 [..., N, K/2], low nibble is the even k
    block_scale: Tensor  # float8_e4m3fn [..., N, K/16]
    alpha: Tensor  # fp32 [..., N]: weight_scale_2 of the partition that row n belongs to
    input_scale: Tensor | None  # fp32 []: static activation scale (W4A4); None: per token

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        *lead, n, half_k = self.codes.shape
        return (*lead, n, 2 * half_k)


class KernelSet(ABC):
    """NVFP4 kernels of one architecture and one arithmetic mode."""

    #: Named in the start-up summary and in ``assay_layers{how=...}``.
    name: str
    #: Whether activations are quantised to NVFP4 before the product (W4A4).
    quantizes_activations: bool = False

    @abstractmethod
    def prepare(self, weight: PackedWeight) -> Any:
        """Turn packed weights into this set's operand. Called once a layer, after loading."""

    def prepare_gate_up(self, weight: PackedWeight) -> Any:
        """The same for rows gate | up that `dense_swiglu` or `grouped_l1` will read."""
        return self.prepare(weight)

    @abstractmethod
    def prepare_plain(self, weight: Tensor) -> Any:
        """The same for weights that are not NVFP4: bf16 [..., N, K]."""

    @abstractmethod
    def dense(self, x: Tensor, operand: Any, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x [M, K] bf16 times W^T [K, N] -> [M, N]; fp32 output serves the compressor."""

    @abstractmethod
    def dense_swiglu(self, x: Tensor, operand: Any, limit: float) -> Tensor:
        """Shared expert L1: x [M, K] -> clamp and SwiGLU of its 2I channels -> [M, I] bf16."""

    @abstractmethod
    def grouped_l1(self, x: Tensor, operand: Any, groups: Groups, limit: float) -> Tensor:
        """Routed L1: gather rows of x [M, K], GEMM by expert, clamp, SwiGLU -> [R, I] bf16."""

    @abstractmethod
    def grouped_l2(self, h: Tensor, operand: Any, groups: Groups) -> Tensor:
        """Routed L2: h [R, I] by expert, router weights, sum over top-k -> [M, H] bf16."""

    def route(
        self,
        topk_ids: Tensor,  # int [M, top_k], global expert ids; -1: unused slot
        topk_weights: Tensor,  # fp32 [M, top_k]
        num_local_experts: int,
        expert_map: Tensor | None,  # int [E_global] -> local id, -1: lives elsewhere
    ) -> Any:
        """The router's choice as the grouped kernels read it.

        On a GPU its shapes do not depend on the choice: the host must not wait for the device, and
        a CUDA graph has to hold for any choice.
        """
        if topk_ids.is_cuda:
            from assay_kernels.kernels.sm90.routing import SortedRows

            return SortedRows.from_router(topk_ids, topk_weights, num_local_experts, expert_map)
        return Groups.from_router(topk_ids, topk_weights, num_local_experts, expert_map)

    def routed(self, x: Tensor, l1: Any, l2: Any, rows: Any, limit: float) -> Tensor:
        """Both routed layers, x [M, H] bf16 -> [M, H] bf16; rows is what `route` gave."""
        return self.grouped_l2(self.grouped_l1(x, l1, rows, limit), l2, rows)

    @abstractmethod
    def wo_a(self, x: Tensor, operand: Any) -> Tensor:
        """Batched over output groups: x [M, G, K], each group times its W^T [K, R] -> [M, G, R]."""


def local_experts(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Global expert ids, -1: unused slot -> int64 local ids, -1: unused or living elsewhere.

    expert_map: int [E_global] -> local id, -1: lives elsewhere; None: all live here.
    """
    ids = topk_ids.long()
    if expert_map is None:
        return ids
    return torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)


@dataclass(frozen=True)
class Groups:
    """Which (token, expert) pairs are computed here, sorted by local expert."""

    tokens: Tensor  # int64 [R]: row of x
    experts: Tensor  # int64 [R]: local expert, ascending
    weights: Tensor  # fp32 [R]: router weight
    ends: Tensor  # int32 [E]: cumulative row counts by local expert
    num_tokens: int

    @classmethod
    def from_router(
        cls,
        topk_ids: Tensor,  # int [M, top_k], global expert ids; -1: unused slot
        topk_weights: Tensor,  # fp32 [M, top_k]
        num_local_experts: int,
        expert_map: Tensor | None,  # int [E_global] -> local id, -1: lives elsewhere
    ) -> Groups:
        """Sort the router's choice by expert; leave out unused slots and experts of other ranks."""
        num_tokens, top_k = topk_ids.shape
        flat = local_experts(topk_ids, expert_map).reshape(-1)
        order = torch.argsort(flat, stable=True)
        order = order[flat[order] >= 0]
        local = flat[order]
        counts = torch.bincount(local, minlength=num_local_experts)
        return cls(
            tokens=order // top_k,
            experts=local,
            weights=topk_weights.reshape(-1)[order].float(),
            ends=counts.cumsum(0).to(torch.int32),
            num_tokens=num_tokens,
        )
