"""The public verb `ablate`: change the order and the inputs of a model's blocks, and measure what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import nn

from depthprobe.ablations import kinds as _kinds
from depthprobe.ablations.effects import MASKED
from depthprobe.ablations.run import Progress, SweepSettings, Swept, sweep
from depthprobe.ablations.schedule import Combine, Schedule, parse
from depthprobe.ablations.sweep import planned_evaluations
from depthprobe.ablations.table import merge_against_skip, proxies, table
from depthprobe.checkpoint import Checkpoint
from depthprobe.corpus import Corpus
from depthprobe.estimate import Resampler, plain_table
from depthprobe.fingerprint import digest
from depthprobe.prepare import prepare
from depthprobe.verify import Anatomy

__all__ = [
    "Ablations",
    "ablate",
    "default_schedules",
    "default_sweep",
    "run_ablations",
    "sweep_cost",
]

ANALYZE_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Ablations:
    """What changes cost.

    Attributes:
        table: schedule, kind, unit, layers, combine, metric, value, ci_low, ci_high, n: one row a schedule and metric.
        merging: ρ by layer, the proxies' rank correlations, the unmodified loss, and what the sweep took.
        swept: the effects a sequence, `[sequences, schedules]`.
    """

    table: pd.DataFrame
    merging: dict[str, Any]
    swept: Swept

    def to_frame(self) -> pd.DataFrame:
        """A copy of the table."""
        return self.table.copy()


def ablate(
    model: str | Path | nn.Module | Checkpoint,
    schedules: str | Iterable[str | Schedule] | None = None,
    data: Any = None,
    *,
    combine: Combine = "sum",
    controls: bool = True,
    score_positions: float = 1.0,
    tokens: int = 8192,
    seq_len: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    seed: int = 0,
    bos: Literal["auto", "always", "never"] = "auto",
    text_field: str = "text",
    resume: str | Path | None = None,
    progress: Progress | None = None,
    **loading: Any,
) -> Ablations:
    """Run changed models and measure loss, KL and agreement against the unmodified one.

    What schedules share is run once: all single skips and adjacent merges take about half the block evaluations that
    one forward pass each would.

    Args:
        model: as in `analyze`.
        schedules: such as `"0-3 (4+5) 6-11"`, or `Schedule`s; None for all single skips, adjacent merges and swaps.
        data: as in `analyze`.
        combine: what stages of several units in strings do: `sum`, `mean`, `branch-sum`, `weights`.
        controls: beside default merges, run what they are judged against.
        score_positions: share of the positions that are scored, drawn by (seed, sequence).
        tokens, seq_len, seed, bos, text_field: as in `analyze`.
        batch_size: sequences at once; `auto` for what fits in 2 GiB of states and logits.
        resume: folder that keeps finished chunks, for a run that goes on after a kill.
        progress: called with (block evaluations done, in all).
        loading: further arguments of `load`.

    Returns:
        Effects with paired 95 % bootstrap intervals over sequences.

    Raises:
        UsageError: a schedule that is wrong, or that this model cannot run.
        OutputError: `resume` belongs to another run.
        NonFiniteError: an effect is not finite.
    """
    settings = SweepSettings(score_positions, seed, None if batch_size == "auto" else batch_size)
    settings.check()
    schedules = [schedules] if isinstance(schedules, str) else schedules
    given = None if schedules is None else [parse(s, combine) if isinstance(s, str) else s for s in schedules]
    _, corpus, anatomy = prepare(
        model, data, tokens=tokens, seq_len=seq_len, seed=seed, bos=bos, text_field=text_field, **loading
    )
    blocks, post_ln = len(anatomy.stream), anatomy.post_ln
    chosen = default_schedules(blocks, controls=controls, post_ln=post_ln) if given is None else given
    return run_ablations(anatomy, corpus, chosen, settings, progress, None if resume is None else Path(resume))


def default_schedules(
    blocks: int,
    kinds: tuple[str, ...] = _kinds.DEFAULT_KINDS,
    *,
    unit: str = "block",
    span: int = 2,
    combine: Combine = "sum",
    controls: bool = True,
    post_ln: bool = False,
    seed: int = 0,
) -> list[Schedule]:
    """All schedules of some kinds, with the controls of adjacent merges where there are any; each once.

    Adding up post-LN blocks keeps each one's normalisation as part of its update and penalises them by construction, so
    with `post_ln` their merges are made in every way: sum and mean of blocks, and attentions first, then MLPs, with
    the sum and with one norm over the sum of the branches.
    """
    if blocks == 1:  # one block has no neighbour
        kinds = tuple(kind for kind in kinds if kind in ("skip", "repeat", "parallel"))
    made = _kinds.schedules(blocks, kinds, unit, span, combine, seed)
    if post_ln and "merge" in kinds and unit == "block":
        made += _kinds.schedules(blocks, ("merge",), span=span, combine="mean")
        for way in ("sum", "branch-sum"):
            made += _kinds.schedules(blocks, ("attention-first",), span=span, combine=way)
    if controls and "merge" in kinds and unit == "block":
        made += _kinds.controls(blocks)
    unique = {(s.stages, s.combine if s.merges else ""): s for s in reversed(made)}
    return list(reversed(unique.values()))


def run_ablations(
    anatomy: Anatomy,
    corpus: Corpus,
    schedules: list[Schedule],
    settings: SweepSettings,
    progress: Progress | None = None,
    resume: Path | None = None,
    layers: pd.DataFrame | None = None,
    pairs: pd.DataFrame | None = None,
    skip_first: int | None = None,
) -> Ablations:
    """Sweep, and put the result into tables; `layers` and `pairs` of a report add the proxies' correlations."""
    swept = sweep(anatomy, corpus, schedules, settings, progress, resume, skip_first=skip_first)
    resampler = Resampler(corpus.sequences, corpus.documents, settings.seed)
    cost = "kl" if "kl" in swept.effects else "state_distance"
    base = None
    if swept.base_loss is not None:
        value, low, high = (float(v[0]) for v in resampler.intervals(swept.base_loss[:, None]))
        base = {"value": value, "ci_low": low, "ci_high": high}
    merging = {
        **place_of(corpus, settings, anatomy.objective == "masked"),
        "rho": merge_against_skip(swept, resampler, cost),
        "proxies": [] if layers is None or pairs is None else proxies(swept, layers, pairs, resampler, cost),
        "base_loss": base,
        "evaluations": swept.evaluations,
        "plain_evaluations": swept.plain_evaluations,
        "seconds": swept.seconds,
        "clusters": resampler.clusters,
        "notes": [*swept.notes, *_rounded(anatomy, schedules)],
    }
    if swept.fetched is not None:
        merging["fetched"] = vars(swept.fetched)
    if swept.later is not None:
        merging["later"] = plain_table(swept.later.frame(resampler))
    return Ablations(table(swept, resampler), merging, swept)


def _rounded(anatomy: Anatomy, schedules: list[Schedule]) -> list[str]:
    """What half precision does to the control of a merge."""
    dtype = anatomy.stream.checkpoint.dtype
    controls = any(unit.part == "~" for schedule in schedules for stage in schedule.stages for unit in stage)
    if dtype not in (torch.bfloat16, torch.float16) or not controls:
        return []
    return [
        f"In {str(dtype).removeprefix('torch.')} the norm of a merge's random vector is that of a difference of "
        "rounded states: where the merge drops little, the vector is too long, and the merge looks cheap."
    ]


def place_of(corpus: Corpus, settings: SweepSettings, masked: bool) -> dict[str, Any]:
    """Where effects are measured: tables of the same tokens and positions can be joined."""
    return {
        "corpus": corpus.name,
        "sha256": corpus.sha256,
        "ids": digest(corpus.inputs),
        "sequences": corpus.sequences,
        "tokens": corpus.tokens,
        "score_positions": MASKED if masked else settings.score_positions,
        "seed": settings.seed,
    }


def default_sweep(
    anatomy: Anatomy,
    corpus: Corpus,
    seed: int,
    layers: pd.DataFrame,
    pairs: pd.DataFrame,
    progress: Progress | None = None,
    skip_first: int = 1,
) -> Ablations:
    """What `analyze` runs: single skips, adjacent merges and swaps, a quarter of the positions scored.

    The skips are watched for what they do to later blocks' updates, the leading `skip_first` positions left out.
    """
    schedules = default_schedules(len(anatomy.stream), controls=False, post_ln=anatomy.post_ln)
    settings = SweepSettings(score_positions=ANALYZE_SHARE, seed=seed)
    return run_ablations(anatomy, corpus, schedules, settings, progress, None, layers, pairs, skip_first)


def sweep_cost(anatomy: Anatomy, corpus: Corpus, schedules: list[Schedule]) -> tuple[int, str]:
    """Block evaluations of a sweep (of one chunk), and a sentence on it."""
    blocks = len(anatomy.stream)
    shared, plain = planned_evaluations(schedules, blocks)
    text = (
        f"{len(schedules)} changed models on {corpus.sequences} × {corpus.tokens} tokens, at the cost of "
        f"{shared / blocks:.0f} forward passes' blocks instead of {plain / blocks:.0f}."
    )
    return shared, text
