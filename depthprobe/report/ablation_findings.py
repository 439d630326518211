"""What the first screen says of changed models: which blocks a model needs, and what merging two of them costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from depthprobe.report.ablation_tables import (
    Series,
    by_sum_alone,
    cost_metric,
    cost_words,
    headline_merge,
    merges,
    metric_rows,
    sequences,
    series,
)
from depthprobe.report.schema import Report
from depthprobe.report.tables import UNITS, highest, interval, lowest, number, placements, visible, with_interval
from depthprobe.report.words import FEW, Finding, ends, plural

__all__ = ["CHANGES"]

_CHEAP = 0.05  # nats
_TRUSTED = 0.7  # Spearman's correlation from which on a proxy's order is said to be close to the measured one
_LONGEST = 48


def _skipping(report: Report) -> Finding | None:
    rows = metric_rows(report, cost_metric(report))
    rows = rows[(rows["kind"] == "skip") & (rows["count"] == 1)]
    said = [_skips(report, rows[rows["unit"] == unit], unit) for unit in UNITS if (rows["unit"] == unit).any()]
    if not said:
        return None
    unit = next(unit for unit in UNITS if (rows["unit"] == unit).any())
    (first, short), others = said[0], said[1:]
    found = rows[rows["unit"] == unit]
    more = [_cheap(report, found["value"], found["ci_high"], "single skip"), *(text for text, _ in others)]
    return Finding("Skipping", first, " ".join(filter(None, more)), short)


def _skips(report: Report, rows: pd.DataFrame, unit: str) -> tuple[str, str]:
    """A sentence on the least and the most expensive skip of a unit, and a short one."""
    of = "" if unit == "block" else f"the {'MLP' if unit == 'mlp' else unit} of "
    least, most = lowest(rows), highest(rows)
    name, nats = _short_name(report), cost_words(report)[1]
    if len(rows) == 1:
        text = f"Skipping {of}block {least['layer']} costs {_cost(report, least)}."
        return text, f"{of}block {least['layer']}: {name} {with_interval(least, 2)}{nats}"
    text = (
        f"Skipping {of}one block costs least for block {least['layer']}, {_cost(report, least)}; most for block "
        f"{most['layer']}, {_cost(report, most)}."
    )
    short = (
        f"{name} {with_interval(least, 2)} ({of}block {least['layer']}) to {with_interval(most, 2)} ({most['layer']})"
    )
    return text, short


def _merging(report: Report) -> Finding | None:
    chosen = headline_merge(report, cost_metric(report))
    if chosen is None:
        return None
    rows, name = chosen.rows, _short_name(report)
    best, dearest = lowest(rows), highest(rows)
    layer = int(best["layer"])
    pair = f"blocks {layer} and {layer + 1}"
    how = "costs" if len(rows) == 1 else "costs least for"
    text = f"Merging two neighbours ({chosen.label}) {how} {pair}, {_cost(report, best)}"
    if len(rows) == 1:
        text = f"Merging {pair} ({chosen.label}) costs {_cost(report, best)}"
    skip = _cheaper_skip(report, layer)
    if skip is not None:
        verdict = _against(best, skip)
        text += f": {verdict} skipping block {skip['layer']} costs, {with_interval(skip)}"
    cheap = _cheap(report, rows["value"], rows["ci_high"], "adjacent merge")
    last = int(dearest["layer"])
    ends_at = f"The dearest is that of blocks {last} and {last + 1}, {_cost(report, dearest)}." if len(rows) > 1 else ""
    more = [cheap, ends_at, _ways(report, chosen.label), _beside_controls(report, chosen)]
    count = f"; {_count_cheap(rows['value'])} of {len(rows)} cost < {_CHEAP} nats" if name == "KL" else ""
    short = f"{name} {with_interval(best, 2)} ({layer}+{layer + 1}, {chosen.label}){count}"
    return Finding("Merging", f"{text}.", " ".join(filter(None, more)), short)


def _cheaper_skip(report: Report, layer: int) -> Any | None:
    """The row of the cheaper skip of a pair's two blocks."""
    found = series(report, cost_metric(report)).get("skip")
    rows = found.rows[found.rows["layer"].isin((layer, layer + 1))] if found else None
    return None if rows is None or rows.empty else lowest(rows)


def _against(row: Any, other: Any) -> str:
    (low, high), (other_low, other_high) = ends(row), ends(other)
    return "less than" if high < other_low else "more than" if low > other_high else "not told apart from what"


def _ways(report: Report, best: str) -> str:
    """For post-LN, what the other ways to combine would have said: the best one was chosen."""
    found = merges(report, cost_metric(report))
    if placements(report) != {"post"} or len(found) < 2:
        return ""
    each = ", ".join(f"{number(float(one.rows['value'].median()))} by {one.label}" for one in found)
    return f"Of {len(found)} ways to combine, {best} was taken as the cheapest for this post-LN model (medians {each})."


def _beside_controls(report: Report, chosen: Series) -> str:
    """At how many places a merge costs less than each control that was made as it was."""
    said = []
    names = {"skip": "skipping block l", "swap": "a swap", "apart": "a merge of l and l+2", "random": "a random vector"}
    controls = series(report, cost_metric(report))
    for name, words in names.items():
        if name not in controls or by_sum_alone(name, chosen):
            continue
        both = chosen.rows.merge(controls[name].rows, on="layer", suffixes=("", "_control"))
        if not both.empty:
            less = int((both["ci_high"] < both["ci_low_control"]).sum())
            said.append(f"{words} at {less} of {len(both)} places")
    return f"Going by intervals that do not overlap, a merge costs less than {', '.join(said)}." if said else ""


def _claim(report: Report) -> Finding | None:
    rho = report.merging.get("rho")
    middle = (rho or {}).get("median") or {}
    if rho is None or middle.get("value") is None:
        return None
    rows, cost = rho["layers"], cost_words(report)[0]
    low, high = ends(middle)
    verdict = "below 1" if high < 1 else "above 1" if low > 1 else "not told apart from 1"
    text = (
        f"ρ_l, the {cost} of merging l and l+1 over that of skipping l, has a median of {with_interval(middle)} over "
        f"{len(rows)} pairs, {verdict}; {_slope(rho.get('slope') or {})}."
    )
    below, above = sum(ends(row)[1] < 1 for row in rows), sum(ends(row)[0] > 1 for row in rows)
    more = (
        f"ρ_l is below 1 at {below} and above 1 at {above} of the {len(rows)} pairs, going by intervals (merges are "
        "by sum). A merge cost that falls with depth may only say that late blocks do less, which is why it is put "
        "against the skip's."
    )
    few = f"; {sequences(report)} sequences" if sequences(report) < FEW else ""
    short = f"ρ median {with_interval(middle, 2)}, {verdict}{few}"
    return Finding("Merge/skip", text, more, short)


def _slope(slope: dict[str, Any]) -> str:
    if slope.get("value") is None:
        return "its slope with depth is not known"
    low, high = ends(slope)
    verdict = (
        "rises with depth"
        if low > 0
        else "falls with depth"
        if high < 0
        else "has no slope with depth that this sample can tell"
    )
    return f"it {verdict} (slope of log ρ over relative depth {with_interval(slope)})"


def _proxies(report: Report) -> Finding | None:
    known = [row for row in report.merging.get("proxies") or [] if row["value"] is not None]
    if not known:
        return None
    best = max(known, key=lambda row: row["value"])
    low, high = ends(best)
    if low > _TRUSTED:
        verdict = f"the whole interval is above {_TRUSTED}, so its order is close to the measured one on this model"
    elif low > 0:
        verdict = "it goes with the cost, but its order is not the measured one: no substitute"
    elif high < 0:
        verdict = "it orders them the wrong way round"
    else:
        verdict = "not told apart from no relation, so it cannot stand in for the measurement"
    text = (
        f"Of {len(known)} cheap proxies {visible(best['proxy'])} orders {best['blocks']} place{plural(best['blocks'])} "
        f"most like the measured {visible(best['cost'])}: Spearman's correlation {with_interval(best)}; {verdict}."
    )
    others = "; ".join(f"{visible(row['proxy'])} {with_interval(row)}" for row in known if row is not best)
    more = f"The others: {others}. The best of several looks better than it is. " if others else ""
    more += "Intervals are over sequences; the blocks are this model's own."
    return Finding("Proxies", text, more, "")


def _schedules(report: Report) -> Finding | None:
    """What to say where there are neither skips nor merges of neighbours: the least and the most expensive schedule."""
    if report.ablations.empty or _skipping(report) or headline_merge(report, cost_metric(report)):
        return None
    rows = metric_rows(report, cost_metric(report))
    least, most = lowest(rows), highest(rows)
    name, nats = _short_name(report), cost_words(report)[1]
    text = f"The schedule {_shortened(least['schedule'])} costs {_cost(report, least)}"
    short = f"{name} {with_interval(least, 2)}{nats}"
    if len(rows) > 1:
        text = f"Of {len(rows)} schedules, {_shortened(least['schedule'])} costs least, {_cost(report, least)}"
        text += f"; {_shortened(most['schedule'])} most, {_cost(report, most)}"
        short = f"{name} {with_interval(least, 2)} to {with_interval(most, 2)}, {len(rows)} schedules"
    return Finding("Schedules", f"{text}.", "", short)


def _shared(report: Report) -> Finding | None:
    made, plain = report.merging.get("evaluations"), report.merging.get("plain_evaluations")
    if report.ablations.empty or not made or not plain or made >= plain:
        return None
    count = len(report.ablations[["schedule", "combine"]].drop_duplicates())
    text = (
        f"{count} schedule{plural(count)} took {made:,} block evaluations instead of {plain:,}: what schedules share "
        "is run once."
    )
    return Finding("Shared work", text, short="")


def _short_name(report: Report) -> str:
    return "KL" if cost_metric(report) == "kl" else "1 − cos"


def _cost(report: Report, row: Any) -> str:
    """`KL 0.1 [0.09, 0.11] nats, loss +0.08 [0.07, 0.09]` of a row of the cost."""
    name, nats = cost_words(report)
    words = f"{name} {with_interval(row)}{nats}"
    table = report.ablations
    same = (table["schedule"] == row["schedule"]) & (table["combine"] == row["combine"])
    loss = table[same & (table["metric"] == "delta_loss")]
    if loss.empty:
        return words
    found = loss.iloc[0]
    sign = "+" if found["value"] > 0 else ""
    return f"{words} and loss {sign}{number(found['value'])} {interval(found['ci_low'], found['ci_high'])}".strip()


def _cheap(report: Report, values: pd.Series, highs: pd.Series, what: str) -> str:
    if cost_metric(report) != "kl" or len(values) < 2:
        return ""
    count, whole = _count_cheap(values), _count_cheap(highs)
    sure = f" ({whole} with the whole interval)" if count and highs.notna().any() else ""
    return f"{count} of {len(values)} {what}s cost less than {_CHEAP} nats of KL{sure}."


def _count_cheap(values: Iterable[float]) -> int:
    return sum(value < _CHEAP for value in values)


def _shortened(schedule: str) -> str:
    text = visible(schedule)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


CHANGES: tuple[Callable[[Report], Finding | None], ...] = (
    _skipping,
    _merging,
    _claim,
    _schedules,
    _proxies,
    _shared,
)
