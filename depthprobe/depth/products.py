"""From inner products of gradients, a number a sequence, to rows and curves: ratios of sums over sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from depthprobe.depth.base import Depth, Estimate, Floats, resampler, row
from depthprobe.depth.jacobians import Jacobians
from depthprobe.errors import GradientError

__all__ = ["check_gradient", "from_products", "joined", "later_blocks", "ratios"]

LATER = (0.6, 1 / 3, 0.2)  # of the blocks: the last 18, 10 and 6 of 30


def joined(*parts: str) -> str:
    """A row's variant."""
    return ", ".join(part for part in parts if part)


def later_blocks(blocks: int) -> list[int]:
    """The first blocks that rows are given for, beside the whole model's."""
    found = {blocks - round(share * blocks) for share in LATER}
    return sorted(first for first in found if 0 < first < blocks)


def check_gradient(jacobians: Jacobians, squares: Floats) -> None:
    """Whether there is a gradient to divide by.

    Raises:
        GradientError: none of the squared norms `[sequences]` is above 0.
    """
    if not squares.sum() > 0:
        raise GradientError(
            f"{jacobians.name}: the gradient at the first state is 0 in every sequence", "an output that depends on it"
        )


def ratios(jacobians: Jacobians, above: Floats, below: Floats) -> tuple[Floats, Floats, Floats]:
    """Σ above / Σ below over sequences, with their intervals.

    Args:
        jacobians: whose corpus and settings say how to resample.
        above: `[sequences, M]`.
        below: `[sequences]`, or `[sequences, M]`.

    Returns:
        Values, lower and upper bounds, each `[M]`; NaN bounds where there is one sequence.
    """
    below = np.broadcast_to(below[:, None] if below.ndim == 1 else below, above.shape)
    bootstrap = resampler(jacobians.corpus, jacobians.settings)
    value = above.sum(axis=0) / below.sum(axis=0)
    if bootstrap.clusters < 2:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    drawn = bootstrap.replicates(above) / bootstrap.replicates(below)
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    return value, low, high


def from_products(
    name: str, share: str, jacobians: Jacobians, products: Floats, forward: float, backward: float
) -> Estimate:
    """Elasticity and direct share, from the first block and from later ones.

    Args:
        name: of the elasticity.
        share: of the direct share.
        jacobians: what they were taken with.
        products: ⟨h, g⟩, ⟨g, g⟩ and ⟨g_0, g⟩ at the input of every block, `[sequences, blocks, 3]`.
        forward: forward passes' worth of units that were run.
        backward: how often a cotangent was carried through all units.
    """
    check_gradient(jacobians, products[:, 0, 1])
    curve: dict[str, Any] = {"first_block": np.arange(products.shape[1])}
    for column, metric in ((0, "elasticity"), (2, "direct_share")):
        value, low, high = ratios(jacobians, products[:, :, column], products[:, :, 1])
        curve |= {metric: value, f"{metric}_ci_low": low, f"{metric}_ci_high": high}
    rows: list[Depth] = []
    bootstrap = resampler(jacobians.corpus, jacobians.settings)
    per_sequence: dict[str, Floats] = {}
    for first in [0, *later_blocks(products.shape[1])]:
        variant = joined(jacobians.variant, f"from block {first}" if first else "")
        of = sum(len(unit.names) for unit in jacobians.units if unit.layer >= first)
        columns = per_sequence[variant] = products[:, first]
        rows.append(row(name, jacobians.kind, variant, bootstrap.function(columns, lambda m: m[:, 0] / m[:, 1]), of))
        if not first:
            direct = bootstrap.function(columns, lambda m: m[:, 2] / m[:, 1])
            rows.insert(1, row(share, jacobians.kind, variant, direct, of))
    return Estimate(rows, per_sequence, {"first_blocks": pd.DataFrame(curve)}, forward, backward, jacobians.notes)
