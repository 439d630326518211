"""The public verb `gradients`: how the loss's gradient, and a random one, change on their way down the stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthprobe.checkpoint import Checkpoint
from depthprobe.contrast import OverModels, over_seeds
from depthprobe.corpus import Corpus
from depthprobe.cotangents import Choice, Cotangents
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.estimate import Interval, PerSequence, Resampler
from depthprobe.fresh import fresh_twin
from depthprobe.glossary import METRICS
from depthprobe.offload import allowed, refuse_offloaded
from depthprobe.prepare import prepare
from depthprobe.probes.gradients import Cotangent, StateNorms, backpropagate, differentiable, graph_bytes
from depthprobe.probes.weights import POOLED, Key, Weights, groups_that_fit, sequence_groups
from depthprobe.processes import dealt, paced
from depthprobe.report import Report
from depthprobe.verify import Anatomy

__all__ = [
    "GradientSettings",
    "Gradients",
    "gradients",
    "gradients_cost",
    "joined",
    "run_gradients",
    "with_gradients",
]

Progress = Callable[[int, int], None]
MEMORY = 2 << 30


@dataclass(frozen=True)
class GradientSettings:
    """Which gradients to take, and how.

    Attributes:
        cotangent: `loss`, `random` or `both`: what is carried back from the top.
        weights: norms of the loss's gradients by every weight too.
        skip_first: leading positions that the stream's gradient norms leave out.
        seed: of every random draw; of the first fresh model.
        fresh: how many random initialisations to measure instead of the checkpoint's weights; 0 for the checkpoint.
        memory: bytes that autograd may keep of one sequence, and the same again for sums of weights' gradients.
    """

    cotangent: Choice = "both"
    weights: bool = True
    skip_first: int = 1
    seed: int = 0
    fresh: int = 0
    memory: int = MEMORY

    def check(self) -> None:
        """Refuse what makes no sense before anything is loaded.

        Raises:
            UsageError: an unknown cotangent, or a number that is too small.
        """
        if self.cotangent not in ("both", "loss", "random"):
            raise UsageError(f"--cotangent {self.cotangent}", "loss, random or both")
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", "0 or more")
        if self.skip_first < 0:
            raise UsageError(f"--skip-first {self.skip_first}", "0 or more")
        if self.fresh < 0:
            raise UsageError(f"{self.fresh} fresh models", "0 or more")
        if self.memory < 1:
            raise UsageError(f"--memory is {self.memory} bytes", "more than 0")

    def cotangents(self, anatomy: Anatomy, corpus: Corpus) -> Cotangents:
        """What will be carried back in this model.

        Raises:
            UsageError: the model has no loss, or its sequences are too short.
        """
        found = Cotangents.of(anatomy, self.cotangent, self.seed)
        counted = corpus.tokens - ("loss" in found.names and anatomy.objective == "causal")
        if counted <= self.skip_first:
            raise UsageError(
                f"--skip-first {self.skip_first} leaves no position with a gradient in sequences of {corpus.tokens} "
                "tokens, the last of which predicts nothing",
                fix="skip fewer positions, or use longer sequences",
            )
        return found


@dataclass(frozen=True, eq=False)
class Gradients:
    """What the gradients are.

    Attributes:
        table: layer, unit, metric, value, ci_low, ci_high, n, as in `layers.csv`.
        summary: loss, ratio, ratio_median and ratio_random (x_1 over x_L, with intervals: the gradient at x_0 is
            inverse to the embedding's scale, which says nothing of depth), what they were measured on, and notes.
    """

    table: pd.DataFrame
    summary: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A copy of the table."""
        return self.table.copy()


def gradients(
    model: str | Path | nn.Module | Checkpoint,
    data: Any = None,
    *,
    cotangent: Choice = "both",
    weights: bool = True,
    fresh: int = 0,
    tokens: int = 4096,
    seq_len: int | None = None,
    seed: int = 0,
    skip_first: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    text_field: str = "text",
    progress: Progress | None = None,
    **loading: Any,
) -> Gradients:
    """Measure gradients at every state of the stream and at every weight, without a change to the model.

    ℓ is a sequence's mean cross-entropy over its predicted positions. Sequences are run one at a time: there is no
    batch whose size could change a number. Weights in half precision are used in float32.

    Args:
        model: as in `analyze`.
        data: as in `analyze`.
        cotangent: what is carried back: the `loss`'s gradient, a `random` unit vector at every token of x_L, or both.
        weights: the loss's gradients by every weight too.
        fresh: measure so many random initialisations of the model's configuration instead, with seeds `seed`, …
        tokens, seq_len, seed, skip_first, bos, text_field: as in `analyze`.
        progress: called with (sequences done, in all).
        loading: further arguments of `load`.

    Returns:
        Rows with 95 % intervals over sequences; over seeds where there is more than one fresh model.

    Raises:
        UsageError: a request that makes no sense, or a loss that the model does not have.
        GradientError: something in the model has no derivative.
        NonFiniteError: a gradient is not finite.
    """
    settings = GradientSettings(cotangent, weights, skip_first, seed, fresh)
    settings.check()
    _, corpus, anatomy = prepare(
        model, data, tokens=tokens, seq_len=seq_len, seed=seed, bos=bos, text_field=text_field, **loading
    )
    return run_gradients(anatomy, corpus, settings, progress)


def run_gradients(
    anatomy: Anatomy, corpus: Corpus, settings: GradientSettings, progress: Progress | None = None
) -> Gradients:
    """Take the gradients of a verified model on a corpus; see `gradients`."""
    refuse_offloaded(anatomy.stream.checkpoint.offload, "gradients were asked for")
    cotangents = settings.cotangents(anatomy, corpus)
    notes = list(cotangents.notes)
    started, count, models = time.perf_counter(), corpus.sequences, max(1, settings.fresh)
    means, losses = PerSequence(count * models), np.full(count * models, np.nan)
    weighed = settings.weights and "loss" in cotangents.names
    pooled: list[dict[Key, Interval]] = []
    dtype, progress = anatomy.stream.checkpoint.dtype, paced(progress)
    memory = allowed(settings.memory, anatomy.stream.checkpoint.offload)
    for place in range(models):
        if settings.fresh:
            _, _, anatomy = prepare(fresh_twin(anatomy.stream.checkpoint, settings.seed + place), corpus)
        model, offset = anatomy.stream.checkpoint.model, place * count
        groups = groups_that_fit(model, count, memory)
        groups = min(groups, 1) if models > 1 else groups  # the interval is over models then
        group_of = sequence_groups(count, groups, corpus.documents)
        weights = None
        norms = StateNorms(means, settings.skip_first, anatomy.objective == "causal", offset)
        with dealt(count, losses[offset : offset + count]) as mine, differentiable(model):
            weights = Weights(anatomy.stream, means, group_of, offset, mine.start) if weighed else None
            keep = graph_bytes(anatomy.stream, _inputs(anatomy, corpus, 0)) <= memory
            for row in mine:
                losses[offset + row] = _one(anatomy, corpus, row, cotangents, norms, weights, keep)
                if progress is not None:
                    progress(offset + row + 1, count * models)
        means.exchange()
        if weights is not None:
            pooled.append(weights.close())
    if weighed and not pooled[0]:
        notes.append(f"{POOLED} was left out: the sums of the gradients do not fit into --memory.")
    if dtype in (torch.bfloat16, torch.float16) and not settings.fresh:
        notes.append(f"Gradients were taken in float32, of weights in {str(dtype).removeprefix('torch.')}.")
    resampler = OverModels(models) if models > 1 else Resampler(count, corpus.documents, settings.seed)
    table = _table(means, pooled, resampler, count)
    summary = {
        "cotangents": list(cotangents.names),
        "loss": None if np.isnan(losses).any() else _value(resampler, losses[:, None], lambda m: m[:, 0]),
        "ratio": _ratio(means, resampler, "gradient_norm", len(anatomy.stream)),
        "ratio_median": _ratio(means, resampler, "gradient_norm_median", len(anatomy.stream)),
        "ratio_random": _ratio(means, resampler, "gradient_norm_random", len(anatomy.stream)),
        "bottom": min(1, len(anatomy.stream) - 1),
        "fresh": [settings.seed + place for place in range(settings.fresh)],
        "sequences": count,
        "clusters": resampler.clusters,
        "tokens": corpus.tokens,
        "corpus": corpus.name,
        "sha256": corpus.sha256,
        "skip_first": settings.skip_first,
        "seconds": time.perf_counter() - started,
        "notes": notes,
    }
    return Gradients(table, summary)


def joined(report: Report, found: Gradients) -> Report:
    """The report with these gradients, instead of those that it had."""
    mine = {name for name in METRICS if "gradient" in name}
    layers = report.layers[~report.layers["metric"].isin(mine)]
    summary = found.summary
    if summary["sha256"] != report.corpus["sha256"]:
        here, there = summary["corpus"], report.corpus["name"]
        where = here if here != there else "another part of the text"
        other = f"Gradients were taken on {where}, all else was measured on {there}."
        summary = {**summary, "notes": [*summary["notes"], other]}
    return replace(report, layers=pd.concat([layers, found.table], ignore_index=True), gradients=summary)


def with_gradients(
    report: Report, anatomy: Anatomy, corpus: Corpus, settings: GradientSettings, progress: Progress | None = None
) -> Report:
    """What `analyze` does: the report with gradients, or with a note on why this model has none."""
    try:
        return joined(report, run_gradients(anatomy, corpus, settings, progress))
    except DepthprobeError as error:
        return replace(report, notes=[*report.notes, f"Gradients were left out: {error}."])


def gradients_cost(corpus: Corpus, settings: GradientSettings) -> str:
    """What the gradients will cost, in a sentence."""
    models = f"{settings.fresh} × " if settings.fresh > 1 else ""
    back = "two backward passes" if settings.cotangent == "both" else "a backward pass"
    return f"Gradients: a forward and {back} over {models}{corpus.sequences} × {corpus.tokens} tokens."


def _one(
    anatomy: Anatomy,
    corpus: Corpus,
    sequence: int,
    cotangents: Cotangents,
    norms: StateNorms,
    weights: Weights | None,
    keep: bool,
) -> float:
    """One sequence's gradients into `norms` and `weights`; its loss, or NaN for none."""
    stream = anatomy.stream
    inputs, loss = cotangents.loss(anatomy, _inputs(anatomy, corpus, sequence), sequence)
    random = cotangents.random(corpus.tokens, stream.blocks.width, sequence)

    def see(cotangent: Cotangent, layer: int, gradient: Tensor) -> None:
        norms.see(sequence, cotangent, layer, gradient)

    value = backpropagate(stream, inputs, loss, random, see, weights, keep)
    if weights is not None:
        weights.end(sequence)
    return float("nan") if value is None else value


def _inputs(anatomy: Anatomy, corpus: Corpus, sequence: int) -> Tensor:
    checkpoint = anatomy.stream.checkpoint
    dtype = checkpoint.dtype if corpus.is_states else torch.int64
    return corpus.inputs[sequence : sequence + 1].to(checkpoint.device, dtype)


def _table(
    means: PerSequence, pooled: list[dict[Key, Interval]], resampler: Resampler | OverModels, count: int
) -> pd.DataFrame:
    """The rows, in the order of the glossary, then unit, then layer."""
    keys = list(means.values)
    columns = np.stack([means.values[key] for key in keys], axis=1)
    values, low, high = resampler.intervals(columns)
    n = (~np.isnan(columns)).sum(axis=0)
    rows: list[tuple[Any, ...]] = [
        (layer, unit, metric, values[k], low[k], high[k], int(n[k])) for k, (metric, unit, layer) in enumerate(keys)
    ]
    for key in pooled[0] if pooled else ():
        interval = pooled[0][key]
        if len(pooled) > 1:
            interval = over_seeds([one[key].value if key in one else 0.0 for one in pooled])
        metric, unit, layer = key
        rows.append((layer, unit, metric, interval.value, interval.low, interval.high, count * len(pooled)))
    table = pd.DataFrame(rows, columns=["layer", "unit", "metric", "value", "ci_low", "ci_high", "n"])
    first = table.groupby("unit", sort=False)["layer"].min().sort_values(kind="stable")
    units = {name: place for place, name in enumerate(first.index)}
    order = {name: place for place, name in enumerate(METRICS)}
    keyed = table.assign(metric=table["metric"].map(order), unit=table["unit"].map(units))
    return table.loc[keyed.sort_values(["metric", "unit", "layer"]).index].reset_index(drop=True)


def _ratio(means: PerSequence, resampler: Resampler | OverModels, metric: str, blocks: int) -> dict[str, float] | None:
    """The value at x_1 (x_0 of a single block) over that at x_L; None where it was not measured or is 0 at x_L.

    Of several models it is the geometric mean of their ratios, with the interval of their logs.
    """
    keys = [(metric, "block", min(1, blocks - 1)), (metric, "block", blocks)]
    if keys[0] not in means.values or not means.values[keys[1]].all():
        return None
    columns = np.stack([means.values[key] for key in keys], axis=1)
    if isinstance(resampler, Resampler):
        return _value(resampler, columns, lambda m: m[:, 0] / m[:, 1])
    with np.errstate(divide="ignore", invalid="ignore"):  # a gradient of 0 has no log, and leaves no interval
        logs = _value(resampler, columns, lambda m: np.log(m[:, 0] / m[:, 1]))
    return {name: float(np.exp(log)) for name, log in logs.items()}


def _value(resampler: Resampler | OverModels, columns: np.ndarray, of_means: Callable[[Any], Any]) -> dict[str, float]:
    interval = resampler.function(columns, of_means)
    return {"value": interval.value, "ci_low": interval.low, "ci_high": interval.high}
