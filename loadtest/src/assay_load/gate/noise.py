"""How small a slow-down a handful of repetitions can show, given how much they differ."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from assay_load.measure.histogram import RELATIVE_ERROR

# Quantiles of Student's t by degrees of freedom, from the usual tables (NIST/SEMATECH e-Handbook of
# Statistical Methods, 1.3.6.7.2, for 0.95).
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771,
       1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725)  # fmt: skip
T80 = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879, 0.876, 0.873, 0.870,
       0.868, 0.866, 0.865, 0.863, 0.862, 0.861, 0.860)  # fmt: skip
ROUNDING = RELATIVE_ERROR / math.sqrt(3)
"""Standard deviation of what a histogram's buckets round: equal repetitions are no sharper."""
MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for many normal values; for few it is less."""


def slowdown(now: float, baseline: float, larger_is_better: bool) -> float:
    """0.1: 10 % longer, or a rate divided by 1.1; negative: faster."""
    return baseline / now - 1 if larger_is_better else now / baseline - 1


def spread(series: Sequence[Sequence[float]]) -> float:
    """Standard deviation within the series, if they are normal, from the median of the absolute
    differences of all pairs within each. As a median it does not mind one wild repetition, which
    the medians that are compared do not mind either; of the usual robust estimates it is among the
    least uncertain for so few values (P. J. Rousseeuw, C. Croux, JASA 88, 1993)."""
    pairs = [abs(a - b) for values in series for a, b in itertools.combinations(values, 2)]
    # Differences of two normal values vary sqrt(2) times as much; 0.6745 is the normal's quartile.
    return statistics.median(pairs) / (math.sqrt(2) * 0.6745)


def detectable(now: Sequence[float], baseline: Sequence[float]) -> float:
    """The smallest true slow-down that a one-sided test at 5 % finds four times in five, by the
    spread within both series of repetitions (of logarithms), or by the histograms' rounding where
    that is more. Infinite for values <= 0, and where nothing was repeated."""
    if min(*now, *baseline) <= 0 or len(now) < 2 or len(baseline) < 2:
        return math.inf
    logs = [[math.log(v) for v in values] for values in (now, baseline)]
    error = (
        MEDIAN * max(spread(logs), ROUNDING) * math.sqrt(sum(1 / len(values) for values in logs))
    )
    freedom = len(now) + len(baseline) - 2
    index = min(freedom, len(T95)) - 1
    return math.expm1((T95[index] + T80[index]) * error)
