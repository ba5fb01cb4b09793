"""The router's choice as tiles of 128 rows, each of one expert, in shapes that ignore the choice.

Rows are sorted by expert and every expert's rows are padded to whole tiles: tiles in use come
first, so a persistent kernel needs their number only, read on the device (CUDA graphs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from assay_kernels.kernels.interface import Groups, local_experts

TILE = 128


@dataclass(frozen=True)
class TiledRows:
    """R = 128 * tiles rows for M tokens with `slots` experts each."""

    source: Tensor  # int32 [R]: row of x, -1: padding
    weight: Tensor  # fp32 [R]: router weight, 0: padding
    tile_expert: Tensor  # int32 [tiles + 1]: local expert of a tile; last: how many are in use
    place: Tensor  # int32 [M, slots]: row of a token's slot, -1: no expert here

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    @classmethod
    def from_router(
        cls,
        topk_ids: Tensor,  # int [M, slots], global expert ids; -1: unused slot
        topk_weights: Tensor,  # fp32 [M, slots]
        num_local_experts: int,
        expert_map: Tensor | None,  # int [E_global] -> local id, -1: lives elsewhere
    ) -> TiledRows:
        """Sort stably, so that the result is a function of the choice alone."""
        tokens, slots = topk_ids.shape
        count = tokens * slots
        device = topk_ids.device
        ids = local_experts(topk_ids, expert_map)
        keys = torch.where(ids >= 0, ids, num_local_experts).flatten()
        keys, order = keys.sort(stable=True)
        experts = torch.arange(num_local_experts, device=device)
        ends = torch.searchsorted(keys, experts, right=True)
        first_row, tile_expert = _tiles(ends, count)
        tiles = tile_expert.shape[0] - 1
        # Rows without an expert here go to a place past the last tile, which is cut off.
        here = keys < num_local_experts
        expert = keys.clamp(max=num_local_experts - 1)
        row = torch.arange(count, device=device) + first_row[expert]
        row = torch.where(here, row, tiles * TILE)
        source = torch.full((tiles * TILE + 1,), -1, dtype=torch.int32, device=device)
        weight = torch.zeros(tiles * TILE + 1, dtype=torch.float32, device=device)
        source[row] = torch.where(here, order // slots, -1).int()
        weight[row] = torch.where(here, topk_weights.flatten()[order].float(), 0.0)
        place = torch.empty(count, dtype=torch.int32, device=device)
        place[order] = torch.where(here, row, -1).int()
        return cls(
            source=source[:-1].contiguous(),
            weight=weight[:-1].contiguous(),
            tile_expert=tile_expert,
            place=place.view(tokens, slots),
        )

    @classmethod
    def from_groups(cls, groups: Groups | TiledRows) -> tuple[TiledRows, Tensor | None]:
        """The same rows, and where each of those that `Groups` has sorted lies in the tiles."""
        if isinstance(groups, TiledRows):
            return groups, None
        count = groups.tokens.shape[0]
        device = groups.tokens.device
        first_row, tile_expert = _tiles(groups.ends.long(), count)
        rows = (tile_expert.shape[0] - 1) * TILE
        position = torch.arange(count, device=device)
        keep = position + first_row[groups.experts.long()]
        source = torch.full((rows,), -1, dtype=torch.int32, device=device)
        weight = torch.zeros(rows, dtype=torch.float32, device=device)
        source[keep] = groups.tokens.int()
        weight[keep] = groups.weights.float()
        # A token's rows, in the order of their experts, side by side.
        by_token = torch.sort(groups.tokens, stable=True)
        fan = torch.bincount(groups.tokens, minlength=groups.num_tokens)
        first = fan.cumsum(0) - fan
        slots = int(fan.max()) if count else 1
        place = torch.full((groups.num_tokens, slots), -1, dtype=torch.int32, device=device)
        place[by_token.values, position - first[by_token.values]] = keep[by_token.indices].int()
        return cls(source, weight, tile_expert, place), keep


def _tiles(ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cumulative row counts by expert, int64 [E], of at most `count` rows -> what to add to a
    sorted row's index to have its row in the tiles, int64 [E]; and `tile_expert`."""
    experts = ends.shape[0]
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    tile_ends = ((ends - begins + TILE - 1) // TILE).cumsum(0)
    tile_begins = torch.cat([tile_ends.new_zeros(1), tile_ends[:-1]])
    tiles = min(count, experts) + count // TILE
    used = torch.searchsorted(tile_ends, torch.arange(tiles, device=ends.device), right=True)
    tile_expert = torch.cat([used.clamp(max=experts - 1), tile_ends[-1:]]).int()
    return tile_begins * TILE - begins, tile_expert
