"""An answer must not depend on which pages of the KV cache a request was given."""

from __future__ import annotations

import pytest
import torch

from assay_kernels.kernels.cpu import v4_ops


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_summed_in_an_order_that_pages_do_not_change(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, 200, (40, 30), generator=generator)
    pages = torch.randperm(1000, generator=generator)[:200]
    moved = torch.where(slots >= 0, pages[slots.clamp(min=0)], -1)

    ids, index = v4_ops._compact(slots)
    moved_ids, moved_index = v4_ops._compact(moved)

    assert torch.equal(index, moved_index)
    assert torch.equal(pages[ids], moved_ids)
    assert torch.equal(torch.where(index >= 0, ids[index.clamp(min=0)], -1), slots)


def test_no_key_at_all() -> None:
    ids, index = v4_ops._compact(torch.full((2, 3), -1))
    assert ids.numel() == 0
    assert (index == -1).all()
