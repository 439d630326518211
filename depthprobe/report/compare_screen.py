"""A comparison on a terminal: one screen, plain text where it is piped."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthprobe.report.compare_schema import Comparison
from depthprobe.report.compare_tables import headline, model_rows, scalars, tally, verdict_rows
from depthprobe.report.tables import shortened, visible

__all__ = ["show_comparison"]

_RUNS = 6
_LINES = 4
_NAME = 22
_COLOURS = {"supported": "green", "contradicted": "red"}


def show_comparison(comparison: Comparison, console: Console | None = None, saved: Path | None = None) -> None:
    """Print the models, what is unfair, what is one number a model, and the verdict.

    Args:
        comparison: what to print.
        console: where to; standard output by default, without colour where that is not a terminal.
        saved: the path of compare.html, printed last.
    """
    console = console or Console(highlight=False)
    console.print(Text(headline(comparison), "bold"))
    console.print(_models(comparison))
    for warning in comparison.warnings:
        console.print(Text(f"! {visible(warning)}", "yellow"))
    console.print(_scalars(comparison, console.width))
    console.print(Text(f"Verdict: {tally(comparison)}", "bold"))
    verdict, silent = _verdict(comparison)
    if verdict:
        console.print(verdict, no_wrap=True, overflow="ellipsis")
    if silent:
        console.print(Text(f"cannot be judged here: {', '.join(silent)}", "dim"))
    for note in comparison.notes:
        console.print(Text(visible(note), "dim"))
    if saved is not None:
        console.print(Text(f"Comparison: {saved}"), soft_wrap=True)


def _models(comparison: Comparison) -> Table:
    grid = Table.grid(padding=(0, 2))
    rows = model_rows(comparison)
    for row in rows[:_RUNS]:
        grid.add_row(*(Text(visible(row[key])) for key in ("name", "group", "build", "dtype", "training")))
    if len(rows) > _RUNS:
        grid.add_row(f"and {len(rows) - _RUNS} more")
    return grid


def _scalars(comparison: Comparison, width: int) -> Table:
    shown = max(1, min(_LINES, (width - 24) // 26))
    table = scalars(comparison, shown)
    grid = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    more = len(comparison.lines) - shown
    grid.add_column(f"(and {more} more lines)" if more > 0 else "", no_wrap=True)
    for heading in table.headings:
        grid.add_column(Text(_short(heading)), justify="right", no_wrap=True)
    for what, cells in table.rows:
        grid.add_row(what, *cells)
    return grid


def _verdict(comparison: Comparison) -> tuple[Text, list[str]]:
    """A line a criterion that was judged, and the claims that could not be."""
    rows = verdict_rows(comparison)
    judged = [row for row in rows if row["shown"]]
    widths = {key: max((len(visible(row[key])) for row in judged), default=0) for key in ("verdict", "run", "shown")}
    widths["run"] = min(widths["run"], _NAME)
    said = Text()
    for row in judged:
        name = _short(row["run"])
        said.append(f"{row['claim']} ")
        said.append(row["verdict"].ljust(widths["verdict"]), _COLOURS.get(row["verdict"], ""))
        said.append(f"  {name.ljust(widths['run'])}  {row['shown'].rjust(widths['shown'])}  {row['criterion']}\n")
    said.rstrip()
    told = {row["claim"] for row in judged}
    return said, list(dict.fromkeys(row["claim"] for row in rows if row["claim"] not in told))


def _short(name: str) -> str:
    return shortened(name, _NAME)
