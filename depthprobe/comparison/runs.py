"""What is compared: saved reports, or checkpoints that are analyzed now, with what is known of their training."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from depthprobe.errors import OutputError
from depthprobe.report import Report

__all__ = ["Point", "Run", "Spec", "Training", "named_apart", "open_run"]

Spec = str | Path | Report
Watch = Callable[[str], Callable[[int, int], None]]
_SEED = re.compile(r"(?:^|[-_.])s(?:eed)?[-_]?(\d+)$")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Training:
    """What the lab's record says of a checkpoint, None where it says nothing.

    Attributes:
        seed: of the initialisation.
        step: updates that were made.
        tokens: that it was trained on, repetitions counted.
        loss: on the validation text, nats a token.
        text: sha256 of what it was trained on.
        failed: why the run counts as failed.
    """

    seed: int | None = None
    step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    text: str | None = None
    failed: str | None = None


@dataclass(frozen=True, eq=False)
class Point:
    """One checkpoint of a run: its report, and what is known of its training."""

    report: Report
    training: Training


@dataclass(frozen=True, eq=False)
class Run:
    """One trained model.

    Attributes:
        name: how it is called in every table; unlike that of any other run.
        source: what the user gave.
        how: where its numbers come from, in words.
        points: its checkpoints in the order of steps, the last one is the model.
        seed: of its training, from the lab's record or from a name that ends in `-s3` or `-seed3`; None if unknown.
        group: of the seeds that it is one of; empty for none.
    """

    name: str
    source: str
    how: str
    points: tuple[Point, ...]
    seed: int | None
    group: str = ""

    @property
    def report(self) -> Report:
        """Of its last checkpoint."""
        return self.points[-1].report

    @property
    def training(self) -> Training:
        """Of its last checkpoint."""
        return self.points[-1].training


def open_run(
    spec: Spec,
    *,
    data: Any = None,
    reports: str | Path = "reports",
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Read a report, or analyze a checkpoint and keep its report.

    Args:
        spec: a report; a folder with a report.json, or the path of one; or a checkpoint, as `analyze` takes it. Of a
            folder that `depthprobe train` left, every checkpoint is taken.
        data: what a checkpoint is analyzed on.
        reports: the folder that its report is kept in, and looked for.
        options: of `analyze`.
        say: is told what is being done.
        watch: a title → what is called with the progress of an analysis.

    Raises:
        OutputError: there is neither a report nor a checkpoint, or the report cannot be read.
        DepthprobeError: whatever `analyze` refuses.
    """
    if isinstance(spec, Report):
        name = str(spec.model["name"])
        training = _of_source(spec)
        return Run(name, str(spec.model["source"]), "a report", (Point(spec, training),), _seed(training, name))
    text = str(spec)
    path = Path(text).expanduser()
    if (path / "report.json").exists() or path.suffix == ".json":
        report = Report.load(path)
        name = path.resolve().name if path.is_dir() else path.resolve().parent.name
        training = _of_source(report)
        return Run(name, text, f"report of {_day(report)}", (Point(report, training),), _seed(training, name))
    folders = _checkpoints(path)
    if (path / "compare.json").exists() and not folders:
        raise OutputError(f"{path} holds a comparison", "a report or a checkpoint", _GIVE)
    if path.is_dir() and not folders:
        raise OutputError(f"{path} holds neither a report nor a checkpoint", "report.json or config.json", _GIVE)
    from depthprobe.comparison.analyzed import Analyzer  # takes seconds to import, which saved reports need not

    analyze_one = Analyzer(data, Path(reports), dict(options or {}), say or (lambda text: None), watch)
    if not folders:  # a hub id or a file
        report, how = analyze_one(text, None)
        return Run(str(report.model["name"]), text, how, (Point(report, Training()),), _seed(Training(), path.stem))
    points, told = [], ""
    name = path.resolve().name
    for folder in folders:
        report, told = analyze_one(str(folder), None if folder == path else f"{name}/{folder.name}")
        points.append(Point(report, training_of(folder)))
    if folders[-1] != path and (failed := training_of(path).failed):  # whose last weights were not fit to be kept
        points[-1] = replace(points[-1], training=replace(points[-1].training, failed=failed))
    how = told if len(points) == 1 else f"{len(points)} checkpoints, the last {told}"
    return Run(name, text, how, tuple(points), _seed(points[-1].training, name))


def training_of(folder: Path) -> Training:
    """What the record beside a checkpoint of the lab says; nothing where there is none.

    Raises:
        OutputError: run.json is there and cannot be read.
    """
    if not (folder / "run.json").exists():
        return Training()
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"{folder / 'run.json'} is not the record of a run: {error}") from None
    settings = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(settings, dict):  # somebody else's run.json
        return Training()
    result = record.get("result") or {}
    step = record.get("step", result.get("steps"))
    tokens, loss = result.get("tokens"), result.get("val_loss")
    if result == {} and step is not None:
        tokens = step * settings["batch_size"] * settings["seq_len"]
        loss = _logged(folder.parent / "log.jsonl", step)
    failed = result.get("reason") if result.get("status") == "failed" else None
    text = (record.get("text") or {}).get("sha256")
    return Training(settings.get("seed"), step, tokens, loss, text, failed)


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of equal names by their folder too, and by a number where that is the same as well."""
    # a table takes no halves of characters, which the name of a folder may have
    runs = [replace(run, name=run.name.encode(errors="backslashreplace").decode()) for run in runs]
    parents = [Path(run.source).resolve().parent.name for run in runs]
    many = Counter(run.name for run in runs)
    longer = [f"{parent}/{run.name}" if many[run.name] > 1 and run.how != "a report" else run.name
              for run, parent in zip(runs, parents, strict=True)]  # fmt: skip
    many, seen, found = Counter(longer), Counter[str](), []
    for run, name in zip(runs, longer, strict=True):
        seen[name] += 1
        found.append(replace(run, name=f"{name} #{seen[name]}" if many[name] > 1 else name))
    return found


_GIVE = "give the folder that `depthprobe analyze` or `depthprobe train` wrote, or a checkpoint"


def _checkpoints(path: Path) -> list[Path]:
    """The folders with a checkpoint of one run, in the order of steps, the folder itself last; none for no folder."""
    if not path.is_dir():
        return []
    steps = [(int(found[1]), folder) for folder in path.iterdir()
             if (found := _STEP.fullmatch(folder.name)) and (folder / "config.json").exists()]  # fmt: skip
    own = [path] if (path / "config.json").exists() else []
    last = training_of(path).step if own else None
    return [folder for step, folder in sorted(steps) if step != last] + own


def _of_source(report: Report) -> Training:
    """What is recorded beside the checkpoint that a report is of, if that is still where it was."""
    source = Path(str(report.model.get("source") or ""))
    if report.model.get("format") != "directory" or report.gradients.get("fresh") or not source.is_dir():
        return Training()
    try:
        return training_of(source)
    except OutputError:
        return Training()


def _logged(log: Path, step: int) -> float | None:
    """The validation loss at a step, between two looks on the line from one to the other; None outside of them."""
    try:
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        seen = [(row["step"], row["val_loss"]) for row in rows if row["val_loss"] is not None]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not seen or not seen[0][0] <= step <= seen[-1][0]:
        return None
    steps, losses = zip(*seen, strict=True)
    return float(np.interp(step, steps, losses))


def _seed(training: Training, name: str) -> int | None:
    if training.seed is not None:
        return training.seed
    found = _SEED.search(name)
    return int(found[1]) if found else None


def _day(report: Report) -> str:
    return str(report.run.get("created") or "an unknown day")[:10]
