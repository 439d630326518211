"""What skipping a block does to the updates of later ones, read off the runs that a sweep makes anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.estimate import Resampler
from depthprobe.processes import exchange
from depthprobe.verify import Anatomy

__all__ = ["Later", "over_tokens", "reason_against"]

Floats = NDArray[np.float64]
STATISTICS = ("mean", "p95")
HALF = (torch.bfloat16, torch.float16)


class Later:
    """Collects the relative change of every later block's update, ‖Δ' − Δ‖ / ‖Δ‖ per token, while schedules run.

    The matrix of Csordás, Manning & Potts 2025, with the mean and the 95th percentile over tokens in place of their
    maximum. The update of a block is what it writes: its net change, since its identity path is the identity.

    Args:
        blocks: L.
        sequences: of the corpus.
        skip_first: leading positions that are left out.
    """

    def __init__(self, blocks: int, sequences: int, skip_first: int = 1) -> None:
        self.blocks, self.skip_first = blocks, skip_first
        self.columns = {name: np.full((sequences, blocks, blocks), np.nan) for name in STATISTICS}
        self._rows: NDArray[np.int64] = np.arange(0)
        self._spine: Sequence[Tensor] | Mapping[int, Tensor] = []

    def begin(self, rows: NDArray[np.int64]) -> None:
        """The sequences of the batch that is run next."""
        self._rows = rows

    def spine(self, states: Sequence[Tensor] | Mapping[int, Tensor]) -> None:
        """Its unmodified states x_0 … x_L, `[batch, tokens, width]`; before and after a block, when it is seen."""
        self._spine = states

    def see(self, skipped: int, block: int, x: Tensor, z: Tensor) -> None:
        """Block `block` read x and left z in the run without block `skipped`."""
        update = self._spine[block + 1].float() - self._spine[block].float()
        size = torch.linalg.vector_norm(update, dim=-1)
        away = torch.linalg.vector_norm((z.float() - x.float()).sub_(update), dim=-1)
        change = torch.where(size > 0, away / size.clamp_min(1e-38), torch.nan)[:, self.skip_first :].double()
        found = over_tokens(change, torch.ones_like(change, dtype=torch.bool))
        for name, values in zip(STATISTICS, found, strict=True):
            self.columns[name][self._rows, skipped, block] = values

    def exchange(self) -> None:
        """Take over what the other processes of this run saw."""
        exchange(self.columns, len(self.columns[STATISTICS[0]]))

    def frame(self, resampler: Resampler) -> pd.DataFrame:
        """The matrix as rows: skipped, unit, tokens, statistic, value, ci_low, ci_high; units from 0."""
        first, second = np.triu_indices(self.blocks, k=1)
        tables = []
        for name, columns in self.columns.items():
            value, low, high = resampler.intervals(columns[:, first, second])
            table = pd.DataFrame({"skipped": first, "unit": second, "tokens": "all tokens", "statistic": name})
            tables.append(table.assign(value=value, ci_low=low, ci_high=high))
        return pd.concat(tables, ignore_index=True)


def over_tokens(change: Tensor, keep: Tensor) -> tuple[Floats, Floats]:
    """Mean and 95th percentile over the positions that are kept and have an update at all, both `[batch]`.

    Args:
        change: `[batch, tokens]`, NaN where there is no update.
        keep: the same shape.
    """
    values = torch.where(keep, change, torch.nan)
    return (
        values.nanmean(dim=1).nan_to_num(0.0).cpu().numpy(),
        values.nanquantile(0.95, dim=1).nan_to_num(0.0).cpu().numpy(),
    )


def reason_against(anatomy: Anatomy, tokens: int, skip_first: int) -> str:
    """Why the matrix cannot be read off a sweep of this model; empty if it can."""
    if len(anatomy.stream) < 2:
        return "there is one block"
    if tokens <= skip_first:
        return "no position is left"
    if anatomy.stream.checkpoint.dtype in HALF:
        return "a block's update would be a difference of states in half precision"
    branches = [branch for block in anatomy.blocks for branch in block.branches]
    if not all(block.branches for block in anatomy.blocks) or any(
        branch.placement == "post" or branch.gain or abs(branch.skip_scale - 1) > 1e-6 for branch in branches
    ):
        return "a block's identity path is not the identity"
    return ""
