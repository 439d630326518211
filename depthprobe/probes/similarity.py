"""How alike states are: neighbours, all pairs in the same pass, and the kept sample for what needs the corpus mean."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.estimate import PerSequence
from depthprobe.offload import OnDisk
from depthprobe.probes.base import Batch, Dots, Step, cosine, key_rng, mean_tokens
from depthprobe.processes import collected, count, dealt_to_this

__all__ = ["PAIR_METRICS", "KeptStates", "Similarity"]

PAIR_METRICS = ("angular_distance", "cosine")


class Similarity:
    """Cosines of neighbouring states and updates, and the angle between every two states.

    All pairs come from one Gram matrix a token over the L + 1 normalised states of a batch, so they cost neither a
    pass nor memory that grows with the corpus.
    """

    def __init__(self, means: PerSequence) -> None:
        self.means = means
        self.pairs: dict[str, NDArray[np.float64]] = {}  # [sequences, pairs], pairs in the order of np.triu_indices
        self.states: list[Tensor] = []
        self.previous: dict[str, tuple[Tensor, Tensor]] = {}  # unit → its update, and the squared norm of that
        self.neighbours: list[Tensor] = []

    def begin(self, batch: Batch) -> None:
        """Start the stack of normalised states with x_0."""
        self.states, self.previous, self.neighbours = [self._direction(batch, batch.entry.x)], {}, []

    def see(self, batch: Batch, step: Step) -> None:
        """Compare the block's two states, and its updates with the previous block's."""
        block = step.units["block"]
        turned = one_less_cosine(block)
        near = 1 - turned
        self.means.add(("cosine_adjacent", "block", step.layer), batch.sequences, mean_tokens(near, batch.skip))
        self.means.add(("_cosine_adjacent_including", "block", step.layer), batch.sequences, mean_tokens(near, 0))
        self.means.add(("block_influence", "block", step.layer), batch.sequences, mean_tokens(turned, batch.skip))
        for unit, now in step.units.items():
            before = self.previous.get(unit)
            if before is not None:
                u, uu = (t.to(now.u.device) for t in before)
                both = cosine(Dots(u, now.u).su, uu, now.uu)
                key = ("update_cosine_next", unit, step.layer - 1)
                self.means.add(key, batch.sequences, mean_tokens(both, batch.skip))
        self.previous = {unit: (now.u, now.uu) for unit, now in step.units.items()}
        self.states.append(self._direction(batch, step.z))
        # arccos is ill-conditioned near 1, where neighbours are; 1 − cos θ = 2 sin²(θ/2) is not.
        self.neighbours.append(2 * (turned[:, batch.skip :] / 2).sqrt().asin().mean(dim=1))

    def end(self, batch: Batch) -> None:
        """Reduce the batch's Gram matrices to one angle and one cosine a pair and sequence."""
        layers = len(self.states)
        if not self.pairs:
            count = layers * (layers - 1) // 2
            # Not a new dictionary: several copies of the probe, a batch each, share this one.
            self.pairs.update({name: np.full((self.means.sequences, count), np.nan) for name in PAIR_METRICS})
        rows, columns = np.triu_indices(layers, k=1)
        size = max(1, (1 << 25) // (layers * self.states[0].shape[-1]))  # tokens at once: 128 MiB of states
        for place, sequence in enumerate(batch.sequences):
            cosines = torch.zeros(layers, layers, dtype=torch.float64)
            angles = torch.zeros(layers, layers, dtype=torch.float64)
            tokens = self.states[0].shape[1]
            for start in range(0, tokens, size):
                here = [state[place, start : start + size].to(self.states[0].device) for state in self.states]
                x = torch.stack(here, dim=1)
                gram = torch.bmm(x, x.transpose(1, 2)).clamp_(-1, 1)
                cosines += gram.sum(dim=0).cpu().double() / tokens
                angles += gram.acos_().sum(dim=0).cpu().double() / (math.pi * tokens)
            for layer, angle in enumerate(self.neighbours):
                angles[layer, layer + 1] = angle[place].cpu() / math.pi
            self.pairs["angular_distance"][sequence] = angles.numpy()[rows, columns]
            self.pairs["cosine"][sequence] = cosines.numpy()[rows, columns]
        self.states, self.previous, self.neighbours = [], {}, []

    @staticmethod
    def _direction(batch: Batch, x: Tensor) -> Tensor:
        x = x[:, batch.skip :].float()
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30)


def one_less_cosine(block: Dots) -> Tensor:
    """1 − cos(s, s + u) per token, to its own relative precision where the update is small.

    Twice ‖s‖‖y‖(1 − cos) is ‖u‖² − (‖y‖ − ‖s‖)², and ‖y‖ − ‖s‖ is (2⟨s, u⟩ + ‖u‖²) / (‖y‖ + ‖s‖): no difference of
    two numbers near 1 is taken.
    """
    longer = (2 * block.su + block.uu) / (block.yy.sqrt() + block.ss.sqrt())
    small = (block.uu - longer.square()).clamp_min(0) / (2 * (block.ss * block.yy).sqrt())
    return torch.where(block.uu < block.ss / 4, small, 1 - cosine(block.ss + block.su, block.ss, block.yy))


class KeptStates:
    """A bounded sample of positions whose states are kept, for metrics that need the corpus mean first.

    The sample takes the same number of positions from every sequence, drawn by (seed, sequence), so it does not
    depend on batches or order, and its size does not grow with the corpus.

    Args:
        sequences: number of sequences of the corpus.
        tokens: positions of each that may be drawn.
        skip: leading positions that may not.
        budget: how many positions to keep in all.
        seed: of the draw.
    """

    def __init__(self, sequences: int, tokens: int, skip: int, budget: int, seed: int) -> None:
        eligible = tokens - skip
        self.each = min(eligible, max(16, budget // max(sequences, 1)))
        used = min(sequences, max(1, budget // self.each))
        self.slots = {int(s): k for k, s in enumerate(np.linspace(0, sequences - 1, used).round().astype(int))}
        self.sequences, self.skip, self.eligible, self.seed = sequences, skip, eligible, seed
        self.states: list[Tensor] | OnDisk = []  # one [sequences kept, positions, width] a layer

    def bytes(self, layers: int, width: int) -> int:
        """What so many layers take, in float32."""
        return len(self.slots) * self.each * layers * width * 4

    def begin(self, batch: Batch) -> None:
        """Choose the positions and keep x_0 at them."""
        rows = [(row, self.slots[int(s)], int(s)) for row, s in enumerate(batch.sequences) if int(s) in self.slots]
        self._slots = torch.tensor([slot for _, slot, _ in rows], dtype=torch.long)
        rng_positions = [self.positions(sequence) for _, _, sequence in rows]
        self._rows = torch.tensor([row for row, _, _ in rows], dtype=torch.long)[:, None]
        self._positions = torch.from_numpy(np.array(rng_positions, dtype=np.int64).reshape(len(rows), self.each))
        self._keep(0, batch.entry.x)

    def positions(self, sequence: int) -> NDArray[np.int64]:
        """The kept positions of one sequence, in order."""
        drawn = key_rng(self.seed, sequence, 0).permutation(self.eligible)[: self.each]
        return np.sort(drawn) + self.skip

    def see(self, batch: Batch, step: Step) -> None:
        """Keep the state that the block wrote."""
        self._keep(step.layer + 1, step.z)

    def end(self, batch: Batch) -> None:
        """Nothing is left to do."""

    def exchange(self) -> None:
        """Take over the states that other processes of this run kept."""
        if count() == 1:
            return
        mine = torch.tensor([self.slots[s] for s in dealt_to_this(self.sequences) if s in self.slots], dtype=torch.long)
        for layer in range(max(collected(len(self.states)))):  # one by one, since all together may be large
            held = self.states[layer][mine] if layer < len(self.states) else None
            for slots, states in collected((mine, held)):
                if states is None:  # of a process without sequences
                    continue
                if layer == len(self.states):
                    self.states.append(states.new_zeros(len(self.slots), *states.shape[1:]))
                self.states[layer][slots] = states

    def _keep(self, layer: int, x: Tensor) -> None:
        if layer == len(self.states):
            self.states.append(torch.zeros(len(self.slots), self.each, x.shape[-1], dtype=x.dtype))
        if len(self._slots):
            self.states[layer][self._slots] = x[self._rows.to(x.device), self._positions.to(x.device)].cpu()
