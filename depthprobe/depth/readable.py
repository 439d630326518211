"""What a straight line can read from the states: the next token, the current token, and the position.

A ridge classifier is fitted to the states of one half of the sequences and scored on the other, at a few states from
x_0 to x_L. It shows what is there in the open, not what the model uses (Alain & Bengio 2016, "Understanding
intermediate layers using linear classifier probes").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.corpus import Corpus, halves
from depthprobe.depth.base import DepthSettings, Floats, Progress, batches, bytes_of_sequence
from depthprobe.depth.ridge import Ridge, best_penalty
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.estimate import Resampler
from depthprobe.offload import refuse_offloaded
from depthprobe.probes.base import key_rng
from depthprobe.processes import dealt, paced
from depthprobe.verify import Anatomy

__all__ = ["TARGETS", "Kept", "Readable", "Watcher", "check", "readable", "run", "score"]

Ints = NDArray[np.int64]

TARGETS = ("next token", "current token", "position")
POSITIONS = 8192  # whose states are kept; enough for 14 a dimension at a width of 576
FEWEST = 5  # training positions of a class
NEAR = 0.9  # of the way from the baseline to the best state
_DRAWN, _SHUFFLED = 1 << 26, 1 << 27  # tags of random draws
_COLUMNS = ["target", "state", "accuracy", "ci_low", "ci_high", "baseline", "baseline_low", "baseline_high",
            "control", "control_low", "control_high", "classes", "train", "test"]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Readable:
    """What can be read from where.

    Attributes:
        table: a row a target and state: target, state (l of x_l); accuracy, baseline (always the class that is most
            frequent where it was fitted) and control (fitted to shuffled labels), each with its 95 % interval over the
            sequences that score; classes; train and test (positions).
        first: a row a target: target, state (the first that was looked at which comes 90 % of the way from the
            baseline to the best one; NaN where the best is not above the baseline), ci_low, ci_high, best (the
            largest accuracy), baseline.
        notes: sentences on what was left out or is in doubt.
    """

    table: pd.DataFrame
    first: pd.DataFrame
    notes: tuple[str, ...]


class Watcher(Protocol):
    """What is shown every state of a run.

    Attributes:
        columns: what it keeps, a row a sequence.
    """

    columns: list[np.ndarray]

    def see(self, sequences: Ints, layer: int, x: Tensor) -> None:
        """x_l, `[batch, tokens, width]`, of the sequences with these indices."""


def run(
    anatomy: Anatomy,
    corpus: Corpus,
    settings: DepthSettings,
    watchers: Sequence[Watcher],
    progress: Progress | None = None,
) -> None:
    """One forward pass over the corpus, every state shown to every watcher.

    Raises:
        UsageError: the model's weights are offloaded.
        NonFiniteError: a state is infinite or not a number.
    """
    refuse_offloaded(anatomy.stream.checkpoint.offload, "phases of computation were asked for")
    kept = bytes_of_sequence(anatomy, corpus, len(anatomy.stream) + 3, 0)
    progress, columns = paced(progress), [column for watcher in watchers for column in watcher.columns]
    with torch.no_grad(), dealt(corpus.sequences, *columns) as mine:
        for indices, inputs in batches(anatomy, corpus, settings, kept, mine):
            for layer, x in enumerate(anatomy.stream.states(anatomy.stream.enter(inputs))):
                if not bool(torch.isfinite(x).all()):
                    row, position = (~torch.isfinite(x)).any(dim=-1).nonzero()[0].tolist()
                    found = f"x_{layer} is not finite ({x.dtype}, sequence {indices[row]}, position {position})"
                    raise NonFiniteError(found, "finite activations", "try --dtype float32")
                for watcher in watchers:
                    watcher.see(indices, layer, x)
            if progress is not None:
                progress(int(indices[-1]) + 1, corpus.sequences)


class Kept:
    """States at a bounded sample of positions, the same number from every sequence, drawn by (seed, sequence).

    Args:
        anatomy, corpus, settings: the model, its corpus, the seed, the skipped positions, and the memory of which a
            quarter may be taken.
        layers: at how many states, evenly spaced from x_0 to x_L.
    """

    def __init__(self, anatomy: Anatomy, corpus: Corpus, settings: DepthSettings, layers: int) -> None:
        blocks, self.width = len(anatomy.stream), anatomy.stream.blocks.width
        self.layers: list[int] = np.linspace(0, blocks, min(layers, blocks + 1)).round().astype(int).tolist()
        budget = min(POSITIONS, settings.memory // (16 * self.width * len(self.layers)))
        eligible = corpus.tokens - settings.skip_first
        each = max(1, min(eligible, budget // corpus.sequences))
        drawn = [key_rng(settings.seed, s, _DRAWN).permutation(eligible)[:each] for s in range(corpus.sequences)]
        self.positions: Ints = np.sort(np.array(drawn, dtype=np.int64), axis=1) + settings.skip_first
        shape = (corpus.sequences, each, self.width)
        self.states = {layer: torch.zeros(shape, dtype=torch.float32) for layer in self.layers}
        self.columns = [states.numpy() for states in self.states.values()]

    def see(self, sequences: Ints, layer: int, x: Tensor) -> None:
        """Keep the state at this sequence's positions, if it is one that is kept."""
        if layer in self.states:
            at = torch.from_numpy(self.positions[sequences])
            rows = torch.arange(len(sequences))[:, None]
            self.states[layer][torch.from_numpy(sequences)] = x[rows.to(x.device), at.to(x.device)].float().cpu()


def readable(
    anatomy: Anatomy,
    corpus: Corpus,
    settings: DepthSettings | None = None,
    layers: int = 8,
    classes: int = 50,
    progress: Progress | None = None,
) -> Readable:
    """How well ridge classifiers read three targets from the states; one forward pass over the corpus.

    Targets are the next and the current token, among those that are most frequent where it is fitted, and the
    position, in as many ranges of equal length. Fitted on one half of the sequences, scored on the other; a document
    is in one half as a whole. Accuracies are averaged over a sequence's positions, then over sequences.

    Args:
        anatomy: a verified model.
        corpus: what to run it on; of float states only the position is read.
        settings: seed, skipped positions, batch size, memory.
        layers: at how many states at most, evenly spaced, x_0 and x_L among them.
        classes: at most, of each target.
        progress: called with (sequences done, in all).

    Raises:
        UsageError: fewer than two layers or classes, or no position is left once the first ones are skipped.
        NonFiniteError: a state is infinite or not a number.
    """
    settings = settings or DepthSettings()
    check(corpus, settings, layers, classes)
    kept = Kept(anatomy, corpus, settings, layers)
    run(anatomy, corpus, settings, [kept], progress)
    return score(kept, anatomy, corpus, settings, classes)


def check(corpus: Corpus, settings: DepthSettings, layers: int, classes: int) -> None:
    """Refuse what makes no sense before anything is run.

    Raises:
        UsageError: fewer than two layers or classes, or settings that make no sense.
    """
    settings.check(corpus)
    if layers < 2:
        raise UsageError(f"{layers} states to read from", "at least 2: x_0 and the last")
    if classes < 2:
        raise UsageError(f"{classes} classes to tell apart", "at least 2")


def score(kept: Kept, anatomy: Anatomy, corpus: Corpus, settings: DepthSettings, classes: int) -> Readable:
    """Fit and score the classifiers on states that were kept."""
    empty = pd.DataFrame(columns=["target", "state", "ci_low", "ci_high", "best", "baseline"])
    if corpus.sequences < 2:
        note = "Nothing was read from the states: one half of the sequences fits and the other scores; there is one."
        return Readable(pd.DataFrame(columns=_COLUMNS), empty, (note,))
    train = halves(corpus)
    labels, notes = _labels(kept, anatomy, corpus, settings)
    tables, firsts = [], []
    for target in TARGETS:
        if target not in labels:
            continue
        limit = classes
        if target == "position":  # in ranges of equal length, so that none has too few
            limit = min(classes, corpus.tokens - settings.skip_first, kept.positions[train].size // FEWEST)
            labels[target] = labels[target] * max(limit, 1) // (corpus.tokens - settings.skip_first)
        chosen = _frequent(labels[target][train], limit)
        label = np.full_like(labels[target], -1)
        for place, name in enumerate(chosen):
            label[labels[target] == name] = place
        used = int((label[train] >= 0).sum())
        if len(chosen) < 2 or not (label[~train] >= 0).any():
            notes.append(
                f"The {target} was not read from the states: fewer than two classes have {FEWEST} examples to fit on "
                "and any to score; ask for more tokens."
            )
            continue
        if used < 2 * kept.width:
            notes.append(
                f"The {target} was read with classifiers fitted on {used:,} positions, fewer than two a dimension "
                f"({2 * kept.width:,}): more tokens would read more."
            )
        table, first = _read(kept, corpus, settings, target, label, train, len(chosen))
        tables.append(table)
        firsts.append(first)
    whole = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=_COLUMNS)
    return Readable(whole, pd.DataFrame(firsts) if firsts else empty, tuple(notes))


def _labels(kept: Kept, anatomy: Anatomy, corpus: Corpus, settings: DepthSettings) -> tuple[dict[str, Ints], list[str]]:
    """Target → label at every kept position, `[sequences, each]`; -1 for none."""
    labels, notes = {"position": kept.positions - settings.skip_first}, []
    if corpus.is_states:
        notes.append("Tokens were not read from the states: the model was given states, and there are none.")
        return labels, notes
    ids = corpus.inputs.numpy()
    labels["current token"] = np.take_along_axis(ids, kept.positions, axis=1)
    if anatomy.causal:
        after = np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        labels["next token"] = np.take_along_axis(after, kept.positions, axis=1)
    else:
        notes.append("The next token was not read from the states: this model is shown it.")
    return labels, notes


def _frequent(labels: Ints, limit: int) -> Ints:
    """The most frequent labels, at most so many, each with enough examples; the smaller one of equals."""
    names, counts = np.unique(labels[labels >= 0], return_counts=True)
    order = np.argsort(-counts, kind="stable")[: max(limit, 0)]
    return names[order[counts[order] >= FEWEST]]


def _read(
    kept: Kept, corpus: Corpus, settings: DepthSettings, target: str, label: Ints, train: NDArray[np.bool_], count: int
) -> tuple[pd.DataFrame, dict[str, object]]:
    """One target at every state: its rows, and the first state from which it can be read."""
    fits, scores = (label >= 0) & train[:, None], (label >= 0) & ~train[:, None]
    folds = _folds(corpus, train, fits)
    # one shuffle for all states, so that they differ by the state alone
    shuffled = label.copy()
    tag = _SHUFFLED + TARGETS.index(target)
    shuffled[fits] = key_rng(settings.seed, 0, tag).permutation(label[fits])
    columns: dict[str, list[Floats]] = {"accuracy": [], "control": []}
    for layer in kept.layers:
        states = kept.states[layer].numpy()
        fitted, trying = Ridge(states[fits]), [Ridge(states[fold]) for fold in folds]
        for name, to in (("accuracy", label), ("control", shuffled)):
            trials = [
                (ridge, to[fold], states[fits & ~fold], to[fits & ~fold])
                for ridge, fold in zip(trying, folds, strict=True)
            ]
            penalty = best_penalty(trials, count)
            right = np.full(label.shape, np.nan)
            said = fitted.scores(to[fits], count, states[scores], [penalty])[0].argmax(axis=1)
            right[scores] = said == label[scores]
            columns[name].append(_mean(right[~train]))
    common = np.where(scores, label == np.bincount(label[fits]).argmax(), np.nan)
    documents = None if corpus.documents is None else corpus.documents[~train]
    draws = Resampler(int((~train).sum()), documents, settings.seed)
    states_read, baseline = len(kept.layers), _mean(common[~train])
    accuracies = np.stack([*columns["accuracy"], baseline], axis=1)
    values, low, high = draws.intervals(accuracies)
    control, control_low, control_high = draws.intervals(np.stack(columns["control"], axis=1))
    table = pd.DataFrame(
        {
            "target": target, "state": kept.layers, "accuracy": values[:-1], "ci_low": low[:-1], "ci_high": high[:-1],
            "baseline": values[-1], "baseline_low": low[-1], "baseline_high": high[-1], "control": control,
            "control_low": control_low, "control_high": control_high, "classes": count, "train": int(fits.sum()),
            "test": int(scores.sum()),
        }, columns=_COLUMNS,
    )  # fmt: skip
    best = int(values[:-1].argmax())
    above = draws.function(accuracies, lambda means: means[:, best] - means[:, states_read])
    known = np.array(kept.layers, dtype=np.float64)
    first = draws.function(accuracies, lambda means: known[_near(means)])
    read = above.value > 0 and not above.low <= 0
    ends = (first.value, first.low, first.high) if read else (np.nan,) * 3
    return table, {"target": target, **dict(zip(("state", "ci_low", "ci_high"), ends, strict=True)),
                   "best": values[best], "baseline": values[-1]}  # fmt: skip


def _folds(corpus: Corpus, train: NDArray[np.bool_], fits: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Two halves of the positions that are fitted on; each has to read the other, which chooses the penalty.

    Whole sequences, or documents, where there are two: states tell one text from another, so with a penalty that is
    too small they read the text's own frequent tokens, which helps in that text alone. With single positions left out,
    the states of SmolLM2's random twin read worse than the baseline.
    """
    if train.sum() > 1:
        inner = np.zeros_like(train)
        inner[train] = halves(corpus.take(train))
        first = fits & inner[:, None]
    else:
        first = fits & (np.arange(fits.shape[1]) % 2 == 0)
    # a half may have no example at all
    return [fold for fold in (first, fits & ~first) if fold.any() and (fits & ~fold).any()]


def _near(means: Floats) -> Ints:
    """The first of the states that is near the best; `[R, states + 1]`, the baseline last, to `[R]`."""
    accuracies, baseline = means[:, :-1], means[:, -1:]
    goal = baseline + NEAR * (accuracies.max(axis=1, keepdims=True) - baseline)
    return (accuracies >= goal - 1e-12).argmax(axis=1)


def _mean(right: Floats) -> Floats:
    """Mean over a sequence's positions that count, NaN where there is none."""
    counts = (~np.isnan(right)).sum(axis=1)
    return np.where(counts > 0, np.nansum(right, axis=1) / np.maximum(counts, 1), np.nan)
