"""What every probe is given: a batch, and one step a block with the products that several probes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.branches import Reader
from depthprobe.stream import Entry

__all__ = ["Batch", "Dots", "Probe", "Step", "cosine", "key_rng", "mean_tokens", "median_tokens", "ratio", "wide"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some sequences of the corpus, entered into the model.

    Attributes:
        reader: the model, to run further blocks with.
        entry: x_0 and the arguments of every block.
        sequences: their indices in the corpus, `[batch]`.
        skip: how many leading positions the stream's metrics leave out.
        seed: of every random draw, which is keyed by (seed, sequence, layer).
    """

    reader: Reader
    entry: Entry
    sequences: NDArray[np.int64]
    skip: int
    seed: int


class Dots:
    """A state s and an update u with their inner products, per token in float64 from float32 sums."""

    def __init__(self, s: Tensor, u: Tensor) -> None:
        self.s, self.u = s.float(), u.float()

    @cached_property
    def ss(self) -> Tensor:
        """‖s‖², `[batch, tokens]`."""
        return wide(torch.linalg.vector_norm(self.s, dim=-1)).square()

    @cached_property
    def uu(self) -> Tensor:
        """‖u‖², `[batch, tokens]`."""
        return wide(torch.linalg.vector_norm(self.u, dim=-1)).square()

    @cached_property
    def su(self) -> Tensor:
        """⟨s, u⟩, `[batch, tokens]`."""
        return wide(torch.linalg.vecdot(self.s, self.u))

    @cached_property
    def yy(self) -> Tensor:
        """‖s + u‖², `[batch, tokens]`."""
        return (self.ss + 2 * self.su + self.uu).clamp_min(0)


@dataclass(frozen=True, eq=False)
class Step:
    """One block's work on one batch.

    Attributes:
        layer: index of the block.
        x: the state before it, `[batch, tokens, width]` in the model's dtype.
        z: the state after it.
        update: Δ in float32: z − x, or in half precision the sum of the branches where they were found.
        branches: `attention` and `mlp` as (s, u), where they were found.
    """

    layer: int
    x: Tensor
    z: Tensor
    update: Tensor
    branches: Mapping[str, tuple[Tensor, Tensor]]

    @cached_property
    def units(self) -> dict[str, Dots]:
        """Every unit's state and update, `block` first, whose update is Δ."""
        return {"block": Dots(self.x, self.update)} | {name: Dots(s, u) for name, (s, u) in self.branches.items()}

    @cached_property
    def zz(self) -> Tensor:
        """‖z‖², `[batch, tokens]`."""
        return wide(torch.linalg.vector_norm(self.z.float(), dim=-1)).square()


class Probe(Protocol):
    """What the measuring loop calls: `begin`, then `see` once a block in order, then `end`, for every batch.

    A shallow copy of the probe is made for every batch, since several may be under way at once: what belongs to a batch
    is assigned to attributes, what belongs to the corpus is changed in place.
    """

    def begin(self, batch: Batch) -> None:
        """A batch has been entered; its x_0 is `batch.entry.x`."""

    def see(self, batch: Batch, step: Step) -> None:
        """Block `step.layer` has run."""

    def end(self, batch: Batch) -> None:
        """The last block of this batch has run."""


def wide(values: Tensor) -> Tensor:
    """Per-token values in float64, on the CPU where the device has none."""
    return values.cpu().double() if values.device.type == "mps" else values.double()


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """above / below, 0 where both are 0."""
    return torch.where((above == 0) & (below == 0), torch.zeros_like(above), above / below)


def cosine(ab: Tensor, aa: Tensor, bb: Tensor) -> Tensor:
    """⟨a, b⟩ / (‖a‖ ‖b‖) within [−1, 1], 0 where a or b is 0."""
    return ratio(ab, (aa * bb).sqrt()).clamp(-1, 1)


def mean_tokens(values: Tensor, skip: int) -> NDArray[np.float64]:
    """Mean over the tokens that are not skipped, `[batch, tokens]` to `[batch]`."""
    return values[:, skip:].mean(dim=1).cpu().numpy()


def median_tokens(values: Tensor, skip: int) -> NDArray[np.float64]:
    """Median over the tokens that are not skipped, the mean of the two middle ones for an even number."""
    return values[:, skip:].quantile(0.5, dim=1).cpu().numpy()


def key_rng(seed: int, sequence: int, layer: int) -> np.random.Generator:
    """A generator that depends on nothing but its key, so that draws survive any batching, order and process."""
    return np.random.default_rng([seed, sequence, layer])
