"""Participation: how many units write something that matters, whatever their order."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings, Estimate, Floats, Progress, resampler, row
from depthprobe.depth.effects import Skips, run_skips
from depthprobe.verify import Anatomy

__all__ = ["DOES", "MISSES", "participation", "writers"]

DOES = "Counts how many units have a share in what the model predicts, as the exponential of the shares' entropy."
MISSES = "Takes no notice of order: branches that all read x_0 count as many as a chain, so it is no depth."


def participation(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    skips: Skips | None = None,
) -> Estimate:
    """N_eff = exp of the entropy of the units' shares in the sum of all skips' KLs; 0 if all are 0.

    The KL of skipping a unit at all tokens is averaged over positions and sequences before the shares are taken. A
    model without a language-model head has `state_distance` in its place.

    Args:
        anatomy, corpus, unit, settings, progress: as in `run_skips`.
        skips: runs of the same corpus and unit, if they were made before.

    Returns:
        The row `participation`; `per_sequence` the costs, `[sequences, N]`; the curve `shares` (skipped, share, cost
        with ci_low and ci_high; units from 0).
    """
    settings = settings or DepthSettings()
    if skips is None:
        skips = run_skips(anatomy, corpus, unit, settings, progress, later=False)
    name, costs = skips.of(unit, corpus).cost
    draws = resampler(corpus, settings)
    note = "" if name == "kl" else f"of {name}: the model has no language-model head"
    value, low, high = draws.intervals(costs)
    shares = value / max(float(value.sum()), 1e-300)
    table = pd.DataFrame(
        {"skipped": range(skips.count), "share": shares, "cost": value, "ci_low": low, "ci_high": high}
    )
    found = row("participation", unit, "", draws.function(costs, writers), skips.count, note)
    return Estimate([found], {"": costs}, {"shares": table}, skips.evaluations, notes=list(skips.notes))


def writers(costs: Floats) -> Floats:
    """exp of the entropy of each row's shares, 0 for a row of zeros; `[R, N]` to `[R]`."""
    total = costs.sum(axis=1, keepdims=True)
    shares = costs / np.where(total > 0, total, 1)
    logs = np.log(np.where(shares > 0, shares, 1))
    return np.where(total[:, 0] > 0, np.exp(-(shares * logs).sum(axis=1)), 0.0)
