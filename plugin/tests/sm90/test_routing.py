"""Rows sorted by expert with shapes that do not depend on the routing, against `Groups`."""

from __future__ import annotations

import pytest
import torch

from assay_kernels.kernels.interface import Groups
from assay_kernels.kernels.sm90.routing import SortedRows


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_are_those_of_groups(tokens: int, mapped: bool) -> None:
    torch.manual_seed(tokens)
    experts, local, top_k = 16, 6 if mapped else 16, 4
    ids = torch.rand(tokens, experts).topk(top_k, dim=1).indices
    ids[torch.rand(tokens, top_k) < 0.2] = -1
    weights = torch.rand(tokens, top_k)
    expert_map = None
    if mapped:
        expert_map = torch.full((experts,), -1)
        expert_map[torch.randperm(experts)[:local]] = torch.arange(local)
    groups = Groups.from_router(ids, weights, local, expert_map)
    rows = SortedRows.from_router(ids, weights, local, expert_map)
    count = int(rows.ends[-1])
    assert rows.tokens.shape == (tokens * top_k,)
    assert torch.equal(rows.ends, groups.ends)
    assert torch.equal(rows.tokens[:count].long(), groups.tokens)
    assert torch.equal(rows.weights[:count], groups.weights)
    assert torch.equal(rows.fan.long(), torch.bincount(groups.tokens, minlength=tokens))


def test_groups_convert() -> None:
    groups = Groups.from_router(torch.tensor([[0, 2], [2, -1]]), torch.rand(2, 2), 3, None)
    rows = SortedRows.from_groups(groups)
    assert rows.fan.tolist() == [2, 1]
    assert rows.ends.tolist() == [1, 1, 3]
    assert SortedRows.from_groups(rows) is rows
