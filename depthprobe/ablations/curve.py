"""The curve of stages: as a table on disk and on the terminal."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthprobe.ablations.staging import Staging
from depthprobe.errors import OutputError
from depthprobe.estimate import Interval

__all__ = ["save_staging", "show_staging", "staging_frame"]

FEW = 32
_VALUES = ("relative_kl", "kl", "delta_loss", "top1_agreement")


def staging_frame(found: Staging) -> pd.DataFrame:
    """One row a point: stages, schedule, combine, then each value with ci_low and ci_high."""
    rows = []
    for point in found.points:
        row: dict[str, object] = {"stages": point.stages, "schedule": point.schedule, "combine": found.combine}
        for name in _VALUES:
            interval: Interval = getattr(point, name)
            row |= {name: interval.value, f"{name}_ci_low": interval.low, f"{name}_ci_high": interval.high}
        rows.append({**row, "n": found.sequences})
    return pd.DataFrame(rows)


def save_staging(found: Staging, folder: Path) -> Path:
    """Write stages.csv into a folder, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    path = folder / "stages.csv"
    temporary = folder / f".stages.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging_frame(found).to_csv(temporary, index=False, lineterminator="\n")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror or error}", fix="choose another --out") from None
    return path


def show_staging(found: Staging, console: Console | None = None) -> None:
    """Print D(κ) and the curve."""
    console = console or Console(highlight=False)
    for kappa in found.depth:
        console.print(Text(_depth(found, kappa)))
    if found.sequences < FEW:
        console.print(
            Text(f"Intervals rest on {found.sequences} sequences; below {FEW} they tend to be too narrow.", "dim")
        )
    console.print(Text(f"Searched: {found.searched}. KL to the unigram: {found.unigram_kl:.2f} nats.", "dim"))
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for heading in ("stages", "of unigram KL", "Δ loss", "top-1"):
        table.add_column(heading, justify="right")
    table.add_column("schedule", overflow="fold")
    for point in found.points:
        kl, loss, top = point.relative_kl, point.delta_loss, point.top1_agreement
        share = f"{kl.value:.3g} [{kl.low:.3g}, {kl.high:.3g}]"
        table.add_row(
            str(point.stages), share, f"{loss.value:+.3f}", f"{top.value:.2f}", Text(point.schedule or "none")
        )
    console.print(table)


def _depth(found: Staging, kappa: float) -> str:
    """D(κ) in words; what is only known to be so at most is not printed as a value."""
    depth, within = found.depth[kappa], f"of {found.units} stages keep the KL within {kappa:.0%} of the unigram's"
    if found.at_most(kappa):
        return f"at most {depth.value:.0f} {within}; no fewer were tried"
    bound = "at most " if 0 < found.points[-1].stages == depth.low else ""
    return f"{depth.value:.1f} {within}  [{bound}{depth.low:.1f}, {depth.high:.1f}]"
