"""The figure of gradients: how large they are at every state, on their way down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatterSciNotation

from depthprobe.report.panels import Panel, Theme, lines
from depthprobe.report.schema import Report
from depthprobe.report.tables import by_layer, number

__all__ = ["GRADIENT_PANELS", "PlainLog"]

_METRICS = ("gradient_norm", "gradient_norm_median", "gradient_norm_random", "gradient_norm_random_median")
_APART = 4.0  # how many times larger or smaller than all others x_0's gradient may be and still be drawn


class PlainLog(LogFormatterSciNotation):
    """1.2 instead of 1.2 × 10⁰, at the places that a logarithmic axis has room for."""

    def __call__(self, x: float, pos: Any = None) -> str:
        """The label of a tick at x; empty where there is no room."""
        if not super().__call__(x, pos):
            return ""
        return f"{x:.3g}" if 1e-4 <= x < 1e5 else super().__call__(x, pos)


def _draw(report: Report, axes: Sequence[Axes], theme: Theme) -> None:
    for ax, metric, ylabel in zip(
        axes,
        ("gradient_norm", "gradient_norm_random"),
        (r"loss: $\|\partial\ell/\partial x_l\|$", r"random: $\|v^\top \partial x_L/\partial x_l\|$"),
        strict=True,
    ):
        apart = _apart(report, metric)
        rows = report.layers
        rows = rows[~(rows["metric"].str.startswith("gradient") & (rows["layer"] == 0))] if apart else rows
        what = [(metric, "block", "mean"), (f"{metric}_median", "block", "median")]
        tables = lines(replace(report, layers=rows), ax, theme, what, ylabel)
        if any((one["value"] > 0).any() for one in tables):
            ax.set_yscale("log", nonpositive="mask")
            ax.yaxis.set_major_formatter(PlainLog())
            ax.yaxis.set_minor_formatter(PlainLog())
        said = f"at $x_0$, off this scale: {apart}" if apart else "" if tables else "not measured"
        ax.text(0.99, 0.95, said, transform=ax.transAxes, ha="right", va="top", color=theme.ink, fontsize=9)
        if not tables:
            ax.set_yticks([])


def _apart(report: Report, metric: str) -> str | None:
    """The gradient at x_0, where drawing it would flatten all others."""
    values = by_layer(report, metric)
    first, others = values.get(0), [value for layer, value in values.items() if layer > 0 and value > 0]
    if first is None or len(others) < 2 or min(others) / _APART <= first <= max(others) * _APART:
        return None
    return number(first)


GRADIENT_PANELS: tuple[Panel, ...] = (
    Panel(
        "gradients", "How the gradient travels down",
        "A gradient travels from right to left: where a curve rises towards the left, the blocks amplify it. The "
        "random one does not depend on head and targets, and is 1 at x_L; at x_0 both depend on the embedding's scale.",
        _METRICS, lambda report: bool({*report.layers["metric"]} & {*_METRICS}), ("gradient",), 5.4, 2, _draw,
    ),
)  # fmt: skip
