"""The figure and the finding of phases: does the model still compute, or only refine?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from depthprobe.report.panels import Panel, Theme, finish, lines
from depthprobe.report.schema import Report
from depthprobe.report.tables import by_layer, number, with_interval
from depthprobe.report.words import FEW, Finding, ends, plural

__all__ = ["PHASE_PANELS", "finding", "spans"]

_TARGETS = ("next token", "current token", "position")
_LENS = "lens_kl"
_NEAR = 0.1  # of the largest KL of the lens, as in lens_kl_depth
_MARKERS = ("o", "s", "^")


def finding(report: Report) -> Finding | None:
    """From which state on the model only refines, and into which ranges its states fall; None if not looked for."""
    found = report.phases
    said = [text for text in (_from(found) + _few(report), _clusters(found)) if text]
    if not said:
        return None
    text = "; ".join(said)
    return Finding("Phases", f"{text[0].upper()}{text[1:]}.", " ".join(_more(report)))


def spans(ranges: Sequence[Sequence[int]]) -> str:
    """Ranges of states in words: x_0 | x_1–x_24 | x_25–x_30."""
    return " | ".join(f"x_{low}" if low == high else f"x_{low}–x_{high}" for low, high in ranges)


def _from(found: dict[str, Any]) -> str:
    """From where the next token can be read."""
    row = found.get("first", {}).get("next token")
    if not row:
        return ""
    if row["state"] is None:
        return "the next token cannot be read from any state by a straight line"
    state, last = int(row["state"]), max(each["state"] for each in found["readable"])
    classes = next(each["classes"] for each in found["readable"] if each["target"] == "next token")
    token = f"the next token, where it is one of the {classes} most frequent,"
    low, high = ends(row)
    within = f" ({_between(int(low), int(high))})" if np.isfinite(low) and low < high else ""
    if state == 0:
        return f"{token} can be read with 90 % of the best state's gain from x_0 already: no block makes it much easier"
    if state == last:
        return f"{token} can be read with 90 % of the best state's gain from x_{state} alone, the last{within}"
    return (
        f"{token} can first be read with 90 % of the best state's gain at "
        f"x_{state}{within}: blocks before still compute it, those after refine it"
    )


def _few(report: Report) -> str:
    """A warning where the classifiers of the next token were fitted on fewer than two positions a dimension."""
    fitted = [row["train"] for row in report.phases.get("readable", []) if row["target"] == "next token"]
    few = bool(fitted) and fitted[0] < 2 * report.model["width"]
    return f" (fitted on {number(fitted[0])} positions: too few to rely on)" if few else ""


def _between(low: int, high: int) -> str:
    return f"from x_{low} to x_{high} in resamples"


def _clusters(found: dict[str, Any]) -> str:
    clusters = found.get("clusters")
    if not clusters:
        return ""
    return f"clusters: {spans(clusters['ends'])}" if clusters["clear"] else "no clear clusters of layers"


def _more(report: Report) -> list[str]:
    found, said = report.phases, []
    rows = pd.DataFrame(found.get("readable") or [], columns=["target", "state", "accuracy", "baseline"])
    for target, group in rows.groupby("target", sort=False):
        best, last = group.iloc[int(group["accuracy"].to_numpy().argmax())], group.iloc[-1]
        ending = "" if best["state"] == last["state"] else f", {number(last['accuracy'])} at x_{last['state']}"
        said.append(
            f"{str(target).capitalize()}: accuracy {number(best['accuracy'])} at x_{best['state']}{ending}; always the "
            f"most frequent class {number(best['baseline'])}."
        )
    states = rows["state"].nunique()
    if states and states <= report.model["blocks"]:
        said.append(f"Read at {states} of {report.model['blocks'] + 1} states.")
    lens = by_layer(report, _LENS)
    if lens:
        near = min(layer for layer, value in lens.items() if value <= _NEAR * max(lens.values()))
        said.append(f"Through the model's own head the KL first is below {_NEAR:.0%} of its largest at x_{near}.")
    clusters = found.get("clusters")
    if clusters:
        silhouette = with_interval({"value": clusters["silhouette"], **clusters})
        kept = [each["share"] for each in found["boundaries"] if each["chosen"] and each["share"] is not None]
        if clusters["clear"] and kept:
            said.append(f"Silhouette {silhouette}; each boundary in at least {min(kept):.0%} of resamples.")
    said += found.get("notes", [])
    count = int(found.get("sequences", FEW))
    if count < FEW:
        half = ", half of which score what is read" if count > 1 else ""
        said.append(f"Measured on {count} sequence{plural(count)}{half}: fewer than {FEW} make an interval too narrow.")
    return said


def _draw(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    top, bottom = axes
    if not lines(report, top, theme, [(_LENS, "block", "lens")], "KL of the lens, nats"):
        top.set_yticks([])
        top.text(0.5, 0.5, "no lens", transform=top.transAxes, ha="center", va="center", color=theme.ink, fontsize=9)
    # the lens's own curve first: `lines` takes the colours in order, and the probes are drawn in the others
    lines(report, bottom, theme, [("lens_top1", "block", "lens: top-1")], "")
    table = pd.DataFrame(report.phases.get("readable") or [], columns=["target", "state", "accuracy", "ci_low",
                                                                        "ci_high", "baseline"])  # fmt: skip
    for place, target in enumerate(_TARGETS):
        rows = table[table["target"] == target].astype({"ci_low": float, "ci_high": float})
        if rows.empty:
            continue
        colour = theme.lines[place + 1]
        bottom.plot(rows["state"], rows["accuracy"], color=colour, marker=_MARKERS[place], markersize=5, linewidth=1.6,
                    markeredgecolor=theme.background, markeredgewidth=0.5, label=target)  # fmt: skip
        bottom.fill_between(rows["state"], rows["ci_low"], rows["ci_high"], color=colour, alpha=0.2, linewidth=0)
        bottom.axhline(rows["baseline"].iloc[0], color=colour, linewidth=1, linestyle=(0, (1, 2)))
    bottom.set_ylim(-0.02, 1.04)
    finish(bottom, "share read rightly", "state $x_l$")
    top.set_xlim(-0.5, report.model["blocks"] + 0.5)  # the axes are shared
    _shade(report, axes, theme)


def _shade(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    """Every second cluster, and at each boundary the share of resamples that have it."""
    clusters = report.phases.get("clusters")
    if not clusters:
        return
    if not clusters["clear"]:
        axes[0].text(
            0.01, 0.05, "no clear clusters of layers", transform=axes[0].transAxes, color=theme.ink, fontsize=9
        )
        return
    for ax in axes:
        for place, (low, high) in enumerate(clusters["ends"]):
            if place % 2:
                ax.axvspan(low - 0.5, high + 0.5, color=theme.ink, alpha=0.08, linewidth=0, zorder=0)
    for each in report.phases["boundaries"]:
        if each["chosen"] and each["share"] is not None:
            axes[0].text(each["after"] + 0.5, 0.97, f" {each['share']:.0%}", transform=axes[0].get_xaxis_transform(),
                         va="top", color=theme.ink, fontsize=8)  # fmt: skip


def _alt(report: Report) -> str:
    found = finding(report)
    rows = report.phases.get("readable") or []
    said = []
    for target in _TARGETS:
        values = [row for row in rows if row["target"] == target]
        if values:
            first, last = values[0], values[-1]
            said.append(
                f"{target} from {number(first['accuracy'])} at x_{first['state']} to {number(last['accuracy'])} at "
                f"x_{last['state']}, baseline {number(first['baseline'])}"
            )
    curves = f"Curves over depth: accuracy of {'; '.join(said)}." if said else "Curves over depth."
    return f"{curves} {found.text if found else ''}".strip()


PHASE_PANELS: tuple[Panel, ...] = (
    Panel(
        "phases", "Whether the model still computes",
        "Where the next token can be read as well as at the end, later blocks only refine it; dotted lines are what "
        "always the most frequent class gets, and shading marks clusters of states, with the share of resamples that "
        "have the boundary.",
        ("lens_kl", "lens_top1"), lambda report: bool(report.phases.get("clusters") or report.phases.get("readable")),
        ("phases", "from the states"), 5.4, 2, _draw, _alt,
    ),
)  # fmt: skip
