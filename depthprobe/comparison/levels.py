"""At what runs are compared: as they are, at equal tokens of training, and at equal validation loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from depthprobe.comparison.measures import measures, mixed
from depthprobe.comparison.runs import Run, Training

__all__ = ["Level", "levels"]

Amount = Callable[[Training], float | None]


@dataclass(frozen=True, eq=False)
class Level:
    """One way to put runs side by side.

    Attributes:
        name: `as they are`, `equal tokens` or `equal loss`.
        words: the same with its number.
        frames: `measures` of every run, in the order of the runs.
    """

    name: str
    words: str
    frames: list[pd.DataFrame]


def levels(runs: Sequence[Run]) -> tuple[list[Level], list[str]]:
    """The levels that the runs have in common, the last checkpoints of all first, and why others are missing.

    Between two checkpoints every number, and each end of its interval, lies on the line from one to the other, over
    tokens or over validation loss. Equal tokens are the fewest that a run ended with. Equal loss is the lowest one that
    all runs reached, at its last crossing; there is none where the losses of the runs do not overlap.
    """
    frames = [[measures(point.report, point.training.loss) for point in run.points] for run in runs]
    last = [each[-1] for each in frames]
    if len(runs) == 1:
        return [Level("as they are", "as they are", last)], []
    notes: list[str] = []
    found = [_last(runs, last)]
    if found[0].name != "equal tokens":
        found += _at_tokens(runs, frames, notes)
    found += _at_loss(runs, frames, notes)
    return found, notes


def _last(runs: Sequence[Run], frames: list[pd.DataFrame]) -> Level:
    tokens = {run.training.tokens for run in runs}
    if len(tokens) == 1 and None not in tokens:
        return Level("equal tokens", f"at equal tokens of training, {next(iter(tokens)):,}", frames)
    return Level("as they are", "as they are", frames)


def _at_tokens(runs: Sequence[Run], frames: list[list[pd.DataFrame]], notes: list[str]) -> list[Level]:
    known = [run.training.tokens for run in runs if run.training.tokens is not None]
    unknown = [run.name for run in runs if run.training.tokens is None]
    if unknown:
        if known:
            notes.append(f"Not at equal tokens: how long {_list(unknown)} was trained is not recorded.")
        return []
    fewest = min(known)
    chosen = [_at(run, each, lambda t: t.tokens, fewest) for run, each in zip(runs, frames, strict=True)]
    missing = [run.name for run, frame in zip(runs, chosen, strict=True) if frame is None]
    if missing:
        notes.append(f"Not at equal tokens: {_list(missing)} has no checkpoints around {fewest:,} tokens of training.")
        return []
    words = f"at equal tokens of training, {fewest:,}, between checkpoints"
    return [Level("equal tokens", words, [frame for frame in chosen if frame is not None])]


def _at_loss(runs: Sequence[Run], frames: list[list[pd.DataFrame]], notes: list[str]) -> list[Level]:
    if not any(len(run.points) > 1 for run in runs):
        return []
    ranges = []
    for run in runs:
        losses = [point.training.loss for point in run.points if point.training.loss is not None]
        if not losses:
            notes.append(f"Not at equal loss: no validation loss of {run.name} is recorded.")
            return []
        ranges.append((min(losses), max(losses)))
    if len({run.training.text for run in runs}) > 1:
        notes.append("Not at equal loss: the runs were trained on different texts, so their losses do not compare.")
        return []
    level = max(low for low, _ in ranges)
    if level > min(high for _, high in ranges):
        each = ", ".join(f"{run.name} {low:.3f} to {high:.3f}" for run, (low, high) in zip(runs, ranges, strict=True))
        notes.append(f"Not at equal loss: the validation losses of the checkpoints do not overlap ({each}).")
        return []
    chosen = [_at(run, each, lambda t: t.loss, level) for run, each in zip(runs, frames, strict=True)]
    words = f"at equal validation loss, {level:.3f}, between checkpoints"
    return [Level("equal loss", words, [frame for frame in chosen if frame is not None])]


def _at(run: Run, frames: list[pd.DataFrame], amount: Amount, level: float) -> pd.DataFrame | None:
    """The measures where a run last had that much of something; None where it never had."""
    amounts = [amount(point.training) for point in run.points]
    known = [(x, frame) for x, frame in zip(amounts, frames, strict=True) if x is not None]
    if known and known[-1][0] == level:
        return known[-1][1]
    for (before, first), (after, second) in reversed(list(pairwise(known))):
        if min(before, after) <= level <= max(before, after):
            return mixed(first, second, (level - before) / (after - before) if after != before else 1.0)
    return None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
