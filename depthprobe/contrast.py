"""Values that were measured apart: their differences, their ratios, and what several training seeds can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from depthprobe.estimate import Interval

__all__ = [
    "OverModels",
    "between",
    "difference",
    "median",
    "over_seeds",
    "paired",
    "ratio",
    "same_seeds",
    "smallest_effect",
    "unpaired",
]

NAN = float("nan")


def difference(a: Interval, b: Interval) -> Interval:
    """a − b of two independent values: half-widths add up in quadrature, each side by itself, as for normal errors.

    Where both rest on the same sequences their errors go together, and the interval is wider than it need be.
    """
    value = a.value - b.value
    low = np.hypot(a.value - a.low, b.high - b.value)
    high = np.hypot(a.high - a.value, b.value - b.low)
    return Interval(value, float(value - low), float(value + high))


def ratio(a: Interval, b: Interval) -> Interval:
    """a / b of two positive values of the same run, as wide as any correlation of their errors can make it.

    For normal errors of log a and log b, sd(log a − log b) ≤ sd(log a) + sd(log b), so the half-widths add up. A lower
    end that is not positive leaves the upper end of the ratio open. There is no interval where one of the two has none.
    """
    if not (a.value > 0 and b.value > 0):
        raise ValueError(f"a ratio of {a.value} and {b.value}")
    if np.isnan([a.low, a.high, b.low, b.high]).any():
        return Interval(a.value / b.value, NAN, NAN)
    return Interval(a.value / b.value, max(a.low, 0.0) / b.high, a.high / b.low if b.low > 0 else np.inf)


def median(intervals: Sequence[Interval]) -> Interval:
    """The median of several values of one run, with the medians of their ends, as if all erred together."""
    columns = np.array([(each.value, each.low, each.high) for each in intervals])
    value, low, high = np.median(columns, axis=0)
    return Interval(float(value), float(low), float(high))


def between(a: Interval, b: Interval, weight: float) -> Interval:
    """On the line from a (weight 0) to b (weight 1), ends as values."""
    mixed = [(1 - weight) * x + weight * y for x, y in ((a.value, b.value), (a.low, b.low), (a.high, b.high))]
    return Interval(*mixed)


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean over training seeds with its 95 % interval by Student's t; no interval for a single one."""
    found = np.asarray(values, dtype=np.float64)
    count, mean = len(found), float(found.mean())
    if count < 2:
        return Interval(mean, NAN, NAN)
    reach = float(stats.t.ppf(0.975, count - 1) * found.std(ddof=1) / np.sqrt(count))
    return Interval(mean, mean - reach, mean + reach)


class OverModels:
    """Intervals over models that were all measured on the same sequences, by Student's t.

    A bootstrap of a few models would make them too narrow (for two, by a factor of 13).

    Args:
        models: how many; the rows of a column are those of the first, then of the second, and so on.
    """

    def __init__(self, models: int) -> None:
        self.models = self.clusters = models

    def intervals(self, columns: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """Means, lower and upper bounds, each `[M]`, of columns `[models × sequences, M]`."""
        found = [over_seeds(each[~np.isnan(each)]) for each in self._each(columns).T]  # of models that have it
        return tuple(np.array(ends) for ends in zip(*((i.value, i.low, i.high) for i in found), strict=True))

    def function(self, columns: NDArray[np.float64], of_means: Callable[[Any], Any]) -> Interval:
        """The mean over models of a function of each one's means; `of_means` is as in `Resampler`."""
        return over_seeds(of_means(self._each(columns)))

    def _each(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """A mean for each model `[models, M]`."""
        return np.nanmean(columns.reshape(self.models, -1, columns.shape[1]), axis=1)


def paired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Mean of a − b over seeds that both groups have, in the same order: a t-interval of the differences."""
    return over_seeds([x - y for x, y in zip(a, b, strict=True)])


def unpaired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Mean of a minus mean of b over seeds that have nothing to do with each other (Welch 1947)."""
    first, second = (np.asarray(values, dtype=np.float64) for values in (a, b))
    value = float(first.mean() - second.mean())
    if min(len(first), len(second)) < 2:
        return Interval(value, NAN, NAN)
    parts = [float(values.var(ddof=1)) / len(values) for values in (first, second)]
    total = sum(parts)
    if total == 0:
        return Interval(value, value, value)
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    reach = float(stats.t.ppf(0.975, freedom) * np.sqrt(total))
    return Interval(value, value - reach, value + reach)


def same_seeds(first: Sequence[int | None], second: Sequence[int | None]) -> list[int] | None:
    """Where in `second` each training seed of `first` stands; None unless both have the same seeds, each once."""
    if any(None in seeds or len({*seeds}) < len(seeds) for seeds in (first, second)) or {*first} != {*second}:
        return None
    return [second.index(seed) for seed in first]


@cache
def smallest_effect(count: int, other: int | None = None, power: float = 0.8) -> float:
    """The difference, in standard deviations, that a two-sided t-test at 5 % finds with this power.

    Args:
        count: seeds of one group, or pairs.
        other: seeds of the other group; None for pairs, where the deviation is that of the paired differences.
        power: probability to find it.

    Returns:
        By the noncentral F (Cohen 1988); infinite where there is nothing to test with. 1.7 for five pairs.
    """
    freedom = count - 1 if other is None else count + other - 2
    if count < 2 or (other is not None and other < 2):
        return float("inf")
    scale = np.sqrt(1 / count if other is None else 1 / count + 1 / other)
    critical = stats.t.ppf(0.975, freedom)

    def missing(shift: float) -> float:
        return float(stats.ncf.sf(critical**2, 1, freedom, shift**2) - power)  # t² of two sides is one side of F

    end = 2.0
    while missing(end) < 0:
        end *= 1.5
    return float(scale * optimize.brentq(missing, 1e-3, end))
