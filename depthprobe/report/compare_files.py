"""A comparison's folder, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from depthprobe.errors import UsageError
from depthprobe.report import compare_html
from depthprobe.report.compare_panels import COMPARE_PANELS, available
from depthprobe.report.compare_schema import Comparison
from depthprobe.report.files import write_whole

__all__ = ["save"]


def save(comparison: Comparison, directory: Path, figure_format: str = "png") -> Path:
    """What `Comparison.save` does."""
    if figure_format not in ("png", "svg"):
        raise UsageError(f"figures cannot be written as {figure_format!r}", "png or svg", "pass one of the two")
    contents = {"compare.json": comparison.to_json().encode()}
    tables = {"compare": comparison.table, "differences": comparison.differences, "verdict": comparison.verdict}
    for name, table in tables.items():
        if name != "differences" or len(comparison.lines) > 1:
            csv = table.to_csv(index=False, lineterminator="\n")
            contents[f"{name}.csv"] = csv.encode(errors="backslashreplace")
    for panel in available(comparison):
        contents[f"figures/compare_{panel.name}.{figure_format}"] = compare_html.render(
            comparison, panel, figure_format
        )
    contents["compare.html"] = compare_html.page(comparison).encode(errors="backslashreplace")
    stale = {f"figures/compare_{panel.name}.{kind}" for panel in COMPARE_PANELS for kind in ("png", "svg")}
    write_whole(contents, directory, stale | {"differences.csv"})
    return directory / "compare.html"
