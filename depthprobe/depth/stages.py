"""Stages: how few sequential steps keep the predictions. The search is that of `depthprobe stages`."""

from __future__ import annotations

from depthprobe.ablations.curve import staging_frame
from depthprobe.ablations.run import SweepSettings
from depthprobe.ablations.staging import KAPPAS, find_stages
from depthprobe.corpus import Corpus, halves
from depthprobe.depth.base import DepthSettings, Estimate, Progress, resampler, row, units_of
from depthprobe.processes import batches_in_all
from depthprobe.verify import Anatomy

__all__ = ["DOES", "MISSES", "stages"]

DOES = (
    "Counts the fewest stages, each of units that read the same state, that keep the predictions within κ of the "
    "distance to the corpus's unigram."
)
MISSES = "Units that are not neighbours cannot share a stage, and the search need not find the cheapest grouping."


def stages(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    kappas: tuple[float, ...] = KAPPAS,
    limit: int = 1,
) -> Estimate:
    """D(κ): the fewest stages with KL(unchanged ‖ changed) ≤ κ · KL(unchanged ‖ unigram), between counts by the line.

    One half of the sequences chooses, the other scores; the interval is over those that score. See
    `ablations.staging.find_stages`.

    Args:
        anatomy: a verified causal language model.
        corpus: at least two sequences.
        unit: `block` or `sublayer`.
        settings: seed, batch size, memory; all positions count.
        progress: called with (stages done with, stages in all).
        kappas: where the curve is read, a row each; its variant is κ in per cent.
        limit: fewest stages that are searched for.

    Returns:
        Rows `stages`; the curve `stages`, a row a count from N down, as in stages.csv.

    Raises:
        UsageError: no next-token head, fewer than two sequences, sublayers that were not found.
    """
    settings = settings or DepthSettings()
    settings.check()
    sweeps = SweepSettings(seed=settings.seed, batch_size=settings.batch_size, memory=settings.memory)
    units = units_of(anatomy, unit)
    found = find_stages(
        anatomy, corpus, limit=limit, settings=sweeps, progress=progress, units=units, kappas=tuple(kappas)
    )
    step = sweeps.sequences_at_once(anatomy, corpus)
    first = halves(corpus)  # as the search deals them
    chunks = sum(batches_in_all(int(half.sum()), step) for half in (first, ~first))
    clusters = resampler(corpus.take(~first), settings).clusters
    note = f"combined by {found.combine}" if anatomy.post_ln else ""
    rows = [
        row("stages", unit, f"{100 * k:g}%", interval, found.units, _said(note, found.at_most(k)), clusters)
        for k, interval in found.depth.items()
    ]
    cost = found.evaluations / (chunks * len(anatomy.stream))
    notes = [
        f"Stages of {unit}s were searched so: {found.searched}. {found.sequences} sequences scored, the others chose.",
        f"Stages took {cost:.0f} forward passes of the blocks.",
    ]
    return Estimate(rows, curves={"stages": staging_frame(found)}, cost_forward=cost, notes=notes)


def _said(note: str, bound: bool) -> str:
    """The note of a row, with a word on a value that is a bound only."""
    return "; ".join(filter(None, (note, "at most: no fewer were tried" if bound else "")))
