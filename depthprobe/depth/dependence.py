"""Dependence: the depth of the graph of who reads whom, each edge by what the reader would do without the writer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthprobe.corpus import Corpus
from depthprobe.depth.base import (
    DepthSettings,
    Estimate,
    Floats,
    Progress,
    batches,
    bytes_of_sequence,
    refuse_carried,
    resampler,
    row,
)
from depthprobe.depth.paths import Taken, Walk, block_skips
from depthprobe.estimate import Resampler
from depthprobe.probes.base import wide
from depthprobe.processes import dealt
from depthprobe.verify import Anatomy

__all__ = ["DOES", "MISSES", "dependence", "depth_of_weights"]

DOES = (
    "Counts how many units stand one behind the other on the way to the readout, each reader's depth being one more "
    "than that of what it reads, weighted by how much its update would change without each."
)
MISSES = (
    "Takes one contribution away at a time, so that two that say the same look needless to every reader; squares the "
    "changes, so that a branch cut into two halves weighs half as much (not in the first power); and counts what "
    "a unit erases and replaces as handed on, so that a chain written with skips scores less than its length. A branch "
    "that only rescales the stream counts as one that reads it."
)

# How a reader's changes become weights: power 2 is the definition; power 1 is the same for a branch and for its halves.
POWERS = {"": 2, "first power": 1}


def dependence(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """D = Σ_s w_out,s d_s with d_t = 1 + Σ_s w_ts d_s, where w_ts is reader t's dependence on writer s.

    a_ts = ‖F_t(x_t) − F_t(x_t − c_{s→t})‖ / ‖F_t(x_t)‖, where c_{s→t} is what is left at reader t of what unit s wrote
    (`depth.paths`), taken away at all positions at once. Writer 0 is the embedding, with depth 0; the readout reads
    last. F_t is what unit t writes, through its own frozen identity path; of the readout it is the logits less their
    mean over the vocabulary, which is all that a softmax sees of them, or the last state of a model without a head.
    w_ts = a_ts² / Σ_s a_ts² is taken per token, averaged over a sequence's tokens and then over sequences; d follows
    from the averages, and the interval from resampled ones. The variant `first power` has a_ts in place of a_ts².

    Args:
        anatomy: a verified model.
        corpus: what to run it on.
        unit: `block` or `sublayer`.
        settings: seed, skipped positions, batch size.
        progress: called with (pairs of units done, in all).

    Returns:
        Rows `dependence`, variants "" and `first power`. `per_sequence`: the weights, `[sequences, M]`, in the order
        of the curve `weights`. Curves: `weights` (writer, reader, a, w, first_power; writer 0 is the embedding, unit
        i is writer and reader i + 1, the readout N + 1), `profile` (reader, d with ci_low and ci_high, variant) and,
        for blocks, `pairs`: `update_dependence` as in pairs.csv, i the block that writes and j the one that reads, L
        for the readout.

    Raises:
        UsageError: blocks hand on something beside the stream, or sublayers were not found.
        NonFiniteError: an activation is not finite.
    """
    settings = settings or DepthSettings()
    settings.check(corpus)
    refuse_carried(anatomy, "dependence")
    skips, notes = block_skips(anatomy, corpus, settings.seed)
    walk = Walk(anatomy, unit, skips)
    count, blocks = len(walk), len(anatomy.stream)
    pairs = [(s, t) for t in range(1, count + 2) for s in range(t)]
    columns = {name: np.empty((corpus.sequences, len(pairs))) for name in ("a", *POWERS)}
    each = bytes_of_sequence(anatomy, corpus, 4 * count + 8, 0)  # reads, writes, and what is left twice over
    at_most = len(pairs)
    with torch.no_grad(), walk, dealt(corpus.sequences, *columns.values()) as mine:
        rounds = -(-len(mine) // settings.sequences_at_once(corpus, each))
        for place, (indices, inputs) in enumerate(batches(anatomy, corpus, settings, each, mine)):
            start = 0
            for reader, changes, base in _readers(walk, inputs):
                for name, values in _means(changes, base, settings.skip_first).items():
                    columns[name][indices, start : start + reader] = values
                start += reader
                if progress is not None:
                    progress(place * at_most + start, rounds * at_most)
    draws = resampler(corpus, settings)
    rows = []
    for variant in POWERS:
        interval = draws.function(columns[variant], lambda m: depth_of_weights(m, count)[:, -1])
        rows.append(row("dependence", unit, variant, interval, count))
    curves = {"weights": _weights(pairs, columns), "profile": _profile(columns, draws, count)}
    if unit == "block":
        curves["pairs"] = _pairs(pairs, columns["a"], draws)
    if anatomy.stream.checkpoint.dtype in (torch.bfloat16, torch.float16):
        notes.append("In half precision, rounding adds a change of about 1e-3 to 1e-2 to every dependence.")
    cost = walk.evaluations / (max(1, rounds) * blocks)
    notes.append(f"Dependence took {cost:.1f} forward passes of the blocks and {count + 2} readouts.")
    return Estimate(rows, {name: columns[name] for name in POWERS}, curves, cost_forward=cost, notes=notes)


def depth_of_weights(weights: Floats, count: int) -> Floats:
    """The depth of every reader from its weights on all writers before it.

    Args:
        weights: `[R, M]`, M = (N + 1)(N + 2) / 2: for reader 1, …, N + 1 its weights on writers 0, …, reader − 1; they
            sum to 1, or to less where a reader depends on nothing.
        count: N.

    Returns:
        `[R, N + 1]`: d of units 1 … N, and last D, the depth of what the readout reads.
    """
    depths = np.zeros((len(weights), count + 2))
    start = 0
    for reader in range(1, count + 2):
        some = weights[:, start : start + reader]
        depths[:, reader] = (reader <= count) + (some * depths[:, :reader]).sum(axis=1)
        start += reader
    return depths[:, 1:]


def _readers(walk: Walk, inputs: Tensor) -> Iterator[tuple[int, list[Tensor | None], Tensor]]:
    """Every reader: its index, ‖F_t(x_t) − F_t(x_t − c)‖ of each writer (None for 0), ‖F_t(x_t)‖; `[batch, tokens]`."""
    taken = walk.take(inputs)
    left = [taken.entry.x.float()]  # of the embedding, and then of every unit's writing
    before = left
    for index, x in enumerate(taken.reads):
        before = before if walk.joins(index) else left
        base = taken.writes[index]

        def change(c: Tensor, index: int = index, x: Tensor = x, base: Tensor = base) -> Tensor:
            changed = walk.write(taken, index, (x.float() - c).to(x.dtype))
            return _norm(base - changed)

        changes = [change(c) if bool(c.any()) else None for c in before]
        yield index + 1, changes + [None] * (index + 1 - len(changes)), _norm(base)
        path = taken.paths[index]
        left = [*(path.carry(c) for c in left), base]
    yield _readout(walk, taken, left)


def _readout(walk: Walk, taken: Taken, left: list[Tensor]) -> tuple[int, list[Tensor | None], Tensor]:
    """The same of the readout, sequence by sequence: logits take room."""
    logits = walk.anatomy.objective is not None

    def read(sequence: int, x: Tensor) -> Tensor:
        out = walk.stream.readout(x.to(taken.last.dtype), taken.entry.inputs[sequence : sequence + 1]).float()
        return out - out.mean(dim=-1, keepdim=True) if logits else out

    norms: list[list[Tensor]] = [[] for _ in left]
    bases = []
    for sequence in range(len(taken.last)):
        x = taken.last[sequence : sequence + 1]
        base = read(sequence, x)
        bases.append(_norm(base))
        for writer, c in enumerate(left):
            norms[writer].append(_norm(base - read(sequence, x.float() - c[sequence : sequence + 1])))
    return len(left), [torch.cat(parts) for parts in norms], torch.cat(bases)


def _norm(v: Tensor) -> Tensor:
    return wide(torch.linalg.vector_norm(v, dim=-1))


def _means(changes: list[Tensor | None], base: Tensor, skip: int) -> dict[str, Floats]:
    """A reader's a and weights on each writer, means over tokens, `[batch, writers]`."""
    zero = torch.zeros_like(base)
    change = torch.stack([zero if c is None else c for c in changes])[..., skip:]  # [writers, batch, tokens]
    base = base[..., skip:]
    # Where nothing is written, a ratio to it has no meaning: such tokens are left out, and only they.
    ratio = torch.where(base > 0, change / base.clamp_min(1e-300), torch.nan)
    found = {"a": ratio.nanmean(dim=-1).nan_to_num(0.0)}
    for name, power in POWERS.items():
        part = change.pow(power)
        found[name] = (part / part.sum(dim=0).clamp_min(1e-300)).mean(dim=-1)
    return {name: values.T.cpu().numpy() for name, values in found.items()}


def _weights(pairs: list[tuple[int, int]], columns: dict[str, Floats]) -> pd.DataFrame:
    table = pd.DataFrame(pairs, columns=["writer", "reader"])
    return table.assign(
        a=columns["a"].mean(axis=0), w=columns[""].mean(axis=0), first_power=columns["first power"].mean(axis=0)
    )


def _profile(columns: dict[str, Floats], draws: Resampler, count: int) -> pd.DataFrame:
    """d of every unit."""
    tables = []
    for variant in POWERS:
        value = depth_of_weights(columns[variant].mean(axis=0)[None], count)[0]
        if draws.clusters < 2:
            low = high = np.full_like(value, np.nan)
        else:
            low, high = np.quantile(depth_of_weights(draws.replicates(columns[variant]), count), [0.025, 0.975], axis=0)
        tables.append(
            pd.DataFrame(
                {"reader": range(1, count + 2), "d": value, "ci_low": low, "ci_high": high, "variant": variant}
            )
        )
    return pd.concat(tables, ignore_index=True)


def _pairs(pairs: list[tuple[int, int]], columns: Floats, draws: Resampler) -> pd.DataFrame:
    """`update_dependence` as rows of pairs.csv: blocks from 0, the readout L, without the embedding."""
    value, low, high = draws.intervals(columns)
    rows = [
        (s - 1, t - 1, "update_dependence", value[k], low[k], high[k], len(columns))
        for k, (s, t) in enumerate(pairs)
        if s > 0
    ]
    return pd.DataFrame(rows, columns=["i", "j", "metric", "value", "ci_low", "ci_high", "n"])
