"""The report on a terminal: one screen, plain text where it is piped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthprobe.report.depth_tables import CONTROLS, control_names, depth_lines
from depthprobe.report.findings import findings
from depthprobe.report.headline import headline
from depthprobe.report.schema import Report
from depthprobe.report.tables import anatomy_rows, layer_table, number, visible

__all__ = ["show", "show_anatomy", "show_depth", "show_schedules"]

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


def show_anatomy(found: dict[str, Any], console: Console | None = None) -> None:
    """Print what `depthprobe.inspect` returns: the map, the placement of every block, and the checks.

    Args:
        found: `model`, `anatomy` and `verification`.
        console: where to; standard output by default.
    """
    console = console or Console(highlight=False)
    model, anatomy = found["model"], found["anatomy"]
    order = "causal" if anatomy["causal"] else "bidirectional"
    head = {"causal": "a next-token head", "masked": "a masked-token head"}.get(
        model["objective"], "no language-model head"
    )
    facts = (
        f"{model['architecture']}, {model['parameters']:,} parameters, {model['dtype']}, on {model['device']}",
        f"{model['blocks']} blocks at {anatomy['block_list']}, width {model['width']}, {order}, {head}",
        f"norm placement: {anatomy['summary']}",
    )
    console.print(Text(visible(model["name"]), "bold"), *map(Text, facts), sep="\n")
    rows = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for heading in ("blocks", "attention", "mlp"):
        rows.add_column(heading, overflow="fold")
    for row in anatomy_rows(anatomy):
        rows.add_row(*(Text(row[name]) for name in ("blocks", "attention", "mlp")))
    checks = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for heading in ("check", "difference", "floor", ""):
        checks.add_column(heading, overflow="fold")
    for check in found["verification"]:
        verdict = Text("holds", "green") if check["passed"] else Text("fails", "bold red")
        checks.add_row(check["what"], f"{check['value']:.1e}", f"{check['floor']:.0e}", verdict)
    console.print(rows, checks, sep="\n")
    for note in (*model["notes"], *anatomy["notes"]):
        console.print(Text(visible(note), "dim"))


def show_depth(report: Report, console: Console | None = None) -> None:
    """Print every estimate for the whole model beside its controls, a line each; the report has the intervals of all.

    What could not be estimated follows, with the reason.

    Args:
        report: with estimates.
        console: where to; standard output by default.
    """
    console = console or Console(highlight=False)
    lacking = [one for one in report.deep.get("estimators", []) if one["reason"]]
    missing = Text("\n".join(f"{one['name']} was left out: {visible(one['reason'])}" for one in lacking), "dim")
    if report.depth.empty:
        console.print("No number of units was estimated.", missing, sep="\n" if lacking else "")
        return
    grid = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    grid.add_column("estimate", overflow="fold")
    for heading in ("value", *(CONTROLS[name] for name in control_names(report)), "gate"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for line in depth_lines(report):
        if line.whole:
            name, said = f"{line.name} {line.variant}".strip(), Text("passes", "green") if line.passed else "–"
            grid.add_row(Text(visible(name)), line.value, *(cell.split(" [")[0] for cell in line.controls), said)
    console.print(grid)
    if lacking:
        console.print(missing)


def show_schedules(table: pd.DataFrame, console: Console | None = None) -> None:
    """Print what each schedule costs, a line each.

    Args:
        table: rows of `ablations.csv`.
        console: where to; standard output by default.
    """
    console = console or Console(highlight=False)
    values = table.pivot_table(index="schedule", columns="metric", values="value", sort=False)
    names = [name for name in ("kl", "delta_loss", "top1_agreement", "state_distance") if name in values]
    grid = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    grid.add_column("schedule", overflow="fold")
    for name in names:
        grid.add_column(name, justify="right")
    for schedule, row in values.iterrows():
        grid.add_row(Text(visible(str(schedule))), *(number(float(row[name])) for name in names))
    console.print(grid)


def _findings(report: Report) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings(report):
        said = finding.text if finding.short is None else finding.short
        if said:
            grid.add_row(finding.topic, Text(said))
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
