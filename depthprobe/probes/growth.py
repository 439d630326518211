"""How large the stream is, how large each update is against it, and in which direction the update points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.errors import NonFiniteError
from depthprobe.estimate import PerSequence
from depthprobe.probes.base import Batch, Dots, Step, cosine, mean_tokens, median_tokens, ratio, wide
from depthprobe.processes import collected, count

__all__ = ["Growth", "Sink"]

SINK_RATIO = 50.0


@dataclass
class Sink:
    """A position whose norm exceeds 50 times the median of its layer within a sequence."""

    position: int
    sequences: set[int]
    layers: set[int]
    max_norm: float = 0.0
    max_ratio: float = 0.0

    def add(self, other: Sink) -> None:
        """What was seen of the same position in other sequences."""
        self.sequences |= other.sequences
        self.layers |= other.layers
        self.max_norm, self.max_ratio = max(self.max_norm, other.max_norm), max(self.max_ratio, other.max_ratio)


class Growth:
    """Norms, update ratios, shares and alignments of every unit.

    Keys that begin with an underscore are the parts of ‖x_L‖² = ‖x_0‖² + Σ‖Δ‖² + 2Σ⟨Δ, x⟩, and, with the suffix
    `_including`, metrics over all positions; they go into the report beside the tables, not into them.
    """

    def __init__(self, means: PerSequence, width: int) -> None:
        self.means, self.width = means, width
        self.sinks: dict[int, Sink] = {}

    def begin(self, batch: Batch) -> None:
        """Measure x_0."""
        energy = wide(torch.linalg.vector_norm(batch.entry.x.float(), dim=-1)).square()
        self._state(batch, 0, energy)

    def see(self, batch: Batch, step: Step) -> None:
        """Measure a block and its branches, then the state that it wrote."""
        for unit, dots in step.units.items():
            self._finite(step, unit, dots.uu, batch)
            self._unit(batch, step.layer, unit, dots)
        self._finite(step, "block", step.zz, batch)
        self._state(batch, step.layer + 1, step.zz)

    def end(self, batch: Batch) -> None:
        """Nothing is left to do."""

    def exchange(self) -> None:
        """Take over the sinks that other processes of this run saw."""
        for theirs in collected(self.sinks) if count() > 1 else ():
            for position, sink in theirs.items():
                self.sinks.setdefault(position, Sink(position, set(), set())).add(sink)

    def _state(self, batch: Batch, layer: int, energy: Tensor) -> None:
        norm = energy.sqrt()
        self._add(batch, "residual_norm", "block", layer, norm)
        self._add(batch, "_residual_norm_including", "block", layer, norm, skip=0)
        self._add(batch, "residual_rms", "block", layer, norm / self.width**0.5)
        self._add(batch, "_energy", "block", layer, energy)
        self.means.add(("residual_norm_median", "block", layer), batch.sequences, median_tokens(norm, batch.skip))
        self._find_sinks(batch, layer, norm)

    def _unit(self, batch: Batch, layer: int, unit: str, dots: Dots) -> None:
        size = ratio(dots.uu.sqrt(), dots.ss.sqrt())
        if not bool(torch.isfinite(size[:, batch.skip :]).all()):
            row, position = (~torch.isfinite(size)).nonzero()[-1].tolist()
            raise NonFiniteError(
                f"the state that the {unit} of block {layer} adds to has norm 0 (sequence {batch.sequences[row]}, "
                f"position {position})",
                "a state to compare the update with",
                "leave out texts with ids whose embedding is 0, such as padding",
            )
        self._add(batch, "update_norm", unit, layer, dots.uu.sqrt())
        self._add(batch, "update_ratio", unit, layer, size)
        self.means.add(("update_ratio_median", unit, layer), batch.sequences, median_tokens(size, batch.skip))
        self._add(batch, "update_share", unit, layer, ratio(dots.su + dots.uu, dots.yy))
        self._add(batch, "update_energy_share", unit, layer, ratio(dots.uu, dots.yy))
        self._add(batch, "update_alignment", unit, layer, cosine(dots.su, dots.ss, dots.uu))
        if unit == "block":
            self._add(batch, "_update_ratio_including", unit, layer, size, skip=0)
        self._add(batch, "_update_energy", unit, layer, dots.uu)
        self._add(batch, "_cross", unit, layer, dots.su)

    def _add(self, batch: Batch, metric: str, unit: str, layer: int, values: Tensor, skip: int | None = None) -> None:
        means = mean_tokens(values, batch.skip if skip is None else skip)
        self.means.add((metric, unit, layer), batch.sequences, means)

    def _finite(self, step: Step, unit: str, energy: Tensor, batch: Batch) -> None:
        if not bool(torch.isfinite(energy).all()):
            place = (~torch.isfinite(energy)).nonzero()[0].tolist()
            dtype = str(step.z.dtype).removeprefix("torch.")
            raise NonFiniteError.in_block(step.layer, unit, dtype, int(batch.sequences[place[0]]), place[1])

    def _find_sinks(self, batch: Batch, layer: int, norm: Tensor) -> None:
        over = norm / norm.median(dim=1, keepdim=True).values.clamp_min(1e-30)
        for row, position in (over > SINK_RATIO).nonzero().tolist():
            size, above = float(norm[row, position]), float(over[row, position])
            seen = Sink(position, {int(batch.sequences[row])}, {layer}, size, above)
            self.sinks.setdefault(position, Sink(position, set(), set())).add(seen)
