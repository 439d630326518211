"""Rows of the ablations, by what was done and where: for their figures, sentences and the page's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from depthprobe.report.schema import Report
from depthprobe.report.tables import number, placements, visible, with_interval

__all__ = [
    "ScheduleTable",
    "Series",
    "cost_metric",
    "cost_words",
    "headline_merge",
    "label_text",
    "merges",
    "metric_rows",
    "others",
    "schedule_table",
    "sequences",
    "series",
]

Cells = tuple[str, str, str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Series:
    """One kind of change at every place where it was made.

    Attributes:
        label: what was done, in a few words.
        combine: how merged units were combined; empty where none were.
        rows: schedule, combine, layer (the first that is changed), value, ci_low and ci_high, in the order of layers.
    """

    label: str
    combine: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class ScheduleTable:
    """The cheapest and the dearest schedules, values already in words.

    Attributes:
        metrics: the metric of each column of values, the one that it is sorted by first.
        parts: (title, rows); a row is schedule, kind, combine and one cell a metric, the first with its interval. One
            part where all fit into it.
        left_out: how many are in no part.
    """

    metrics: tuple[str, ...]
    parts: tuple[tuple[str, tuple[Cells, ...]], ...]
    left_out: int


def cost_metric(report: Report) -> str:
    """What a change costs: `kl`, or `state_distance` where there is no next-token head to compare."""
    return "kl" if (report.ablations["metric"] == "kl").any() else "state_distance"


def cost_words(report: Report) -> tuple[str, str]:
    """The cost's short name and its unit with a space in front, empty where it has none."""
    return ("KL", " nats") if cost_metric(report) == "kl" else ("state distance", "")


def sequences(report: Report) -> int:
    """On how many sequences the changes were measured."""
    found = report.merging.get("sequences")
    return int(found if found is not None else report.ablations["n"].max())


def metric_rows(report: Report, metric: str) -> pd.DataFrame:
    """The rows of one metric with the changed layers as numbers: layer (the first; −1 for none), count, near.

    `near` is whether the changed layers are neighbours, each the next of the one before.
    """
    rows = report.ablations[report.ablations["metric"] == metric].copy()
    layers = [_numbers(text) for text in rows["layers"]]
    rows["layer"] = [found[0] if found else -1 for found in layers]
    rows["count"] = [len(found) for found in layers]
    rows["near"] = [found == list(range(found[0], found[0] + len(found))) if found else False for found in layers]
    return rows


def series(report: Report, metric: str) -> dict[str, Series]:
    """What merges of neighbouring blocks are judged against, by name: skip, skip both, swap, apart, random.

    A name is absent where there is no such schedule.
    """
    rows = metric_rows(report, metric)
    block, near, kind = rows["unit"] == "block", rows["near"], rows["kind"]
    control = kind == "control"
    found = {
        "skip": ("skip $l$", block & (kind == "skip") & (rows["count"] == 1)),
        "skip both": ("skip $l$, $l+1$", block & near & (kind == "skip") & (rows["count"] == 2)),
        "swap": ("swap $l$, $l+1$", near & (kind == "swap")),
        "apart": ("merge $l$, $l+2$", control & ~near & (rows["combine"] != "")),
        "random": ("random vector", control & near & (rows["combine"] == "")),
    }
    return {name: _series(label, rows[chosen]) for name, (label, chosen) in found.items() if chosen.any()}


def merges(report: Report, metric: str) -> list[Series]:
    """Adjacent merges of two whole blocks, a series a way to combine; the one that speaks for them first.

    For post-LN models that is the cheapest by its median over the places that all have; otherwise `sum`, the claim's
    own, or the first there is.
    """
    rows = metric_rows(report, metric)
    rows = rows[(rows["kind"] == "merge") & rows["near"] & (rows["count"] == 2)]
    found = []
    for (unit, combine), group in rows.groupby(["unit", "combine"], sort=False):
        if unit in ("block", "sublayer"):
            first = "" if unit == "block" else "attention first"
            way = {"weights": "averaged weights", "sum": "" if first else "sum"}.get(str(combine), label_text(combine))
            found.append(_series(", ".join(filter(None, (first, way))), group))
    honest = [one for one in found if one.combine != "weights"] or found
    best: Series | None
    if placements(report) == {"post"} and len(honest) > 1:
        shared = set.intersection(*(set(one.rows["layer"]) for one in honest))
        best = min(honest, key=lambda one: one.rows.loc[one.rows["layer"].isin(shared), "value"].median())
    else:
        best = next((one for one in honest if one.label == "sum"), honest[0] if honest else None)
    return sorted(found, key=lambda one: one is not best)


def headline_merge(report: Report, metric: str) -> Series | None:
    """The merges that speak for the model, None where there are none."""
    return next(iter(merges(report, metric)), None)


def by_sum_alone(name: str, chosen: Series) -> bool:
    """Whether a control is of merges by sum, while the merges that speak for the model are made in another way."""
    return name in ("apart", "random") and chosen.label != "sum"


def others(report: Report, metric: str) -> list[Series]:
    """Every further kind of change that was made place by place: repeats, orders, sublayers, longer merges."""
    rows = metric_rows(report, metric)
    block = rows["unit"] == "block"
    known = (rows["kind"] == "control") | (rows["kind"] == "swap") | ~rows["near"]
    known |= block & (rows["kind"] == "skip") & (rows["count"] <= 2)
    known |= rows["unit"].isin(("block", "sublayer")) & (rows["kind"] == "merge") & (rows["count"] == 2)
    found = []
    for (kind, unit, combine, count), group in rows[~known].groupby(["kind", "unit", "combine", "count"], sort=False):
        special = {"custom": "attention ∥ MLP", "merge": "attention first"} if unit == "sublayer" else {}
        words = special.get(str(kind), label_text(kind))
        parts = [words, "" if unit in ("block", "sublayer") else label_text(unit), "" if count == 1 else f"{count}"]
        parts.append(f"({label_text(combine)})" if combine not in ("", "sum") else "")
        found.append(_series(" ".join(filter(None, parts)), group))
    return found


def label_text(text: Any) -> str:
    """A word from a table as a figure's label takes it: short, and without mathematics."""
    word = visible(text)
    return (word if len(word) <= 24 else f"{word[:23]}…").replace("$", r"\$")


def schedule_table(report: Report, most: int = 10) -> ScheduleTable:
    """The `most` cheapest and the `most` dearest schedules; all of them, cheapest first, where there are few.

    Random vectors are no schedules and stay out.
    """
    cost = cost_metric(report)
    metrics = tuple(m for m in ("kl", "delta_loss", "top1_agreement") if (report.ablations["metric"] == m).any())
    metrics = metrics if cost == "kl" else (cost, *metrics)
    values = {(row["schedule"], row["combine"], row["metric"]): row for row in _records(report.ablations)}
    chosen = report.ablations[report.ablations["metric"] == cost].drop_duplicates(["schedule", "combine"])
    total = len(chosen)
    chosen = chosen[(chosen["kind"] != "control") | (chosen["combine"] != "")]
    ranked = _records(chosen.sort_values("value", kind="stable"))

    def cells(rows: Iterable[dict[str, Any]]) -> tuple[Cells, ...]:
        return tuple(
            (row["schedule"], row["kind"], row["combine"],
             (with_interval(row), *(_cell(values.get((row["schedule"], row["combine"], m))) for m in metrics[1:])))
            for row in rows
        )  # fmt: skip

    if len(ranked) <= 2 * most:
        return ScheduleTable(metrics, (("All schedules, cheapest first", cells(ranked)),), total - len(ranked))
    parts = (f"The {most} cheapest", cells(ranked[:most])), (f"The {most} dearest", cells(ranked[: -most - 1 : -1]))
    return ScheduleTable(metrics, parts, total - 2 * most)


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict(orient="records")]


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else number(row["value"])


def _series(label: str, rows: pd.DataFrame) -> Series:
    kept = rows[["schedule", "combine", "layer", "value", "ci_low", "ci_high"]].drop_duplicates("layer")
    return Series(label, str(rows["combine"].iloc[0]), kept.sort_values("layer").reset_index(drop=True))


def _numbers(text: str) -> list[int]:
    """The layers of `4,5`; none for what is no such list."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isascii() and part.isdigit() for part in parts) else []
