"""The public verb `compare`: from reports and checkpoints to a comparison and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from depthprobe.comparison.fairness import missing, warnings
from depthprobe.comparison.levels import levels
from depthprobe.comparison.lines import ALL_PAIRS, Line, differences, lines_of, table
from depthprobe.comparison.runs import Run, Spec, Watch, named_apart, open_run
from depthprobe.contrast import same_seeds
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.evidence import placement
from depthprobe.report.compare_schema import Comparison
from depthprobe.verdict import Case, verdict

__all__ = ["compare"]


def compare(
    *runs: Spec,
    groups: Mapping[str, Sequence[Spec]] | None = None,
    data: Any = None,
    reports: str | Path = "reports",
    say: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    command: str | None = None,
    **options: Any,
) -> Comparison:
    """Put models side by side against relative depth, and judge the claims by them.

    Intervals of single runs are over sequences, and a difference takes them for independent; those of a group are over
    its training seeds, by Student's t, paired where two groups have the same seeds. Runs of the lab that kept several
    checkpoints are compared at equal loss too, and at equal tokens.

    Args:
        runs: reports, folders with one, or checkpoints, which are analyzed first (or whose report in `reports` is
            taken if it is of the same weights, text and options).
        groups: name → the runs that are seeds of one model; a run that stands in both is taken once.
        data: what checkpoints are analyzed on, as in `analyze`.
        reports: where their reports are kept.
        say: is told of every checkpoint that is analyzed.
        watch: a title → what is called with the progress of an analysis.
        command: what the user typed, for the record.
        options: further arguments of `analyze`.

    Returns:
        The comparison: tables, warnings, verdict; `save(dir)` writes it.

    Raises:
        UsageError: no run, a list in place of a run, or a group of models that are not seeds of one.
        OutputError: a report cannot be read, or is of another schema version.
        DepthprobeError: whatever `analyze` refuses.
    """
    if any(isinstance(spec, list | tuple) for spec in runs):
        raise UsageError("a list of runs", "each run as an argument of its own, compare(*runs)")
    wanted: dict[Spec, tuple[Spec, str]] = {}
    for name, members in (groups or {}).items():
        if not name or not members:
            raise UsageError(f"group {name!r} with {len(members)} runs", "a name and at least one run")
        for spec in members:
            if wanted.setdefault(_key(spec), (spec, name))[1] != name:
                raise UsageError(f"{spec} is in two groups", "each run in one group")
    alone = [(spec, "") for spec in runs if _key(spec) not in wanted]
    chosen = [*alone, *wanted.values()]
    if not chosen:
        raise UsageError("nothing to compare", "at least one run")
    opened = []
    for spec, group in chosen:
        try:
            run = open_run(spec, data=data, reports=reports, options=options, say=say, watch=watch)
        except DepthprobeError as error:
            if str(spec) in error.found:
                raise
            raise type(error)(f"{spec}: {error.found}", error.expected, error.fix) from error  # which of the runs
        opened.append(Run(run.name, run.source, run.how, run.points, run.seed, group))
    return _compared(named_apart(opened), command)


def _key(spec: Spec) -> Spec:
    """What tells one run from another: of a path, the place that it leads to, however it is spelt."""
    if not isinstance(spec, str | Path):
        return spec
    path = Path(spec).expanduser()
    if not path.exists():  # a hub id
        return str(spec)
    place = path.resolve()
    return str(place.parent if place.name == "report.json" else place)


def _compared(runs: list[Run], command: str | None) -> Comparison:
    lines = lines_of(runs)
    found, notes = levels(runs)
    unfair = warnings(runs)
    return Comparison(
        runs=[_facts(run) for run in runs],
        lines=[
            {"name": line.name, "runs": [run.name for run in line.runs], "blocks": line.blocks,
             "resolution": line.resolution, "gate": line.gate}
            for line in lines
        ],
        levels=[{"name": level.name, "words": level.words} for level in found],
        warnings=unfair,
        notes=[*notes, *missing(runs), *_grouping(lines)],
        table=table(lines, found[0].frames),
        differences=differences(lines, found),
        verdict=verdict([_case(line) for line in lines]),
        run={
            "command": command or "depthprobe.compare(…)",
            "depthprobe": metadata.version("depthprobe"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )  # fmt: skip


def _facts(run: Run) -> dict[str, Any]:
    report, training = run.report, run.training
    names = ("blocks", "width", "parameters", "architecture", "dtype", "vocab_size", "objective")
    return {
        "name": run.name,
        "group": run.group,
        "source": run.source,
        "how": run.how,
        **{name: report.model.get(name) for name in names},
        "placement": placement(report) or None,
        "fresh": len(report.gradients.get("fresh") or []),
        "corpus": report.corpus["name"],
        "sha256": report.corpus["sha256"],
        "sequences": report.corpus["sequences"],
        "tokens": report.corpus["tokens"],
        "seed": run.seed,
        "trained_tokens": training.tokens,
        "val_loss": training.loss,
        "failed": training.failed,
        "checkpoints": [point.training.step for point in run.points],
    }


def _case(line: Line) -> Case:
    tokens = {run.training.tokens for run in line.runs}
    failed = [f"{run.name}: {run.training.failed}" for run in line.runs if run.training.failed]
    return Case(
        line.name,
        tuple(run.report for run in line.runs),
        tuple(run.seed for run in line.runs),
        tokens.pop() if len(tokens) == 1 else None,
        "; ".join(failed) or None,
    )


def _grouping(lines: Sequence[Line]) -> list[str]:
    """How groups are compared, and which pairs of lines are."""
    notes = []
    grouped = [line for line in lines if line.grouped]
    for place, a in enumerate(grouped):
        for b in grouped[place + 1 :]:
            how = "the same training seeds, so that differences are paired" if same_seeds(a.seeds, b.seeds) else (
                "different or unknown training seeds, so that they are compared as independent")  # fmt: skip
            notes.append(f"Groups {a.name} and {b.name} have {how}.")
    if len(lines) > ALL_PAIRS:
        notes.append(f"{len(lines)} lines: differences are those of {lines[0].name} and each other one.")
    return notes
