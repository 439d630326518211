"""What the kept sample of states gives once a run is over: centred cosines, CKA, linearity, and rounding."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.estimate import PerSequence
from depthprobe.probes.base import cosine
from depthprobe.probes.pooled import FOLDS, Layer, Pair, Pooled, cka, fitted, linearity
from depthprobe.probes.similarity import KeptStates

__all__ = ["GROUPS", "Pooled", "analyze_kept", "rounding_floors"]

GROUPS = 10


def analyze_kept(kept: KeptStates, means: PerSequence) -> tuple[list[Pooled], list[str]]:
    """Centred and standardised cosines into `means`; CKA and linearity as pooled values.

    Returns:
        The pooled values, and a plain sentence for each metric that had to be left out.
    """
    sequences = np.array(sorted(kept.slots, key=kept.slots.__getitem__), dtype=np.int64)
    groups = np.arange(len(sequences)) % min(GROUPS, len(sequences))
    order = np.lexsort((groups, groups % FOLDS))  # fold after fold, group after group, so that each is a slice
    ends = np.flatnonzero(np.diff(groups[order], append=-1)) + 1
    bounds = (0, *(ends * kept.each).tolist())
    pooled: list[Pooled] = []
    notes: list[str] = []
    width = kept.states[0].shape[-1]
    fewest = fitted(bounds)
    linear = fewest >= 4 * width and len(bounds) > FOLDS
    if not linear:
        notes.append(
            f"linearity was left out: its ridge map needs at least 4 tokens a dimension to fit on ({4 * width:,} in "
            f"{FOLDS} folds of sequences), and the sample has {fewest:,}; ask for more tokens"
        )
    rows = torch.from_numpy(order)

    def tokens(layer: int) -> Tensor:
        return _centred(kept.states[layer][rows].flatten(0, 1))  # a copy, by its order

    now = Layer.of(tokens(0), bounds)
    for layer in range(len(kept.states) - 1):
        after = Layer.of(tokens(layer + 1), bounds)
        _cosines(means, sequences[order], layer, now.x, after.x)
        pair = Pair.of(now, after)
        interval = cka(pair)
        if interval is None:
            notes.append(f"cka_adjacent was left out at layer {layer}: a state does not vary between tokens")
        else:
            pooled.append(Pooled("cka_adjacent", layer, interval, len(sequences)))
        if linear:
            pooled += linearity(layer, pair, len(sequences))
        now = after
        del pair  # its sums take as much as several blocks
    return pooled, notes


def _centred(x: Tensor) -> Tensor:
    """Tokens `[tokens, width]` less their mean, in float32, in place; a second pass takes the rounding of the first."""
    x = x.float()
    x -= x.mean(dim=0, dtype=torch.float64).float()
    x -= x.mean(dim=0, dtype=torch.float64).float()
    return x


def _cosines(means: PerSequence, sequences: NDArray[np.int64], layer: int, a: Tensor, b: Tensor) -> None:
    def average(x: Tensor, y: Tensor) -> NDArray[np.float64]:
        dots = [torch.linalg.vecdot(p, q).double() for p, q in ((x, y), (x, x), (y, y))]
        return cosine(*dots).reshape(len(sequences), -1).mean(dim=1).numpy()

    def unit(x: Tensor) -> Tensor:
        spread = torch.linalg.vector_norm(x, dim=0) / len(x) ** 0.5
        # A dimension that does not vary is 0 in every token and stays so.
        return x / torch.where(spread > 0, spread, 1.0)

    means.add(("cosine_adjacent_centred", "block", layer), sequences, average(a, b))
    means.add(("cosine_adjacent_standardised", "block", layer), sequences, average(unit(a), unit(b)))


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
