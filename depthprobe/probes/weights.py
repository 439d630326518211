"""Norms of the loss's gradients by every weight: of each sequence's own, and of the gradient of the mean loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from depthprobe.estimate import Interval, PerSequence, jackknife
from depthprobe.processes import collected, count, summed
from depthprobe.stream import Stream

__all__ = ["BEFORE", "NORM", "POOLED", "Key", "Weights", "groups_that_fit", "sequence_groups"]

NORM, POOLED = "weight_gradient_norm", "weight_gradient_norm_pooled"
BEFORE = -1  # layer of a weight that x_0 depends on; one that is also read after the last block counts as such

Key = tuple[str, str, int]


class Weights:
    """Where every floating weight stands, and what its gradients come to.

    A weight inside block l has layer l and its name within the block; one outside has its whole name, and layer −1 if
    x_0 depends on it (embeddings, tied heads too), otherwise L (final norm, head).

    Args:
        stream: the model.
        means: where each sequence's norms go, unless no loss reaches the weight in any sequence.
        groups: of each sequence, `[sequences]`: those of a group are summed apart, for a jackknife (`sequence_groups`).
            A single group leaves no interval, None no sums.
        offset: added to the index of a sequence, for the several models of one table.
        start: index of the first sequence that this process sees.
    """

    def __init__(
        self,
        stream: Stream,
        means: PerSequence,
        groups: NDArray[np.int64] | None = None,
        offset: int = 0,
        start: int = 0,
    ) -> None:
        self.means, self.offset, self.start = means, offset, start
        self.group_of, self.groups = groups, 0 if groups is None else int(groups.max()) + 1
        named = [_floating(module) for module in stream.blocks.modules]
        times = Counter(id(p) for block in named for _, p in block)
        self.blocks = [[p for _, p in block] for block in named]
        others = [(name, p) for name, p in _floating(stream.checkpoint.model) if id(p) not in times]
        self.outside = [p for _, p in others]
        self.places: dict[int, tuple[str, int]] = {id(p): (name, len(named)) for name, p in others}
        for layer, block in enumerate(named):
            for name, p in block:
                self.places.setdefault(id(p), (name, layer))
        # These gather their gradient from several places, so that its norm has to wait until all have been seen.
        self._waits = {id(p) for p in self.outside} | {key for key, number in times.items() if number > 1}
        self._weights = {id(p): p for p in (*self.outside, *(p for block in self.blocks for p in block))}
        self._held: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._counts = np.zeros(max(self.groups, 1), dtype=np.int64)
        self._sequences: list[int] = []

    def take(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], door: bool = False) -> None:
        """A part of some weights' gradients, from the current sequence; `door` if it came through x_0."""
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            key = id(weight)
            if door:
                self.places[key] = (self.places[key][0], BEFORE)
            if key in self._waits:
                held = self._held.get(key)
                self._held[key] = gradient if held is None else held + gradient
            else:
                self._finish(key, gradient)

    def end(self, sequence: int) -> None:
        """The current sequence is through."""
        for key, gradient in self._held.items():
            self._finish(key, gradient)
        self._held.clear()
        self._counts[self._group()] += 1
        self._sequences.append(sequence + self.offset)
        if self._norms:
            values = torch.stack([norm.cpu() for norm in self._norms.values()]).numpy()
            for key, value in zip(self._norms, values, strict=True):
                self.means.add(self._key(NORM, key), np.array([sequence + self.offset]), value[None])
        self._norms.clear()

    def close(self) -> dict[Key, Interval]:
        """Fill in 0 where a sequence did not reach a weight that others did; the norms of the pooled gradients.

        Returns:
            Of each weight ‖Σ_s ∂ℓ_s/∂W‖ / n, with a jackknife over the groups; empty without groups.
        """
        if count() > 1:
            self._exchange()
        for metric, name, layer in [key for key in self.means.values if key[0] == NORM]:
            column = self.means.values[metric, name, layer]
            mine = np.array(self._sequences)
            column[mine] = np.nan_to_num(column[mine])
        found = {}
        for key, sums in self._sums.items():
            total, n = sums.sum(dim=0), int(self._counts.sum())
            value = _norm(total) / n
            left_out = [_norm(total - part) / (n - int(m)) for part, m in zip(sums, self._counts, strict=True) if m < n]
            interval = jackknife(float(value), np.array([float(norm) for norm in left_out]))
            # A norm is not below 0, whatever Student's t says of a small one.
            found[self._key(POOLED, key)] = Interval(interval.value, max(interval.low, 0.0), interval.high)
        return found

    def _finish(self, key: int, gradient: Tensor) -> None:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        self._norms[key] = _norm(gradient)
        if self.groups:
            if key not in self._sums:
                self._sums[key] = gradient.new_zeros((self.groups, *gradient.shape))
            self._sums[key][self._group()] += gradient

    def _group(self) -> int:
        return 0 if self.group_of is None else int(self.group_of[self.start + len(self._sequences)])

    def _exchange(self) -> None:
        """Take over what other processes of this run saw."""
        keys, dtype = list(self.places), next((sums.dtype for sums in self._sums.values()), None)
        mine = [(self.places[key], key in self._sums) for key in keys]
        every = collected((self._sequences, self._counts, mine, dtype))
        self._sequences = [sequence for sequences, *_ in every for sequence in sequences]
        self._counts = sum((counts for _, counts, *_ in every), np.zeros_like(self._counts))
        dtype = next((theirs for *_, theirs in every if theirs is not None), dtype)
        for place, key in enumerate(keys):
            self.places[key] = min(seen[place][0] for _, _, seen, _ in every)  # before the blocks, if any saw that
            if any(seen[place][1] for _, _, seen, _ in every):
                weight = self._weights[key]
                if key not in self._sums:
                    self._sums[key] = torch.zeros((self.groups, *weight.shape), dtype=dtype, device=weight.device)
                self._sums[key] = summed(self._sums[key])

    def _key(self, metric: str, key: int) -> Key:
        return (metric, *self.places[key])


def groups_that_fit(model: nn.Module, sequences: int, memory: int, most: int = 10) -> int:
    """How many groups' gradient sums `memory` bytes hold; at most one a sequence."""
    size = sum(p.numel() * max(p.element_size(), 4) for _, p in _floating(model))
    return min(most, sequences, memory // max(size, 1))


def sequence_groups(sequences: int, most: int, documents: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Which group each sequence is in, `[sequences]`, from 0; None where `most` leaves no group.

    Groups hold whole documents, so that a jackknife over them sees how documents differ: the longest first, each to
    the group that has least. Of one document, or where none is known, sequences go round.

    Args:
        sequences: how many there are.
        most: groups, of which there are no more than documents.
        documents: the document of each sequence, None where unknown.
    """
    if most < 1:
        return None
    owners = np.zeros(sequences, np.int64) if documents is None else np.unique(documents, return_inverse=True)[1]
    sizes = np.bincount(owners)
    if len(sizes) < 2:
        return np.arange(sequences) % most
    group_of, held = np.zeros_like(sizes), np.zeros(min(most, len(sizes)), dtype=np.int64)
    for document in np.argsort(-sizes, kind="stable"):
        group_of[document] = held.argmin()
        held[group_of[document]] += sizes[document]
    return group_of[owners]


def _floating(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.is_floating_point()]


def _norm(x: Tensor) -> Tensor:
    """Frobenius norm in float64, where the device has it."""
    return torch.linalg.vector_norm(x, dtype=None if x.device.type == "mps" else torch.float64)
