"""Rows and words from a report, for every place that shows them: the page, the terminal, the findings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pandas as pd

from depthprobe.report.schema import Report

__all__ = [
    "UNITS",
    "anatomy_rows",
    "by_layer",
    "curve",
    "highest",
    "interval",
    "layer_table",
    "lowest",
    "metrics_used",
    "number",
    "pair_matrix",
    "placements",
    "ranges",
    "shortened",
    "skipped_rows",
    "units_of",
    "visible",
    "with_interval",
]

UNITS = ("block", "attention", "mlp")

# What one line a layer shows: metric of the block → heading
_COLUMNS = {
    "residual_norm": "‖x_l‖",
    "update_norm": "‖Δ_l‖",
    "update_ratio": "ratio",
    "update_alignment": "alignment",
    "block_influence": "influence",
    "interaction_error": "interaction",
    "lens_top1": "lens top-1",
}


@dataclass(frozen=True)
class LayerTable:
    """One line a layer, values already in words.

    Attributes:
        metrics: the metric of each column.
        headings: its short heading.
        rows: (layer, cells); a cell is empty where the layer has no such value.
    """

    metrics: tuple[str, ...]
    headings: tuple[str, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]


def curve(report: Report, metric: str, unit: str = "block") -> pd.DataFrame:
    """The rows of one metric of one unit in the order of layers; empty if it was not measured."""
    frame = report.layers
    chosen = frame[(frame["metric"] == metric) & (frame["unit"] == unit)]
    return chosen.sort_values("layer").reset_index(drop=True)


def lowest(rows: pd.DataFrame) -> pd.Series:
    """The row of the smallest value, the first of equals."""
    return rows.iloc[int(rows["value"].to_numpy().argmin())]


def highest(rows: pd.DataFrame) -> pd.Series:
    """The row of the largest value, the first of equals."""
    return rows.iloc[int(rows["value"].to_numpy().argmax())]


def by_layer(report: Report, metric: str, unit: str = "block") -> dict[int, float]:
    """layer → value of one metric of one unit."""
    rows = curve(report, metric, unit)
    return {int(layer): float(value) for layer, value in zip(rows["layer"], rows["value"], strict=True)}


def units_of(report: Report, metric: str) -> list[str]:
    """The units that a metric was measured for, blocks first."""
    found = set(report.layers.loc[report.layers["metric"] == metric, "unit"])
    return [unit for unit in UNITS if unit in found]


def pair_matrix(report: Report, metric: str) -> pd.DataFrame:
    """One pair metric as a symmetric square over states, `[states, states]`; the diagonal is not a number."""
    chosen = report.pairs[report.pairs["metric"] == metric]
    states = sorted(set(chosen["i"]) | set(chosen["j"]))
    upper = chosen.pivot(index="i", columns="j", values="value").reindex(index=states, columns=states)
    return upper.fillna(upper.T)


def visible(text: Any) -> str:
    """Text in which what a page would hide or be confused by (control and direction characters) shows as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def number(value: Any, digits: int = 3) -> str:
    """A number as people write it: three significant digits, thousands separated, a true minus; a dash for none."""
    if value is None or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        text = f"{value:,}"
    else:
        # the exponent of the rounded value: 9.999 has two digits before the point
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        if value != 0 and not 1e-3 <= abs(value) < 1e7:
            text = f"{mantissa}e{int(exponent)}"
        else:
            text = f"{value:,.{max(0, digits - 1 - int(exponent))}f}"
    return text.replace("-", "−")


def interval(low: Any, high: Any, digits: int = 3) -> str:
    """`[low, high]`, `[low, ∞)` where its upper end is open, or nothing where there is no interval."""
    if high == math.inf:
        return f"[{number(low, digits)}, ∞)" if math.isfinite(low) else ""
    ends = number(low, digits), number(high, digits)
    return "" if "–" in ends else f"[{ends[0]}, {ends[1]}]"


def with_interval(row: Any, digits: int = 3) -> str:
    """`value [low, high]` of a row or a dict with `value`, `ci_low` and `ci_high`."""
    ends = interval(row["ci_low"], row["ci_high"], digits)
    return number(row["value"], digits) + (f" {ends}" if ends else "")


def ranges(numbers: Iterable[int]) -> str:
    """`0–3, 5, 7–9` for whole numbers in ascending order."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [value for _, value in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(parts)


def placements(report: Report) -> set[str]:
    """The norm placements of all units that were found."""
    units = [block.get(kind) for block in report.anatomy.get("blocks", []) for kind in ("attention", "mlp")]
    return {unit["placement"] for unit in units if unit}


def anatomy_rows(anatomy: dict[str, Any]) -> list[dict[str, str]]:
    """Blocks of equal build as one row: blocks, attention, mlp."""
    rows: list[dict[str, Any]] = []
    for block in anatomy.get("blocks", []):
        words = {kind: _unit(block.get(kind), str(block["index"])) for kind in ("attention", "mlp")}
        same = next((row for row in rows if all(row[kind] == words[kind] for kind in words)), None)
        if same:
            same["indices"].append(block["index"])
        else:
            rows.append({"indices": [block["index"]], **words})
    return [{"blocks": ranges(row["indices"]), "attention": row["attention"], "mlp": row["mlp"]} for row in rows]


def _unit(unit: dict[str, Any] | None, index: str) -> str:
    if not unit:
        return "not found"
    # a full path differs from block to block by its number alone
    parts = (unit.get("module") or "").split(".")
    if index in parts[:-1]:
        parts[parts.index(index)] = "*"
    module = ".".join(parts)
    words = str(unit["placement"]) + (", parallel" if unit.get("parallel") else "") + (f" ({module})" if module else "")
    for key, what in (("scale", "branch"), ("skip_scale", "stream")):
        scale = unit.get(key)
        if scale is not None and abs(scale - 1) > 1e-6:
            words += f", {what} × {number(float(scale))}"
    return words + (", stream × a learned factor a dimension" if unit.get("gain") else "")


def skipped_rows(report: Report, most: int = 8) -> list[dict[str, Any]]:
    """Where leaving out the first positions changed most, as a factor, one row a metric and unit, largest first."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report.skipped:
        change = _change(row["without"], row["including"])
        key = row["metric"], row["unit"]
        if key not in best or change > best[key]["change"]:
            best[key] = {**row, "change": change}
    return sorted(best.values(), key=lambda row: -row["change"])[:most]


def _change(without: Any, including: Any) -> float:
    if without is None or including is None:
        return 0.0
    return abs(including - without) / max(abs(without), 1e-12)


def layer_table(report: Report, most: int | None = None) -> LayerTable:
    """One line a layer of what matters most about its block; at most `most` lines, evenly spread, ends included."""
    values = {metric: by_layer(report, metric) for metric in _COLUMNS}
    metrics = tuple(metric for metric in _COLUMNS if values[metric])
    layers = sorted({layer for metric in metrics for layer in values[metric]})
    if most is not None and len(layers) > most:
        last = len(layers) - 1
        layers = [layers[round(step * last / (most - 1))] for step in range(most)]
    rows = tuple(
        (layer, tuple(number(values[metric][layer]) if layer in values[metric] else "" for metric in metrics))
        for layer in layers
    )
    return LayerTable(metrics, tuple(_COLUMNS[metric] for metric in metrics), rows)


def metrics_used(report: Report) -> set[str]:
    """The names of all metrics that the report has a value of."""
    growth = {
        name for name, value in report.growth.items() if isinstance(value, dict) and value.get("value") is not None
    }
    rho = {"rho"} if report.merging.get("rho") else set()
    tables = (report.layers, report.pairs, report.ablations)
    depth = set(report.depth["name"])
    return {metric for table in tables for metric in table["metric"]} | growth | rho | depth


def shortened(name: object, most: int = 28) -> str:
    """A name of at most so many characters, without its middle: checkpoints of one run differ at the end."""
    shown = visible(name)
    keep = most - 1
    return shown if len(shown) <= most else f"{shown[: keep // 2]}…{shown[-(keep - keep // 2) :]}"
