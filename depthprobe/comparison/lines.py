"""Lines, which are runs or groups of seeds, their table, and the differences between any two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from depthprobe.comparison.levels import Level
from depthprobe.comparison.measures import Key, depth_name, parts
from depthprobe.comparison.runs import Run
from depthprobe.contrast import difference, over_seeds, paired, same_seeds, smallest_effect, unpaired
from depthprobe.errors import UsageError
from depthprobe.estimate import Interval
from depthprobe.report.compare_schema import COMPARE_COLUMNS, DIFFERENCE_COLUMNS

__all__ = ["ALL_PAIRS", "Line", "differences", "lines_of", "table"]

ALL_PAIRS = 6  # lines of which each is put beside each; of more, each beside the first
_KEYS = ["relative_depth", "layer", "unit", "metric"]


@dataclass(frozen=True, eq=False)
class Line:
    """What is compared: one run, or the seeds of one model.

    Attributes:
        name: of the group, or of the run.
        runs: one, or the seeds in the order of their names.
        places: of its runs among all.
    """

    name: str
    runs: tuple[Run, ...]
    places: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """L of its models."""
        return int(self.runs[0].report.model["blocks"])

    @property
    def seeds(self) -> list[int | None]:
        """The training seed of each run, None where it is not known."""
        return [run.seed for run in self.runs]

    @property
    def grouped(self) -> bool:
        """Whether the seed is the unit, rather than the sequence."""
        return len(self.runs) > 1

    @property
    def resolution(self) -> dict[str, float]:
        """Metric → the value that rounding alone gives it, the largest of its runs."""
        found: dict[str, float] = {}
        for run in self.runs:
            for metric, value in run.report.resolution.items():
                found[metric] = max(value, found.get(metric, 0.0))
        return found

    @property
    def gate(self) -> list[list[str]]:
        """Estimates of depth, [metric, unit], that passed the gate in all of its runs."""
        passed = [
            [depth_name(row), str(row["unit"])]
            for row in self.runs[0].report.depth.to_dict("records")
            if row["passes_gate"]
        ]
        others = [run.report.depth[run.report.depth["passes_gate"]] for run in self.runs[1:]]
        theirs = [{(depth_name(row), row["unit"]) for row in frame.to_dict("records")} for frame in others]
        return [each for each in passed if all(tuple(each) in found for found in theirs)]


def lines_of(runs: Sequence[Run]) -> list[Line]:
    """One line a group and one a run without a group, in the order of their first runs.

    Raises:
        UsageError: the models of a group differ in depth or width, one stands in it twice, or it is called like a run.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        key = f"group {run.group}" if run.group else f"run {run.name}"
        groups.setdefault(key, []).append(place)
    lines = []
    for places in groups.values():
        members = tuple(runs[place] for place in places)
        for what in ("blocks", "width"):
            sizes = {run.report.model[what] for run in members}
            if len(sizes) > 1:
                found = f"group {members[0].group!r} has models of {' and '.join(map(str, sorted(sizes)))} {what}"
                raise UsageError(found, "seeds of one model", "give the others a group of their own")
        prints = [run.report.model.get("fingerprint") for run in members]
        if len(members) > 1 and len({*prints}) < len(prints) and None not in prints:
            raise UsageError(f"group {members[0].group!r} has the same weights twice", "runs of different seeds")
        lines.append(Line(members[0].group or members[0].name, members, tuple(places)))
    for name, count in Counter(line.name for line in lines).items():
        if count > 1:
            raise UsageError(f"group {name!r} is called like a run that is not in it", "another name")
    return lines


def table(lines: Sequence[Line], frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of compare.csv: every run's, and those of each group of several, whose unit is the seed."""
    found = []
    for line in lines:
        for run, place in zip(line.runs, line.places, strict=True):
            found.append(frames[place].assign(run=run.name, group=run.group))
        if line.grouped:
            found.append(_mean([frames[place] for place in line.places]).assign(run="", group=line.name))
    return pd.concat(found, ignore_index=True)[list(COMPARE_COLUMNS)].astype(COMPARE_COLUMNS)


def _mean(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The mean over seeds of what all have, with t-intervals."""
    count = len(frames)
    grouped = pd.concat(frames).groupby(_KEYS, dropna=False, sort=False)["value"]
    found = grouped.agg(["mean", "std", "size"]).reset_index()
    found = found[found["size"] == count]
    reach = stats.t.ppf(0.975, count - 1) * found["std"] / np.sqrt(count)
    ends = {"value": found["mean"], "ci_low": found["mean"] - reach, "ci_high": found["mean"] + reach, "n": count}
    return found[_KEYS].assign(**ends)


def differences(lines: Sequence[Line], levels: Sequence[Level]) -> pd.DataFrame:
    """The rows of differences.csv, a − b: at each level, of each two lines (of many, of the first and each other)."""
    pairs = list(combinations(lines, 2))
    if len(lines) > ALL_PAIRS:
        pairs = [(lines[0], line) for line in lines[1:]]
    rows = []
    for level in levels:
        known = [parts(frame) for frame in level.frames]
        for a, b in pairs:
            first, second = ([known[place] for place in line.places] for line in (a, b))
            shared = [key for key in first[0] if all(key in each for each in (*first, *second))]
            costs = {(run.report.merging.get("rho") or {}).get("cost") for run in (*a.runs, *b.runs)}
            shared = [key for key in shared if len(costs) == 1 or not key[0].startswith("rho")]
            rows += [_row(a, b, key, [x[key] for x in first], [x[key] for x in second], level.words) for key in shared]
    return pd.DataFrame(rows, columns=list(DIFFERENCE_COLUMNS)).astype(DIFFERENCE_COLUMNS)


def _row(a: Line, b: Line, key: Key, first: list[Interval], second: list[Interval], level: str) -> tuple[object, ...]:
    metric, unit, where = key
    values = [[each.value for each in side] for side in (first, second)]
    if not a.grouped and not b.grouped:
        found = difference(first[0], second[0])
        method = "the two intervals in quadrature, as if independent"
    elif not (a.grouped and b.grouped):
        one, seeds = min(len(first), len(second)), max(len(first), len(second))
        found, method = unpaired(*values), f"no interval: {one} run against {seeds} seeds"
    elif (places := same_seeds(a.seeds, b.seeds)) is not None:
        found = paired(values[0], [values[1][place] for place in places])
        method = f"t over {len(places)} pairs of equal seeds, which shows effects from {_sd(len(places))} SD on"
    else:
        found, sizes = unpaired(*values), (len(first), len(second))
        method = f"Welch's t over {sizes[0]} and {sizes[1]} seeds, which shows effects from {_sd(*sizes)} SD on"
    if not np.isfinite(found.low) and not method.startswith("no interval"):
        method = "no interval: one of the two has none"
    floor = max(a.resolution.get(metric, 0.0), b.resolution.get(metric, 0.0))
    if floor and abs(found.value) <= floor:
        method += "; no more than rounding alone"
    means = [over_seeds(side).value for side in values]
    return (a.name, b.name, metric, unit, where, *means, found.value, found.low, found.high, f"{level}; {method}")


def _sd(count: int, other: int | None = None) -> str:
    return f"{smallest_effect(count, other):.1f}"
