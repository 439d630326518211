"""Does the next block need this block's update? It is run again on the state from before it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from depthprobe.errors import NonFiniteError
from depthprobe.estimate import PerSequence
from depthprobe.probes.base import Batch, Dots, Step, cosine, key_rng, mean_tokens, ratio

__all__ = ["Interaction", "foreign_state"]


class Interaction:
    """Runs block l + 1 on x_l and on a control state, beside x_{l+1}: two further evaluations a block."""

    def __init__(self, means: PerSequence) -> None:
        self.means = means
        self.before: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        """Block 0 has no predecessor."""
        self.before = None

    def see(self, batch: Batch, step: Step) -> None:
        """Compare this block's update with what it is without the previous block's."""
        if self.before is not None:
            layer = step.layer - 1
            true, before = step.units["block"].u, batch.reader.stream.at(step.layer, self.before)
            blind = self._update(batch, step.layer, before)
            self._add(batch, "interaction_error", layer, _error(true, blind))
            both = Dots(true, blind)
            self._add(batch, "interaction_cosine", layer, cosine(both.su, both.ss, both.uu))
            foreign = batch.reader.stream.inherit(foreign_state(batch, layer, before, step.x), step.x)
            control = self._update(batch, step.layer, foreign)
            self._add(batch, "interaction_error_control", layer, _error(true, control))
        self.before = step.x

    def end(self, batch: Batch) -> None:
        """Let the last state go."""
        self.before = None

    def _update(self, batch: Batch, index: int, x: Tensor) -> Tensor:
        update = batch.reader.visit(batch.entry, index, x).update
        finite = torch.isfinite(update[:, batch.skip :]).all(dim=-1).all(dim=-1).cpu().numpy()
        if not finite.all():  # a mean that is no number would count as a sequence that was not measured
            what = f"block {index}'s update without that of block {index - 1}"
            dtype = str(x.dtype).removeprefix("torch.")
            raise NonFiniteError.of_change(what, dtype, int(batch.sequences[~finite][0]))
        return update

    def _add(self, batch: Batch, metric: str, layer: int, values: Tensor) -> None:
        self.means.add((metric, "block", layer), batch.sequences, mean_tokens(values, batch.skip))


def _error(true: Tensor, other: Tensor) -> Tensor:
    dots = Dots(true, true - other)
    return ratio(dots.uu.sqrt(), dots.ss.sqrt())


def foreign_state(batch: Batch, layer: int, x: Tensor, z: Tensor) -> Tensor:
    """The control's stand-in for x_l: z = x_{l+1} less a foreign update of the same norm and the same angle with z.

    The foreign direction is another token's Δ_l of the same sequence, made orthogonal to z; an isotropic one would
    be off the manifold of updates. Every token of a sequence takes that of the token a fixed draw further on.

    Args:
        batch: whose seed and sequences key the draw.
        layer: of the update that is replaced.
        x, z: states before and after it, `[batch, tokens, width]`.
    """
    after = z.float()
    update = after - x.float()
    tokens, skip = update.shape[1], batch.skip
    donors = np.zeros((len(batch.sequences), tokens), dtype=np.int64)
    for row, sequence in enumerate(batch.sequences):
        rng = key_rng(batch.seed, int(sequence), layer + 1)
        eligible = tokens - skip
        shift = int(rng.integers(1, eligible)) if eligible > 1 else 0
        donors[row, skip:] = skip + (np.arange(eligible) + shift) % eligible
        # A skipped position is no donor, and takes its own from anywhere else.
        donors[row, :skip] = skip + rng.integers(0, eligible, size=skip)
    rows = torch.arange(len(update), device=update.device)[:, None]
    foreign = update[rows, torch.from_numpy(donors).to(update.device)]
    unit = after / torch.linalg.vector_norm(after, dim=-1, keepdim=True).clamp_min(1e-30)
    foreign = foreign - torch.linalg.vecdot(foreign, unit)[..., None] * unit
    foreign = foreign / torch.linalg.vector_norm(foreign, dim=-1, keepdim=True).clamp_min(1e-30)
    size = torch.linalg.vector_norm(update, dim=-1, keepdim=True)
    along = torch.linalg.vecdot(update, unit)[..., None]
    across = (size.square() - along.square()).clamp_min(0).sqrt()
    return (after - along * unit - across * foreign).to(z.dtype)
