"""`path_spectrum`: the gradient at the input, split by how many branches it came through."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings, Estimate, Floats, Progress, resampler, row
from depthprobe.depth.jacobians import Jacobians, dot
from depthprobe.depth.products import check_gradient, ratios
from depthprobe.processes import collected, dealt, paced
from depthprobe.verify import Anatomy

__all__ = ["CANCELS", "DOES", "MISSES", "path_spectrum"]

DOES = "Splits the loss's gradient at the input by the number of branches it came through, and takes the parts' norms."
MISSES = "Where the parts cancel, which the cross term tells, their norms say nothing of their sum."

CANCELS = 1e-2  # a cross term below this: all but a hundredth of the parts' energy cancels


def path_spectrum(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """‖g_k‖² for all k, their mean D⁺ = Σ k ‖g_k‖² / Σ_{k≥1} ‖g_k‖², and the cross term ‖Σ g_k‖² / Σ ‖g_k‖².

    With a unit's Jacobian J = P + B, g_k ← Pᵀg_k + Bᵀg_{k−1}. A unit with m units above it has m + 1 parts to carry,
    so that N units take about N / 2 backward passes (to the states alone). Energies are over a sequence's tokens
    and width, the skipped first tokens left out, added over sequences. A path passes one of two parallel sublayers.

    Args:
        anatomy: the verified model.
        corpus: ids `[sequences, tokens]` or states `[sequences, tokens, width]`; run one sequence at a time.
        unit: `block` or `sublayer`.
        settings: seed, first positions left out.
        progress: called with (sequences done, in all).

    Returns:
        Rows `path_spectrum` (D⁺; 0 where nothing came through a branch) and `path_cross`; the curve `spectrum`:
        ‖g_k‖² and its share for every k.

    Raises:
        UsageError: blocks that hand on more than the stream, sublayers that were not found, no position left.
        GradientError: something in the model has no derivative, or the gradient at the input is 0.
    """
    settings = settings or DepthSettings()
    count, energies, squares = corpus.sequences, [], np.zeros(corpus.sequences)
    progress = paced(progress)
    with dealt(count, squares) as mine, Jacobians("path_spectrum", anatomy, corpus, unit, settings) as jacobians:
        for place in mine:
            energy, squares[place] = _one(jacobians, place)
            energies.append(energy)
            if progress is not None:
                progress(place + 1, count)
    energies = [energy for theirs in collected(energies) for energy in theirs]
    check_gradient(jacobians, squares)
    columns = np.column_stack([squares, np.stack(energies)])  # ‖g‖², then ‖g_k‖² for k = 0, 1, …
    k = np.arange(columns.shape[1] - 1)

    def mean(sums: Floats) -> Floats:
        total = sums[:, 2:].sum(axis=1)
        return np.where(total > 0, sums[:, 1:] @ k / np.where(total > 0, total, 1.0), 0.0)

    bootstrap = resampler(corpus, settings)
    cross = bootstrap.function(columns, lambda sums: sums[:, 0] / sums[:, 1:].sum(axis=1))
    note = f"the parts cancel to {cross.value:.0e} of their energy: this number means nothing"
    note = note if cross.value < CANCELS else ""
    name, of = jacobians.variant, jacobians.of
    rows = [
        row("path_spectrum", unit, name, bootstrap.function(columns, mean), of, note),
        row("path_cross", unit, name, cross, of, note and "the parts g_k cancel"),
    ]
    share, low, high = ratios(jacobians, columns[:, 1:], columns[:, 1:].sum(axis=1))
    curve = pd.DataFrame({"k": k, "energy": columns[:, 1:].sum(axis=0), "share": share, "ci_low": low, "ci_high": high})
    passes = sum(range(1, len(jacobians.units) + 1)) / len(jacobians.units)
    return Estimate(rows, {name: columns}, {"spectrum": curve}, 2.0, 1.0 + passes, jacobians.notes)


def _one(jacobians: Jacobians, place: int) -> tuple[Floats, float]:
    """Of one sequence: ‖g_k‖² for k = 0 …, and ‖g‖²."""
    tape = jacobians.forward(place)
    skip = jacobians.settings.skip_first
    g, parts = tape.cotangent, [tape.cotangent]
    for index in reversed(range(len(jacobians.units))):
        ran = jacobians.at(tape, index)
        g = ran.pull(g).total  # apart from the parts: their sum would be mostly rounding where they cancel
        above = torch.zeros_like(g)
        carried = []
        for part in parts:
            pulled = ran.pull(part)
            carried.append(pulled.identity + above)
            above = pulled.gone
        parts = [*carried, above]
    return np.array([dot(part, part, skip) for part in parts]), dot(g, g, skip)
