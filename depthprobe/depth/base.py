"""What every estimator of effective depth is given and gives back: settings, units, rows with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.ablations.schedule import Part, Unit
from depthprobe.corpus import Corpus
from depthprobe.depth.gate import FEWEST
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.estimate import Interval, Resampler
from depthprobe.verify import Anatomy

__all__ = [
    "COLUMNS",
    "QUICK_LEN",
    "SEQ_LEN",
    "SPREAD",
    "Depth",
    "DepthSettings",
    "Estimate",
    "Floats",
    "Progress",
    "UnitKind",
    "batches",
    "bytes_of_sequence",
    "refuse_carried",
    "resampler",
    "row",
    "shortened",
    "units_of",
]

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]
UnitKind = Literal["block", "sublayer"]

COLUMNS = ("name", "unit", "variant", "value", "ci_low", "ci_high", "of", "passes_gate", "note")
TOKENS_AT_ONCE = 2048
SEQ_LEN = 128  # more and shorter sequences than elsewhere, since the interval is over them
QUICK_LEN = 32  # the same of the few tokens that `analyze` has for it
SPREAD = 4  # the text that sequences are taken from is so much longer, so that they are of more documents
_PARTS: dict[str, Part] = {"attention": "a", "mlp": "m"}


@dataclass(frozen=True)
class DepthSettings:
    """How effective depth is estimated.

    Attributes:
        seed: of every random draw and of the resamples.
        skip_first: leading positions that averages over the stream's tokens leave out. KL counts every position.
        batch_size: sequences at once; None for about 2,048 tokens, fewer if `memory` does not hold them.
        memory: bytes that states and logits of one batch may take.
        probes: random vectors a unit and sequence, from which the traces of Jacobians are estimated.
    """

    seed: int = 0
    skip_first: int = 1
    batch_size: int | None = None
    memory: int = 2 << 30
    probes: int = 2

    def check(self, corpus: Corpus | None = None) -> None:
        """Refuse what makes no sense before anything is run.

        Raises:
            UsageError: a number that is too small, or no position is left once the first ones are skipped.
        """
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", "0 or more")
        if self.skip_first < 0:
            raise UsageError(f"--skip-first {self.skip_first}", "0 or more")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"the batch size is {self.batch_size}", "at least 1, or auto")
        if self.probes < 1:
            raise UsageError(f"{self.probes} probes of a trace", "at least 1")
        if self.memory < 1:
            raise UsageError(f"--memory is {self.memory} bytes", "more than 0")
        if corpus is not None and corpus.tokens <= self.skip_first:
            raise UsageError(
                f"--skip-first {self.skip_first} leaves nothing of sequences of {corpus.tokens} tokens",
                fix="skip fewer positions, or use longer sequences",
            )

    def sequences_at_once(self, corpus: Corpus, each: int = 0) -> int:
        """The batch size, where a sequence takes about `each` bytes."""
        fit = self.memory // each if each else corpus.sequences
        return self.batch_size or max(1, min(fit, TOKENS_AT_ONCE // corpus.tokens))


@dataclass(frozen=True)
class Depth:
    """One row of depth.csv, but for the gate, which is judged by whoever knows the calibration.

    Attributes:
        name: of the metric, as in the glossary.
        unit: `block` or `sublayer`: what is counted.
        variant: a threshold, a cotangent or a first layer; empty for the default.
        value, ci_low, ci_high: with its 95 % interval over sequences; NaN bounds where one sequence is all there is.
        of: N, how many units the model has.
        note: what a reader should know of this number, empty if nothing.
        clusters: how many documents, or sequences, the interval is over; None for those of the corpus.
    """

    name: str
    unit: str
    variant: str
    value: float
    ci_low: float
    ci_high: float
    of: int
    note: str = ""
    clusters: int | None = None


@dataclass(frozen=True, eq=False)
class Estimate:
    """What one estimator found.

    Attributes:
        rows: rows of depth.csv.
        per_sequence: variant → what the value is made of, a row a sequence: `[sequences]` where the value is their
            mean, `[sequences, M]` where it is a function of the M means.
        curves: tables beside the value: over a threshold, by unit, from unit to unit.
        cost_forward: forward passes' worth of unit evaluations (and readouts, where they are counted) over the corpus.
        cost_backward: the same in backward passes.
        notes: sentences on this run.
    """

    rows: list[Depth]
    per_sequence: Mapping[str, Floats] = field(default_factory=dict)
    curves: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    cost_forward: float = 0.0
    cost_backward: float = 0.0
    notes: list[str] = field(default_factory=list)

    def value(self, name: str, variant: str = "") -> Depth:
        """The row of that name and variant.

        Raises:
            KeyError: there is none.
        """
        for found in self.rows:
            if (found.name, found.variant) == (name, variant):
                return found
        raise KeyError((name, variant))


def row(
    name: str, unit: str, variant: str, interval: Interval, of: int, note: str = "", clusters: int | None = None
) -> Depth:
    """A row from a value with its interval.

    Raises:
        NonFiniteError: the value is no number.
    """
    if not np.isfinite(interval.value):
        raise NonFiniteError(f"{name} ({unit}{', ' + variant if variant else ''}) is not finite", "a finite depth")
    return Depth(name, unit, variant, interval.value, interval.low, interval.high, of, note, clusters)


def resampler(corpus: Corpus, settings: DepthSettings) -> Resampler:
    """The bootstrap over the corpus's sequences, or documents."""
    return Resampler(corpus.sequences, corpus.documents, settings.seed)


def shortened(corpus: Corpus, tokens: int, seq_len: int = SEQ_LEN) -> Corpus:
    """About `tokens` tokens in evenly spread sequences, those of text cut to `seq_len`; an encoder's last one stays.

    Ids and states that were given as sequences are taken whole: a part of an image or of a task is another input. If
    they are long these are more tokens than asked for: two sequences at least, and as many as the gate needs where
    those have no more than `SPREAD` times the tokens.
    """
    if corpus.cuttable:
        return corpus.cut(seq_len).spread(tokens)
    least = max(2, min(FEWEST, SPREAD * tokens // corpus.tokens))
    return corpus.spread(max(tokens, least * corpus.tokens))


def units_of(anatomy: Anatomy, unit: str) -> tuple[Unit, ...]:
    """The units that are counted, in the order in which they write: whole blocks, or attention and MLP of every block.

    Raises:
        UsageError: an unknown kind of unit, or a block whose branches were not found.
    """
    if unit not in get_args(UnitKind):
        raise UsageError(f"--unit {unit}", " or ".join(get_args(UnitKind)))
    if unit == "block":
        return tuple(Unit(index) for index in range(len(anatomy.stream)))
    missing = [block.index for block in anatomy.blocks if not block.branches]
    if missing:
        raise UsageError(
            f"--unit sublayer, but attention and MLP branches were not found in block {missing[0]}", "whole blocks"
        )
    return tuple(Unit(block.index, _PARTS[branch.unit]) for block in anatomy.blocks for branch in block.branches)


def refuse_carried(anatomy: Anatomy, name: str) -> None:
    """For estimators that take a block to be a function of the stream's state alone.

    Raises:
        UsageError: blocks hand on something beside the stream, such as attention scores.
    """
    if anatomy.stream.blocks.carried:
        raise UsageError(
            f"{name} takes a block to be a function of the stream, and this model's blocks hand on more beside it",
            "a model whose blocks hand on the stream alone",
        )


def bytes_of_sequence(anatomy: Anatomy, corpus: Corpus, states: int, logits: int) -> int:
    """What a sequence takes where so many of its states and of its logits are kept at once, in float32."""
    return (
        4
        * corpus.tokens
        * (states * anatomy.stream.blocks.width + logits * (anatomy.stream.checkpoint.vocab_size or 0))
    )


def batches(
    anatomy: Anatomy, corpus: Corpus, settings: DepthSettings, each: int = 0, mine: range | None = None
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Indices of sequences, `[batch]`, and their ids or states on the model's device, one batch after another.

    Args:
        anatomy, corpus, settings: the model, its corpus, and the batch size if one was set.
        each: bytes that a sequence takes, see `bytes_of_sequence`; 0 where it does not matter.
        mine: the sequences of this process; None for all.
    """
    checkpoint = anatomy.stream.checkpoint
    step = settings.sequences_at_once(corpus, each)
    mine = range(corpus.sequences) if mine is None else mine
    for start in mine[::step]:
        inputs = corpus.inputs[start : min(start + step, mine.stop)]
        indices = np.arange(start, start + len(inputs))
        yield indices, inputs.to(checkpoint.device, checkpoint.dtype if corpus.is_states else torch.int64)
