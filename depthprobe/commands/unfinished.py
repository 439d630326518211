"""What a run of `analyze` has finished, kept beside its report until that is written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthprobe.commands.existing import finished_report

if TYPE_CHECKING:
    from depthprobe.checkpoint import Checkpoint
    from depthprobe.corpus import Corpus
    from depthprobe.report import Report

__all__ = ["Unfinished"]

_STAGES = "finished"  # where the kept report says how far it is


class Unfinished:
    """A report as far as it is, in a folder of its own beside the one that it will be in.

    Of several processes the first one reads and writes, and all are told.

    Args:
        target: the folder of the report.
    """

    def __init__(self, target: Path) -> None:
        place = target.absolute()
        self.folder = place.parent / f".{place.name}.unfinished"

    def load(self, options: dict[str, Any], opened: tuple[Checkpoint, Corpus]) -> tuple[Report, list[str]] | None:
        """The report and the stages that are in it; None where nothing was kept.

        Args:
            options: of this analysis, as they stand in a report.
            opened: the checkpoint and the text.

        Raises:
            OutputError: what was kept is of other weights, another text or other options.
        """
        from depthprobe.processes import told

        report = told(lambda: finished_report(self.folder, options, opened, "leave out --resume to start anew"))
        if report is None:
            return None
        run = {name: value for name, value in report.run.items() if name != _STAGES}
        return replace(report, run=run), list(report.run[_STAGES])

    def keep(self, report: Report, stages: list[str]) -> None:
        """Keep a report with these stages.

        Raises:
            OutputError: it cannot be written.
        """
        from depthprobe.processes import told
        from depthprobe.report.files import write_whole

        marked = replace(report, run={**report.run, _STAGES: stages})
        told(lambda: write_whole({"report.json": marked.to_json().encode()}, self.folder))

    def drop(self) -> None:
        """Forget it."""
        from depthprobe.processes import told

        told(lambda: shutil.rmtree(self.folder, ignore_errors=True))
