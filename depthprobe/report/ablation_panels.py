"""What each figure of a changed model draws: merges against their controls, ρ, the loss, other kinds, cheap proxies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from depthprobe.report.ablation_tables import (
    by_sum_alone,
    cost_metric,
    headline_merge,
    label_text,
    merges,
    metric_rows,
    others,
    series,
)
from depthprobe.report.panels import Panel, Theme, finish
from depthprobe.report.schema import Report
from depthprobe.report.tables import number, visible, with_interval

__all__ = ["ABLATION_PANELS"]

_FLOOR = 1e-6  # costs that a logarithmic axis does not tell apart: rounding makes more
_MOST = 6
_WITHOUT_MATHS = str.maketrans("", "", "$\\")


@dataclass(frozen=True)
class _Look:
    """How one curve looks; `line` is the place of its colour in the theme, or None for ink."""

    line: int | None
    dash: Any
    marker: str
    width: float = 1.3
    band: float = 0.13


_MERGE = _Look(0, "-", "o", 2.2, 0.25)
_CONTROLS = {
    "skip": _Look(1, "-", "s"),
    "skip both": _Look(1, (0, (4, 1.5)), "D"),
    "swap": _Look(2, "-", "^"),
    "apart": _Look(3, (0, (5, 1.5, 1.2, 1.5)), "v"),
    "random": _Look(None, (0, (1.5, 1.2)), "x", 1.1, 0.08),
}
_THIN = tuple(_Look(0, dash, "", 0.9, 0.0) for dash in ((0, (4, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5))))
_OTHERS = tuple(
    _Look(place, dash, marker)
    for place, dash, marker in (
        (0, "-", "o"), (1, (0, (4, 1.5)), "s"), (2, (0, (1.5, 1.2)), "^"), (3, (0, (5, 1.5, 1.2, 1.5)), "D"),
        (None, "-", "v"), (None, (0, (4, 1.5)), "x"),
    )
)  # fmt: skip


def _curve(ax: Axes, theme: Theme, label: str, rows: pd.DataFrame, look: _Look, floor: float | None = None) -> None:
    """One curve with its interval; values below `floor` are drawn at it."""
    colour = theme.ink if look.line is None else theme.lines[look.line]
    value, low, high = (rows[name].to_numpy(dtype=float) for name in ("value", "ci_low", "ci_high"))
    if floor is not None:
        value, low, high = (np.maximum(column, floor) for column in (value, low, high))
    edge: dict[str, Any] = {} if look.marker == "x" else {"markeredgecolor": theme.background, "markeredgewidth": 0.5}
    ax.plot(rows["layer"], value, label=label, color=colour, linestyle=look.dash, linewidth=look.width,
            marker=look.marker, markersize=5 if len(rows) <= 40 else 3, zorder=2 + look.width / 10, **edge)  # fmt: skip
    if len(rows) == 1:
        known = np.isfinite(low) & np.isfinite(high)
        ax.vlines(rows["layer"][known], low[known], high[known], color=colour, linewidth=look.width)
    elif look.band:
        ax.fill_between(rows["layer"], low, high, color=colour, alpha=look.band, linewidth=0)


def _log_cost(ax: Axes, theme: Theme, report: Report, drawn: Sequence[pd.DataFrame]) -> None:
    """A logarithmic axis of costs that begins at the smallest value, not where an interval reaches for zero."""
    values = np.concatenate([rows["value"].to_numpy(dtype=float) for rows in drawn])
    ax.set_yscale("log")
    ax.set_ylim(bottom=max(_FLOOR / 2, float(values.min()) / 1.6))
    if (values < _FLOOR).any():
        ax.text(0.01, _FLOOR, "$10^{-6}$ or less", transform=ax.get_yaxis_transform(), va="bottom", fontsize=8,
                color=theme.ink, alpha=0.8)  # fmt: skip
    _plain_numbers(ax)
    finish(ax, _axis(report), "layer $l$, the first that is changed")


def _plain_numbers(ax: Axes) -> None:
    """0.1 in place of a power of ten; between the powers only where there would be few numbers."""
    low, high = ax.get_ylim()
    ax.yaxis.set_major_formatter("{x:g}")
    near = ax.get_yscale() == "log" and high / low < 12
    ax.yaxis.set_minor_formatter("{x:g}" if near else NullFormatter())


def _axis(report: Report) -> str:
    return "KL, nats a token" if cost_metric(report) == "kl" else "1 − cos of the last state"


def _cost_curves(report: Report) -> list[tuple[str, pd.DataFrame, _Look]]:
    cost = cost_metric(report)
    best, *rest = merges(report, cost)
    drawn = [(f"merge $l$, $l+1$ ({best.label})", best.rows, _MERGE)]
    drawn += [(f"merged: {one.label}", one.rows, look) for one, look in zip(rest, _THIN, strict=False)]
    controls = series(report, cost)
    for name, look in _CONTROLS.items():
        if name in controls:
            how = " (by sum)" if by_sum_alone(name, best) else ""
            drawn.append((f"{controls[name].label}{how}", controls[name].rows, look))
    return drawn


def _merge_cost(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    curves = _cost_curves(report)
    for label, rows, look in curves:
        _curve(axes[0], theme, label, rows, look, _FLOOR)
    _log_cost(axes[0], theme, report, [rows for _, rows, _ in curves])


def _rho(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, rho = axes[0], report.merging["rho"]
    rows = _rho_rows(report)
    layers, values = rows["layer"].to_numpy(dtype=float), rows["value"].to_numpy(dtype=float)
    colour = theme.lines[0]
    known = rows.dropna(subset=["ci_low", "ci_high"])
    ax.vlines(known["layer"], known["ci_low"].clip(lower=_FLOOR), known["ci_high"], color=colour, linewidth=1.4)
    ax.plot(layers, values, linestyle="", marker="o", markersize=5, color=colour, label=r"$\rho_l$")
    ax.axhline(1, color=theme.ink, linewidth=1.0, label="merge = skip")
    slope = rho.get("slope") or {}
    if slope.get("value") is not None and len(rows) > 1:
        # the slope is the report's own, of log ρ over relative depth; only the line's height is set here
        depth = layers / (layers.max() or 1)
        about, height = depth - depth.mean(), np.log(values).mean()
        ax.plot(layers, np.exp(height + slope["value"] * about), color=theme.lines[1], linewidth=1.4,
                linestyle=(0, (4, 1.5)), label="fitted slope")  # fmt: skip
        if None not in (slope["ci_low"], slope["ci_high"]):
            ends = [np.exp(height + end * about) for end in (slope["ci_low"], slope["ci_high"])]
            ax.fill_between(layers, np.minimum(*ends), np.maximum(*ends), color=theme.lines[1], alpha=0.15, linewidth=0)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.85), max(high, 1.2))
    _plain_numbers(ax)
    finish(ax, r"$\rho_l$")


def _rho_rows(report: Report) -> pd.DataFrame:
    rows = pd.DataFrame(report.merging["rho"]["layers"]).astype(
        {"layer": int, "value": float, "ci_low": float, "ci_high": float}
    )
    return rows.assign(value=rows["value"].clip(lower=_FLOOR)).sort_values("layer").reset_index(drop=True)


def _loss_curves(report: Report) -> list[tuple[str, pd.DataFrame, _Look]]:
    rows = metric_rows(report, "delta_loss")
    rows = rows[(rows["count"] == 1) & (rows["kind"] == "skip")]
    looks = {"block": _CONTROLS["skip"], "attention": _OTHERS[2], "mlp": _OTHERS[3]}
    drawn = [
        (f"skip {'block' if unit == 'block' else unit} $l$", rows[rows["unit"] == unit].sort_values("layer"), look)
        for unit, look in looks.items()
        if (rows["unit"] == unit).any()
    ]
    # the same way to combine that headlines the costs, whatever the loss would choose
    chosen = headline_merge(report, cost_metric(report))
    same = [one for one in merges(report, "delta_loss") if chosen is not None and one.label == chosen.label]
    return drawn + [(f"merge $l$, $l+1$ ({one.label})", one.rows, _MERGE) for one in same]


def _loss(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, curves = axes[0], _loss_curves(report)
    for label, rows, look in curves:
        _curve(ax, theme, label, rows, look)
    sizes = np.abs(np.concatenate([rows["value"].to_numpy(dtype=float) for _, rows, _ in curves]))
    typical = float(np.median(sizes))
    if typical > 0 and sizes.max() > 20 * typical:
        near = 10.0 ** np.floor(np.log10(typical))
        ax.set_yscale("symlog", linthresh=near, linscale=0.6)
        _plain_numbers(ax)
    ax.axhline(0, color=theme.ink, linewidth=0.8, alpha=0.6)
    finish(ax, "change of the loss, nats a token")


def _other_kinds(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    found = others(report, cost_metric(report))[:_MOST]
    for one, look in zip(found, _OTHERS, strict=False):
        _curve(axes[0], theme, one.label, one.rows, look, _FLOOR)
    _log_cost(axes[0], theme, report, [one.rows for one in found])


def _proxies(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    ax, rows = axes[0], _known_proxies(report)[::-1]
    for place, row in enumerate(rows):
        if row["ci_low"] is not None and row["ci_high"] is not None:
            ax.hlines(place, row["ci_low"], row["ci_high"], color=theme.lines[0], linewidth=1.6)
        ax.plot(row["value"], place, marker="o", markersize=6, color=theme.lines[0])
    ax.axvline(0, color=theme.ink, linewidth=0.8, alpha=0.6)
    ax.set(xlim=(-1.04, 1.04), ylim=(-0.6, len(rows) - 0.4), xlabel="Spearman's rank correlation over blocks")
    ax.set_yticks(range(len(rows)), [_against(row) for row in rows])


def _known_proxies(report: Report) -> list[dict[str, Any]]:
    return [row for row in report.merging.get("proxies") or [] if row["value"] is not None]


def _against(row: dict[str, Any]) -> str:
    return f"{label_text(row['proxy'])}\nfor {label_text(row['cost'])}"


def _said(label: str, rows: pd.DataFrame) -> str:
    values = rows["value"]
    ends = f"from {number(float(values.iloc[0]))} at {rows['layer'].iloc[0]} to {number(float(values.iloc[-1]))}"
    between = f"between {number(float(values.min()))} and {number(float(values.max()))}"
    return f"{label.translate(_WITHOUT_MATHS)} {ends} at {rows['layer'].iloc[-1]}, {between}"


def _alt(curves: Sequence[tuple[str, pd.DataFrame]]) -> str:
    return f"Curves over depth: {'; '.join(_said(label, rows) for label, rows in curves)}."


def _has_rho(report: Report) -> bool:
    return bool((report.merging.get("rho") or {}).get("layers"))


def _rho_alt(report: Report) -> str:
    median = report.merging["rho"].get("median") or {}
    about = f"; median {with_interval(median)}" if median.get("value") is not None else ""
    return f"Points with intervals over depth: {_said('rho', _rho_rows(report))}{about}."


def _proxies_alt(report: Report) -> str:
    each = "; ".join(f"{row['proxy']} for {row['cost']} {with_interval(row)}" for row in _known_proxies(report))
    return f"Rank correlations with intervals: {visible(each)}."


ABLATION_PANELS: tuple[Panel, ...] = (
    Panel(
        "merge_cost", "What merging two neighbours costs",
        "At l: if blocks l and l+1 were one wider layer, running both on the same input would cost far less than "
        "skipping either and less than the controls; a curve that merely falls with depth may only say that late "
        "blocks do less.",
        ("kl", "state_distance"), lambda report: bool(merges(report, cost_metric(report))), (), 4.6, 1, _merge_cost,
        lambda report: _alt([(label, rows) for label, rows, _ in _cost_curves(report)]),
    ),
    Panel(
        "rho", "Merge against skip",
        "Below 1, hiding block l's update from block l+1 alone (a merge by sum) costs less than hiding it from all "
        "later blocks; the slope says whether that changes with depth.",
        ("rho",), _has_rho, (), 3.4, 1, _rho, _rho_alt,
    ),
    Panel(
        "delta_loss", "What skips and merges do to the loss",
        "Above 0 the changed model predicts this corpus worse, below 0 better; where a skip costs nothing, the block "
        "is not needed for this corpus.",
        ("delta_loss",), lambda report: bool(_loss_curves(report)), ("state_distance",), 3.6, 1, _loss,
        lambda report: _alt([(label, rows) for label, rows, _ in _loss_curves(report)]),
    ),
    Panel(
        "other_changes", "Other changes",
        "Each curve is one kind of change, made at every place that it fits: the lower, the less the model notices it.",
        ("kl", "state_distance"), lambda report: bool(others(report, cost_metric(report))), (), 3.2, 1, _other_kinds,
        lambda report: _alt([(one.label, one.rows) for one in others(report, cost_metric(report))[:_MOST]]),
    ),
    Panel(
        "proxies", "Whether a cheap measurement can stand in",
        "At 1 the cheap metric orders the blocks exactly as their measured cost does, at 0 it says nothing about it.",
        ("block_influence", "update_ratio", "angular_distance", "interaction_error"),
        lambda report: bool(_known_proxies(report)), (), 3.0, 1, _proxies, _proxies_alt,
    ),
)  # fmt: skip
