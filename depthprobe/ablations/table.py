"""From a sweep to its table, and to the two questions it is for: is a merge cheaper than a skip, and can a cheap proxy
be trusted?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from depthprobe.ablations.run import Swept
from depthprobe.ablations.schedule import Schedule
from depthprobe.estimate import Interval, Resampler

__all__ = ["COLUMNS", "PROXIES", "merge_against_skip", "proxies", "table"]

COLUMNS = ("schedule", "kind", "unit", "layers", "combine", "metric", "value", "ci_low", "ci_high", "n")
# What each cheap metric of layer l stands in for.
PROXIES = {
    "block_influence": "skip",
    "update_ratio": "skip",
    "angular_distance": "skip",
    "interaction_error": "merge",
}
SILENT = 1e-7  # nats, or 1 − cos: below it a skip's cost is rounding
Floats = NDArray[np.float64]


def table(swept: Swept, resampler: Resampler) -> pd.DataFrame:
    """The rows of `ablations.csv`; intervals are paired: each sequence is compared with itself."""
    frames = []
    for metric, values in swept.effects.items():
        means, low, high = resampler.intervals(values)
        frames.append(
            pd.DataFrame(
                {
                    "schedule": [schedule.label for schedule in swept.schedules],
                    "kind": [schedule.kind for schedule in swept.schedules],
                    "unit": [schedule.unit for schedule in swept.schedules],
                    "layers": [",".join(map(str, schedule.changed)) for schedule in swept.schedules],
                    "combine": [schedule.combine if schedule.merges else "" for schedule in swept.schedules],
                    "metric": metric,
                    "value": means,
                    "ci_low": low,
                    "ci_high": high,
                    "n": len(values),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)[list(COLUMNS)]


def merge_against_skip(swept: Swept, resampler: Resampler, cost: str = "kl") -> dict[str, Any] | None:
    """ρ_l = cost(merge l, l + 1) / cost(skip l) by layer, its median, and its slope over relative depth.

    ρ below 1: hiding block l's update from block l + 1 alone costs less than hiding it from all later blocks.

    Args:
        swept: a sweep with single skips and adjacent merges of whole blocks, `sum`.
        resampler: over its sequences.
        cost: `kl`, or `state_distance` without a head.

    Returns:
        `layers`, a list of layer, value, ci_low, ci_high, without those that cost nothing to skip; `median` and
        `slope` with intervals. None where the sweep lacks one of the two.
    """
    columns = swept.effects.get(cost)
    skips = _by_layer(swept, "skip", 1)
    merges = _by_layer(swept, "merge", 2)
    # A block that does nothing costs nothing to skip: its ratio would be rounding over rounding.
    if columns is None:
        return None
    layers = [i for i in sorted(set(skips) & set(merges)) if columns[:, skips[i]].mean() > SILENT]
    if len(layers) < 2:
        return None
    chosen = columns[:, [*(merges[i] for i in layers), *(skips[i] for i in layers)]]
    count = len(layers)
    relative = np.array(layers) / (max(layers) or 1)

    def ratio(m: Floats) -> Floats:
        return m[:, :count] / np.maximum(m[:, count:], 1e-12)

    def slope(m: Floats) -> Floats:
        centred = relative - relative.mean()
        return np.log(np.maximum(ratio(m), 1e-12)) @ centred / (centred @ centred)

    rows = []
    for place, layer in enumerate(layers):
        interval = resampler.function(chosen, lambda m, place=place: ratio(m)[:, place])  # type: ignore[misc]
        rows.append({"layer": layer, **_plain(interval)})
    return {
        "cost": cost,
        "layers": rows,
        "median": _plain(resampler.function(chosen, lambda m: np.median(ratio(m), axis=1))),
        "slope": _plain(resampler.function(chosen, slope)),
    }


def proxies(
    swept: Swept, layers: pd.DataFrame, pairs: pd.DataFrame, resampler: Resampler, cost: str = "kl"
) -> list[dict[str, Any]]:
    """Spearman's rank correlation over layers of each cheap metric with the cost it stands in for.

    The interval resamples the sequences that the cost was measured on; the proxy keeps its value.
    """
    columns = swept.effects.get(cost)
    found = []
    for name, kind in PROXIES.items():
        costs = _by_layer(swept, kind, 1 if kind == "skip" else 2)
        cheap = _proxy(name, layers, pairs)
        shared = sorted(set(costs) & set(cheap))
        if columns is None or len(shared) < 4:
            continue
        guess = np.array([cheap[i] for i in shared])
        interval = resampler.function(columns[:, [costs[i] for i in shared]], _rank_correlation(guess))
        found.append({"proxy": name, "cost": f"{cost} of {kind}", "blocks": len(shared), **_plain(interval)})
    return found


def _rank_correlation(guess: Floats) -> Callable[[Floats], Floats]:
    ranks = stats.rankdata(guess)

    def of_means(m: Floats) -> Floats:
        theirs = stats.rankdata(m, axis=1)
        a, b = ranks - ranks.mean(), theirs - theirs.mean(axis=1, keepdims=True)
        return b @ a / np.maximum(np.linalg.norm(b, axis=1) * np.linalg.norm(a), 1e-300)

    return of_means


def _proxy(name: str, layers: pd.DataFrame, pairs: pd.DataFrame) -> dict[int, float]:
    if name == "angular_distance":
        near = pairs[(pairs["metric"] == name) & (pairs["j"] == pairs["i"] + 1)]
        return dict(zip(near["i"], near["value"], strict=True))
    rows = layers[(layers["metric"] == name) & (layers["unit"] == "block")]
    return dict(zip(rows["layer"], rows["value"], strict=True))


def _by_layer(swept: Swept, kind: str, count: int) -> dict[int, int]:
    """First layer → column, for schedules of a kind that change so many neighbouring blocks."""

    def fits(schedule: Schedule) -> bool:
        changed = schedule.changed
        near = all(b == a + 1 for a, b in pairwise(changed))
        plain = schedule.unit == "block" and (schedule.combine == "sum" or not schedule.merges)
        return schedule.kind == kind and len(changed) == count and near and plain

    return {schedule.changed[0]: place for place, schedule in enumerate(swept.schedules) if fits(schedule)}


def _plain(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "ci_low": interval.low, "ci_high": interval.high}
