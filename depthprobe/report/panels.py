"""What each figure draws: plain functions from a report onto the axes they are given."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from depthprobe.report.schema import Report
from depthprobe.report.tables import UNITS, curve, pair_matrix

__all__ = ["DARK", "LIGHT", "PANELS", "Panel", "Theme", "finish", "lines"]

# 1 − value is what is small where a metric is near 1, so rounding is felt at that end of the scale
_NEAR_ONE = ("cosine", "cka", "linearity", "interaction_cosine", "lens_top1")


@dataclass(frozen=True)
class Theme:
    """Colours of one variant of a figure; lines after Okabe and Ito, told apart by colour-blind eyes and in grey."""

    background: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme("#ffffff", "#1f2430", "#dcdfe6", ("#0072b2", "#d55e00", "#009e73", "#8a3f74"))
DARK = Theme("#16191f", "#dfe3ea", "#343a45", ("#56b4e9", "#f0a05a", "#3fc79a", "#d89cc4"))
_ROOM = 80  # characters that fit beside each other in a legend
_MARKERS = ("o", "s", "^", "D")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        name: of its file.
        title: above it on the page.
        reading: how to read it, one sentence.
        metrics: those it draws.
        there: whether a report has what it draws.
        topic: a word by which a note on why it is missing is recognised.
        height: in inches; every figure is 6 inches wide.
        rows: axes, one above the other.
        draw: puts the report onto them.
        alt: what it shows, for those who do not see it; None for curves over depth, which are described alike.
    """

    name: str
    title: str
    reading: str
    metrics: tuple[str, ...]
    there: Callable[[Report], bool]
    topic: tuple[str, ...]
    height: float
    rows: int
    draw: Callable[[Report, Sequence[Axes], Theme], None]
    alt: Callable[[Report], str] | None = None


def lines(
    report: Report, ax: Axes, theme: Theme, what: Sequence[tuple[str, str, str]], ylabel: str
) -> list[pd.DataFrame]:
    """Draw (metric, unit, label) curves with their intervals; those that were not measured are passed over."""
    drawn = []
    for place, (metric, unit, label) in enumerate(what):
        rows = curve(report, metric, unit)
        if rows.empty:
            continue
        colour = theme.lines[place % len(theme.lines)]
        marker = _MARKERS[place % len(_MARKERS)]
        sns.lineplot(
            x=rows["layer"].to_numpy(),
            y=rows["value"].to_numpy(),
            ax=ax,
            label=label,
            color=colour,
            errorbar=None,
            marker=marker,
            linewidth=1.6,
            markersize=5 if len(rows) <= 40 else 3,
            markeredgecolor=theme.background,
            markeredgewidth=0.5,
        )
        ax.lines[-1].set_linestyle(_DASHES[place % len(_DASHES)])
        known = rows.dropna(subset=["ci_low", "ci_high"])
        ax.fill_between(known["layer"], known["ci_low"], known["ci_high"], color=colour, alpha=0.2, linewidth=0)
        drawn.append(rows)
    finish(ax, ylabel)
    _rounding(report, ax, theme, [metric for metric, _, _ in what])
    return drawn


def finish(ax: Axes, ylabel: str, xlabel: str = "layer $l$") -> None:
    """Name the axes, count layers in whole numbers, and put the legend above where there is a choice."""
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    low, high = ax.get_xlim()
    if high - low < 1:  # a single layer
        ax.set_xlim(low - 0.5, high + 0.5)
    handles, labels = ax.get_legend_handles_labels()
    _no_legend(ax)
    if len(handles) > 1:
        longest = max(len(re.sub(r"\\[a-z]+|[\\${}^_|]", "", label)) for label in labels)
        columns = max(1, min(len(handles), 4, _ROOM // (longest + 7)))
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2,
                  handlelength=2.4, columnspacing=1.4)  # fmt: skip


def _no_legend(ax: Axes) -> None:
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()


def _rounding(report: Report, ax: Axes, theme: Theme, metrics: Sequence[str]) -> None:
    """Shade what rounding alone gives, the largest of the metrics that share the axes."""
    floors = {metric: report.resolution[metric] for metric in metrics if report.resolution.get(metric)}
    if not floors:
        return
    low, high = ax.get_ylim()
    if all(metric.startswith(_NEAR_ONE) for metric in floors):
        band = (min(floors.values()), 1.0)
    elif "update_alignment" in floors or "update_share" in floors:
        band = (-max(map(abs, floors.values())), max(map(abs, floors.values())))
    else:
        band = (min(low, 0.0) if ax.get_yscale() == "linear" else low, max(floors.values()))
    ax.axhspan(*band, color=theme.ink, alpha=0.13, linewidth=0)
    place = "top" if band[1] == 1.0 else "bottom"
    ax.text(0.99, band[place == "bottom"], "rounding alone", transform=ax.get_yaxis_transform(), ha="right", va=place,
            fontsize=8, color=theme.ink, alpha=0.8)  # fmt: skip
    ax.set_ylim(min(low, band[0]), max(high, band[1]))


def _zero(ax: Axes, theme: Theme) -> None:
    low, high = ax.get_ylim()
    if low < 0 < high:
        ax.axhline(0, color=theme.ink, linewidth=0.8, alpha=0.6)


def _log_if_wide(ax: Axes, tables: Sequence[pd.DataFrame]) -> None:
    values = np.concatenate([rows["value"].to_numpy() for rows in tables]) if tables else np.array([])
    if values.size and values.min() > 0 and values.max() / values.min() > 20:
        low, high = ax.get_ylim()
        ax.set_yscale("log")
        if low <= 0:  # as a shaded floor has it, which nothing on a log axis is
            ax.set_ylim(values.min() / 1.3, high)


def _growth(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax = axes[0]
    what = [("residual_norm", "block", "mean"), ("residual_norm_median", "block", "median")]
    tables = lines(report, ax, theme, what, r"$\|x_l\|$")
    norms = tables[0][tables[0]["value"] > 0]
    layers, logs = norms["layer"].to_numpy(dtype=float), np.log(norms["value"].to_numpy())
    # the slopes are the report's own; only the height of each line is set here, to the same least squares
    for key, place, first in (("growth_power", 2, 1), ("growth_rate", 3, 0)):
        fit, kept = report.growth.get(key), layers >= first
        if not fit or fit.get("value") is None or kept.sum() < 2 or (fit["value"] <= 0 and key == "growth_rate"):
            continue
        slope = fit["value"] if key == "growth_power" else np.log(fit["value"])
        x = np.log(layers[kept]) if key == "growth_power" else layers[kept]
        label = f"power, $l^{{{fit['value']:.2f}}}$" if key == "growth_power" else f"rate, ${fit['value']:.3f}^l$"
        y = np.exp(slope * (x - x.mean()) + logs[kept].mean())
        ax.plot(layers[kept], y, color=theme.lines[place], linewidth=1.1, linestyle=_DASHES[place], label=label)
    _log_if_wide(ax, tables)
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=0)
    finish(ax, r"$\|x_l\|$")


def _decomposition(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, rows = axes[0], pd.DataFrame(report.growth["decomposition"]).sort_values("layer")
    # each sign stacks away from zero on its own side, so that a negative cross term shows as one
    up, down = np.zeros(len(rows)), np.zeros(len(rows))
    for place, (key, label) in enumerate(
        (("start", r"start $\|x_0\|^2$"), ("updates", "updates"), ("cross", "cross term"))
    ):
        part = rows[key].to_numpy(dtype=float)
        base = np.where(part >= 0, up, down)
        ax.bar(rows["layer"], part, bottom=base, width=0.86, color=theme.lines[place], label=label, linewidth=0.6,
               edgecolor=theme.background, hatch=("", "///", "...")[place])  # fmt: skip
        up, down = up + np.clip(part, 0, None), down + np.clip(part, None, 0)
    ax.plot(
        rows["layer"], rows["stream"], color=theme.ink, marker="o", markersize=3.5, linewidth=1.2, label=r"$\|x_l\|^2$"
    )
    _zero(ax, theme)
    finish(ax, "squared norm")


def _ratio(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    tables = lines(report, axes[0], theme, [("update_ratio", unit, unit) for unit in UNITS], r"$\|u\|\,/\,\|s\|$")
    _log_if_wide(axes[0], tables)
    if axes[0].get_yscale() == "linear":
        axes[0].set_ylim(bottom=0)


def _alignment(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    for ax, metric, ylabel in zip(
        axes, ("update_alignment", "update_share"), (r"cos$(u, s)$", r"$\langle u, y\rangle\,/\,\|y\|^2$"), strict=True
    ):
        lines(report, ax, theme, [(metric, unit, unit) for unit in UNITS], ylabel)
        _zero(ax, theme)
    _no_legend(axes[1])


def _similarity(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    what = [("cosine_adjacent", "block", "cosine"), ("cosine_adjacent_centred", "block", "centred"),
            ("cosine_adjacent_standardised", "block", "standardised"), ("cka_adjacent", "block", "CKA")]  # fmt: skip
    lines(report, axes[0], theme, what, r"similarity of $x_l$ and $x_{l+1}$")


def _angles(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, square = axes[0], pair_matrix(report, "angular_distance").fillna(0.0)
    step = max(1, len(square) // 10)
    sns.heatmap(
        square,
        ax=ax,
        cmap="mako",
        vmin=0,
        rasterized=True,
        xticklabels=step,
        yticklabels=step,
        cbar_kws={"label": "angular distance (1 = opposite)"},
    )
    ax.set_box_aspect(1)
    ax.set(xlabel="state $x_j$", ylabel="state $x_i$")
    ax.tick_params(axis="y", rotation=0)


def _interaction(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    what = [("interaction_error", "block", "true update hidden"),
            ("interaction_error_control", "block", "control: a foreign one hidden")]  # fmt: skip
    lines(report, axes[0], theme, what, "interaction error")
    axes[0].set_ylim(bottom=0)


def _linearity(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    what = [("linearity", "block", r"$x_l \to x_{l+1}$"), ("linearity_update", "block", r"$x_l \to \Delta_l$")]
    lines(report, axes[0], theme, what, "held-out R²")
    _zero(axes[0], theme)


def _lens(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    what = [("lens_loss", "block", "loss"), ("lens_kl", "block", "KL to the final prediction")]
    lines(report, axes[0], theme, what, "nats")
    axes[0].set_ylim(bottom=-0.02 * axes[0].get_ylim()[1])
    lines(report, axes[1], theme, [("lens_top1", "block", "top-1 agreement")], "top-1 agreement")
    axes[1].set_ylim(-0.02, 1.04)


def _measured(*metrics: str) -> Callable[[Report], bool]:
    """Whether a report has any of these metrics."""
    return lambda report: bool({*report.layers["metric"], *report.pairs["metric"]} & {*metrics})


PANELS: tuple[Panel, ...] = (
    Panel(
        "growth", "How the stream grows",
        "A straight line on a logarithmic axis is growth by a constant factor; where mean and median part, a few "
        "tokens carry the norm.",
        ("residual_norm", "residual_norm_median", "growth_power", "growth_rate", "update_growth_rate"),
        _measured("residual_norm"), ("growth", "norm of the stream"), 3.7, 1, _growth,
    ),
    Panel(
        "decomposition", "What the growth is made of",
        "The three parts add up to the line ‖x_l‖² exactly: a large cross term means that updates point along the "
        "stream, one below zero that they point against it.",
        ("cross_share", "update_norm"), lambda report: bool(report.growth.get("decomposition")),
        ("decomposition",), 3.7, 1, _decomposition,
    ),
    Panel(
        "update_ratio", "How much each unit changes the stream",
        "Near 0 a unit hardly changes what it reads; a curve that falls with depth means that later units change "
        "relatively less.",
        ("update_ratio",), _measured("update_ratio"), ("update ratio",), 3.6, 1, _ratio,
    ),
    Panel(
        "alignment", "In which direction each unit writes",
        "Above zero a unit reinforces what is there, below zero it erases; the share says how much of the result is "
        "the unit's own.",
        ("update_alignment", "update_share"), _measured("update_alignment", "update_share"), ("alignment",),
        5.4, 2, _alignment,
    ),
    Panel(
        "similarity", "How alike neighbouring states are",
        "Where the plain cosine is near 1 and the standardised one is not, a few large dimensions make the states "
        "look alike.",
        ("cosine_adjacent", "cosine_adjacent_centred", "cosine_adjacent_standardised", "cka_adjacent"),
        _measured("cosine_adjacent", "cka_adjacent"), ("cka", "similarity"), 3.7, 1, _similarity,
    ),
    Panel(
        "angular_distance", "How far apart any two states are",
        "Dark is close: a dark square on the diagonal is a range of blocks that together hardly turn the stream.",
        ("angular_distance",), _measured("angular_distance"), ("angular", "pairs"), 4.6, 1, _angles,
    ),
    Panel(
        "interaction", "Whether the next block needs this one",
        "At l: how much block l+1's update changes when block l's is hidden from it; below the control it reacts less "
        "to that update than to a foreign one of equal size and angle.",
        ("interaction_error", "interaction_error_control"), _measured("interaction_error"), ("interaction",), 3.6, 1,
        _interaction,
    ),
    Panel(
        "linearity", "Whether a matrix could replace the block",
        "The map to x_{l+1} is near 1 wherever the block changes little; the map to the update alone shows whether "
        "its work is linear.",
        ("linearity", "linearity_update"), _measured("linearity", "linearity_update"), ("linearity", "linear map"),
        3.6, 1, _linearity,
    ),
    Panel(
        "lens", "When the prediction is made",
        "Each state is read through the model's own final norm and head: where the curves level off, later blocks no "
        "longer change what the head reads.",
        ("lens_loss", "lens_kl", "lens_top1"), _measured("lens_loss", "lens_kl", "lens_top1"), ("lens",), 5.4, 2, _lens,
    ),
)  # fmt: skip
