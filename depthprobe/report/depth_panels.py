"""The figures of effective depth: estimates beside their controls, where depth builds up, and who affects whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from depthprobe.report.depth_tables import CONTROLS, SHARES, control_names, curve_of, label
from depthprobe.report.panels import Panel, Theme, finish
from depthprobe.report.schema import Report
from depthprobe.report.tables import number, with_interval

__all__ = ["DEPTH_PANELS", "LATER_PANELS"]

_METRICS = (
    "stages",
    "dependence",
    "path_elasticity",
    "path_elasticity_raw",
    "path_spectrum",
    "cosine_crossing",
    "lens_kl_depth",
    "lens_overlap_depth",
    "depth_score",
    "participation",
)
_HOLLOW = ("s", "^")


def _shown(report: Report) -> pd.DataFrame:
    """Estimates of the whole model."""
    table = report.depth
    return table[(table["of"] == table["of"].max()) & ~table["name"].isin(SHARES)]


def _draw_estimates(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, rows = axes[0], _shown(report)
    places = {(row["name"], row["variant"]): place for place, (_, row) in enumerate(rows.iterrows())}
    held = [row for row in report.deep.get("controls", []) if (row["name"], row["variant"]) in places]
    for place, control in enumerate(control_names(report)):
        mine = [row for row in held if row["control"] == control]
        ax.plot(
            [row["value"] for row in mine],
            [places[row["name"], row["variant"]] + 0.18 * (place * 2 - 1) for row in mine],
            linestyle="",
            marker=_HOLLOW[place % len(_HOLLOW)],
            markerfacecolor="none",
            markeredgecolor=theme.lines[2 + place],
            markersize=5,
            label=CONTROLS[control],
        )
    for passed, colour, said in ((True, theme.lines[1], "passes the gate"), (False, theme.lines[0], "does not pass")):
        some = rows[rows["passes_gate"] == passed]
        if some.empty:
            continue
        y = [places[name, variant] for name, variant in zip(some["name"], some["variant"], strict=True)]
        low, high = (some[end].astype(float) for end in ("ci_low", "ci_high"))  # which need not enclose the value
        ax.hlines(y, low, high, color=colour, linewidth=1.6)
        ax.plot(some["value"], y, linestyle="", marker="D" if passed else "o", color=colour, markersize=6, label=said)
    ax.set_yticks(list(places.values()), [label({"name": name, "variant": variant}) for name, variant in places])
    ax.set_ylim(len(places) - 0.5, -0.5)  # from above, with room for the controls of a single one
    of = int(report.depth["of"].max())
    ends = [rows[name].astype(float) for name in ("value", "ci_low", "ci_high")]
    # an elasticity may be negative, or above N
    drawn = np.concatenate([[0, of], *ends, [row["value"] for row in held]])
    ax.set_xlim(np.nanmin(drawn) - 0.02 * of, np.nanmax(drawn) + 0.04 * of)
    ax.axvline(of, color=theme.ink, linewidth=0.8)
    finish(ax, "", f"{report.deep.get('unit', 'block')}s, of {of}")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0.2)  # beside long names


def _draw_profile(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    of = int(report.depth["of"].max())
    read = curve_of(report, "dependence/profile")
    variants = [] if read.empty else list(dict.fromkeys(read["variant"]))
    for place, variant in enumerate(variants):
        rows = read[read["variant"] == variant]
        said = f"depth of a unit by dependence{f' ({variant})' if variant else ''}"
        _line(axes[0], rows.iloc[:-1].assign(unit=rows["reader"].iloc[:-1] - 1), "d", theme.lines[place], said)
    passed = curve_of(report, "elasticity/profile")
    if not passed.empty:
        rows = passed.assign(unit=range(len(passed)))
        _line(axes[1], rows, "value", theme.lines[2], "part of a unit in path_elasticity")
    finish(axes[0], "depth of reading")
    finish(axes[1], "share of a step", "unit, from 0" if of != report.model["blocks"] else "block $l$")
    for ax in axes:
        if not ax.lines:
            ax.set_yticks([])
            ax.text(0.5, 0.5, "not estimated", transform=ax.transAxes, ha="center", color=theme.ink, fontsize=9)


def _line(ax: Axes, rows: pd.DataFrame, value: str, colour: str, said: str) -> None:
    known = rows.dropna(subset=["ci_low", "ci_high"])
    ax.plot(rows["unit"], rows[value], color=colour, marker="o", markersize=4, linewidth=1.6, label=said)
    low, high = (known[end].to_numpy(dtype=float) for end in ("ci_low", "ci_high"))
    ax.fill_between(known["unit"], low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_stages(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, rows = axes[0], curve_of(report, "stages/stages")
    ax.plot(rows["stages"], rows["relative_kl"], color=theme.lines[0], marker="o", markersize=4, linewidth=1.6)
    known = rows.dropna(subset=["relative_kl_ci_low", "relative_kl_ci_high"])
    if not known.empty:
        low, high = (known[end].to_numpy(dtype=float) for end in ("relative_kl_ci_low", "relative_kl_ci_high"))
        ax.fill_between(known["stages"], low, high, color=theme.lines[0], alpha=0.2, linewidth=0)
    for kappa in (0.01, 0.03, 0.1):
        ax.axhline(kappa, color=theme.ink, linewidth=0.7, linestyle=":")
    ax.set_yscale("log", nonpositive="mask")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    finish(ax, "KL, of that to the unigram", "sequential stages")


def _draw_effects(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    rows = curve_of(report, "effects/effects")
    rows = rows[rows["statistic"] == "mean"]
    kinds = list(dict.fromkeys(rows["tokens"]))
    top = float(np.nanquantile(rows["value"].astype(float), 0.98))
    for place, ax in enumerate(axes):
        if place >= len(kinds):
            ax.set_axis_off()
            continue
        square = rows[rows["tokens"] == kinds[place]].pivot(index="skipped", columns="unit", values="value")
        sns.heatmap(
            square.astype(float), ax=ax, vmin=0, vmax=top, cmap="mako_r" if theme.background == "#ffffff" else "mako",
            cbar_kws={"label": "relative change"}, square=False, linewidths=0,
        )  # fmt: skip
        ax.set(xlabel="later unit", ylabel="skipped unit", title=f"measured at {kinds[place]}")
        ax.tick_params(rotation=0)
        ax.grid(False)


def _draw_thresholds(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    tables = [curve_of(report, name) for name in ("crossing/thresholds", "lens/thresholds")]
    rows = pd.concat([table for table in tables if not table.empty])
    rows = rows[rows["variant"] == ""]
    for place, (name, mine) in enumerate(rows.groupby("name", sort=False)):
        share = np.linspace(0, 1, len(mine))
        ax, colour = axes[0], theme.lines[place % len(theme.lines)]
        ends = f"{number(float(mine['threshold'].iloc[0]), 2)} to {number(float(mine['threshold'].iloc[-1]), 2)}"
        ax.step(share, mine["value"], where="mid", color=colour, linewidth=1.6, label=f"{name}: {ends}")
        low, high = (mine[end].astype(float) for end in ("ci_low", "ci_high"))
        ax.fill_between(share, low, high, step="mid", color=colour, alpha=0.15, linewidth=0)
    axes[0].set_xticks([0, 0.5, 1], ["lowest", "", "highest"])
    axes[0].set(xlabel="threshold, over its range", ylabel="estimate")
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2)


def _alt(report: Report) -> str:
    said = [f"{label(row)} {with_interval(row)}" for _, row in _shown(report).iterrows()]
    return f"Estimates of effective depth with intervals, beside their controls: {'; '.join(said)}."


def _has(*names: str) -> Callable[[Report], bool]:
    """Whether one of these curves has a row."""
    return lambda report: any(not curve_of(report, name).empty for name in names)


DEPTH_PANELS: tuple[Panel, ...] = (
    Panel(
        "depth", "Estimates beside their controls",
        "Filled marks are this model, hollow ones the same model with random weights and on random tokens: an estimate "
        "that is no higher than these says nothing of what was learned.",
        _METRICS, lambda report: not report.depth.empty, ("effective depth",), 5.2, 1, _draw_estimates, _alt,
    ),
    Panel(
        "depth_profile", "Where depth builds up",
        "Above, how many units stand behind what a unit reads: a straight line up is a chain, a flat one units side by "
        "side. Below, how much of the gradient's way leads through each unit.",
        (), _has("dependence/profile", "elasticity/profile"), (), 5.0, 2, _draw_profile,
        lambda _: "Curves over units: the depth of reading of each, and its part in path_elasticity.",
    ),
    Panel(
        "stages", "How few stages will do",
        "The price of running in fewer sequential stages, as a share of the distance to predicting from frequencies "
        "alone; dotted at 1, 3 and 10 %.",
        (), _has("stages/stages"), (), 3.4, 1, _draw_stages,
        lambda _: "Curve of the cost of running the model in fewer stages.",
    ),
    Panel(
        "effects", "Which layers later layers need",
        "How much each later unit's update changes, relative to itself, when a unit is skipped; below, skipped at the "
        "first tokens only and measured at later ones, so that it went through attention.",
        (), _has("effects/effects"), (), 6.4, 2, _draw_effects,
        lambda _: "Heatmaps of the relative change of each later update when a unit is skipped.",
    ),
    Panel(
        "thresholds", "What the published thresholds decide",
        "The published estimates are read off at one threshold: the flatter a curve, the less its choice matters.",
        ("cosine_crossing", "lens_kl_depth", "lens_overlap_depth"),
        _has("crossing/thresholds", "lens/thresholds"), (), 3.4, 1, _draw_thresholds,
        lambda _: "Steps of the published estimates over their thresholds.",
    ),
)  # fmt: skip

LATER_PANELS = tuple(panel for panel in DEPTH_PANELS if panel.name == "effects")  # which a sweep alone gives, too
