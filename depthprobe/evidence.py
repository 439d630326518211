"""The numbers of a report by which claims are judged, each with its interval, or a phrase that says why it is missing.

Several layers of one report were measured on the same sequences, and only their single intervals are kept: what is made
of them has the widest interval that any correlation allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from depthprobe.contrast import median, ratio
from depthprobe.estimate import Interval
from depthprobe.report import Report
from depthprobe.report.ablation_tables import cost_metric, headline_merge, series

__all__ = [
    "FITS",
    "Measure",
    "clusters",
    "depth_excess",
    "gradient_ratio",
    "growth",
    "late",
    "late_over_early",
    "least_share",
    "most_over_least",
    "placement",
    "rho",
    "rho_slope",
    "weight_ratio",
]

Measure = Callable[[Report], Interval | str]
FITS = 0.8  # R² below which no law of growth is said to fit


def placement(report: Report) -> str:
    """`pre`, `post`, … as concluded for most blocks; empty where no branches were found."""
    summary = str(report.anatomy.get("summary") or "")
    word = summary.split(",")[0].split(" ")[0]
    return word if word in ("pre", "post", "branch", "sandwich", "none") else ""


def clusters(report: Report, part: str) -> tuple[int, str]:
    """Over how many documents or sequences the intervals of a part of the report are, and which of the two."""
    texts, here = report.corpus.get("documents") or 0, getattr(report, part)
    documents, sequences = texts > 1, int(here.get("sequences") or report.corpus["sequences"])
    # Reports that were made before parts said so: documents, but no more than the part has sequences.
    count = here.get("clusters") or (min(texts, sequences) if documents else sequences)
    return int(count), "documents" if documents and int(count) <= texts else "sequences"


def growth(name: str, fits: str | None = None) -> Measure:
    """A fitted number of the stream's growth; refused where the law explains less than 80 % of it.

    Also for less than three blocks: any law fits two states, and cross terms cannot be more than half of the growth.
    """

    def measure(report: Report) -> Interval | str:
        if (blocks := report.model["blocks"]) < 3:
            return f"{blocks} blocks, 3 are needed to tell how a stream grows"
        found, r2 = report.growth.get(name), report.growth.get(fits) if fits else None
        if not found or found.get("value") is None:
            return "the stream's norm does not grow" if report.growth else "growth was not measured"
        if fits and (r2 is None or r2 < FITS):
            return (
                f"no power law fits the growth (R² {'unknown' if r2 is None else format(r2, '.2f')}, {FITS:g} needed)"
            )
        return _interval(found)

    return measure


def late_over_early(metric: str) -> Measure:
    """The median over the last third of the blocks over that of the first third."""

    def measure(report: Report) -> Interval | str:
        thirds = _thirds(report, metric)
        return thirds if isinstance(thirds, str) else _over(thirds[2], thirds[0])

    return measure


def most_over_least(metric: str) -> Measure:
    """The largest of the medians of the three thirds of the blocks over the smallest."""

    def measure(report: Report) -> Interval | str:
        thirds = _thirds(report, metric)
        if isinstance(thirds, str):
            return thirds
        return _over(max(thirds, key=lambda x: x.value), min(thirds, key=lambda x: x.value))

    return measure


def late(metric: str, control: str | None = None) -> Measure:
    """The median over the last third of the blocks; over that of a control."""

    def measure(report: Report) -> Interval | str:
        thirds = _thirds(report, metric)
        if isinstance(thirds, str) or control is None:
            return thirds if isinstance(thirds, str) else thirds[2]
        others = _thirds(report, control)
        return others if isinstance(others, str) else _over(thirds[2], others[2])

    return measure


def rho(part: str) -> Measure:
    """The median or the slope of ρ, merges by `sum`."""

    def measure(report: Report) -> Interval | str:
        found = (report.merging.get("rho") or {}).get(part)
        return _interval(found) if found else "no block was both skipped and merged"

    return measure


def rho_slope(report: Report) -> Interval | str:
    """The slope of log ρ over relative depth; of post-LN by its cheapest way to combine, from the table of costs.

    There the intervals of single costs are all that is known: their half-widths add up, whatever their correlation.
    """
    if placement(report) != "post":
        return rho("slope")(report)
    if report.ablations.empty:
        return "no block was both skipped and merged"
    cost = cost_metric(report)
    merge, skip = headline_merge(report, cost), series(report, cost).get("skip")
    if merge is None or skip is None:
        return "no block was both skipped and merged"
    both = merge.rows.merge(skip.rows, on="layer", suffixes=("", "_skip"))
    both = both[(both["value"] > 0) & (both["ci_low_skip"] > 0) & (both["ci_low"] > 0)]
    if len(both) < 3:
        return "fewer than three places where a merge and a skip cost something, beyond their intervals"
    slope = low = high = 0.0
    relative = both["layer"] / both["layer"].max()
    centred = relative - relative.mean()
    for (_, row), weight in zip(both.iterrows(), centred / (centred**2).sum(), strict=True):
        value = math.log(row["value"] / row["value_skip"])
        ends = math.log(row["ci_low"] / row["ci_high_skip"]), math.log(row["ci_high"] / row["ci_low_skip"])
        slope += weight * value
        low += min(weight * end for end in ends)
        high += max(weight * end for end in ends)
    return Interval(slope, low, high)


def gradient_ratio(report: Report) -> Interval | str:
    """The gradient of the median token at x_1 over that at x_L."""
    if report.model["blocks"] < 2:
        return "one block has no first and last"
    found = report.gradients.get("ratio_median")
    if found:
        return _interval(found)
    measured = report.gradients.get("loss") is not None
    why = "the median token has no gradient at x_L, where few positions have a loss" if measured else ""
    return why or "the loss's gradients were not measured"


def weight_ratio(report: Report) -> Interval | str:
    """The gradient of the MLP's second matrix in the first block over that in the last."""
    if report.model["blocks"] < 2:
        return "one block has no first and last"
    rows = report.layers[report.layers["metric"] == "weight_gradient_norm"]
    rows = rows[(rows["layer"] >= 0) & (rows["layer"] < report.model["blocks"])]
    module = ((report.anatomy.get("blocks") or [{}])[0].get("mlp") or {}).get("module")
    names = [name for name in dict.fromkeys(rows["unit"]) if str(name).startswith(f"{module}.")]
    matrices = [name for name in names if str(name).endswith("weight")]
    if not matrices:
        told = f": {module}, which writes its update, has no weights" if module and len(rows) else ""
        return f"no gradient of the MLP's second matrix is known{told}"
    rows = rows[rows["unit"] == matrices[-1]].sort_values("layer")
    return _over(_row(rows.iloc[0]), _row(rows.iloc[-1]))


def least_share(report: Report) -> Interval | str:
    """The smallest share ‖u‖² / ‖y‖² of a branch in what a norm is given."""
    rows = report.layers[(report.layers["metric"] == "update_energy_share") & (report.layers["unit"] != "block")]
    if rows.empty:
        return "attention and MLP were not found apart"
    values = [_row(row) for _, row in rows.iterrows()]
    least = min(values, key=lambda x: x.value)
    return Interval(least.value, min(x.low for x in values), min(x.high for x in values))


def depth_excess(name: str, unit: str) -> Measure:
    """An estimate of depth that passes the gate, less that of its randomly initialised twin, as a share of N."""

    def measure(report: Report) -> Interval | str:
        rows = report.depth
        label = rows["name"] + (" " + rows["variant"]).where(rows["variant"] != "", "")
        found = rows[(label == name) & (rows["unit"] == unit)]
        if found.empty:
            return "effective depth was not estimated"
        row = found.iloc[0]
        if not row["passes_gate"]:
            return "no estimate of depth passes the gate on both models"
        twins = [
            control["value"]
            for control in report.deep.get("controls") or []
            if control["control"] == "random-init" and (control["name"], control["unit"], control["variant"])
            == (row["name"], unit, row["variant"])
        ]  # fmt: skip
        if not twins or twins[0] is None:
            return "there is no randomly initialised twin to compare with"
        value, low, high = ((row[end] - twins[0]) / row["of"] for end in ("value", "ci_low", "ci_high"))
        return Interval(float(value), float(low), float(high))

    return measure


def _thirds(report: Report, metric: str) -> list[Interval] | str:
    """Medians of a metric of whole blocks over the first, middle and last third of them."""
    rows = report.layers[(report.layers["metric"] == metric) & (report.layers["unit"] == "block")]
    blocks = report.model["blocks"]
    place = ((rows["layer"] + 0.5) / blocks * 3).clip(upper=2.999).astype(int)
    found = [_median(rows[place == third]) for third in range(3)]
    known = [each for each in found if each is not None]
    if rows.empty:
        return f"{metric} was not measured"
    if len(known) < 3:
        return f"{metric} has no value in some third of {blocks} block{'s' if blocks > 1 else ''}"
    floor = report.resolution.get(metric, 0.0)
    if floor and max(each.value for each in known) <= floor:
        return f"{metric} is no more than rounding alone"
    return known


def _median(rows: pd.DataFrame) -> Interval | None:
    return None if rows.empty else median([_row(row) for _, row in rows.iterrows()])


def _over(a: Interval, b: Interval) -> Interval | str:
    return ratio(a, b) if a.value > 0 and b.value > 0 else "a ratio of values that are not positive"


def _row(row: pd.Series) -> Interval:
    return Interval(float(row["value"]), float(row["ci_low"]), float(row["ci_high"]))


def _interval(found: dict[str, float | None]) -> Interval:
    value, low, high = (found[name] for name in ("value", "ci_low", "ci_high"))
    return Interval(*(math.nan if end is None else float(end) for end in (value, low, high)))
