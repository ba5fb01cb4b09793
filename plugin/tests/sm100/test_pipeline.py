"""The kernel's synchronisation, searched state by state, and mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from assay_kernels.kernels.sm100.config import GemmConfig
from assay_kernels.kernels.sm100.pipeline import Protocol, mutants, search


def small(ctas: int, stages: int, acc_stages: int, warps: int = 1) -> Protocol:
    """The kernel's protocol with fewer stages and epilogue warps."""
    config = GemmConfig.make(256, 2) if ctas == 2 else GemmConfig.make(128)
    protocol = Protocol.of(config, warps=warps)
    return replace(protocol, stages=stages, acc_stages=acc_stages)


CASES = [(1, 2, 1, 2), (1, 2, 2, 2), (1, 3, 2, 1), (2, 2, 1, 1), (2, 2, 2, 1)]


@pytest.mark.parametrize(("ctas", "stages", "acc_stages", "warps"), CASES)
@pytest.mark.parametrize(("k_tiles", "tiles"), [(1, 3), (2, 2), (3, 3)])
def test_no_interleaving_deadlocks_or_races(
    ctas: int, stages: int, acc_stages: int, warps: int, k_tiles: int, tiles: int
) -> None:
    outcome = search(small(ctas, stages, acc_stages, warps), k_tiles=k_tiles, tiles=tiles)
    assert outcome.problems == ()
    assert outcome.states > 50


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("name", sorted(mutants(small(2, 2, 1))))
def test_a_mistake_is_found(ctas: int, name: str) -> None:
    protocol = small(ctas, 2, 1, 2 if ctas == 1 else 1)
    if name not in mutants(protocol):
        pytest.skip("needs two CTAs")
    assert search(mutants(protocol)[name], k_tiles=3, tiles=3).problems


@pytest.mark.parametrize(
    "config", [GemmConfig.make(128), GemmConfig.make(256, 2), GemmConfig.make(16, swapped=True)]
)
def test_the_model_has_the_kernels_constants(config: GemmConfig) -> None:
    protocol = Protocol.of(config)
    assert protocol.bytes_a_cta * protocol.ctas == protocol.expected_bytes
    assert protocol.barrier_arrivals().count(1) + protocol.acc_stages == config.barriers
    assert protocol.acc_releases == 4 * config.ctas
