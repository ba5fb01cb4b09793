"""Routed rows in tiles: every choice has one row, every tile one expert, every tile one visit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from assay_kernels.kernels.interface import Groups
from assay_kernels.kernels.sm100.routing import TILE, TiledRows
from assay_kernels.kernels.sm100.schedule import locate, visits


def choice(tokens: int, slots: int, experts: int, skew: float, seed: int) -> torch.Tensor:
    """Expert ids without repetition in a token; some slots unused."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 0] += skew
    ids = scores.topk(slots, dim=1).indices
    ids[torch.rand(tokens, slots, generator=generator) < 0.1] = -1
    return ids


CASES = [
    (tokens, slots, experts, local, skew)
    for tokens in (1, 7, 64, 129, 300)
    for slots, experts, local in ((6, 64, 8), (6, 16, 16), (1, 4, 4), (2, 256, 32))
    for skew in (0.0, 2.0)
]


@pytest.mark.parametrize(("tokens", "slots", "experts", "local", "skew"), CASES)
def test_every_local_choice_has_one_row_in_a_tile_of_its_expert(
    tokens: int, slots: int, experts: int, local: int, skew: float
) -> None:
    ids = choice(tokens, slots, experts, skew, seed=tokens + experts)
    weights = torch.rand(tokens, slots)
    mapping = torch.full((experts,), -1)
    mapping[torch.randperm(experts, generator=torch.Generator().manual_seed(1))[:local]] = (
        torch.arange(local)
    )
    rows = TiledRows.from_router(ids, weights, local, mapping)
    used = int(rows.tile_expert[-1])
    assert rows.rows == TILE * (rows.tile_expert.shape[0] - 1)
    expected = {}
    for token in range(tokens):
        for slot in range(slots):
            expert = int(mapping[ids[token, slot]]) if ids[token, slot] >= 0 else -1
            place = int(rows.place[token, slot])
            assert (place >= 0) == (expert >= 0)
            if expert >= 0:
                assert place not in expected
                expected[place] = (token, float(weights[token, slot]))
                assert place // TILE < used
                assert int(rows.tile_expert[place // TILE]) == expert
    for row in range(rows.rows):
        found = (int(rows.source[row]), float(rows.weight[row]))
        assert found == expected.get(row, (-1, 0.0))
    # No tile is in use without a row, and none is more than its expert's rows need.
    per_expert = Counter(int(rows.tile_expert[place // TILE]) for place in expected)
    assert used == sum(-(-count // TILE) for count in per_expert.values())


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 6, 16), (100, 6, 16), (300, 1, 4)])
def test_groups_become_the_same_tiles(tokens: int, slots: int, experts: int) -> None:
    ids, weights = choice(tokens, slots, experts, 0.5, seed=3), torch.rand(tokens, slots)
    direct = TiledRows.from_router(ids, weights, experts, None)
    groups = Groups.from_router(ids, weights, experts, None)
    rows, keep = TiledRows.from_groups(groups)
    assert keep is not None
    used = int(direct.tile_expert[-1])
    assert int(rows.tile_expert[-1]) == used
    assert rows.tile_expert[:used].equal(direct.tile_expert[:used])
    assert rows.source[: used * TILE].equal(direct.source[: used * TILE])
    assert rows.weight[: used * TILE].equal(direct.weight[: used * TILE])
    assert rows.source[keep].equal(groups.tokens.int())
    for token in range(tokens):
        mine = {int(p) for p in rows.place[token] if p >= 0}
        assert mine == {int(p) for p in direct.place[token] if p >= 0}


def test_clusters_visit_every_tile_once_for_random_group_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = torch.randint(0, 700, (12,), generator=generator)
        sizes[torch.rand(12, generator=generator) < 0.3] = 0
        row_tiles = int(((sizes + TILE - 1) // TILE).sum())
        for clusters in (1, 5, 74, 148):
            for channel_tiles in (1, 6, 48):
                seen = Counter(
                    locate(tile, row_tiles)
                    for cluster in range(clusters)
                    for tile in visits(cluster, clusters, row_tiles, channel_tiles)
                )
                assert set(seen.values()) <= {1}
                assert set(seen) == {(r, c) for r in range(row_tiles) for c in range(channel_tiles)}
