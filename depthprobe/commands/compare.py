"""`depthprobe compare`."""

from __future__ import annotations

import glob
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthprobe.commands.options import (
    OUT_PANEL,
    Bos,
    Data,
    Debug,
    Device,
    Dtype,
    Figures,
    InterruptedRunError,
    Seed,
    SeqLen,
    TextField,
    Tokens,
    Trust,
    check_figures,
    command_line,
)
from depthprobe.errors import UsageError

if TYPE_CHECKING:
    from depthprobe.measure import Progress


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            help="Folders that analyze wrote, or checkpoints, which are analyzed first. Of a folder that train wrote "
            "every checkpoint is taken.",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATTERN",
            show_default=False,
            help="Join runs, which are training seeds of one model, into one line with a band. Repeat it for every "
            "group; quote the pattern.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the comparison.", rich_help_panel=OUT_PANEL)] = Path(
        "reports/compare"
    ),
    figures: Figures = "png",
    data: Data = None,
    tokens: Tokens = 8192,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Put models side by side against relative depth, and judge the claims on layer normalisation by them.

    Differences come with intervals, at equal tokens of training, and at equal loss where the lab kept checkpoints
    (`train --save-at`). The interval of a run is over sequences; of a group it is over its seeds, paired where two
    groups have the same ones. What makes a comparison unfair is said first. The options on text and model are those of
    analyze, for RUNs that are checkpoints; their reports are kept in reports/.

    Example: `depthprobe compare --group pre='reports/pre-s*' --group post='reports/post-s*'`
    """
    groups = _groups(group or [])
    if not runs and not groups:
        raise UsageError("no run", "at least one folder with a report, or a checkpoint")
    from depthprobe.report.files import check_writable

    check_figures(figures)
    check_writable(out)

    from depthprobe.comparison import compare as run
    from depthprobe.progress import Bar, say
    from depthprobe.report.compare_screen import show_comparison

    with ExitStack() as bars:

        def watch(title: str) -> Progress:
            """A bar for each stage of an analysis, told apart by how much there is to do."""
            stage: dict[int, Progress] = {}

            def step(done: int, total: int) -> None:
                if total not in stage:
                    bars.close()  # of the stage before
                    stage.clear()
                    stage[total] = bars.enter_context(Bar(f"Analyzing {title}", total, "parts"))
                stage[total](done, total)

            return step

        try:
            comparison = run(
                *(runs or ()), groups=groups, data=data, say=say, watch=watch, command=command_line(), tokens=tokens,
                seq_len=seq_len, bos=bos, text_field=text_field, seed=seed, dtype=dtype, device=device,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise InterruptedRunError(
                "interrupted; no comparison was written", fix="reports that were done are kept"
            ) from None
    path = comparison.save(out, figures)  # type: ignore[arg-type]
    show_comparison(comparison, saved=path)


def _groups(given: list[str]) -> dict[str, list[str]]:
    """Name → what its pattern stands for in the file system.

    Raises:
        UsageError: no name, no pattern, a name that is given twice, or nothing that fits.
    """
    found: dict[str, list[str]] = {}
    for text in given:
        name, equals, pattern = text.partition("=")
        if not (name and equals and pattern):
            raise UsageError(f"--group {text}", "NAME=PATTERN, such as pre='reports/pre-s*'")
        if name in found:
            raise UsageError(f"--group {name} is given twice", "one pattern a group", "use a pattern that fits all")
        found[name] = sorted(glob.glob(pattern))
        if not found[name]:
            raise UsageError(
                f"--group {text} fits nothing", "folders with reports, or checkpoints", "quote the pattern"
            )
    return found
