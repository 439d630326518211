"""What a report says of gradients: one finding, and a table of the weights by kind."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from depthprobe.report.schema import Report
from depthprobe.report.tables import by_layer, number, ranges, with_interval
from depthprobe.report.words import FEW, Finding, ends, plural

__all__ = ["WeightTable", "facts", "gradient_finding", "weight_table"]

_MOST = 24
_WEIGHT = "weight_gradient_norm"


@dataclass(frozen=True)
class WeightTable:
    """Gradients of weights, values already in words.

    Attributes:
        first: the lowest block.
        last: the highest.
        kinds: (name within the block, at the lowest block, median over blocks, at the highest, lowest over highest, the
            same of the pooled gradients).
        outside: (name, value) of weights outside the blocks.
        left_out: how many kinds are not shown.
    """

    first: int
    last: int
    kinds: tuple[tuple[str, ...], ...]
    outside: tuple[tuple[str, str], ...]
    left_out: int


def gradient_finding(report: Report) -> Finding | None:
    """How much larger or smaller the gradient is near the input than at the top."""
    summary = report.gradients
    ratios = [(name, summary.get(key)) for name, key in (("loss", "ratio"), ("random", "ratio_random"))]
    known = [(name, ratio) for name, ratio in ratios if _known(ratio)]
    if not known:
        return None
    main, ratio = known[0]
    metric = "gradient_norm" if main == "loss" else "gradient_norm_random"
    norms = by_layer(report, metric)
    bottom, top = int(summary.get("bottom", 1)), max(norms)
    low, high = ends(ratio)
    verdict = "larger" if low > 1 else "smaller" if high < 1 else "not told apart"
    what = "The loss's gradient" if main == "loss" else "A random gradient"
    compared = f"{verdict} at x_{bottom} {'from' if low <= 1 <= high else 'than'} at x_{top}"
    text = f"{what} is {compared}: × {with_interval(ratio)} a token"
    if len(known) > 1:
        text += f"; a random one's × {with_interval(known[1][1])}"
    return Finding("Gradients", f"{text}.", " ".join(_more(report, summary, metric, norms, bottom, top)))


def _more(
    report: Report, summary: dict[str, Any], metric: str, norms: dict[int, float], bottom: int, top: int
) -> list[str]:
    said = []
    if metric == "gradient_norm" and _known(summary.get("ratio_median")):
        said.append(f"For the median token it is × {with_interval(summary['ratio_median'])}.")
    if bottom > 0 and 0 in norms:
        said.append(f"Its norm is {number(norms[bottom])} at x_{bottom}, {number(norms[top])} at x_{top}; the "
                    f"{number(norms[0])} at x_0 depends on the embedding's scale too.")  # fmt: skip
    share = by_layer(report, metric.replace("norm", "first_share")).get(bottom)
    if share is not None:
        out = "is left out" if summary.get("skip_first", 1) else "is counted"
        said.append(f"Position 0 {out} and holds {share:.0%} of the squared gradient at x_{bottom}.")
    count, models = int(summary["sequences"]), len(summary.get("fresh") or [])
    on = f"{count} sequence{plural(count)}"
    if models > 1:
        said.append(f"Measured on {on} of {models} random initialisations, over which the intervals are.")
    elif count < FEW:
        said.append(f"Measured on {on}: fewer than {FEW} make an interval too narrow." if count > 1 else
                    "Measured on one sequence, which leaves no interval.")  # fmt: skip
    return said


def weight_table(report: Report) -> WeightTable | None:
    """Each kind of weight in one line, in the model's own order; None where no weight was measured."""
    rows = report.layers[report.layers["metric"].isin((_WEIGHT, f"{_WEIGHT}_pooled"))]
    inside = rows[(rows["layer"] >= 0) & (rows["layer"] < report.model["blocks"])]
    own = inside[inside["metric"] == _WEIGHT]
    if own.empty:
        return None
    kinds, first, last = [], int(own["layer"].min()), int(own["layer"].max())
    for unit, group in own.groupby("unit", sort=False):
        values = _by_layer(group)
        pooled = _by_layer(inside[(inside["metric"] != _WEIGHT) & (inside["unit"] == unit)])
        ends = [number(values[layer]) if layer in values else "–" for layer in (first, last)]
        kinds.append((str(unit), ends[0], number(median(values.values())), ends[1],
                      _over(values, first, last), _over(pooled, first, last)))  # fmt: skip
    outside = rows[(rows["metric"] == _WEIGHT) & ~rows.index.isin(own.index)]
    named = tuple((str(row["unit"]), with_interval(row)) for _, row in outside.iterrows())
    return WeightTable(first, last, tuple(kinds[:_MOST]), named[:_MOST], max(0, len(kinds) - _MOST))


def facts(report: Report) -> list[tuple[str, str]]:
    """On what the gradients were measured."""
    summary = report.gradients
    seeds = summary.get("fresh")
    loss, seconds = summary.get("loss"), summary.get("seconds")
    found = [
        ("model", f"random initialisations, seed{plural(len(seeds))} {ranges(seeds)}" if seeds else None),
        ("measured on", f"{number(summary['sequences'])} × {number(summary['tokens'])}"),
        ("loss", f"{with_interval(loss)} nats a token" if _known(loss) else None),
        ("time", f"{number(seconds)} s" if seconds else None),
    ]
    return [(key, value) for key, value in found if value]


def _by_layer(rows: pd.DataFrame) -> dict[int, float]:
    return {int(layer): float(value) for layer, value in zip(rows["layer"], rows["value"], strict=True)}


def _over(values: dict[int, float], low: int, high: int) -> str:
    return number(values[low] / values[high]) if low in values and values.get(high) else "–"


def _known(value: Any) -> bool:
    return isinstance(value, dict) and value.get("value") is not None
