"""All numbers of one report as one table, and what is compared of them: thirds of the depth, one number a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from depthprobe.contrast import between, median
from depthprobe.estimate import Interval
from depthprobe.report import Report

__all__ = ["MODEL", "THIRDS", "Key", "depth_name", "measures", "mixed", "parts"]

Key = tuple[str, str, str]  # metric, unit, where
THIRDS = ("early", "middle", "late")
MODEL = "model"
_COLUMNS = ["relative_depth", "layer", "unit", "metric", "value", "ci_low", "ci_high", "n"]
_RATIOS = {"ratio": "gradient_ratio", "ratio_median": "gradient_ratio_median", "ratio_random": "gradient_ratio_random"}


def measures(report: Report, val_loss: float | None = None) -> pd.DataFrame:
    """The numbers of a report: relative_depth, layer, unit, metric, value, ci_low, ci_high, n.

    A state x_l of L + 1 stands at l / L, a unit of block l at (l + ½) / L. What is one number a model has neither layer
    nor relative depth: its growth, the median and the slope of ρ, the loss, what became of the gradient, and estimates
    of effective depth, whose unit is what they count and whose variant stands behind the name.

    Args:
        report: of one model.
        val_loss: on the validation text of its training, where that is known.
    """
    blocks = int(report.model["blocks"])
    layers = report.layers.copy()
    states = set(layers.loc[(layers["layer"] == blocks) & (layers["unit"] == "block"), "metric"])
    offset = np.where(layers["metric"].isin(states), 0.0, 0.5)
    layers["relative_depth"] = np.clip((layers["layer"] + offset) / blocks, 0.0, 1.0)
    rho = report.merging.get("rho") or {}
    ratios = [((row["layer"] + 0.5) / blocks, row["layer"], "block", "rho", row) for row in rho.get("layers") or []]
    single = [(np.nan, pd.NA, unit, metric, value) for metric, unit, value in _of_model(report, val_loss)]
    rows = [(*place, *_values(value), _count(report, place[3], value)) for *place, value in [*ratios, *single]]
    more = pd.DataFrame(rows, columns=_COLUMNS)
    together = [part.astype({"layer": "Int64"})[_COLUMNS] for part in (layers, more) if not part.empty]
    return pd.concat(together, ignore_index=True) if together else more.astype({"layer": "Int64"})


def parts(frame: pd.DataFrame) -> dict[Key, Interval]:
    """What is compared of `measures`, by (metric, unit, where).

    `where` is a third of the depth, early, middle or late, with the median over its layers; or `model`. The ends of a
    median are the medians of the ends, as if all layers erred together.
    """
    third = np.minimum(np.floor(frame["relative_depth"] * 3), 2)
    where = third.map({float(place): name for place, name in enumerate(THIRDS)}).fillna(MODEL)
    found: dict[Key, Interval] = {}
    for (metric, unit, place), rows in frame.groupby(["metric", "unit", where], sort=False):
        found[str(metric), str(unit), str(place)] = median([Interval(*ends) for ends in _ends(rows)])
    return found


def mixed(a: pd.DataFrame, b: pd.DataFrame, weight: float) -> pd.DataFrame:
    """`measures` on the line from a (weight 0) to b (weight 1), of all rows that both have; n is the smaller one."""
    keys = ["relative_depth", "layer", "unit", "metric"]
    both = a.merge(b, on=keys, suffixes=("", "_b"))
    ends = [between(Interval(*x), Interval(*y), weight) for x, y in zip(_ends(both), _ends(both, "_b"), strict=True)]
    columns = {"value": [x.value for x in ends], "ci_low": [x.low for x in ends], "ci_high": [x.high for x in ends]}
    return both[keys].assign(**columns, n=both[["n", "n_b"]].min(axis=1))[_COLUMNS]


def depth_name(row: Any) -> str:
    """What a row of depth.csv is called here: its name, and its variant behind it."""
    return f"{row['name']} {row['variant']}".strip()


def _of_model(report: Report, val_loss: float | None) -> list[tuple[str, str, Any]]:
    """(metric, unit, value with interval) of what is one number a model."""
    found: list[tuple[str, str, Any]] = [
        (name, MODEL, value) for name, value in report.growth.items() if isinstance(value, dict)
    ]
    rho = report.merging.get("rho") or {}
    found += [(f"rho_{name}", MODEL, rho.get(name)) for name in ("median", "slope")]
    found.append(("loss", MODEL, _loss(report)))
    found.append(("val_loss", MODEL, val_loss and {"value": val_loss, "ci_low": None, "ci_high": None}))
    found += [(name, MODEL, report.gradients.get(key)) for key, name in _RATIOS.items()]
    for row in report.depth.to_dict("records"):
        found.append((depth_name(row), row["unit"], row))
    return [(metric, unit, value) for metric, unit, value in found if value and value.get("value") is not None]


def _loss(report: Report) -> Any:
    """Of the unchanged model on the report's text: what the sweep found, or the gradients, or the lens on x_L."""
    merging = report.merging
    other = merging.get("sha256") not in (None, report.corpus["sha256"])  # of changed models on a text of their own
    sources = [None if other else merging.get("base_loss")]
    if not report.gradients.get("fresh"):
        sources.append(report.gradients.get("loss"))
    rows = report.layers[(report.layers["metric"] == "lens_loss") & (report.layers["layer"] == report.model["blocks"])]
    sources += rows.to_dict("records")
    return next((source for source in sources if source), None)


def _values(row: Any) -> tuple[float, float, float]:
    ends = (row["value"], row["ci_low"], row["ci_high"])
    value, low, high = (np.nan if end is None else float(end) for end in ends)
    return value, low, high


def _count(report: Report, metric: str, value: Any) -> int:
    """On how many sequences a number rests that says nothing of it itself."""
    if "n" in value:
        return int(value["n"])
    if metric.startswith("rho") or metric == "loss":
        return int(report.merging.get("sequences") or report.corpus["sequences"])
    if metric.startswith("gradient"):
        return int(report.gradients["sequences"])
    if "of" in value:
        return int(report.deep.get("sequences") or report.corpus["sequences"])
    return int(report.corpus["sequences"])


def _ends(rows: pd.DataFrame, suffix: str = "") -> list[tuple[float, float, float]]:
    columns = [rows[f"{name}{suffix}"].to_numpy(dtype=float) for name in ("value", "ci_low", "ci_high")]
    return list(zip(*(column.tolist() for column in columns), strict=True))
