"""`path_elasticity`: the same count in the trace gauge, where what only rescales the stream is no step; by unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings, Estimate, Floats, Progress
from depthprobe.depth.jacobians import Jacobians, dot
from depthprobe.depth.products import from_products, ratios
from depthprobe.processes import collected, dealt, paced
from depthprobe.verify import Anatomy

__all__ = ["DOES", "MISSES", "path_elasticity"]

DOES = "Counts the branches that the loss's gradient came through on its way to the input, but for what only rescales."
MISSES = "It is local: it knows slopes at the given text, and nothing of what a block does that a slope does not show."


def path_elasticity(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """E = ⟨Σ k g_k, g⟩ / ‖g‖² in the trace gauge, and each unit's part of it.

    A unit's Jacobian is N'[(S + αI) + (B − αI)], B = ∂u/∂s and α = tr(B) / d for every token: only B − αI counts as
    having gone through, so that α = −1 + tr(f') / d makes nothing of how a block is divided into skip and branch. Norms
    after the sum are passed by every path; a block with such norms has as its identity path that of its sublayers, one
    after the other. The loss of every target gets an independent sign, so that products of different targets cancel.

    E = Σ e_i over units, e_i = ⟨(B_i − α_i I)ᵀ N_i'ᵀ g_{i+1}, v_i⟩ / ‖g‖², g_{i+1} the gradient behind the unit and v_i
    what its state does when x_0 moves along g: one pass backward and one in forward mode.

    Args:
        anatomy: the verified model.
        corpus: ids `[sequences, tokens]` or states `[sequences, tokens, width]`; run one sequence at a time.
        unit: `block` or `sublayer`.
        settings: seed, first positions left out, probes of a trace.
        progress: called with (sequences done, in all).

    Returns:
        Rows `path_elasticity` (from the first block, and from later ones) and `direct_share`; the curves
        `first_blocks`, both from every block on, and `profile`, e_i by unit.

    Raises:
        UsageError: blocks that hand on more than the stream, sublayers that were not found, no position left.
        GradientError: something in the model has no derivative, or the gradient at the input is 0.
    """
    settings = settings or DepthSettings()
    count = corpus.sequences
    products = np.zeros((count, len(anatomy.stream), 3))
    parts: list[Floats] = []
    progress = paced(progress)
    with dealt(count, products) as mine, Jacobians("path_elasticity", anatomy, corpus, unit, settings) as jacobians:
        for row in mine:
            products[row], part = _one(jacobians, row)
            parts.append(part)
            if progress is not None:
                progress(row + 1, count)
    parts = [part for theirs in collected(parts) for part in theirs]
    # A forward-mode pass runs every unit with a tangent beside its state: two passes' worth.
    found = from_products("path_elasticity", "direct_share", jacobians, products, 2.0 + 2.0, 2.0 + settings.probes)
    value, low, high = ratios(jacobians, np.stack(parts), products[:, 0, 1])
    places = [(counted.layer, name) for counted in jacobians.units for name in counted.names]
    profile = pd.DataFrame(places, columns=["layer", "unit"]).assign(value=value, ci_low=low, ci_high=high)
    return replace(found, curves={**found.curves, "profile": profile})


def _one(jacobians: Jacobians, row: int) -> tuple[Floats, Floats]:
    """Of one sequence: the products at the input of every block `[blocks, 3]`, and ‖g‖² e_i `[units]`."""
    tape = jacobians.forward(row, signed=True)
    skip, units = jacobians.settings.skip_first, jacobians.units
    g = direct = tape.cotangent
    h = torch.zeros_like(g)
    products = np.zeros((len(jacobians.stream), 3))
    through: list[tuple[Tensor, ...]] = []
    for index in reversed(range(len(units))):
        ran = jacobians.at(tape, index)
        gauge = jacobians.traces(tape, index, ran)
        pulled = ran.pull(g, gauge)
        through.append(pulled.through)
        h = ran.pull(h).total + pulled.gone
        g, direct = pulled.total, ran.identity(direct, gauge)
        if index == 0 or units[index - 1].layer != units[index].layer:
            products[units[index].layer] = [dot(other, g, skip) for other in (h, g, direct)]
    v = g.clone()
    v[:, :skip] = 0
    parts: list[float] = []
    for index in range(len(units)):
        parts += [dot(part, v, 0) for part in through.pop()]
        if index + 1 < len(units):
            v = jacobians.push(tape, index, v)
    return products, np.array(parts)
