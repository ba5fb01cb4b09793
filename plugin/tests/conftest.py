"""Of all tests of the plugin."""

from __future__ import annotations

import os
import time

import pytest

END = "ASSAY_TESTS_END"
"""Seconds since the epoch after which no further test is begun. `.ci/run` sets it: a landing has a
limit, and a machine several times slower than others must not lose all of it."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    end = os.environ.get(END)
    if end is not None and time.time() > float(end):
        pytest.skip(f"no time left on this machine ({END}): run it by hand")
