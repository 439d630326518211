"""Ridge classifiers: least squares on one-hot labels with a penalty on the weights (Hoerl & Kennard 1970)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["PENALTIES", "Ridge", "best_penalty"]

Features = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A training position, for features of variance 1: the largest leaves little but how frequent each class is
PENALTIES: tuple[float, ...] = tuple(10.0 ** np.arange(-3, 4))


class Ridge:
    """Ridge classifiers on one set of features, which is decomposed once for all labels and penalties.

    Args:
        features: `[positions, width]`; each dimension is centred and scaled to variance 1 (one that does not vary is
            left out).
    """

    def __init__(self, features: Features) -> None:
        x = features.astype(np.float64)
        self.mean = x.mean(axis=0)
        spread = x.std(axis=0)
        # what is left of a constant by rounding is no spread
        self.scale = np.where(spread > 1e-6 * np.abs(self.mean), 1 / np.maximum(spread, 1e-300), 0.0)
        x = (x - self.mean) * self.scale
        tall = x.shape[0] >= x.shape[1]
        squares, vectors = np.linalg.eigh(x.T @ x if tall else x @ x.T)
        real = squares > max(squares[-1], 1e-300) * 1e-10
        self.s, vectors = np.sqrt(squares[real]), vectors[:, real]
        self.u = x @ vectors / self.s if tall else vectors  # x = u s vᵀ
        self.v = vectors if tall else x.T @ vectors / self.s

    def scores(self, labels: Ints, count: int, features: Features, penalties: Sequence[float]) -> list[Floats]:
        """The value of every class at other features, fitted to the labels; the largest is the class that is read.

        Args:
            labels: 0 … count − 1 at each position that was fitted on, `[positions]`.
            count: of classes.
            features: `[others, width]`.
            penalties: a training position; one result for each.

        Returns:
            For each penalty `[others, count]`: about the probability of each class.
        """
        share = np.bincount(labels, minlength=count) / len(labels)
        along = self.u.T @ (np.eye(count)[labels] - share)
        seen = (features.astype(np.float64) - self.mean) * self.scale @ self.v
        shrunk = [self.s / (self.s**2 + penalty * len(labels)) for penalty in penalties]
        return [seen @ (each[:, None] * along) + share for each in shrunk]


def best_penalty(folds: Sequence[tuple[Ridge, Ints, Features, Ints]], count: int) -> float:
    """The penalty that reads most classes rightly at positions that were not fitted on, the largest of equals.

    Args:
        folds: a classifier, its labels, and the features and labels of other positions.
        count: of classes.
    """
    right = np.zeros(len(PENALTIES))
    for ridge, labels, features, truth in folds:
        right += [(got.argmax(axis=1) == truth).sum() for got in ridge.scores(labels, count, features, PENALTIES)]
    return PENALTIES[len(right) - 1 - int(right[::-1].argmax())]
