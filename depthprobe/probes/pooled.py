"""Metrics of pooled tokens, with a jackknife over groups of sequences: debiased CKA and held-out linearity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from depthprobe.estimate import Interval, jackknife

__all__ = ["FOLDS", "Layer", "Pair", "Pooled", "cka", "fitted", "linearity"]

FOLDS = 5
RIDGE = 1e-4  # of the mean variance of a dimension


@dataclass(frozen=True)
class Pooled:
    """A value from pooled tokens with its jackknife over groups of sequences, at one layer; n is how many sequences."""

    metric: str
    layer: int
    interval: Interval
    n: int


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's tokens, centred, group after group, with the sums of each group.

    Attributes:
        x: `[tokens, width]`, float32.
        square: ‖x‖² of each token, `[tokens]`.
        bounds: where each group begins, and the end, `[groups + 1]`.
        total: Σ x, `[groups, width]`, float64.
        moment: Σ x xᵀ, `[groups, width, width]`, float32.
    """

    x: Tensor
    square: Tensor
    bounds: tuple[int, ...]
    total: Tensor
    moment: Tensor

    @classmethod
    def of(cls, x: Tensor, bounds: tuple[int, ...]) -> Layer:
        """From centred tokens `[tokens, width]`."""
        parts = _parts(x, bounds)
        total = torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts])
        return cls(x, torch.linalg.vecdot(x, x), bounds, total, torch.stack([part.T @ part for part in parts]))


@dataclass(frozen=True, eq=False)
class Pair:
    """Two neighbouring layers a and b, and what joins them: the smaller of Δ = b − a and b itself.

    Either follows from the other and a; the smaller one is kept, so that neither is a small difference of large sums.

    Attributes:
        target: Δ or b, `[tokens, width]`.
        sign: +1 where the target is Δ, so that b = target + a; −1 where it is b, so that Δ = target − a.
        across: Σ a targetᵀ of each group, `[groups, width, width]`.
    """

    a: Layer
    b: Layer
    target: Tensor
    sign: int
    across: Tensor

    @classmethod
    def of(cls, a: Layer, b: Layer) -> Pair:
        """Join two layers of the same tokens."""
        update = b.x - a.x
        sign = 1 if _energy(update) <= _energy(b.x) else -1
        target = update if sign == 1 else b.x
        parts = zip(_parts(a.x, a.bounds), _parts(target, a.bounds), strict=True)
        return cls(a, b, target, sign, torch.stack([x.T @ t for x, t in parts]))


def cka(pair: Pair) -> Interval | None:
    """Debiased linear CKA of two layers with its jackknife; None where one does not vary between tokens."""
    a, b = pair.a, pair.b
    if len(a.bounds) > 2 and len(a.x) - max(np.diff(a.bounds)) < 4:
        return None
    alone = len(a.bounds) == 2  # one group: nothing is left once it is left out
    both = _hsic(a, b, a.moment + pair.across if pair.sign == 1 else pair.across)
    below = _hsic(a, a, a.moment) * _hsic(b, b, b.moment)
    if alone:
        both, below = both[:1], below[:1]
    if not bool((below > 0).all()):
        return None
    value, *left_out = (both / below.sqrt()).tolist()
    return _at_most_one(jackknife(value, np.array(left_out if len(left_out) > 1 else [])))


def _at_most_one(interval: Interval) -> Interval:
    """No CKA and no R² is above 1, though a jackknife's interval may be."""
    return Interval(interval.value, interval.low, min(interval.high, 1.0))


def _hsic(a: Layer, b: Layer, moment: Tensor) -> Tensor:
    """Unbiased HSIC with linear kernels (Song et al. 2012, eq. 5) of all tokens, then without each group.

    With K̃ and L̃ the Gram matrices with their diagonals set to 0, it is
    [tr K̃L̃ + 1ᵀK̃1 1ᵀL̃1 / ((n−1)(n−2)) − 2/(n−2) 1ᵀK̃L̃1] / (n(n−3)), here from sums over tokens alone.
    """

    def sums(values: Tensor) -> Tensor:
        return _variants(torch.stack([part.sum(dim=0, dtype=torch.float64) for part in _parts(values, a.bounds)]))

    def weighted(weights: Tensor, values: Tensor) -> Tensor:
        pairs = zip(_parts(weights, a.bounds), _parts(values, a.bounds), strict=True)
        return _variants(torch.stack([w @ v for w, v in pairs]).double())

    n = _variants(torch.tensor(np.diff(a.bounds), dtype=torch.float64))
    x, y = _variants(a.total), _variants(b.total)
    whole = moment.sum(dim=0)
    inner = torch.linalg.vecdot(moment.flatten(1), whole.flatten()).double()
    own = torch.linalg.vector_norm(moment.flatten(1), dim=1).double().square()
    size = torch.linalg.vector_norm(whole).double().square()
    # ‖S − S_g‖² = ‖S‖² − 2⟨S, S_g⟩ + ‖S_g‖²
    energy = torch.cat([size[None], size - 2 * inner + own])
    across = (x.float() * (y.float() @ whole.T)).sum(dim=1).double()
    without = torch.bmm(moment, y[1:, :, None].float())[..., 0]
    across[1:] -= (x[1:].float() * without).sum(dim=1).double()

    joint = sums(a.square * b.square)
    ones_a, ones_b = (x * x).sum(1) - sums(a.square), (y * y).sum(1) - sums(b.square)
    ones = across - (weighted(a.square, b.x) * y).sum(1) - (weighted(b.square, a.x) * x).sum(1) + joint
    value = energy - joint + ones_a * ones_b / ((n - 1) * (n - 2)) - 2 / (n - 2) * ones
    return value / (n * (n - 3))


def fitted(bounds: tuple[int, ...]) -> int:
    """On how few tokens any of linearity's folds is fitted, where its groups of sequences begin and end so."""
    sizes = np.diff(bounds)
    return int(sizes.sum() - np.bincount(np.arange(len(sizes)) % FOLDS, sizes).max())


def linearity(layer: int, pair: Pair, sequences: int) -> Iterator[Pooled]:
    """Held-out R² of ridge maps from a state to the next one and to the update; every fold from the others.

    One inverse serves both: with A = Σ x xᵀ + λI, the map to the update is A⁻¹ Σ x Δᵀ, and the map to the next state,
    A⁻¹ Σ x (x + Δ)ᵀ, is that plus I − λA⁻¹. Normalising either side would scale the map and leave R² as it is.
    """
    a, target, across = pair.a, pair.target, pair.across
    groups = len(a.bounds) - 1
    errors, totals = np.zeros((2, groups)), np.zeros((2, groups))
    counts = torch.tensor(np.diff(a.bounds), dtype=torch.float64)
    shift = torch.stack([part.sum(dim=0, dtype=torch.float64) for part in _parts(target, a.bounds)])
    folds = torch.arange(groups) % FOLDS
    whole, joined, eye = a.moment.sum(0), across.sum(0), torch.eye(a.x.shape[1], dtype=torch.float64)
    for fold in range(FOLDS):
        fit = folds != fold
        n = counts[fit].sum()
        mean, centre = a.total[fit].sum(0) / n, shift[fit].sum(0) / n
        square = (whole - a.moment[~fit].sum(0)).double().addr_(mean, mean, alpha=-float(n))
        goal = (joined - across[~fit].sum(0)).double().addr_(mean, centre, alpha=-float(n)).float()
        ridge = RIDGE * float(square.diagonal().mean()) + 1e-300
        square.diagonal().add_(ridge)
        # A⁻¹ = RᵀR, R the inverse of A's Cholesky factor: two products with R take less time than A⁻¹ itself.
        root = torch.linalg.solve_triangular(torch.linalg.cholesky(square), eye, upper=False).float()
        weights = root @ goal
        for g in torch.nonzero(~fit)[:, 0].tolist():
            rows = slice(a.bounds[g], a.bounds[g + 1])
            true = target[rows] - centre.float()
            inputs = a.x[rows] - mean.float()
            turned = inputs @ root.T
            missed = true - turned @ weights
            errors[:, g] = _energy(missed), _energy(missed.add_(turned @ root, alpha=pair.sign * ridge))
            totals[:, g] = _energy(true), _energy(true + pair.sign * inputs)
    names = ("linearity_update", "linearity") if pair.sign == 1 else ("linearity", "linearity_update")
    for metric, wrong, total in zip(names, errors, totals, strict=True):
        if total.sum() > 0:  # no update at all leaves nothing to predict
            left_out = 1 - (wrong.sum() - wrong) / (total.sum() - total)
            yield Pooled(metric, layer, _at_most_one(jackknife(1 - wrong.sum() / total.sum(), left_out)), sequences)


def _energy(x: Tensor) -> float:
    return float(torch.linalg.vecdot(x, x).sum(dtype=torch.float64))


def _parts(values: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
    return [values[start:stop] for start, stop in pairwise(bounds)]


def _variants(groups: Tensor) -> Tensor:
    """Sums over all groups, then over all but each one: `[groups, …]` to `[1 + groups, …]`."""
    whole = groups.sum(dim=0, keepdim=True)
    return torch.cat([whole, whole - groups])
