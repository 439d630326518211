"""The report that a command adds to: the one in its folder, or a new one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from depthprobe.commands.options import command_line
from depthprobe.errors import OutputError

if TYPE_CHECKING:
    from depthprobe.checkpoint import Checkpoint
    from depthprobe.corpus import Corpus
    from depthprobe.report import Report
    from depthprobe.verify import Anatomy

__all__ = ["existing_report"]


def existing_report(
    model: Checkpoint, corpus: Corpus, anatomy: Anatomy, target: Path, seed: int, skip_first: int = 1
) -> Report:
    """The report of this model in `target`, made now where there is none.

    Raises:
        OutputError: the report there is of another model.
    """
    from depthprobe.analysis import build_report
    from depthprobe.fingerprint import fingerprint
    from depthprobe.measure import Settings, measure
    from depthprobe.progress import Bar, say
    from depthprobe.report import Report

    if (target / "report.json").exists():
        report = Report.load(target)
        mine = {"name": model.name, "architecture": model.architecture}
        mine["fingerprint"] = fingerprint(model.model, model.offload)
        mine["dtype"] = str(model.dtype).removeprefix("torch.")
        odd = [name for name, value in mine.items() if report.model.get(name) != value]
        if odd:
            raise OutputError(
                f"{target} holds a report of a model with another {', '.join(odd)}", fix="choose another --out"
            )
        return report
    settings = Settings(skip_first=skip_first, seed=seed)
    say(f"No report in {target} yet: measuring first. {settings.cost(anatomy, corpus)}")
    with Bar("Measuring", corpus.sequences) as progress:
        measured = measure(anatomy, corpus, settings, progress)
    options = {"tokens": corpus.inputs.shape[0] * corpus.tokens} | vars(settings)
    return build_report(model, corpus, anatomy, measured, settings, options, command_line())
