"""`path_elasticity_raw`: through how many branches the gradient at the input came, with every branch as it is."""

from __future__ import annotations

import numpy as np
import torch

from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings, Estimate, Floats, Progress
from depthprobe.depth.jacobians import Jacobians, dot
from depthprobe.depth.products import from_products
from depthprobe.processes import dealt, paced
from depthprobe.verify import Anatomy

__all__ = ["DOES", "MISSES", "path_elasticity_raw"]

DOES = "Counts the branches that the loss's gradient came through on its way to the input, each way by its share of it."
MISSES = "It changes when the function does not: a branch that only rescales the stream is counted as a step."


def path_elasticity_raw(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """E = ⟨Σ k g_k, g⟩ / ‖g‖², g = Σ g_k the gradient of the mean loss at x_0 by the number k of branches passed.

    With a unit's Jacobian J = P + B, P its identity path, h = Σ k g_k follows from h ← Jᵀh + (Jᵀg − Pᵀg), g ← Jᵀg:
    it is the derivative of g by a common gain on all B. At the input of each later block the same two cotangents give
    the elasticity of the blocks from there on. Products are over a sequence's tokens and width, the skipped first
    tokens left out, added over sequences. Without a head, random unit vectors at x_L take the place of the gradient.

    Args:
        anatomy: the verified model.
        corpus: ids `[sequences, tokens]` or states `[sequences, tokens, width]`; run one sequence at a time.
        unit: `block` or `sublayer`.
        settings: seed, first positions left out.
        progress: called with (sequences done, in all).

    Returns:
        Rows `path_elasticity_raw` (from the first block, and from later ones) and `direct_share_raw`, ⟨g_0, g⟩ / ‖g‖²;
        the curve `first_blocks`: both from every block on.

    Raises:
        UsageError: blocks that hand on more than the stream, sublayers that were not found, no position left.
        GradientError: something in the model has no derivative, or the gradient at the input is 0.
    """
    settings = settings or DepthSettings()
    blocks, count = len(anatomy.stream), corpus.sequences
    products = np.zeros((count, blocks, 3))  # ⟨h, g⟩, ⟨g, g⟩, ⟨g_0, g⟩ at the input of every block
    progress = paced(progress)
    with dealt(count, products) as mine, Jacobians("path_elasticity_raw", anatomy, corpus, unit, settings) as jacobians:
        for row in mine:
            products[row] = _one(jacobians, row)
            if progress is not None:
                progress(row + 1, count)
    return from_products("path_elasticity_raw", "direct_share_raw", jacobians, products, 2.0, 2.0)


def _one(jacobians: Jacobians, row: int) -> Floats:
    """The products of one sequence, `[blocks, 3]`."""
    tape = jacobians.forward(row)
    skip, units = jacobians.settings.skip_first, jacobians.units
    g = direct = tape.cotangent
    h = torch.zeros_like(g)
    products = np.zeros((len(jacobians.stream), 3))
    for index in reversed(range(len(units))):
        ran = jacobians.at(tape, index)
        pulled = ran.pull(g)
        h = ran.pull(h).total + pulled.gone
        g, direct = pulled.total, ran.identity(direct)
        if index == 0 or units[index - 1].layer != units[index].layer:
            products[units[index].layer] = [dot(other, g, skip) for other in (h, g, direct)]
    return products
