"""Fixtures of the CPU operator tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from . import native


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Results and timings of one thread count, whatever the host has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def native_verdicts() -> dict[str, str | None]:
    return native.probe()


@pytest.fixture
def native_op(native_verdicts: dict[str, str | None]) -> Callable[[str], Callable[..., Any]]:
    """The library's operator of a name; skips, with the reason, where it cannot run."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def get(name: str) -> Callable[..., Any]:
        reason = native_verdicts[name]
        if reason is not None:
            pytest.skip(f"native {name}: {reason}")
        operator: Callable[..., Any] = getattr(torch.ops._C, name)
        return operator

    return get


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
