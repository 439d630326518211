"""The logit lens: every state read out through the model's own final norm and head."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.errors import NonFiniteError
from depthprobe.estimate import PerSequence
from depthprobe.probes.base import Batch, Step, key_rng

__all__ = ["Lens"]


class Lens:
    """Loss, KL to the final distribution and top-1 agreement of every state, at a budget of positions a sequence.

    Args:
        means: where the results go.
        sequences: number of sequences of the corpus.
        budget: how many positions to read out in all, at the cost of one head a layer and position.
        targets: whether the next token of each position is a target (not so for a masked model run unmasked).
        chunk: about how many positions are read out at once; at least those of one sequence.
    """

    def __init__(self, means: PerSequence, sequences: int, budget: int, targets: bool, chunk: int = 256) -> None:
        self.means, self.targets, self.chunk = means, targets, chunk
        self.each = max(1, budget // sequences)
        self.used = set(np.linspace(0, sequences - 1, min(sequences, budget)).round().astype(int).tolist())
        self.states: list[Tensor] = []

    def begin(self, batch: Batch) -> None:
        """Choose the positions and keep x_0 at them."""
        tokens = batch.entry.x.shape[1]
        device = batch.entry.x.device
        self.places = np.array([row for row, s in enumerate(batch.sequences) if int(s) in self.used], dtype=np.int64)
        drawn = [self._positions(batch, tokens, int(s)) for s in batch.sequences[self.places]]
        if not drawn:
            return
        self.positions = torch.from_numpy(np.stack(drawn)).to(device)
        self.rows = torch.from_numpy(self.places).to(device)[:, None]
        self.states = [batch.entry.x[self.rows, self.positions]]

    def see(self, batch: Batch, step: Step) -> None:
        """Keep the state that the block wrote, at the chosen positions."""
        if self.states:
            device = step.z.device
            self.states.append(step.z[self.rows.to(device), self.positions.to(device)])

    def end(self, batch: Batch) -> None:
        """Read out all layers, last first, so that the final distribution is there to compare with."""
        per_row = max(1, self.chunk // self.each)
        for start in range(0, len(self.places), per_row):
            self._chunk(batch, slice(start, start + per_row))
        self.states = []

    def _positions(self, batch: Batch, tokens: int, sequence: int) -> NDArray[np.int64]:
        # Every predicted position counts, the first one too; only the last has no next token to predict.
        eligible = tokens - 1 if self.targets else tokens
        return np.sort(key_rng(batch.seed, sequence, 1 << 20).permutation(eligible)[: self.each])

    def _chunk(self, batch: Batch, rows: slice) -> None:
        where = self.rows.device  # that of the states, which need not be where the ids are
        ids = batch.entry.inputs.to(where)[self.rows[rows, 0]]
        some = self.positions[rows]
        inputs = ids.gather(1, some)  # the tail looks at the shape of its input only
        readout = batch.reader.stream.readout
        final = readout(self.states[-1][rows], inputs).float().log_softmax(-1)
        best = final.argmax(dim=-1)
        targets = ids.gather(1, some + 1) if self.targets else None
        for layer in range(len(self.states) - 1, -1, -1):
            last = layer == len(self.states) - 1
            guess = final if last else readout(self.states[layer][rows], inputs).float().log_softmax(-1)
            kl = torch.zeros_like(best, dtype=final.dtype) if last else _kl(final, guess)
            agree = (guess.argmax(dim=-1) == best).float()
            self._add(batch, rows, "lens_kl", layer, kl)
            self._add(batch, rows, "lens_top1", layer, agree)
            if targets is not None:
                self._add(batch, rows, "lens_loss", layer, -guess.gather(-1, targets[..., None])[..., 0])

    def _add(self, batch: Batch, rows: slice, metric: str, layer: int, values: Tensor) -> None:
        means = values.double().mean(dim=1) if values.device.type != "mps" else values.cpu().double().mean(dim=1)
        found, sequences = means.cpu().numpy(), batch.sequences[self.places[rows]]
        if not np.isfinite(found).all():  # which would count as a sequence that was not measured
            dtype = str(self.states[layer].dtype).removeprefix("torch.")
            what = f"what the logit lens reads from x_{layer} ({metric})"
            raise NonFiniteError.of_change(what, dtype, int(sequences[~np.isfinite(found)][0]))
        self.means.add((metric, "block", layer), sequences, found)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) from log-probabilities; a token of probability 0 adds nothing."""
    chance = p.exp()
    return torch.where(chance > 0, chance * (p - q), torch.zeros_like(p)).sum(dim=-1)
