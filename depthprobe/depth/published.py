"""Published estimates of effective depth: a threshold on a curve over layers, or the centre of mass of one.

`cosine_crossing`, `lens_kl_depth` and `lens_overlap_depth` are those of Hu, Zhou & Zhang 2025, "What affects the
effective depth of large language models?"; `depth_score` that of Csordás, Manning & Potts 2025. Each is given with
what it would be at other thresholds, which is how much the choice of one decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.branches import Reader
from depthprobe.corpus import Corpus
from depthprobe.depth.base import (
    Depth,
    DepthSettings,
    Estimate,
    Floats,
    Progress,
    batches,
    bytes_of_sequence,
    resampler,
    row,
    units_of,
)
from depthprobe.depth.effects import ALL, Skips, run_skips
from depthprobe.depth.paths import Walk
from depthprobe.errors import UsageError
from depthprobe.estimate import Resampler
from depthprobe.probes.base import Dots, cosine, key_rng, mean_tokens
from depthprobe.processes import dealt, paced
from depthprobe.verify import Anatomy

__all__ = [
    "DOES",
    "MISSES",
    "cosine_crossing",
    "depth_score",
    "first_above",
    "first_below",
    "last_crossing",
    "lens_depths",
]

DOES = {
    "cosine_crossing": "Counts the units up to the last one that turns from erasing the stream to reinforcing it.",
    "lens_kl_depth": "Counts the units until the state, read out as it is, predicts nearly what the last state does.",
    "lens_overlap_depth": "Counts the units until the state, read out as it is, ranks first what the last state does.",
    "depth_score": "Says at which unit the effects of skipping a unit have their centre of mass.",
}
MISSES = {
    "cosine_crossing": "The direction of an update says nothing of whether it is needed, or of what it reads.",
    "lens_kl_depth": "What the head cannot read may be there already, and what it reads early may still be worked on.",
    "lens_overlap_depth": "As lens_kl_depth; and five tokens may agree long before their probabilities do.",
    "depth_score": "A centre of mass is no count: N equal units score (N + 1) / 2 however they are wired.",
}

COSINES = np.linspace(-0.2, 0.2, 41)
KLS = np.array([0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
OVERLAPS = np.round(np.arange(0.05, 1, 0.05), 2)
LENS_BYTES = 30 << 20  # of logits at once
TOP = 5


def cosine_crossing(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """The last unit at which cos(u, s) goes from negative to non-negative: how many units stand before it.

    Where there is no crossing it is 0 if the first unit's cosine is non-negative, N if all are negative, with a note.
    The published code takes the mean of a block's three cosines, of attention, MLP and the block itself, and gives the
    index of the last negative one, one less than this. That mean is the variant `mean of units`.

    Args:
        anatomy: a verified model.
        corpus: what to run it on.
        unit: `block` or `sublayer`.
        settings: skipped positions, batch size.
        progress: called with (sequences done, in all).

    Returns:
        Rows `cosine_crossing`; `per_sequence` the cosines, `[sequences, N]`; curves `thresholds` (name, variant,
        threshold, value, ci_low, ci_high), the threshold in place of 0, and `profile` (name, variant, unit, value,
        ci_low, ci_high; units from 0).
    """
    settings = settings or DepthSettings()
    settings.check(corpus)
    parts = [f"{u.layer}{u.part}" for u in units_of(anatomy, unit)]
    blocks = len(anatomy.stream)
    columns = {"": np.full((corpus.sequences, len(parts)), np.nan)}
    whole = unit == "block" and all(len(block.branches) == 2 for block in anatomy.blocks)
    if whole:
        columns["mean of units"] = np.full((corpus.sequences, blocks), np.nan)
    progress, reader = paced(progress), Reader(anatomy.stream, anatomy.blocks)
    with torch.no_grad(), reader, dealt(corpus.sequences, *columns.values()) as mine:
        for indices, inputs in batches(anatomy, corpus, settings, mine=mine):
            entry = anatomy.stream.enter(inputs)
            x, place = entry.x, 0
            for layer in range(blocks):
                visit = reader.visit(entry, layer, x)
                own = _cosine(x, visit.update, settings.skip_first)
                each = [_cosine(s, u, settings.skip_first) for s, u in visit.branches.values()]
                for value in [own] if unit == "block" else each:
                    columns[""][indices, place] = value
                    place += 1
                if whole:
                    columns["mean of units"][indices, layer] = np.mean([own, *each], axis=0)
                x = visit.z
            if progress is not None:
                progress(int(indices[-1]) + 1, corpus.sequences)
    measure = _Threshold("cosine_crossing", unit, 0.0, COSINES, last_crossing)
    draws = resampler(corpus, settings)
    rows = [measure.row(draws, values, variant, len(parts)) for variant, values in columns.items()]
    curves = {
        "thresholds": pd.concat([measure.curve(draws, v, variant) for variant, v in columns.items()]),
        "profile": pd.concat([_profile(draws, v, "cosine_crossing", variant) for variant, v in columns.items()]),
    }
    return Estimate(rows, columns, curves, cost_forward=1.0)


def lens_depths(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    positions: int = 1024,
) -> Estimate:
    """`lens_kl_depth` and `lens_overlap_depth`, from one logit lens: how many units stand before the state.

    The first is the first state whose KL(p_final ‖ p_lens) is below 0.1 of the largest of all states, the second the
    first whose five most likely tokens are, in the mean, to more than 0.2 those of the final distribution. States are
    x_0 … x_N, before and after every unit. The published code takes KL(p_lens ‖ p_final).

    Args:
        anatomy: a verified model with a language-model head.
        corpus: what to run it on.
        unit: `block` or `sublayer`.
        settings: seed, batch size.
        progress: called with (sequences done, in all).
        positions: how many to read out in all, drawn by (seed, sequence) as for the lens of `layers.csv`.

    Returns:
        Rows of both; `per_sequence` `kl` and `overlap`, `[sequences, N + 1]`; curves as of `cosine_crossing`.

    Raises:
        UsageError: there is no head, or it reads several positions together.
    """
    settings = settings or DepthSettings()
    settings.check()
    if anatomy.objective is None or not anatomy.reads_positions_apart:
        raise UsageError("a lens reads states through the head, and this model has none that reads each position alone")
    walk = Walk(anatomy, unit)
    count = len(walk)
    columns = {name: np.full((corpus.sequences, count + 1), np.nan) for name in ("kl", "overlap")}
    used = set(np.linspace(0, corpus.sequences - 1, min(corpus.sequences, positions)).round().astype(int).tolist())
    each = max(1, positions // corpus.sequences)
    eligible = corpus.tokens - (anatomy.objective == "causal")
    kept = bytes_of_sequence(anatomy, corpus, 3 * count + 4, 0)
    progress = paced(progress)
    with torch.no_grad(), walk, dealt(corpus.sequences, *columns.values()) as mine:
        for indices, inputs in batches(anatomy, corpus, settings, kept, mine):
            taken = walk.take(inputs, alone=False)
            for place, sequence in enumerate(indices.tolist()):
                if sequence not in used:
                    continue
                drawn = np.sort(key_rng(settings.seed, sequence, 1 << 20).permutation(eligible)[:each])
                at = torch.from_numpy(drawn).to(inputs.device)
                states = [state[place, at] for state in (*taken.reads, taken.last)]
                kl, overlap = _lens(anatomy, states, inputs[place : place + 1, at])
                columns["kl"][sequence], columns["overlap"][sequence] = kl, overlap
            if progress is not None:
                progress(int(indices[-1]) + 1, corpus.sequences)
    draws = resampler(corpus, settings)
    kl_depth = _Threshold("lens_kl_depth", unit, 0.1, KLS, first_below)
    overlap_depth = _Threshold("lens_overlap_depth", unit, 0.2, OVERLAPS, first_above)
    both = ((kl_depth, columns["kl"]), (overlap_depth, columns["overlap"]))
    rows = [measure.row(draws, values, "", count) for measure, values in both]
    curves = {
        "thresholds": pd.concat([measure.curve(draws, values, "") for measure, values in both]),
        "profile": pd.concat([_profile(draws, values, measure.name, "") for measure, values in both]),
    }
    read = min(each, eligible) * len(used)
    note = f"The lens of effective depth read out {count + 1} states at {read:,} positions."
    return Estimate(rows, columns, curves, cost_forward=1.0, notes=[note])


def depth_score(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    skips: Skips | None = None,
) -> Estimate:
    """Σ l · effect_l / Σ effect_l over units l = 1 … N; 0 if no effect is left.

    The effect is that of skipping the unit: on what is predicted, ‖p' − p‖₂ in the mean over tokens (the default), or
    in the variants `updates …` on later units, the mean of their relative changes; the last unit has none then, and
    counts nothing. The published code has their maxima over tokens and prompts, units from 0, and takes a unit to be
    one of its own later ones. `later tokens`: the unit is skipped at the first tokens and its effect taken after them.

    Args:
        anatomy, corpus, unit, settings, progress: as in `run_skips`.
        skips: runs of the same corpus and unit, if they were made before.

    Returns:
        Rows `depth_score`; `per_sequence` the effects, `[sequences, N]`; the curve `profile`.
    """
    settings = settings or DepthSettings()
    skips = run_skips(anatomy, corpus, unit, settings, progress) if skips is None else skips.of(unit, corpus)
    draws, count = resampler(corpus, settings), skips.count
    columns: dict[str, Floats] = {}
    for tokens, output in skips.output.items():
        columns["" if tokens == ALL else tokens] = output
    first = np.triu_indices(count, k=1)[0]
    for (tokens, statistic), changes in skips.changes.items():
        if statistic == "mean" and count > 1:
            sums = np.stack([changes[:, first == s].sum(axis=1) for s in range(count)], axis=1)
            columns["updates" if tokens == ALL else f"updates, {tokens}"] = sums / np.maximum(np.arange(count)[::-1], 1)
    note = "" if skips.cost[0] == "kl" else "effects on the last state: the model has no language-model head"
    rows = []
    for variant, effect in columns.items():
        interval = draws.function(effect, centre_of_mass)
        rows.append(row("depth_score", unit, variant, interval, count, "" if "updates" in variant else note))
    curves = {"profile": pd.concat([_profile(draws, v, "depth_score", variant) for variant, v in columns.items()])}
    return Estimate(rows, columns, curves, skips.evaluations, notes=list(skips.notes))


def last_crossing(cosines: Floats, threshold: float) -> Floats:
    """Units before the last one that is not below the threshold and follows one that is; `[R, N]` to `[R]`."""
    below = cosines < threshold
    crossing = np.hstack([np.zeros((len(below), 1), dtype=bool), below[:, :-1] & ~below[:, 1:]])
    last = below.shape[1] - 1 - np.argmax(crossing[:, ::-1], axis=1)
    without = np.where(below.all(axis=1), below.shape[1], 0)
    return np.where(crossing.any(axis=1), last, without).astype(np.float64)


def first_below(values: Floats, threshold: float) -> Floats:
    """The first state below so much of the row's largest; 0 where all are 0; `[R, N + 1]` to `[R]`."""
    largest = values.max(axis=1, keepdims=True)
    low = (values < threshold * largest) | (largest == 0)
    return np.where(low.any(axis=1), np.argmax(low, axis=1), values.shape[1] - 1).astype(np.float64)


def first_above(values: Floats, threshold: float) -> Floats:
    """The first state above the threshold, the last one where none is; `[R, N + 1]` to `[R]`."""
    high = values > threshold
    return np.where(high.any(axis=1), np.argmax(high, axis=1), values.shape[1] - 1).astype(np.float64)


def centre_of_mass(effects: Floats) -> Floats:
    """Σ l · effect_l / Σ effect_l, l from 1; 0 where all are 0; `[R, N]` to `[R]`."""
    total = effects.sum(axis=1)
    return effects @ np.arange(1.0, effects.shape[1] + 1) / np.where(total > 0, total, 1)


@dataclass(frozen=True)
class _Threshold:
    """A depth that is read off a curve at a threshold."""

    name: str
    unit: str
    default: float
    grid: NDArray[np.float64]
    read: Callable[[Floats, float], Floats]

    def row(self, draws: Resampler, columns: Floats, variant: str, of: int) -> Depth:
        note = ""
        if self.name == "cosine_crossing":
            below = np.nanmean(columns, axis=0) < self.default
            if not (below[:-1] & ~below[1:]).any():
                note = "no crossing: all cosines are negative" if below.all() else "no crossing from negative"
        interval = draws.function(columns, lambda m: self.read(m, self.default))
        return row(self.name, self.unit, variant, interval, of, note)

    def curve(self, draws: Resampler, columns: Floats, variant: str) -> pd.DataFrame:
        rows = []
        for threshold in self.grid.tolist():
            found = draws.function(columns, lambda m, threshold=threshold: self.read(m, threshold))  # type: ignore[misc]
            rows.append((self.name, variant, threshold, found.value, found.low, found.high))
        return pd.DataFrame(rows, columns=["name", "variant", "threshold", "value", "ci_low", "ci_high"])


def _profile(draws: Resampler, columns: Floats, name: str, variant: str) -> pd.DataFrame:
    value, low, high = draws.intervals(columns)
    table = pd.DataFrame({"name": name, "variant": variant, "unit": range(len(value))})
    return table.assign(value=value, ci_low=low, ci_high=high)


def _cosine(s: Tensor, u: Tensor, skip: int) -> Floats:
    dots = Dots(s, u)
    return mean_tokens(cosine(dots.su, dots.ss, dots.uu), skip)


def _lens(anatomy: Anatomy, states: list[Tensor], ids: Tensor) -> tuple[Floats, Floats]:
    """KL and top-5 overlap of each state `[positions, width]` to the last one's readout, means over positions."""
    stream, sums = anatomy.stream, np.zeros((2, len(states)))
    chunk = max(1, LENS_BYTES // (4 * (stream.checkpoint.vocab_size or 1)))
    for start in range(0, len(states[-1]), chunk):
        some = slice(start, start + chunk)
        final = stream.readout(states[-1][None, some], ids[:, some]).float().log_softmax(dim=-1)
        top = final.topk(min(TOP, final.shape[-1]), dim=-1).indices
        chance = final.exp()
        for place, state in enumerate(states):
            last = place == len(states) - 1
            guess = final if last else stream.readout(state[None, some], ids[:, some]).float().log_softmax(dim=-1)
            kl = torch.where(chance > 0, chance * (final - guess), torch.zeros_like(final)).sum(dim=-1)
            mine = guess.topk(top.shape[-1], dim=-1).indices
            overlap = (mine[..., :, None] == top[..., None, :]).any(dim=-1).double().mean(dim=-1)
            sums[0, place] += float(kl.double().clamp_min(0).sum())
            sums[1, place] += float(overlap.sum())
    return sums[0] / len(states[-1]), sums[1] / len(states[-1])
