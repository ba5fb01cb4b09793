"""Which tile a cluster computes next: the same few lines on the device and in tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def locate(tile: Any, row_tiles: Any) -> tuple[Any, Any]:
    """(row tile, channel tile). Row tiles first, so that clusters at work together share weights.

    Integers on the host, traced values on the device.
    """
    return tile % row_tiles, tile // row_tiles


def visits(cluster: int, clusters: int, row_tiles: int, channel_tiles: int) -> Iterator[int]:
    """The tiles of one persistent cluster, as the kernel's loops walk them."""
    tile = cluster
    while tile < row_tiles * channel_tiles:
        yield tile
        tile += clusters
