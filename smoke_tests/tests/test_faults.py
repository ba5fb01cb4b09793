"""Every fault is caught by the check that is meant for it, on parameters and a seed drawn by this
very run; the good mode passes; what is an outage is never called incoherent.

`make smoke-detection` does the same many times over and writes the table of docs/coherence.md.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from assay_smoke import detection
from assay_smoke.checks import REGISTRY
from assay_smoke.faults.modes import MODES

OUTAGES = [name for name, mode in MODES.items() if not mode.meant and name != detection.GOOD]
QUICK_OUTAGES = ["broken-connection", "errors"]


def drawn(mode: str, recorded: Path) -> detection.Draw:
    seed = random.SystemRandom().randrange(2**32)
    found = asyncio.run(detection.draw(mode, seed, "miniature", recorded, "default"))
    print(found)  # the seed and the parameters, should it fail
    return found


@pytest.mark.parametrize("mode", [name for name in MODES if name not in OUTAGES])
def test_a_fault_is_caught_by_the_check_meant_for_it(mode: str, recorded: Path) -> None:
    found = drawn(mode, recorded)
    assert found.caught, found


@pytest.mark.parametrize(
    "mode", [m if m in QUICK_OUTAGES else pytest.param(m, marks=pytest.mark.slow) for m in OUTAGES]
)
def test_an_outage_is_no_incoherence(mode: str, recorded: Path) -> None:
    found = drawn(mode, recorded)
    assert (found.verdict, found.failed) == ("error", [])


def test_every_check_is_meant_for_some_fault() -> None:
    """A check that no fault can trip protects nothing."""
    meant = {name for mode in MODES.values() for name in mode.meant}
    # Its fault, interleaving, is also one of concurrency; the served miniature covers it.
    assert set(REGISTRY) - meant == {"prefill-decode"}
