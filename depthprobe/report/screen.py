"""The report on a terminal: one screen, plain text where it is piped."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthprobe.report.findings import findings, headline
from depthprobe.report.html import visible
from depthprobe.report.schema import Report
from depthprobe.report.tables import layer_table

__all__ = ["show"]

_LAYERS = 6
_COLUMNS = 7


def show(report: Report, console: Console | None = None, saved: Path | None = None) -> None:
    """Print what was measured, at most six layers of it, and where the report is.

    Args:
        report: what to print.
        console: where to; standard output by default, without colour where that is not a terminal.
        saved: the path of report.html, printed last.
    """
    console = console or Console(highlight=False)
    name = visible(report.model["name"])
    console.print(Text(name if len(name) <= 60 else name[:59] + "…", "bold"), Text(headline(report), "dim"), sep="\n")
    console.print(_findings(report))
    console.print(_layers(report, console.width))
    failed = [check["name"] for check in report.verification if not check["passed"]]
    if failed:
        console.print(Text(f"Verification: {', '.join(failed)} failed; see the report", "bold red"))
    else:
        console.print(Text(f"Verification: all {len(report.verification)} checks hold", "green"))
    if saved is not None:
        console.print(Text(f"Report: {saved}"), soft_wrap=True)


def _findings(report: Report) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings(report):
        grid.add_row(finding.topic, Text(finding.text))
    return grid


def _layers(report: Report, width: int) -> Table:
    table = layer_table(report, _LAYERS)
    grid = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    shown = max(1, min(_COLUMNS, (width - 6) // 11))
    grid.add_column("l", justify="right")
    for heading in table.headings[:shown]:
        grid.add_column(heading, justify="right", no_wrap=True)
    for layer, cells in table.rows:
        grid.add_row(str(layer), *cells[:shown])
    return grid
