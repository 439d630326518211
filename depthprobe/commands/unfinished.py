"""What a run of `analyze` has finished, kept beside its report until that is written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthprobe.commands.existing import finished_report
from depthprobe.errors import OutputError

if TYPE_CHECKING:
    from depthprobe.checkpoint import Checkpoint
    from depthprobe.corpus import Corpus
    from depthprobe.report import Report

__all__ = ["Unfinished"]

_MARK = "unfinished"  # where the kept report says how far it is, and of what
_ANEW = "leave out --resume to start anew"


class Unfinished:
    """A report as far as it is, in a hidden folder in the one that it will be in, or beside that while it is not there.

    Of several processes the first one reads and writes, and all are told.

    Args:
        target: the folder of the report.
    """

    def __init__(self, target: Path) -> None:
        place = target.absolute()
        self.folders = (place / ".unfinished", place.parent / f".{place.name}.unfinished")
        self.folder = self.folders[0] if place.is_dir() else self.folders[1]

    def load(self, options: dict[str, Any], opened: tuple[Checkpoint, Corpus]) -> tuple[Report, list[str]] | None:
        """The report and the stages that are in it; None where nothing was kept.

        Args:
            options: of this analysis, as they stand in a report.
            opened: the checkpoint and the text.

        Raises:
            OutputError: what was kept cannot be read, or is of other weights, another text, other options or versions.
        """
        from depthprobe.processes import told

        def look() -> tuple[Report, list[str]] | None:
            for folder in self.folders:
                try:
                    report = finished_report(folder, options, opened)
                except OutputError as error:
                    raise OutputError(error.found, error.expected, _ANEW) from None
                if report is None:
                    continue
                mark = report.run.get(_MARK) or {}
                mine = _identity(*opened)
                odd = [name for name, value in mine.items() if mark.get("of", {}).get(name) != value]
                if odd:
                    raise OutputError(f"{folder} holds an analysis with another {', '.join(odd)}", fix=_ANEW)
                run = {name: value for name, value in report.run.items() if name != _MARK}
                return replace(report, run=run), list(mark["stages"])
            return None

        return told(look)

    def keep(self, report: Report, stages: list[str], opened: tuple[Checkpoint, Corpus]) -> None:
        """Keep a report with these stages.

        Raises:
            OutputError: it cannot be written.
        """
        from depthprobe.processes import told
        from depthprobe.report.files import write_whole

        def write() -> None:
            marked = replace(report, run={**report.run, _MARK: {"stages": stages, "of": _identity(*opened)}})
            write_whole({"report.json": marked.to_json().encode()}, self.folder)

        told(write)

    def drop(self) -> None:
        """Forget it."""
        from depthprobe.processes import told

        def remove() -> None:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)

        told(remove)


def _identity(model: Checkpoint, corpus: Corpus) -> dict[str, str]:
    """What the numbers depend on beside what `finished_report` looks at."""
    import numpy
    import torch
    import transformers

    from depthprobe.fingerprint import digest

    return {
        "text": digest(corpus.inputs),
        "kind of device": model.device.type,
        "depthprobe": metadata.version("depthprobe"),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
