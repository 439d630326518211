"""Metrics of pooled tokens, with a jackknife over groups of sequences: debiased CKA and held-out linearity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
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
        moment = torch.stack([part.T @ part for part in _parts(x, bounds)])
        return cls(x, _squares(x), bounds, _sums(x, bounds), moment)

    @cached_property
    def hsic(self) -> Tensor:
        """With itself: of all tokens, then without each group; both neighbours need it."""
        return _hsic(self, self, self.moment)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two neighbouring layers a and b, and what joins them: the smaller of Δ = b − a and b itself.

    Either follows from the other and a; the smaller one is kept, so that neither is a small difference of large sums.

    Attributes:
        target: Δ or b, `[tokens, width]`.
        sign: +1 where the target is Δ, so that b = target + a; −1 where it is b, so that Δ = target − a.
        square: ‖·‖² of each token, of the target and of the other one, `[tokens]` each.
        across: Σ a targetᵀ of each group, `[groups, width, width]`.
    """

    a: Layer
    b: Layer
    target: Tensor
    sign: int
    square: tuple[Tensor, Tensor]
    across: Tensor

    @classmethod
    def of(cls, a: Layer, b: Layer) -> Pair:
        """Join two layers of the same tokens."""
        update = b.x - a.x
        small = _squares(update)
        sign = 1 if small.sum(dtype=torch.float64) <= b.square.sum(dtype=torch.float64) else -1
        target, square = (update, (small, b.square)) if sign == 1 else (b.x, (b.square, small))
        parts = zip(_parts(a.x, a.bounds), _parts(target, a.bounds), strict=True)
        return cls(a, b, target, sign, square, torch.stack([x.T @ t for x, t in parts]))


def cka(pair: Pair) -> Interval | None:
    """Debiased linear CKA of two layers with its jackknife; None where one does not vary between tokens."""
    a, b = pair.a, pair.b
    if len(a.bounds) > 2 and len(a.x) - max(np.diff(a.bounds)) < 4:
        return None
    alone = len(a.bounds) == 2  # one group: nothing is left once it is left out
    both = _hsic(a, b, a.moment + pair.across if pair.sign == 1 else pair.across)
    below = a.hsic * b.hsic
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
        return _variants(_sums(values, a.bounds))

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
    first = (weighted(a.square, b.x) * y).sum(1)
    ones = across - first - (first if a is b else (weighted(b.square, a.x) * x).sum(1)) + joint
    value = energy - joint + ones_a * ones_b / ((n - 1) * (n - 2)) - 2 / (n - 2) * ones
    return value / (n * (n - 3))


def folds(groups: int) -> NDArray[np.int64]:
    """The fold of linearity that each group is in; groups of one fold stand beside each other."""
    return np.sort(np.arange(groups) % FOLDS)


def fitted(bounds: tuple[int, ...]) -> int:
    """On how few tokens any of linearity's folds is fitted, where its groups of sequences begin and end so."""
    sizes = np.diff(bounds)
    return int(sizes.sum() - np.bincount(folds(len(sizes)), sizes).max())


def linearity(layer: int, pair: Pair, sequences: int) -> Iterator[Pooled]:
    """Held-out R² of ridge maps from a state to the next one and to the update; every fold from the others.

    One inverse serves both: with A = Σ x xᵀ + λI, the map to the update is A⁻¹ Σ x Δᵀ, and the map to the next state,
    A⁻¹ Σ x (x + Δ)ᵀ, is that plus I − λA⁻¹. Normalising either side would scale the map and leave R² as it is.
    """
    a, target, across, sign = pair.a, pair.target, pair.across, pair.sign
    groups = len(a.bounds) - 1
    errors, totals = torch.zeros(2, groups, dtype=torch.float64), torch.zeros(2, groups, dtype=torch.float64)
    counts = torch.tensor(np.diff(a.bounds), dtype=torch.float64)
    shift = pair.b.total - a.total if sign == 1 else pair.b.total
    energy = [_sums(square, a.bounds) for square in pair.square]
    whole, joined = a.moment.sum(0), across.sum(0)
    for fold in range(FOLDS):
        within = np.flatnonzero(folds(groups) == fold)
        held = slice(within[0], within[-1] + 1)
        rows = slice(a.bounds[held.start], a.bounds[held.stop])
        n = float(counts.sum() - counts[held].sum())
        mean, centre = ((sums.sum(0) - sums[held].sum(0)) / n for sums in (a.total, shift))
        square = (whole - a.moment[held].sum(0)).double().addr_(mean, mean, alpha=-n)
        goal = (joined - across[held].sum(0)).double().addr_(mean, centre, alpha=-n).float()
        ridge = RIDGE * float(square.diagonal().mean()) + 1e-300
        square.diagonal().add_(ridge)
        # A = CCᵀ, and for a token A⁻¹x is C⁻ᵀ(C⁻¹x): solving with C takes less time than inverting either.
        root = torch.linalg.cholesky(square).float()
        turned = torch.linalg.solve_triangular(root.T, a.x[rows] - mean.float(), upper=True, left=False)
        weights = torch.linalg.solve_triangular(root, goal, upper=False)
        missed = torch.addmm(target[rows] - centre.float(), turned, weights, alpha=-1)
        inside = tuple(bound - rows.start for bound in a.bounds[held.start : held.stop + 1])
        errors[0, held] = _sums(_squares(missed), inside)
        missed.add_(torch.linalg.solve_triangular(root, turned, upper=False, left=False), alpha=sign * ridge)
        errors[1, held] = _sums(_squares(missed), inside)
        # Σ‖t − c‖² = Σ‖t‖² − 2⟨c, Σt⟩ + n‖c‖², where c is small, since the tokens of all groups are centred.
        both = (shift, centre), (shift + sign * a.total, centre + sign * mean)
        for k, (sums, c) in enumerate(both):
            totals[k, held] = energy[k][held] - 2 * sums[held] @ c + counts[held] * (c @ c)
    names = ("linearity_update", "linearity") if sign == 1 else ("linearity", "linearity_update")
    for metric, wrong, total in zip(names, errors.numpy(), totals.numpy(), strict=True):
        if total.sum() > 0:  # no update at all leaves nothing to predict
            left_out = 1 - (wrong.sum() - wrong) / (total.sum() - total)
            yield Pooled(metric, layer, _at_most_one(jackknife(1 - wrong.sum() / total.sum(), left_out)), sequences)


def _sums(values: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Of each group's tokens, in float64: `[tokens, …]` to `[groups, …]`."""
    return torch.stack([part.sum(dim=0, dtype=torch.float64) for part in _parts(values, bounds)])


def _squares(x: Tensor) -> Tensor:
    """‖x‖² of each token, without a copy of all products."""
    return torch.linalg.vector_norm(x, dim=1).square()


def _parts(values: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
    return [values[start:stop] for start, stop in pairwise(bounds)]


def _variants(groups: Tensor) -> Tensor:
    """Sums over all groups, then over all but each one: `[groups, …]` to `[1 + groups, …]`."""
    whole = groups.sum(dim=0, keepdim=True)
    return torch.cat([whole, whole - groups])
