"""A batch of a sweep: what is run, at which positions it is scored, and what becomes of its effects."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.ablations.effects import Reference, Scored
from depthprobe.ablations.later import Later
from depthprobe.ablations.schedule import Schedule
from depthprobe.ablations.sweep import Effects
from depthprobe.ablations.units import Units
from depthprobe.corpus import Corpus
from depthprobe.errors import NonFiniteError
from depthprobe.probes.base import key_rng
from depthprobe.verify import Anatomy

__all__ = ["Batch", "Part", "mask_token", "scored_batch", "scores"]

Part = dict[str, NDArray[np.float64]]


class Batch:
    """Some sequences of a corpus, entered into the model.

    Args:
        units: the model.
        corpus: whose sequences.
        rows: which of them.
        share: of the positions that are scored.
        seed: of the draw of positions, and of random directions.
        unigram: log-probabilities of a unigram model, `[vocabulary]`, or None.
        later: what collects the effects on later blocks, or None; the batch has its own that shares the columns.
    """

    def __init__(
        self,
        units: Units,
        corpus: Corpus,
        rows: slice,
        share: float,
        seed: int,
        unigram: Tensor | None,
        later: Later | None,
    ) -> None:
        self.stream, self.seed, self.unigram = units.stream, seed, unigram
        self.sequences = np.arange(rows.start, rows.stop)
        checkpoint, inputs = self.stream.checkpoint, corpus.inputs[rows]
        inputs = inputs.to(checkpoint.device, checkpoint.dtype if corpus.is_states else inputs.dtype)
        self.scored, inputs = scored_batch(units.anatomy, inputs, self.sequences, share, seed)
        self.later = copy.copy(later)
        if self.later is not None:
            self.later.begin(self.sequences)
        with torch.no_grad():
            self.entry = self.stream.enter(inputs)

    def reference(self, last: Tensor) -> Reference | None:
        """The unmodified predictions, from the unmodified x_L; None without a head."""
        return None if self.scored is None else Reference(self.stream, last, self.scored, self.unigram)

    def direction(self, layer: int, like: Tensor) -> Tensor:
        """A random unit vector a token for a layer, shaped like the state that is given."""
        drawn = [key_rng(self.seed, int(s), (1 << 22) + layer).standard_normal(like.shape[1:]) for s in self.sequences]
        vector = torch.from_numpy(np.stack(drawn)).to(like.device, like.dtype)
        return vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)

    def part(self, effects: dict[int, Effects], score: Reference | None, schedules: list[Schedule]) -> Part:
        """The effects as columns, `[batch, schedules]` a metric, beside the unmodified loss.

        Raises:
            NonFiniteError: an effect is not finite; the message names the schedule.
        """
        part = {name: np.stack([effects[i][name] for i in range(len(schedules))], axis=1) for name in effects[0]}
        for name, values in part.items():
            if not np.isfinite(values).all():
                schedule = schedules[int(np.argwhere(~np.isfinite(values))[0, 1])]
                found = f"{name} of the schedule {schedule} is not finite"
                raise NonFiniteError(found, "finite effects", "try float32")
        if score is None:
            return part
        part["base_loss"] = score.base_loss()
        to_unigram = score.unigram_kl()
        return part if to_unigram is None else part | {"unigram_kl": to_unigram}


def scored_batch(
    anatomy: Anatomy, inputs: Tensor, sequences: NDArray[np.int64], share: float, seed: int
) -> tuple[Scored | None, Tensor]:
    """The positions of a batch that are scored, None without a head to score with, and the inputs, masked if need be.

    Args:
        anatomy: the model.
        inputs: ids `[batch, tokens]` or states `[batch, tokens, width]`.
        sequences: their indices in the corpus.
        share: of the positions with a next token; a masked model is scored at 15 % of all.
        seed: of the draw.
    """
    tokenizer, mask = anatomy.stream.checkpoint.tokenizer, mask_token(anatomy)
    if not scores(anatomy):
        return None, inputs
    if tokenizer is not None and mask is not None:
        return Scored.masked(inputs, sequences, tuple(tokenizer.all_special_ids), mask, seed)
    return Scored.next_token(inputs, sequences, share, seed), inputs


def mask_token(anatomy: Anatomy) -> int | None:
    """The id that hides a token from a masked language model; None for other models, or where it is not known."""
    tokenizer = anatomy.stream.checkpoint.tokenizer
    return getattr(tokenizer, "mask_token_id", None) if anatomy.objective == "masked" else None


def scores(anatomy: Anatomy) -> bool:
    """Whether predictions can be compared, and not the last state alone."""
    known = anatomy.objective == "causal" or mask_token(anatomy) is not None
    return known and anatomy.reads_positions_apart
