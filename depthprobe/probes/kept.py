"""What the kept sample of states gives once a run is over: centred cosines, CKA, linearity, and rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.estimate import Interval, PerSequence, jackknife
from depthprobe.probes.base import cosine
from depthprobe.probes.similarity import KeptStates

__all__ = ["GROUPS", "Pooled", "analyze_kept", "cka", "rounding_floors", "unbiased_hsic"]

GROUPS = 10
FOLDS = 5
RIDGE = 1e-4  # of the mean variance of a dimension


@dataclass(frozen=True)
class Pooled:
    """A value from pooled tokens with its jackknife over groups of sequences, at one layer."""

    metric: str
    layer: int
    interval: Interval


@dataclass(frozen=True, eq=False)
class _State:
    """One layer's kept states, centred: `x` float32 `[sequences, positions, width]`, `spread` a dimension each."""

    x: Tensor
    spread: Tensor


def analyze_kept(kept: KeptStates, means: PerSequence) -> tuple[list[Pooled], list[str]]:
    """Centred and standardised cosines into `means`; CKA and linearity as pooled values.

    Returns:
        The pooled values, and a plain sentence for each metric that had to be left out.
    """
    sequences = np.array(sorted(kept.slots, key=kept.slots.__getitem__), dtype=np.int64)
    groups = np.arange(len(sequences)) % min(GROUPS, len(sequences))
    pooled: list[Pooled] = []
    notes: list[str] = []
    width = kept.states[0].shape[-1]
    fitted = len(sequences) * kept.each * (FOLDS - 1) // FOLDS
    linear = fitted >= 4 * width and len(np.unique(groups)) >= FOLDS
    if not linear:
        notes.append(
            f"linearity was left out: its ridge map needs at least 4 tokens a dimension to fit on ({4 * width:,} in "
            f"{FOLDS} folds of sequences), and the sample has {fitted:,}; ask for more tokens"
        )
    now = _centre(kept.states[0])
    own = _Moments.of(now.x, now.x, groups)
    for layer in range(len(kept.states) - 1):
        after = _centre(kept.states[layer + 1])
        _cosines(means, sequences, layer, now, after)
        update = after.x - now.x
        across = _Moments.of(now.x, after.x, groups)
        theirs = _Moments.of(after.x, after.x, groups)
        interval = cka(own, across, theirs)
        if interval is None:
            notes.append(f"cka_adjacent was left out at layer {layer}: a state does not vary between tokens")
        else:
            pooled.append(Pooled("cka_adjacent", layer, interval))
        if linear:
            pooled += _linearity(layer, now.x, after.x, update, groups)
        now, own = after, theirs
    return pooled, notes


def _centre(states: Tensor) -> _State:
    """Exactly centred: float64 mean, float32 differences."""
    flat = states.reshape(-1, states.shape[-1])
    mean = flat.double().mean(dim=0)
    x = (states.double() - mean).float()
    return _State(x, x.reshape(flat.shape).double().square().mean(dim=0).sqrt())


def _cosines(means: PerSequence, sequences: NDArray[np.int64], layer: int, a: _State, b: _State) -> None:
    def average(x: Tensor, y: Tensor) -> NDArray[np.float64]:
        dots = [torch.linalg.vecdot(p, q).double() for p, q in ((x, y), (x, x), (y, y))]
        return cosine(*dots).mean(dim=1).numpy()

    def unit(state: _State) -> Tensor:
        # A dimension that does not vary is 0 in every token and stays so.
        return state.x / torch.where(state.spread > 0, state.spread, 1.0).float()

    means.add(("cosine_adjacent_centred", "block", layer), sequences, average(a.x, b.x))
    means.add(("cosine_adjacent_standardised", "block", layer), sequences, average(unit(a), unit(b)))


@dataclass(frozen=True, eq=False)
class _Moments:
    """Sums over the tokens of each group that the unbiased HSIC of two linear kernels is made of."""

    n: Tensor  # [groups]
    x: Tensor  # Σ x, [groups, width]
    y: Tensor
    xy: Tensor  # Σ x yᵀ, [groups, width, width], float32
    xx: Tensor  # Σ ‖x‖², [groups]
    yy: Tensor
    both: Tensor  # Σ ‖x‖² ‖y‖², [groups]
    x_by_y: Tensor  # Σ ‖y‖² x, [groups, width]
    y_by_x: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, groups: NDArray[np.int64]) -> _Moments:
        rows = [_rows(groups == g) for g in np.unique(groups)]
        parts = [cls._sums(x[r].flatten(0, 1), y[r].flatten(0, 1)) for r in rows]
        return cls(*(torch.stack(column) for column in zip(*parts, strict=True)))

    @staticmethod
    def _sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        p, q = (torch.linalg.vecdot(t, t).double() for t in (x, y))
        a, b = x.double(), y.double()
        number = torch.tensor(float(len(x)), dtype=torch.float64)
        return number, a.sum(0), b.sum(0), x.T @ y, p.sum(), q.sum(), (p * q).sum(), q @ a, p @ b


def _rows(mask: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask))


def unbiased_hsic(m: _Moments, without: int | None = None) -> float:
    """Unbiased HSIC with linear kernels from pooled moments (Song et al. 2012, eq. 5), without one group if asked.

    With K̃ and L̃ the Gram matrices with their diagonals set to 0, it is
    [tr K̃L̃ + 1ᵀK̃1 1ᵀL̃1 / ((n−1)(n−2)) − 2/(n−2) 1ᵀK̃L̃1] / (n(n−3)).
    """

    def total(t: Tensor) -> Tensor:
        return t.sum(0) - (t[without] if without is not None else 0)

    n, x, y = float(total(m.n)), total(m.x), total(m.y)
    xy = total(m.xy).double()
    both, x_by_y, y_by_x = total(m.both), total(m.x_by_y), total(m.y_by_x)
    trace = xy.square().sum() - both
    ones_k, ones_l = x @ x - total(m.xx), y @ y - total(m.yy)
    ones_kl = x @ xy @ y - y_by_x @ y - x_by_y @ x + both
    value = trace + ones_k * ones_l / ((n - 1) * (n - 2)) - 2 / (n - 2) * ones_kl
    return float(value / (n * (n - 3)))


def cka(xx: _Moments, xy: _Moments, yy: _Moments) -> Interval | None:
    """Debiased linear CKA with its jackknife over groups; None where a state does not vary between tokens."""

    def one(without: int | None) -> float:
        below = unbiased_hsic(xx, without) * unbiased_hsic(yy, without)
        return unbiased_hsic(xy, without) / below**0.5 if below > 0 else np.nan

    groups = len(xx.n)
    if int(xx.n.sum() - xx.n.max()) < 4 and groups > 1:
        return None
    value = one(None)
    if np.isnan(value):
        return None
    left_out = np.array([one(g) for g in range(groups)]) if groups > 1 else np.array([])
    return jackknife(value, left_out) if not np.isnan(left_out).any() else None


def _linearity(layer: int, x: Tensor, y: Tensor, update: Tensor, groups: NDArray[np.int64]) -> Iterator[Pooled]:
    """Cross-validated R² of ridge maps x → y and x → Δ; each fold of sequences is predicted from the others'."""
    errors = {"linearity": np.zeros((2, len(np.unique(groups)))), "linearity_update": np.zeros((2, GROUPS))}
    errors["linearity_update"] = np.zeros_like(errors["linearity"])
    for fold in range(FOLDS):
        fit, held = _rows(groups % FOLDS != fold), _rows(groups % FOLDS == fold)
        a = x[fit].flatten(0, 1)
        mean = a.double().mean(0)
        a = (a.double() - mean).float()
        square = (a.T @ a).double()
        ridge = RIDGE * float(square.diagonal().mean()) + 1e-300
        factor = torch.linalg.cholesky(square + ridge * torch.eye(len(square), dtype=torch.float64))
        for name, goal in (("linearity", y), ("linearity_update", update)):
            b = goal[fit].flatten(0, 1)
            centre = b.double().mean(0)
            weights = torch.cholesky_solve((a.T @ (b.double() - centre).float()).double(), factor).float()
            for g in np.unique(groups[held.numpy()]):
                rows = _rows(groups == g)
                true = (goal[rows].flatten(0, 1).double() - centre).float()
                guess = (x[rows].flatten(0, 1).double() - mean).float() @ weights
                errors[name][0, g] = float((true - guess).double().square().sum())
                errors[name][1, g] = float(true.double().square().sum())
    for name, (wrong, total) in errors.items():
        if total.sum() == 0:
            continue  # no update at all: nothing to predict
        left_out = 1 - (wrong.sum() - wrong) / (total.sum() - total)
        yield Pooled(name, layer, jackknife(1 - wrong.sum() / total.sum(), left_out))


def rounding_floors(kept: KeptStates, seed: int) -> dict[str, float]:
    """What rounding alone gives for metrics of neighbouring states, the largest over layers; {} in full precision.

    Each state is compared with itself after noise uniform within half a unit in the last place of its dtype.
    """
    dtype = kept.states[0].dtype
    if dtype not in {torch.bfloat16, torch.float16}:
        return {}
    generator = torch.Generator().manual_seed(seed)
    floors: dict[str, float] = {}
    for states in kept.states:
        x = states.float()
        spacing = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(1e-30))))
        noise = (torch.rand(x.shape, generator=generator) - 0.5) * spacing
        size = torch.linalg.vector_norm(x, dim=-1)
        ratio = torch.linalg.vector_norm(noise, dim=-1) / size.clamp_min(1e-30)
        # For a small random error of relative size r, 1 − cos is r² / 2 and the angle is r.
        here = {
            "update_ratio": float(ratio.mean()),
            "update_norm": float((ratio * size).mean()),
            "block_influence": float(ratio.square().mean() / 2),
            "angular_distance": float(ratio.mean() / torch.pi),
        }
        floors = {name: max(value, floors.get(name, 0.0)) for name, value in here.items()}
    return floors
