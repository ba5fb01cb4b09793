"""The router's choice, sorted by expert, with shapes that do not depend on it.

`interface.Groups` leaves out unused slots, which makes the host wait for the device and the shapes
change with the routing: neither can be captured in a CUDA graph. Here every slot has a row; rows
without an expert on this rank come last and no kernel reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from assay_kernels.kernels.interface import Groups, local_experts


@dataclass(frozen=True)
class SortedRows:
    """R = M * top_k rows; the first `ends[-1]` have an expert here."""

    tokens: Tensor  # int32 [R]: row of x
    weights: Tensor  # fp32 [R]: router weight
    ends: Tensor  # int32 [E]: cumulative row counts by local expert
    fan: Tensor  # int32 [M]: rows of each token
    share: float = 1.0  # of all experts that live here: what part of the rows to expect

    @classmethod
    def from_router(
        cls,
        topk_ids: Tensor,  # int [M, top_k], global expert ids; -1: unused slot
        topk_weights: Tensor,  # fp32 [M, top_k]
        num_local_experts: int,
        expert_map: Tensor | None,  # int [E_global] -> local id, -1: lives elsewhere
    ) -> SortedRows:
        """Sort stably, so that the result is a function of the choice alone."""
        ids = local_experts(topk_ids, expert_map)
        here = ids >= 0
        keys, order = torch.where(here, ids, num_local_experts).flatten().sort(stable=True)
        experts = torch.arange(num_local_experts, device=ids.device)
        return cls(
            tokens=(order // topk_ids.shape[1]).int(),
            weights=topk_weights.flatten()[order].float(),
            ends=torch.searchsorted(keys, experts, right=True).int(),
            fan=here.sum(dim=1).int(),
            share=1.0 if expert_map is None else num_local_experts / expert_map.shape[0],
        )

    @classmethod
    def from_groups(cls, groups: Groups | SortedRows) -> SortedRows:
        """The same rows as `interface.Groups` names."""
        if isinstance(groups, SortedRows):
            return groups
        return cls(
            tokens=groups.tokens.int(),
            weights=groups.weights.float(),
            ends=groups.ends.int(),
            fan=torch.bincount(groups.tokens, minlength=groups.num_tokens).int(),
        )
