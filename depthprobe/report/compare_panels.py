"""The figures of a comparison: one line a model, or a group of seeds with its band, against relative depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from depthprobe.report.compare_schema import Comparison
from depthprobe.report.gradient_panels import PlainLog
from depthprobe.report.panels import Theme, finish
from depthprobe.report.tables import number, shortened, visible

__all__ = ["COMPARE_PANELS", "DRAWN", "ComparePanel", "alt_text", "available", "curves", "draw"]

DRAWN = 10  # lines that one can still tell apart
_MARKERS = "os^DvP*Xph"


@dataclass(frozen=True)
class ComparePanel:
    """One figure.

    Attributes:
        name: of its file.
        title: above it on the page.
        reading: how to read it, one sentence.
        metrics: those it draws, one above the other, each with what stands at its axis.
        unit: of its rows.
        height: in inches.
        floor: whether the axis begins at 0, where it is not logarithmic.
    """

    name: str
    title: str
    reading: str
    metrics: tuple[tuple[str, str], ...]
    unit: str = "block"
    height: float = 3.6
    floor: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Its metrics."""
        return tuple(metric for metric, _ in self.metrics)


def curves(comparison: Comparison, metric: str, unit: str = "block") -> list[tuple[str, pd.DataFrame]]:
    """(name, rows in the order of depth) of every line that has the metric; of a group its own rows."""
    table = comparison.table
    rows = table[(table["metric"] == metric) & (table["unit"] == unit) & table["relative_depth"].notna()]
    found = []
    for line in comparison.lines:
        run, group = ("", line["name"]) if len(line["runs"]) > 1 else (line["runs"][0], None)
        mine = rows[(rows["run"] == run) & ((rows["group"] == group) | (group is None))]
        if not mine.empty:
            found.append((str(line["name"]), mine.sort_values("relative_depth").reset_index(drop=True)))
    return found


def available(comparison: Comparison) -> list[ComparePanel]:
    """The figures that there are numbers for, in the order of the page."""
    there = {(m, u) for m, u in comparison.table[["metric", "unit"]].drop_duplicates().itertuples(index=False)}
    return [panel for panel in COMPARE_PANELS if any((metric, panel.unit) in there for metric in panel.names)]


def draw(comparison: Comparison, panel: ComparePanel, axes: Sequence[Axes], theme: Theme) -> None:
    """Put a figure onto its axes, one a metric; a metric that no line has leaves its axes empty, with a word."""
    places = {line["name"]: place for place, line in enumerate(comparison.lines[:DRAWN])}
    for ax, (metric, ylabel) in zip(axes, panel.metrics, strict=True):
        found = [(name, rows) for name, rows in curves(comparison, metric, panel.unit) if name in places]
        for name, rows in found:
            _line(ax, name, places[name], rows, theme)
        _scale(ax, [rows for _, rows in found], panel.floor)
        finish(ax, ylabel, "relative depth")
        ax.set_xlim(-0.02, 1.02)
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
        if not found:
            ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color=theme.ink, fontsize=9)
            ax.set_yticks([])
    for ax in axes[1:]:
        legend = ax.get_legend()
        if legend is not None and axes[0].get_legend() is not None:
            legend.remove()


def alt_text(comparison: Comparison, panel: ComparePanel) -> str:
    """What a figure shows, for those who do not see it: where each line begins and ends, and between what it lies."""
    said = []
    for metric in panel.names:
        for name, rows in curves(comparison, metric, panel.unit)[:DRAWN]:
            values = rows["value"].to_numpy()
            said.append(
                f"{metric} of {visible(name)} from {number(float(values[0]))} to {number(float(values[-1]))}, between "
                f"{number(float(values.min()))} and {number(float(values.max()))}"
            )
    return f"Curves over relative depth: {'; '.join(said)}."


def _line(ax: Axes, name: str, place: int, rows: pd.DataFrame, theme: Theme) -> None:
    palette = [*theme.lines, *sns.color_palette("colorblind", DRAWN).as_hex()[4:]]
    colour, x = palette[place % len(palette)], rows["relative_depth"].to_numpy()
    dashes = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
    short = shortened(name, 28)
    short = f" {short}" if short.startswith("_") else short  # which would keep it out of the legend
    ax.plot(x, rows["value"], color=colour, label=short.replace("$", r"\$"), linewidth=1.6,
            linestyle=dashes[place % len(dashes)], marker=_MARKERS[place % len(_MARKERS)],
            markersize=5 if len(rows) <= 40 else 3, markeredgecolor=theme.background, markeredgewidth=0.5)  # fmt: skip
    known = rows.dropna(subset=["ci_low", "ci_high"])
    ax.fill_between(known["relative_depth"], known["ci_low"], known["ci_high"], color=colour, alpha=0.2, linewidth=0)


def _scale(ax: Axes, tables: Sequence[pd.DataFrame], floor: bool) -> None:
    values = np.concatenate([rows["value"].to_numpy() for rows in tables]) if tables else np.array([1.0])
    if values.min() > 0 and values.max() / values.min() > 20:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(PlainLog())
        ax.yaxis.set_minor_formatter(PlainLog())
    elif floor and values.min() >= 0:
        ax.set_ylim(bottom=0)
    elif values.min() < 0 < values.max():
        ax.axhline(0, color="0.5", linewidth=0.8)


COMPARE_PANELS: tuple[ComparePanel, ...] = (
    ComparePanel(
        "growth", "How the stream grows",
        "Post-LN normalises what every unit writes, so that there the norm is that of its gains and cannot add up.",
        (("residual_norm", r"$\|x_l\|$"),),
    ),
    ComparePanel(
        "update", "How much each block changes the stream",
        "A line that falls with depth means that later blocks change the stream relatively less.",
        (("update_ratio", r"$\|\Delta_l\|\,/\,\|x_l\|$"), ("block_influence", r"$1 - \cos(x_l, x_{l+1})$")), height=5.4,
    ),
    ComparePanel(
        "alignment", "In which direction each block writes",
        "Above zero a block reinforces what is there, below zero it erases.",
        (("update_alignment", r"cos$(\Delta_l, x_l)$"),), floor=False,
    ),
    ComparePanel(
        "interaction", "Whether the next block needs this one",
        "Above, how much the next block's update changes when this one's is hidden from it; below, when a foreign "
        "one of equal size and angle is.",
        (("interaction_error", "interaction error"), ("interaction_error_control", "its control")), height=5.4,
    ),
    ComparePanel(
        "rho", "Merging against skipping",
        "ρ_l below 1: hiding block l's update from the next block (a merge by sum, of post-LN too, whose verdict is by "
        "its cheapest way) costs less than hiding it from all later ones.",
        (("rho", r"$\rho_l$"),),
    ),
    ComparePanel(
        "lens", "When the prediction is made",
        "Each state read through the model's own head: where a line levels off, later blocks only refine.",
        (("lens_kl", "KL to the final, nats"), ("lens_top1", "top-1 agreement")), height=5.4,
    ),
    ComparePanel(
        "gradients", "How the gradient travels down",
        "From right to left; the median token's, where a few would carry the mean.",
        (("gradient_norm_median", r"$\|\partial\ell/\partial x_l\|$"),),
    ),
)  # fmt: skip
