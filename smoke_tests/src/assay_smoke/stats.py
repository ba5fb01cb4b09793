"""Deciding on rates: intervals, not point estimates, and the size of fault that would be seen.

Wilson's score interval (E. B. Wilson, 1927) stays sensible at 0 of n and n of n, which is where a
healthy server lives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Z95 = 1.959964
"""Normal quantile of a two-sided interval of 95 %."""
POWER = 0.95
"""Chance with which a fault of the size called detectable is seen."""


def wilson(events: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Interval of the rate behind `events` of `n`; (0, 1) without samples.

    Raises ValueError unless 0 <= events <= n.
    """
    if not 0 <= events <= n:
        raise ValueError(f"{events} events of {n}")
    if n == 0:
        return 0.0, 1.0
    p = events / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if events == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if events == n else min(1.0, (centre + spread) / scale)
    return low, high


Decision = Literal["pass", "fail", "unsure"]


@dataclass(frozen=True)
class RateRule:
    """How often something bad may happen.

    Fail: the interval lies above `tolerated`. Pass: it lies below `unacceptable`. Else there are
    not enough samples to tell the two apart.
    """

    tolerated: float
    """Rate that a healthy server may show; 0: one event is one too many."""
    unacceptable: float
    """Rate that must be excluded before the check passes."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerated < self.unacceptable <= 1:
            raise ValueError(
                f"tolerated {self.tolerated} must be at least 0 and below unacceptable"
                f" {self.unacceptable}, which is at most 1"
            )

    def decide(self, events: int, n: int) -> Decision:
        low, high = wilson(events, n)
        if low > self.tolerated:
            return "fail"
        return "pass" if high < self.unacceptable else "unsure"

    def events_to_fail(self, n: int) -> int | None:
        """Fewest events of n that fail; None when not even n of n do."""
        low, high = 0, n
        if wilson(n, n)[0] <= self.tolerated:
            return None
        while low < high:
            middle = (low + high) // 2
            if wilson(middle, n)[0] > self.tolerated:
                high = middle
            else:
                low = middle + 1
        return low

    def detectable(self, n: int, power: float = POWER) -> float | None:
        """Smallest rate of a fault that n samples would fail with chance `power`."""
        needed = self.events_to_fail(n) if n else None
        if needed is None:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            if _at_least(needed, n, middle) >= power:
                high = middle
            else:
                low = middle
        return high

    def samples_to_pass(self) -> int:
        """Fewest samples without any event that pass."""
        low, high = 1, 1
        while self.decide(0, high) != "pass":
            high *= 2
        while low < high:
            middle = (low + high) // 2
            if self.decide(0, middle) == "pass":
                high = middle
            else:
                low = middle + 1
        return low

    def words(self, events: int, n: int, what: str) -> str:
        """'0 of 96 answers wrong; ...' with the interval and what could be seen."""
        low, high = wilson(events, n)
        return f"{events} of {n} {what} ({percent(low)} to {percent(high)})"

    def detects(self, n: int, what: str) -> str:
        rate = self.detectable(n)
        if rate is None:
            return f"nothing with {n} {what}"
        return f"{percent(rate)} of {what} and more"


def _at_least(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial."""
    if k <= 0 or p >= 1:
        return 1.0
    if p <= 0:
        return 0.0
    below = 0.0
    for i in range(k):
        log = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        below += math.exp(log + i * math.log(p) + (n - i) * math.log1p(-p))
    return 1.0 - min(1.0, below)


def percent(rate: float) -> str:
    """Three significant digits: 0.033 %, 12.3 %."""
    return f"{100 * rate:.3g} %"
