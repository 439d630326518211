"""Phases of computation: ranges of layers whose states are alike, and what can be read from them on the way.

Two states are as far apart as their directions: d² = 2 (1 − c), c the cosine averaged over tokens. That is the squared
distance of unit vectors, so the matrix of mean cosines is a Gram matrix and Ward's criterion (Ward 1963) applies to it
without another assumption; CKA would not see a block that turns all states alike, and its moments, `width²` a sequence
and pair of layers, could not be kept a sequence.

Silhouettes alone say little here: states that drift evenly, with no boundary anywhere, reach 0.2 to 0.35 too, since the
two ends of a line are far apart. So each is set against the same matrix with its boundaries evened out: the mean
squared distance of every two states that are as many blocks apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse import diags
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_score
from torch import Tensor

from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings, Floats, Progress
from depthprobe.depth.readable import Ints, Kept, Readable, check, run, score
from depthprobe.estimate import Resampler
from depthprobe.probes.base import wide
from depthprobe.verify import Anatomy

__all__ = ["Clusters", "Phases", "boundaries", "cluster", "even", "phases", "squared_distances"]

MOST = 8  # clusters
# Nineteen random initialisations (of SmolLM2-135M, MiniLM, a small GPT-2 and the four shipped placements; plain and
# centred) have silhouettes of 0.23 to 0.40, which are −0.04 to 0.08 above the best of an even drift. Trained, SmolLM2
# has 0.45 and the GPT-2 0.47, 0.15 and 0.19 above; the shipped placements are within 0.04.
CLEAR = 0.25  # silhouette below which there are no clear phases
EXCESS = 0.1  # how much it has to be above the best of an even drift
_SAME = 1e-6  # squared distance below which states do not differ, but for rounding
_TOKENS = 64  # whose states are multiplied at once


@dataclass(frozen=True, eq=False)
class Clusters:
    """Contiguous clusters of the states x_0 … x_L.

    Attributes:
        count: how many, the one with the best silhouette.
        ends: (first state, last state) of each.
        clear: whether the silhouette is large and well above the best of an even drift, and this number of clusters
            that of most resamples.
        counts: a row a number of clusters: count, silhouette, ci_low, ci_high, drift (the silhouette of an even drift),
            share (of the resamples in which it is best; NaN where there is one sequence).
        between: a row a block: after (l: between x_l and x_{l+1}), distance (of the two), chosen, share (of the
            resamples in which it is a boundary).
    """

    count: int
    ends: tuple[tuple[int, int], ...]
    clear: bool
    counts: pd.DataFrame
    between: pd.DataFrame

    @property
    def best(self) -> pd.Series:
        """The row of the number of clusters that was chosen."""
        return self.counts[self.counts["count"] == self.count].iloc[0]

    def plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        best = self.best
        return {
            "count": self.count,
            "ends": [list(pair) for pair in self.ends],
            "clear": self.clear,
            **{name: _number(best[name]) for name in ("silhouette", "ci_low", "ci_high", "drift", "share")},
            "counts": _rows(self.counts),
        }


@dataclass(frozen=True, eq=False)
class Phases:
    """Clusters of layers, and what can be read at which state.

    Attributes:
        clusters: of the states as they are; None where there are fewer than three, or all are the same.
        centred: of the states less their mean over the sequence's tokens, which takes out what all tokens share.
        readable: ridge classifiers by state.
        cosines: mean cosine of every two states of a sequence, `[sequences, L + 1, L + 1]`.
        corpus: what it was measured on.
        skip_first: leading positions that were left out.
        resamples: of sequences.
        seconds: it took, of which `forward` in the forward pass.
        forward: seconds of the pass over the corpus.
        notes: sentences on what was left out or is in doubt.
    """

    clusters: Clusters | None
    centred: Clusters | None
    readable: Readable
    cosines: Floats
    corpus: Corpus
    skip_first: int
    resamples: int
    seconds: float
    forward: float
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """The field `phases` of a report: JSON's own types, None for what is not a number.

        Keys: clusters and centred (count, ends, clear, silhouette with interval, drift, share, counts; empty where
        there are none), boundaries (after, distance, chosen, share), readable (rows of its table), first (target →
        state, ci_low, ci_high, best, baseline), resamples, skip_first, sequences, tokens, corpus, sha256, seconds,
        notes.
        """
        first = {row["target"]: {key: row[key] for key in row if key != "target"} for row in _rows(self.readable.first)}
        return {
            "clusters": self.clusters.plain() if self.clusters else {},
            "centred": self.centred.plain() if self.centred else {},
            "boundaries": _rows(self.clusters.between) if self.clusters else [],
            "readable": _rows(self.readable.table),
            "first": first,
            "resamples": self.resamples,
            "skip_first": self.skip_first,
            "sequences": self.corpus.sequences,
            "tokens": self.corpus.tokens,
            "corpus": self.corpus.name,
            "sha256": self.corpus.sha256,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def phases(
    anatomy: Anatomy,
    corpus: Corpus,
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    resamples: int = 50,
    layers: int = 8,
    classes: int = 50,
) -> Phases:
    """Clusters of layers and readable targets, from one forward pass over the corpus.

    Args:
        anatomy: a verified model.
        corpus: what to run it on.
        settings: seed, skipped positions, batch size, memory.
        progress: called with (sequences done, in all).
        resamples: of sequences, for how often each number of clusters and each boundary comes out.
        layers, classes: of `readable`.

    Raises:
        UsageError: fewer than two layers or classes, or no position is left once the first ones are skipped.
        NonFiniteError: a state is infinite or not a number.
    """
    settings = settings or DepthSettings()
    check(corpus, settings, layers, classes)
    started = time.perf_counter()
    grams, kept = _Grams(anatomy, corpus, settings.skip_first), Kept(anatomy, corpus, settings, layers)
    run(anatomy, corpus, settings, [grams, kept], progress)
    forward = time.perf_counter() - started
    draws = Resampler(corpus.sequences, corpus.documents, settings.seed, resamples)
    plain, centred = cluster(grams.plain, draws), cluster(grams.centred, draws)
    read = score(kept, anatomy, corpus, settings, classes)
    notes = [*_notes(plain, centred, len(anatomy.stream), draws), *read.notes]
    seconds = time.perf_counter() - started
    return Phases(
        plain, centred, read, grams.plain, corpus, settings.skip_first, resamples, seconds, forward, tuple(notes)
    )


def cluster(cosines: Floats, draws: Resampler) -> Clusters | None:
    """Contiguous clusters of states, as many as have the best silhouette, and how much of it resamples keep.

    Args:
        cosines: of every two states of each sequence, `[sequences, L + 1, L + 1]`.
        draws: resamples of the sequences.

    Returns:
        The clusters; None where there are fewer than three states, or they do not differ.
    """
    sequences, states, _ = cosines.shape
    mean = squared_distances(cosines.mean(axis=0))
    if states < 3 or mean.max() < _SAME:
        return None
    merged = _merged(mean)
    found, drift = _silhouettes(mean, merged), _drift(mean)
    place = int(found.argmax())
    flat = cosines.reshape(sequences, -1)
    several = draws.clusters > 1
    drawn = draws.replicates(flat).reshape(-1, states, states) if several else np.empty((0, states, states))
    best, values, cut = np.zeros(len(found)), [], np.zeros(states - 1)
    for replicate in drawn:
        squared = squared_distances(replicate)
        cuts = _merged(squared)
        again = _silhouettes(squared, cuts)
        values.append(again)
        best[again.argmax()] += 1
        cut[cuts[int(again.argmax())]] += 1
    low, high = np.quantile(values, [0.025, 0.975], axis=0) if several else np.full((2, len(found)), np.nan)
    scale = 1 / len(drawn) if several else math.nan
    counts = pd.DataFrame(
        {"count": np.arange(2, len(found) + 2), "silhouette": found, "ci_low": low, "ci_high": high, "drift": drift,
         "share": best * scale}
    )  # fmt: skip
    chosen = np.sort(merged[place])
    near = np.sqrt(np.diagonal(mean, 1))
    after = np.arange(states - 1)
    between = pd.DataFrame(
        {"after": after, "distance": near, "chosen": np.isin(after, chosen), "share": cut * scale}
    )  # fmt: skip
    starts, stops = [0, *(chosen + 1).tolist()], [*chosen.tolist(), states - 1]
    clear = found[place] >= CLEAR and found[place] - drift.max() >= EXCESS and not counts["share"][place] < 0.5
    return Clusters(place + 2, tuple(zip(starts, stops, strict=True)), bool(clear), counts, between)


def squared_distances(cosines: Floats) -> Floats:
    """d² of every two states from the Gram matrix of their directions, `[states, states]`; 0 on the diagonal."""
    own = np.diag(cosines)
    squared = np.maximum(own[:, None] + own - 2 * cosines, 0)
    np.fill_diagonal(squared, 0)
    return (squared + squared.T) / 2


def even(squared: Floats) -> Floats:
    """The same drift without a boundary: d² of every two states is the mean of all that are as far apart in depth."""
    states = len(squared)
    return np.array([np.diagonal(squared, lag).mean() for lag in range(states)])[
        np.abs(np.subtract.outer(np.arange(states), np.arange(states)))
    ]


def boundaries(squared: Floats) -> Ints:
    """l of every boundary between x_l and x_{l+1}, the one that Ward's contiguous merging removes last first.

    Clusters grow together along the chain of layers only, by scikit-learn; the first k − 1 are those of k clusters.
    Average linkage is not used: with a connectivity scikit-learn keeps distances of connected clusters alone, which on
    a chain leaves the distance of two neighbouring states, and one large step would decide.
    """
    states = len(squared)
    middle = np.eye(states) - 1 / states
    values, vectors = np.linalg.eigh(-0.5 * middle @ squared @ middle)
    points = vectors * np.sqrt(np.maximum(values, 0))  # classical scaling: their distances are the states'
    chain = diags([1.0, 1.0], [-1, 1], shape=(states, states)).tocsr()
    tree = AgglomerativeClustering(n_clusters=None, distance_threshold=0, linkage="ward", connectivity=chain)
    spans = [(state, state) for state in range(states)]
    removed = []
    for one, other in tree.fit(points).children_:
        left, right = sorted((spans[one], spans[other]))
        removed.append(left[1])
        spans.append((left[0], right[1]))
    return np.array(removed[::-1], dtype=np.int64)


def _silhouettes(squared: Floats, cuts: Sequence[Ints]) -> Floats:
    """Silhouette (Rousseeuw 1987) of clusters with these boundaries, one value for each set of them."""
    distances, after = np.sqrt(squared), np.arange(len(squared))
    labels = [(after[:, None] > cut).sum(axis=1) for cut in cuts]
    return np.array([float(silhouette_score(distances, label, metric="precomputed")) for label in labels])


def _merged(squared: Floats) -> list[Ints]:
    """The boundaries of 2, 3, … clusters."""
    order = boundaries(squared)
    return [order[: count - 1] for count in range(2, min(MOST, len(squared) - 1) + 1)]


def _drift(squared: Floats) -> Floats:
    """The silhouettes of an even drift; of equally long clusters where those are better.

    Merging meets nothing but ties there, and what it makes of them is chance.
    """
    states, smooth = len(squared), even(squared)
    counts = range(2, min(MOST, states - 1) + 1)
    equal = [np.round(np.arange(1, count) * states / count).astype(np.int64) - 1 for count in counts]
    return np.maximum(_silhouettes(smooth, _merged(smooth)), _silhouettes(smooth, equal))


class _Grams:
    """Cosines of every two states a sequence, as they are and less their mean over the sequence's tokens."""

    def __init__(self, anatomy: Anatomy, corpus: Corpus, skip: int) -> None:
        states = len(anatomy.stream) + 1
        self.plain = np.zeros((corpus.sequences, states, states))
        self.centred = np.zeros_like(self.plain)
        self.columns = [self.plain, self.centred]
        self.skip, self.states = skip, states
        self.seen: list[Tensor] = []

    def see(self, sequences: Ints, layer: int, x: Tensor) -> None:
        """Collect a batch's states, and reduce them once the last has come."""
        self.seen.append(x[:, self.skip :])
        if len(self.seen) < self.states:
            return
        for place, sequence in enumerate(sequences):
            states = [x[place].float() for x in self.seen]
            self.plain[sequence] = _gram(states)
            self.centred[sequence] = _gram([x - x.mean(dim=0) for x in states])
        self.seen = []


def _gram(states: list[Tensor]) -> Floats:
    """Mean cosine over tokens of every two of some states, each `[tokens, width]`, from products in float64."""
    total, tokens = np.zeros((len(states), len(states))), len(states[0])
    for start in range(0, tokens, _TOKENS):
        parts = [x[start : start + _TOKENS] for x in states]
        directions = [x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30) for x in parts]
        flat = wide(torch.stack(directions)).flatten(1)
        total += (flat @ flat.T).cpu().numpy()
    return total / tokens


def _notes(plain: Clusters | None, centred: Clusters | None, blocks: int, draws: Resampler) -> list[str]:
    if blocks < 2:
        return ["Phases were not looked for: one block has two states, and nothing between them."]
    if plain is None:
        return ["Phases were not looked for: the states do not differ in direction."]
    notes = []
    if draws.clusters < 2:
        notes.append("There is one sequence, so nothing says how far the phases depend on the text.")
    if not plain.clear:
        best = plain.best
        notes.append(
            f"No clear phases: the best silhouette of contiguous clusters is {best['silhouette']:.2f}, and states that "
            f"drift evenly reach {plain.counts['drift'].max():.2f}."
        )
    elif centred is None or not centred.clear:
        notes.append(
            "The phases are those of what all tokens of a sequence share: with each state's mean over the sequence "
            "taken out, none are clear."
        )
    return notes


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): _number(value) for name, value in row.items()} for row in frame.to_dict("records")]


def _number(value: Any) -> Any:
    """In JSON's own types; None for what is not finite."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
