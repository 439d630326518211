"""Rows and words of a comparison, for the page and the terminal: what was compared, side by side, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from depthprobe.glossary import METRICS
from depthprobe.report.compare_schema import Comparison
from depthprobe.report.tables import number, with_interval

__all__ = [
    "SideBySide",
    "difference_tables",
    "headline",
    "how_judged",
    "model_rows",
    "scalars",
    "tally",
    "verdict_rows",
]

# what the first screen shows of what is one number a model: metric → words
SCALARS = {
    "loss": "loss, nats a token",
    "val_loss": "validation loss",
    "growth_power": "growth: exponent of l",
    "growth_rate": "growth: × a block",
    "update_growth_rate": "updates: × a block",
    "cross_share": "cross share of growth",
    "rho_median": "ρ by sum, median",
    "rho_slope": "ρ by sum, slope of its log",
    "gradient_ratio_median": "gradient, x_1 over x_L",
}
_LATE = {
    "update_ratio": "‖Δ‖/‖x‖, last third",
    "block_influence": "1 − cos, last third",
    "interaction_error": "interaction, last third",
}
_ORDER = ("supported", "contradicted", "undecided")


@dataclass(frozen=True)
class SideBySide:
    """Values in words: one row a measure, one cell a line.

    Attributes:
        headings: the names of the lines.
        rows: (what, cells); a cell is empty where a line has no such value.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def headline(comparison: Comparison) -> str:
    """One line on what was compared."""
    lines, runs = len(comparison.lines), len(comparison.runs)
    seeds = f" of {runs} runs" if runs > lines else ""
    what = "One model" if lines == 1 else f"{lines} models"
    levels = "; ".join(level["words"] for level in comparison.levels)
    return f"{what}{seeds}, {levels}" if lines > 1 else f"{what}{seeds}: nothing to set it against"


def model_rows(comparison: Comparison) -> list[dict[str, str]]:
    """One row a run: name, build, size, text, training, how."""
    rows = []
    for run in comparison.runs:
        seed = "" if run["seed"] is None else f"seed {run['seed']}"
        tokens = "" if run["trained_tokens"] is None else f"{run['trained_tokens']:,} tokens"
        loss = "" if run["val_loss"] is None else f"loss {number(float(run['val_loss']))}"
        many = f"{len(run['checkpoints'])} checkpoints" if len(run["checkpoints"]) > 1 else ""
        state = "failed" if run["failed"] else f"{run['fresh']} random initialisations" if run["fresh"] else ""
        rows.append({
            "name": run["name"],
            "group": run["group"],
            "build": f"{run['blocks']} × {run['placement'] or 'unknown'}, width {run['width']:,}",
            "parameters": number(run["parameters"]),
            "dtype": run["dtype"],
            "text": f"{run['sequences']} × {run['tokens']}",
            "training": ", ".join(filter(None, (state, seed, tokens, loss, many))) or "not known",
            "how": run["how"],
        })  # fmt: skip
    return rows


def scalars(comparison: Comparison, most: int | None = None) -> SideBySide:
    """What is one number a model, then estimates of depth, then the last third of the blocks, line by line.

    An estimate of depth that does not pass the gate on a model is left out for it; it stands in compare.csv.

    Args:
        comparison: whose lines.
        most: lines to show, the first ones; None for all.
    """
    lines = comparison.lines[:most]
    columns = [_of_line(comparison.table, line) for line in lines]
    whole = [column[column["relative_depth"].isna()] for column in columns]
    wanted = [(metric, "model", words) for metric, words in SCALARS.items()]
    depths = dict.fromkeys((metric, unit) for line in lines for metric, unit in line["gate"])
    wanted += [(metric, unit, f"depth: {metric}, {unit}s") for metric, unit in depths]
    rows = []
    for metric, unit, words in wanted:
        cells = [
            _cell(column[(column["metric"] == metric) & (column["unit"] == unit)])
            if unit == "model" or [metric, unit] in line["gate"]
            else ""
            for line, column in zip(lines, whole, strict=True)
        ]
        rows.append((words, tuple(cells)))
    for metric, words in _LATE.items():
        rows.append((words, tuple(_late(column, metric) for column in columns)))
    return SideBySide(tuple(line["name"] for line in lines), tuple((what, cells) for what, cells in rows if any(cells)))


def verdict_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """The rows of the verdict, those that something is said on first within a claim's place; value in words."""
    rows = []
    for row in comparison.verdict.to_dict("records"):
        shown = "" if pd.isna(row["value"]) else with_interval(row)
        rows.append({**{str(name): value for name, value in row.items()}, "shown": shown})
    return rows


def tally(comparison: Comparison) -> str:
    """How many criteria came out how, and how many claims could not be judged by any."""
    table = comparison.verdict
    judged = table["value"].notna()
    counts = table.loc[judged, "verdict"].value_counts()
    said = [f"{counts[word]} {word}" for word in _ORDER if word in counts]
    silent = set(table["claim"]) - set(table.loc[judged, "claim"])
    return "; ".join(filter(None, (", ".join(said), f"{len(silent)} claims cannot be judged" if silent else "")))


def how_judged() -> str:
    """How the verdicts came about, in a few sentences."""
    return (
        "A criterion is supported if the whole 95 % interval lies where the claim wants the number, contradicted if "
        "no part of it does, and undecided otherwise; an effect below 10 % counts as none, and an interval over fewer "
        "than eight documents or sequences decides nothing. Intervals of one model are over sequences and say nothing "
        "of other training runs; only groups of seeds do. They are not corrected for "
        "how many criteria there are."
    )


def difference_tables(comparison: Comparison) -> list[dict[str, Any]]:
    """One table a level and pair of lines: what, where, both values, and the difference with its interval.

    Weights' gradients stay in differences.csv.
    """
    found = []
    shown = comparison.differences[~comparison.differences["metric"].str.startswith("weight_gradient")]
    for level in comparison.levels:
        rows = shown[shown["method"].str.startswith(f"{level['words']}; ")]
        for (a, b), part in rows.groupby(["a", "b"], sort=False):
            part = part.assign(value=part["difference"])
            passed = [line["gate"] for line in comparison.lines if line["name"] in (a, b)]
            cells = [_difference(row, passed) for row in part.to_dict("records")]
            found.append({"a": a, "b": b, "level": level["words"], "rows": cells,
                          "apart": sum(cell["apart"] for cell in cells)})  # fmt: skip
    return found


def _difference(row: Any, passed: list[list[list[str]]]) -> dict[str, Any]:
    """A row of differences.csv in words; an estimate of depth that does not pass the gate is a diagnostic alone."""
    named = METRICS.get(str(row["metric"]).partition(" ")[0])
    failed = named is not None and named.table == "depth" and not all(
        [row["metric"], row["unit"]] in gate for gate in passed
    )  # fmt: skip
    shown = f"{with_interval(row)}{', does not pass the gate' if failed else ''}"
    return {**{str(key): value for key, value in row.items()}, "shown": shown, "apart": not failed and _apart(row)}


def _apart(row: Any) -> bool:
    return bool(row["ci_low"] > 0 or row["ci_high"] < 0) and "rounding" not in row["method"]


def _of_line(table: pd.DataFrame, line: dict[str, Any]) -> pd.DataFrame:
    if len(line["runs"]) > 1:
        return table[(table["run"] == "") & (table["group"] == line["name"])]
    return table[table["run"] == line["runs"][0]]


def _cell(rows: pd.DataFrame) -> str:
    return "" if rows.empty else with_interval(_floats(rows.iloc[0]))


def _late(column: pd.DataFrame, metric: str) -> str:
    rows = column[(column["metric"] == metric) & (column["unit"] == "block") & (column["relative_depth"] >= 2 / 3)]
    return "" if rows.empty else with_interval(_floats(rows[["value", "ci_low", "ci_high"]].median(skipna=False)))


def _floats(row: Any) -> dict[str, float]:
    return {name: float(row[name]) for name in ("value", "ci_low", "ci_high")}
