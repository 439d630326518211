"""A comparison as one page that opens offline, in the style of a report's page."""

from __future__ import annotations

from typing import Any

from depthprobe.glossary import METRICS
from depthprobe.report import compare_tables
from depthprobe.report.compare_panels import DRAWN, ComparePanel, alt_text, available, draw
from depthprobe.report.compare_schema import Comparison
from depthprobe.report.figures import drawn
from depthprobe.report.html import data_uri, environment, resource
from depthprobe.report.panels import DARK, LIGHT, Theme

__all__ = ["page", "render"]


def render(comparison: Comparison, panel: ComparePanel, file_format: str = "png", theme: Theme = LIGHT) -> bytes:
    """One figure as the bytes of a png or svg file."""
    return drawn(
        lambda axes: draw(comparison, panel, axes, theme), panel.height, len(panel.metrics), file_format, theme
    )


def page(comparison: Comparison) -> str:
    """The whole page, figures included in a light and a dark variant."""
    used = set(comparison.table["metric"])
    rows = compare_tables.verdict_rows(comparison)
    names = ", ".join(line["name"] for line in comparison.lines)
    return (
        environment()
        .get_template("compare.html.jinja")
        .render(
            css=resource("page.css"),
            version=comparison.run["depthprobe"],
            title=names,
            comparison=comparison,
            headline=compare_tables.headline(comparison),
            models=compare_tables.model_rows(comparison),
            scalars=compare_tables.scalars(comparison),
            judged_rows=[row for row in rows if row["shown"]],
            silent_rows=[row for row in rows if not row["shown"]],
            first_up=_first_up,
            tally=compare_tables.tally(comparison),
            judged=compare_tables.how_judged(),
            sections=[_section(comparison, panel, used) for panel in available(comparison)],
            drawn=DRAWN if len(comparison.lines) > DRAWN else None,
            differences=compare_tables.difference_tables(comparison),
        )
    )


def _first_up(text: str) -> str:
    """A sentence from a phrase; a formula that it begins with stays as it is."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _section(comparison: Comparison, panel: ComparePanel, used: set[str]) -> dict[str, Any]:
    return {
        "panel": panel,
        "reason": None,
        "metrics": [METRICS[name] for name in panel.names if name in used],
        "light": data_uri(render(comparison, panel, "svg", LIGHT)),
        "dark": data_uri(render(comparison, panel, "svg", DARK)),
        "alt": alt_text(comparison, panel),
        "height": round(panel.height * 96),
    }
