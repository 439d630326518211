"""`depthprobe metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from depthprobe.commands.options import Debug


def metrics(
    name: Annotated[str | None, typer.Argument(help="One metric; all of them by default.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Print the glossary: every metric's name, formula, source, and how to read it."""
    from rich.console import Console
    from rich.text import Text

    from depthprobe.glossary import METRICS, NOTATION, lookup

    console = Console(highlight=False)
    if name is None:
        console.print(Text(NOTATION), "", sep="\n")
    for metric in METRICS.values() if name is None else [lookup(name)]:
        where = "report.json" if metric.table == "report" else f"{metric.table}.csv"
        console.print(Text.assemble((metric.name, "bold"), f"  {metric.title}", (f"  [{where}]", "dim")))
        console.print(Text(f"    {metric.formula}"))
        console.print(Text(f"    {metric.reading}"))
        if metric.source:
            console.print(Text(f"    {metric.source}", "dim"))
        console.print()
