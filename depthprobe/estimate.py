"""From per-sequence means to a value with an interval. The sequence, or the document, is the unit of replication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from depthprobe.processes import collected, count

__all__ = ["Interval", "PerSequence", "Resampler", "jackknife", "plain_table"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; the bounds are NaN where one sequence or group leaves nothing to resample."""

    value: float
    low: float
    high: float


class PerSequence:
    """One number a sequence for every key, in float64, placed by the sequence's index in the corpus.

    What is kept does not depend on how sequences were put into batches, on their order, or on which process saw
    them; two of these from disjoint sets of sequences add up with `merge`.
    """

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.values: dict[tuple[str, str, int], Floats] = {}

    def add(self, key: tuple[str, str, int], indices: NDArray[np.int64], values: Floats) -> None:
        """Store the values of some sequences, `values[k]` for sequence `indices[k]`."""
        if key not in self.values:
            self.values[key] = np.full(self.sequences, np.nan)
        self.values[key][indices] = values

    def merge(self, other: PerSequence) -> None:
        """Take over what another process saw."""
        for key, theirs in other.values.items():
            seen = ~np.isnan(theirs)
            self.add(key, np.flatnonzero(seen), theirs[seen])

    def exchange(self) -> None:
        """Take over what the other processes of this run saw, so that all have the same."""
        if count() > 1:
            for other in collected(self):
                self.merge(other)

    def column(self, key: tuple[str, str, int]) -> Floats:
        """The values of one key, `[sequences]`."""
        return self.values[key]


class Resampler:
    """Bootstrap over sequences; over documents, where there is more than one, each with all of its sequences.

    Args:
        sequences: how many there are.
        documents: the document of each sequence, None where unknown.
        seed: of the resamples.
        resamples: how many.
    """

    def __init__(
        self, sequences: int, documents: NDArray[np.int64] | None = None, seed: int = 0, resamples: int = 2000
    ) -> None:
        clusters = np.arange(sequences) if documents is None else np.unique(documents, return_inverse=True)[1]
        self.sequences, self.clusters = sequences, int(clusters.max(initial=-1)) + 1
        if self.clusters < 2:  # a single document says nothing between documents: its sequences are resampled
            clusters, self.clusters = np.arange(sequences), sequences
        rng = np.random.default_rng([seed, 0xB007])
        counts = rng.multinomial(self.clusters, np.full(self.clusters, 1 / max(self.clusters, 1)), size=resamples)
        self._weights = counts[:, clusters].astype(np.float64)

    def replicates(self, columns: Floats) -> Floats:
        """Resampled means `[resamples, M]` of columns `[sequences, M]`; a missing value (NaN) has no weight."""
        present = ~np.isnan(columns)
        totals = self._weights @ np.where(present, columns, 0.0)
        counts = self._weights @ present.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return totals / counts

    def intervals(self, columns: Floats) -> tuple[Floats, Floats, Floats]:
        """Means, lower and upper bounds, each `[M]`, of columns `[sequences, M]`."""
        means = np.nanmean(columns, axis=0)
        if self.clusters < 2:
            return means, np.full_like(means, np.nan), np.full_like(means, np.nan)
        low, high = np.nanquantile(self.replicates(columns), [0.025, 0.975], axis=0)
        return means, low, high

    def function(self, columns: Floats, of_means: Callable[[Floats], Floats]) -> Interval:
        """A function of the means, with the interval of its resamples.

        Args:
            columns: `[sequences, M]`.
            of_means: takes means `[R, M]` and gives one value each, `[R]`.
        """
        value = float(of_means(np.nanmean(columns, axis=0)[None])[0])
        if self.clusters < 2:
            return Interval(value, np.nan, np.nan)
        low, high = np.nanquantile(of_means(self.replicates(columns)), [0.025, 0.975])
        return Interval(value, float(low), float(high))


def plain_table(frame: pd.DataFrame) -> dict[str, Any]:
    """A table as a report holds it: columns and rows of JSON's own types, None for what is not a number."""
    plain = frame.astype(object).where(frame.notna(), None)
    return {"columns": list(frame.columns), "rows": plain.to_numpy().tolist()}


def jackknife(value: float, left_out: Floats) -> Interval:
    """Delete-a-group jackknife with Student's t; `left_out[g]` is the value without group g (Tukey 1958)."""
    groups = len(left_out)
    if groups < 2:
        return Interval(value, np.nan, np.nan)
    error = np.sqrt((groups - 1) / groups * np.sum((left_out - left_out.mean()) ** 2))
    reach = float(_quantile(groups - 1) * error)
    return Interval(value, value - reach, value + reach)


@cache
def _quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; scipy takes a millisecond or more for each."""
    return float(stats.t.ppf(0.975, freedom))
