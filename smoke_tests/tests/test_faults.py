"""Every fault is caught by the check that is meant for it, on parameters and a seed drawn by this
very run; the good mode passes; what is an outage is never called incoherent.

`make smoke-detection` does the same many times over and writes the table of docs/coherence.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from assay_smoke import detection
from assay_smoke.checks import REGISTRY
from assay_smoke.faults.modes import MODES

OUTAGES = [name for name, mode in MODES.items() if not mode.meant and name != detection.GOOD]
QUICK_OUTAGES = ["broken-connection", "errors"]
FAULTS = [name for name, mode in MODES.items() if mode.meant]


@pytest.fixture(scope="module")
def draws(recorded: Path) -> Iterator[dict[str, Future[detection.Draw]]]:
    """A draw of every mode, on both cores."""
    rng = random.SystemRandom()

    def arguments(mode: str) -> tuple[str, int, str, Path]:
        return mode, rng.randrange(2**32), "miniature", recorded

    with ProcessPoolExecutor(2) as pool:
        yield {
            m: pool.submit(detection.draw_alone, arguments(m)) for m in [*FAULTS, *QUICK_OUTAGES]
        }


@pytest.mark.parametrize("mode", FAULTS)
def test_a_fault_is_caught_by_the_check_meant_for_it(
    mode: str, draws: dict[str, Future[detection.Draw]]
) -> None:
    found = draws[mode].result()
    assert found.caught, found


@pytest.mark.parametrize("mode", QUICK_OUTAGES)
def test_an_outage_is_no_incoherence(mode: str, draws: dict[str, Future[detection.Draw]]) -> None:
    found = draws[mode].result()
    assert (found.verdict, found.failed) == ("error", []), found


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in OUTAGES if mode not in QUICK_OUTAGES])
def test_a_slow_outage_is_no_incoherence_either(mode: str, recorded: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    found = asyncio.run(detection.draw(mode, seed, "miniature", recorded))
    assert (found.verdict, found.failed) == ("error", []), found


def test_the_good_mode_passes_the_whole_tier(recorded: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    found = asyncio.run(detection.draw(detection.GOOD, seed, "miniature", recorded))
    assert (found.verdict, found.failed) == ("pass", []), found


def test_every_check_is_meant_for_some_fault() -> None:
    """A check that no fault can trip protects nothing."""
    meant = {name for mode in MODES.values() for name in mode.meant}
    # Its fault, interleaving, is one of concurrency too, which others are meant for.
    assert set(REGISTRY) - meant == {"prefill-decode"}
