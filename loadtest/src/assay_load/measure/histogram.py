"""A histogram of durations that merges exactly: sums of counts, whatever the order or the split.

Buckets are log-linear, as in HdrHistogram: up to 2^8 microseconds each has its own count, above
that each power of two is cut into 2^7 equal parts. A percentile is the middle of a bucket, so it is
within RELATIVE_ERROR of a value that was measured (or within half a microsecond).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

BITS = 7
RELATIVE_ERROR = 2.0 ** -(BITS + 1)
"""0.4 %."""


def bucket(microseconds: int) -> int:
    shift = max(0, microseconds.bit_length() - BITS - 1)
    return (shift << BITS) + (microseconds >> shift)


def bounds(index: int) -> tuple[int, int]:
    """Smallest and largest microsecond of a bucket."""
    shift = max(0, (index >> BITS) - 1)
    low = (index - (shift << BITS)) << shift
    return low, low + (1 << shift) - 1


class Histogram:
    """Durations in seconds in, milliseconds out. Negative ones count as 0."""

    __slots__ = ("_counts", "largest", "smallest", "sum_us")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.sum_us = 0
        self.smallest: int | None = None
        self.largest: int | None = None

    def add(self, seconds: float) -> None:
        value = max(0, round(seconds * 1e6))
        self._counts[bucket(value)] += 1
        self._widen(value, value, value)

    def add_many(self, seconds: np.ndarray | Iterable[float]) -> None:
        array = seconds if isinstance(seconds, np.ndarray) else np.fromiter(seconds, np.float64)
        if not array.size:
            return
        values = np.maximum(np.rint(array * 1e6), 0).astype(np.int64)
        # frexp gives the bit length of each value exactly: they are far below 2^53.
        lengths = np.frexp(values.astype(np.float64))[1].astype(np.int64)
        shifts = np.maximum(0, lengths - BITS - 1)
        indices, counts = np.unique((shifts << BITS) + (values >> shifts), return_counts=True)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            self._counts[index] += count
        self._widen(int(values.min()), int(values.max()), int(values.sum()))

    def _widen(self, smallest: int, largest: int, total: int) -> None:
        self.sum_us += total
        self.smallest = smallest if self.smallest is None else min(smallest, self.smallest)
        self.largest = largest if self.largest is None else max(largest, self.largest)

    def merge(self, other: Histogram) -> None:
        self._counts.update(other._counts)
        if other.smallest is not None and other.largest is not None:
            self._widen(other.smallest, other.largest, other.sum_us)

    @property
    def count(self) -> int:
        return self._counts.total()

    def mean(self) -> float | None:
        """Milliseconds, exact."""
        return self.sum_us / self.count / 1000 if self._counts else None

    def percentile(self, percent: float) -> float | None:
        """Milliseconds; the nearest rank: the smallest value that `percent` % do not exceed."""
        if not self._counts:
            return None
        rank = max(1, -int(-percent * self.count // 100))
        seen = 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= rank:
                low, high = bounds(index)
                assert self.smallest is not None
                assert self.largest is not None
                return min(max((low + high) / 2, self.smallest), self.largest) / 1000
        raise AssertionError("ranks beyond the count")

    def points(self) -> list[tuple[float, float]]:
        """(milliseconds, share of all values up to it) of each bucket that is not empty."""
        out, seen = [], 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            out.append((bounds(index)[1] / 1000, seen / self.count))
        return out

    def to_wire(self) -> dict[str, int | dict[str, int] | None]:
        """As JSON and MessagePack hold it."""
        return {
            "counts": {str(index): self._counts[index] for index in sorted(self._counts)},
            "sum_us": self.sum_us,
            "min_us": self.smallest,
            "max_us": self.largest,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, object]) -> Histogram:
        made = cls()
        counts = wire["counts"]
        assert isinstance(counts, Mapping)
        made._counts = Counter({int(index): int(count) for index, count in counts.items()})
        made.sum_us = int(str(wire["sum_us"]))
        if made._counts:
            made.smallest, made.largest = int(str(wire["min_us"])), int(str(wire["max_us"]))
        return made
