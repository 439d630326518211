"""What a report says of effective depth: the first screen's line, the table beside the controls, the costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pandas as pd

from depthprobe.report.schema import Report
from depthprobe.report.tables import number, with_interval
from depthprobe.report.words import FEW, Finding, ends, plural

__all__ = [
    "CONTROLS",
    "SHARES",
    "DepthLine",
    "control_names",
    "costs",
    "curve_of",
    "depth_facts",
    "depth_finding",
    "depth_lines",
    "disagreements",
    "label",
]

SHARES = ("direct_share", "direct_share_raw", "path_cross")  # in no unit of depth
CONTROLS = {"random-init": "random weights", "random-tokens": "random tokens"}


@dataclass(frozen=True)
class DepthLine:
    """One estimate beside its controls, values in words.

    Attributes:
        name, variant: of the estimate.
        value: with its interval.
        controls: the value of every control, with its interval; a dash where it has none.
        whole: it is a depth of the whole model: neither of its later blocks alone, nor a share.
        passed: the gate's word.
        reason: why not, or by what it passed.
        note: what else is to be known.
    """

    name: str
    variant: str
    value: str
    controls: tuple[str, ...]
    whole: bool
    passed: bool
    reason: str
    note: str


def depth_finding(report: Report) -> Finding | None:
    """What may stand on the first screen: estimates that pass the gate, or that none does."""
    table = report.depth
    if table.empty:
        return None
    of, unit = int(table["of"].max()), str(report.deep.get("unit", "block"))
    passed = table[table["passes_gate"]]
    parts = passed[passed["of"] == of]
    if parts.empty:
        near = _nearest(report)
        text = "No estimate of effective depth passes the gate on this model"
        why = f": {near}" if near else ""
        return Finding("Depth", f"{text}{why}.", _size(report), f"{text}{why or '; see the report'}.")
    said = [f"{with_interval(row)} by {label(row)}{_beside(report, row)}" for _, row in parts.iterrows()]
    text = f"Of {of} {unit}{plural(of)}, the estimates that pass the gate count {_and(said)}."
    more = " ".join([*disagreements(report), _size(report)])
    return Finding("Depth", text, more)


def disagreements(report: Report) -> list[str]:
    """A sentence for every two estimates that pass the gate and whose intervals lie apart."""
    does = {m["name"]: m["does"] for one in report.deep.get("estimators", []) for m in one["metrics"]}
    passed = report.depth[report.depth["passes_gate"]]
    found = []
    for (_, a), (_, b) in combinations(passed[passed["of"] == report.depth["of"].max()].iterrows(), 2):
        if a["name"] == b["name"]:
            continue
        (low, high), (other_low, other_high) = ends(a), ends(b)
        if high < other_low or other_high < low:
            why = f"{a['name']}: {_lower(does.get(a['name'], ''))} {b['name']}: {_lower(does.get(b['name'], ''))}"
            found.append(
                f"{label(a)} and {label(b)} disagree beyond their intervals, as they count different things. {why}"
            )
    return found


def depth_lines(report: Report) -> list[DepthLine]:
    """Every estimate, those that pass first, in the order of the table otherwise."""
    gate = {(row["name"], row["variant"]): row for row in report.deep.get("gate", [])}
    held = {(row["control"], row["name"], row["variant"]): row for row in report.deep.get("controls", [])}
    names, most = control_names(report), report.depth["of"].max()
    lines = []
    for _, row in report.depth.iterrows():
        key = (row["name"], row["variant"])
        judged = gate.get(key, {"passed": bool(row["passes_gate"]), "reason": ""})
        beside = tuple(with_interval(held[control, *key]) if (control, *key) in held else "–" for control in names)
        note = str(row["note"]).split("gate: ")[0].rstrip("; ")
        whole, word = bool(row["of"] == most) and row["name"] not in SHARES, bool(judged["passed"])
        lines.append(DepthLine(*key, with_interval(row), beside, whole, word, str(judged["reason"]), note))
    return sorted(lines, key=lambda line: not line.passed)


def control_names(report: Report) -> list[str]:
    """The controls that were run, in order."""
    return list(dict.fromkeys(row["control"] for row in report.deep.get("controls", [])))


def costs(report: Report) -> list[tuple[str, str, str, str]]:
    """Name, what it counts and misses, passes, seconds of every estimator."""
    found = []
    for one in report.deep.get("estimators", []):
        said = " ".join(f"{m['does']} {m['misses']}" for m in one["metrics"]) or "The effect of a unit on later ones."
        if one["forward"] is None:
            passes = f"left out: {one['reason']}"
        else:
            back = f" and {number(one['backward'], 3)} backward" if one["backward"] else ""
            passes = f"{number(one['forward'], 3)} forward{back}"
        found.append((one["name"], said, passes, f"{number(one['seconds'], 2)} s"))
    return found


def depth_facts(report: Report) -> list[tuple[str, str]]:
    """On what effective depth was estimated."""
    deep = report.deep
    found = [
        ("counted", f"{deep['unit']}s, {int(report.depth['of'].max())} in all" if not report.depth.empty else None),
        ("measured on", f"{number(deep['sequences'])} × {number(deep['tokens'])}"),
        ("controls", ", ".join(CONTROLS[name] for name in control_names(report)) or "none"),
        ("time", f"{number(deep['seconds'])} s, controls included" if deep.get("seconds") else None),
    ]
    return [(key, value) for key, value in found if value]


def curve_of(report: Report, name: str) -> pd.DataFrame:
    """A table beside the estimates, such as `stages/stages`; empty where it is not there.

    What `analyze` knows of effects on later blocks comes from its sweep.
    """
    found: dict[str, Any] | None = report.deep.get("curves", {}).get(name)
    if found is None and name == "effects/effects":
        found = report.merging.get("later")
    if found is None:
        return pd.DataFrame()
    return pd.DataFrame(found["rows"], columns=found["columns"])


def label(row: Any) -> str:
    """`stages, 3%`, or the name alone for the default variant."""
    return f"{row['name']}, {row['variant']}" if row["variant"] else str(row["name"])


def _beside(report: Report, row: Any) -> str:
    """The controls' values in brackets: an estimate is to be read against them."""
    key = (row["name"], row["variant"])
    held = [found for found in report.deep.get("controls", []) if (found["name"], found["variant"]) == key]
    said = ", ".join(f"{CONTROLS[found['control']]} {number(found['value'])}" for found in held)
    return f" ({said})" if said else ""


def _nearest(report: Report) -> str:
    """Why those did not pass that passed their calibration."""
    gate = [row for row in report.deep.get("gate", []) if not row["passed"]]
    close = [row for row in gate if row["reason"].startswith("not above")]
    return "; ".join(f"{label(row)} is {row['reason']}" for row in close[:2])


def _size(report: Report) -> str:
    count = int(report.deep.get("sequences", 0))
    if not count or count >= FEW:
        return ""
    return f"Estimated on {count} sequence{plural(count)}: fewer than {FEW} make an interval too narrow."


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
