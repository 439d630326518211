"""Figures as bytes: which there are for a report, rendered in either theme without touching global state."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import seaborn as sns
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from depthprobe.report.ablation_panels import ABLATION_PANELS
from depthprobe.report.depth_panels import DEPTH_PANELS
from depthprobe.report.gradient_panels import GRADIENT_PANELS
from depthprobe.report.panels import LIGHT, PANELS, Theme
from depthprobe.report.phase_panels import PHASE_PANELS
from depthprobe.report.schema import Report
from depthprobe.report.tables import by_layer, highest, lowest, number, units_of

__all__ = ["NAMES", "alt_text", "available", "drawn", "reason_missing", "render"]

_BY_NAME = {panel.name: panel for panel in (*PANELS, *DEPTH_PANELS, *PHASE_PANELS, *GRADIENT_PANELS, *ABLATION_PANELS)}
NAMES = tuple(_BY_NAME)
_WIDTH = 6.0
_DPI = 200


def available(report: Report) -> list[str]:
    """Names of the figures that this report has data for, in the order of the page."""
    return [name for name, panel in _BY_NAME.items() if panel.there(report)]


def reason_missing(report: Report, name: str) -> str | None:
    """The report's own note on why a figure has no data, or None where it says nothing on it."""
    notes = [*report.notes, *report.model.get("notes", []), *report.anatomy.get("notes", []),
             *report.deep.get("notes", []), *report.phases.get("notes", []),
             *report.gradients.get("notes", []), *report.merging.get("notes", [])]  # fmt: skip
    return next((note for note in notes if any(word in note.lower() for word in _BY_NAME[name].topic)), None)


def render(report: Report, name: str, file_format: str = "png", theme: Theme = LIGHT) -> bytes:
    """One figure as the bytes of a png (200 dots an inch) or svg file, 6 inches wide.

    Args:
        report: has data for this figure (see `available`).
        name: one of `NAMES`.
        file_format: `png` or `svg`.
        theme: `LIGHT` or `DARK`.
    """
    chosen = _BY_NAME[name]
    return drawn(lambda axes: chosen.draw(report, axes, theme), chosen.height, chosen.rows, file_format, theme)


def drawn(
    draw: Callable[[list[Axes]], None], height: float, rows: int = 1, file_format: str = "png", theme: Theme = LIGHT,
    *, shared: bool = True, dpi: int = _DPI,
) -> bytes:  # fmt: skip
    """What `draw` puts onto its axes, in the style of every figure, as the bytes of a file.

    Args:
        draw: is given `rows` axes, one above the other.
        height: in inches; the width is 6.
        rows: number of axes.
        file_format: `png` or `svg`.
        theme: `LIGHT` or `DARK`.
        shared: the axes have the same x, which is labelled below the last one.
        dpi: dots an inch of a png.
    """
    with rc_context(_FILES), sns.axes_style("whitegrid", rc=_style(theme)), sns.plotting_context("paper", rc=_SIZES):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
        figure = Figure(figsize=(_WIDTH, height), layout=layout, facecolor=theme.background)
        axes = list(figure.subplots(rows, 1, sharex=shared and rows > 1, squeeze=False)[:, 0])
        draw(axes)
        sns.despine(fig=figure)
        if shared and rows > 1:
            axes[0].set_xlabel("")
        buffer = io.BytesIO()
        # no date inside: the same report gives the same bytes
        figure.savefig(buffer, format=file_format, dpi=dpi, metadata={"Date": None} if file_format == "svg" else {})
    return buffer.getvalue()


def alt_text(report: Report, name: str) -> str:
    """What the figure shows, for those who do not see it: each curve's ends and extremes."""
    chosen = _BY_NAME[name]
    if chosen.alt is not None:
        return chosen.alt(report)
    if name == "angular_distance":
        rows = report.pairs[report.pairs["metric"] == name]
        low, high = (lowest(rows), highest(rows))
        return (
            f"Heatmap of the angular distance between all states: smallest {number(low['value'])} between x_{low['i']} "
            f"and x_{low['j']}, largest {number(high['value'])} between x_{high['i']} and x_{high['j']}."
        )
    if name == "decomposition":
        last = max(report.growth["decomposition"], key=lambda row: row["layer"])
        parts = ", ".join(f"{key} {number(last[key])}" for key in ("start", "updates", "cross"))
        return f"Stacked bars of the squared norm over depth; at x_{last['layer']} {number(last['stream'])}: {parts}."
    said = []
    for metric in chosen.metrics:
        for unit in units_of(report, metric):
            values = by_layer(report, metric, unit)
            first, last = min(values), max(values)
            of = metric if unit == "block" else f"{metric} of {unit}"
            said.append(
                f"{of} from {number(values[first])} at layer {first} to {number(values[last])} at layer {last}, "
                f"between {number(min(values.values()))} and {number(max(values.values()))}"
            )
    return f"Curves over depth: {'; '.join(said)}."


# seaborn's contexts drop what is not style, so these have one of their own
_FILES: dict[Any, Any] = {
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "depthprobe",
    "svg.fonttype": "path",
    "savefig.facecolor": "auto",
}
_SIZES = {"font.size": 9.5, "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9}


def _style(theme: Theme) -> dict[str, Any]:
    return {
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.faint,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
    }
