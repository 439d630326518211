"""`depthprobe analyze` with several checkpoints: a report each, one comparison, and failures that stop nothing else."""

from __future__ import annotations

import gc
import glob
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from depthprobe.commands.one import Outcome, Request, analyze_one
from depthprobe.commands.options import InterruptedRunError, command_line
from depthprobe.errors import DepthprobeError, UsageError

__all__ = ["analyze_several", "is_pattern", "names_of", "with_revisions"]

COMPARISON = "compare"  # its folder beside those of the reports, so that no report may have this name
_FILES = (".gguf", ".pt", ".pth")
# What many runs call their checkpoints alike: such a name says little without that of the run
_STEP = re.compile(r"(step|checkpoint|ckpt|iter|epoch|global_step)[-_]?\d*", re.IGNORECASE)


@dataclass(frozen=True)
class _Row:
    """What became of one checkpoint; code is the exit status of a failure."""

    name: str
    state: str
    cause: str = ""
    code: int = 0


def is_pattern(spec: str) -> bool:
    """Whether a checkpoint is given by a pattern of the file system, and not by the name of something that is there."""
    return any(mark in spec for mark in "*?[") and not Path(spec).expanduser().exists()


def with_revisions(specs: Sequence[str], revisions: str | None, revision: str | None) -> list[str]:
    """The checkpoints as they were given, or `id@revision` for each of the revisions of the only one.

    Raises:
        UsageError: there are several checkpoints, it is no hub id, or a revision is named twice over.
    """
    if revisions is None:
        return list(specs)
    named = [text.strip() for text in revisions.split(",")]
    found, usual = f"--revisions {revisions}", "one hub id without a revision, and the revisions"
    if not all(named):
        raise UsageError(found, "names with commas between them, such as step0,step1000")
    if len(specs) != 1 or is_pattern(specs[0]):
        raise UsageError(f"{found} is given with several checkpoints", usual, "run it once for each")
    if revision is not None or "@" in specs[0]:
        raise UsageError(f"{found} is given beside another revision", usual, "leave one of them out")
    if Path(specs[0]).expanduser().exists() or specs[0].startswith((".", "/", "~")):
        raise UsageError(
            f"{found} is given with the local path {specs[0]}, which has no revisions",
            usual,
            "name its checkpoints by a pattern, such as 'run/step-*'",
        )
    return [f"{specs[0]}@{name}" for name in named]


def analyze_several(specs: Sequence[str], asked: Request, out: Path, *, compare: bool, debug: bool) -> None:
    """Analyze one checkpoint after the other into folders below `out`, and compare what was finished.

    Args:
        specs: hub ids, paths and patterns.
        asked: what to measure, and on what.
        out: the folder for all of it.
        compare: whether to compare.
        debug: show tracebacks, and stop at what is no error of depthprobe's own.

    Raises:
        UsageError: a pattern fits nothing, or the text cannot be read more than once.
        DepthprobeError: some failed, with the exit status of the first.
    """
    if asked.data == "-":
        raise UsageError("--data - is given with several checkpoints", "a text to read again for each", "use a file")
    from depthprobe.processes import told
    from depthprobe.progress import say
    from depthprobe.report.files import check_writable

    chosen = told(lambda: _distinct(_expanded(specs)))
    names = names_of(chosen)
    told(lambda: check_writable(out))
    rows: list[_Row] = []
    try:
        for place, (spec, name) in enumerate(zip(chosen, names, strict=True), 1):
            say(f"{place} of {len(chosen)}: {spec}")
            rows.append(_attempt(name, spec, asked, out / name, debug))
            _let_go()
        done = [out / row.name for row in rows if row.code == 0]
        # told: a process that has nothing to compare must not end, with an error, before the first one has compared
        rows += told(lambda: _compared(done, asked, out / COMPARISON, compare, debug))
    except KeyboardInterrupt as stopped:
        finished, begun = ", ".join(row.name for row in rows if row.code == 0), "".join(stopped.args[:1])
        if not finished:
            raise InterruptedRunError("interrupted", fix=begun or "nothing was written") from None
        fix = "; ".join(filter(None, (begun, "the same command goes on from there")))
        raise InterruptedRunError(f"interrupted; finished are {finished}, in {out}", fix=fix) from None
    told(lambda: _show(rows))
    if failed := [row for row in rows if row.code]:
        first = f"{failed[0].name}: {failed[0].cause}"
        error = DepthprobeError(f"{len(failed)} of {len(rows)} failed, {'as' if len(failed) == 1 else 'first'} {first}")
        error.exit_code, error.everywhere = failed[0].code, True
        raise error


def _attempt(name: str, spec: str, asked: Request, target: Path, debug: bool) -> _Row:
    """Analyze one checkpoint, and say what became of it."""
    from depthprobe.processes import count
    from depthprobe.progress import say

    try:
        outcome = analyze_one(spec, asked, target, keep=True)
    except InterruptedRunError as error:
        raise KeyboardInterrupt(f"of {name} {error.fix}") from error
    except Exception as error:
        if count() > 1 and not getattr(error, "everywhere", False):  # the other processes know nothing of it, and wait
            raise
        return _failure(name, error, debug)
    say(f"{name}: {_kept(outcome) if outcome.kept else f'done, {outcome.page}'}")
    return _Row(name, "kept" if outcome.kept else "done")


def _kept(outcome: Outcome) -> str:
    day = str(outcome.report.run.get("created") or "an unknown day")[:10]
    place = outcome.page.parent
    return f"nothing to measure, {place} has the report of these weights, this text and these options, of {day}"


def _failure(name: str, error: Exception, debug: bool) -> _Row:
    """The row of a failure. The error is not kept, for its traceback holds the model."""
    from depthprobe.progress import say

    ours = isinstance(error, DepthprobeError)
    if debug:
        if not ours:
            raise error
        traceback.print_exception(error)
    text = str(error) if ours else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; --debug shows where"
    say(f"{name}: failed, {text}")
    return _Row(name, "failed", text, error.exit_code if isinstance(error, DepthprobeError) else 1)


def _let_go() -> None:
    """Free the model before the next one is opened: modules and tracebacks refer to themselves in circles."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compared(folders: Sequence[Path], asked: Request, out: Path, wanted: bool, debug: bool) -> list[_Row]:
    """Compare the reports, print and save that; a row if it failed."""
    from depthprobe.progress import say

    if not wanted:
        return []
    if len(folders) < 2:
        say(f"No comparison: {len(folders) or 'none'} of the checkpoints was finished, and it takes two.")
        return []
    from depthprobe.comparison import compare
    from depthprobe.report.compare_screen import show_comparison

    try:
        comparison = compare(*folders, command=command_line())
        path = comparison.save(out, asked.figures)  # type: ignore[arg-type]
    except Exception as error:
        return [_failure("the comparison", error, debug)]
    show_comparison(comparison, saved=path)
    return []


def _show(rows: Sequence[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from depthprobe.report.tables import visible

    grid = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for heading in ("checkpoint", "", "cause"):
        grid.add_column(heading, overflow="fold")
    for row in rows:
        colour = "bold red" if row.code else "green"
        grid.add_row(Text(visible(row.name)), Text(row.state, colour), Text(visible(row.cause)))
    Console(highlight=False).print(grid)


# --- which checkpoints, and how their folders are called -----------------------------------------------------------


def _expanded(specs: Iterable[str]) -> list[str]:
    """Every checkpoint that a pattern fits, in natural order; what fits and is none is said.

    Raises:
        UsageError: a pattern fits no checkpoint.
    """
    from depthprobe.progress import say

    found: list[str] = []
    for spec in specs:
        if not is_pattern(spec):
            found.append(spec)
            continue
        fitting = sorted(glob.glob(str(Path(spec).expanduser()), recursive=True), key=_natural)
        good = [text for text in fitting if (Path(text) / "config.json").exists() or text.endswith(_FILES)]
        if not good:
            what = "no checkpoint" if fitting else "nothing"
            raise UsageError(f"the pattern {spec} fits {what}", "folders with a config.json, .gguf or .pt files")
        if odd := [Path(text).name for text in fitting if text not in good]:
            say(f"{spec} fits what is no checkpoint too: {', '.join(odd[:5])}{', …' if len(odd) > 5 else ''}")
        found += good
    return found


def _natural(text: str) -> list[tuple[int, str]]:
    """For sorting, with numbers by their size: step-200 before step-1000."""
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(re.split(r"(\d+)", text))]


def _distinct(specs: Iterable[str]) -> list[str]:
    """Without those that lead to the same place, however they are spelt."""
    found: dict[str, str] = {}
    for spec in specs:
        path = Path(spec).expanduser()
        found.setdefault(str(path.resolve()) if path.exists() else spec, spec)
    return list(found.values())


def names_of(specs: Sequence[str]) -> list[str]:
    """A folder's name for each checkpoint, unlike all others: as short as it can be, and no longer than needed."""
    ways = [_ways(spec) for spec in specs]
    lengths = [0] * len(ways)
    while True:
        names = [way[length] for way, length in zip(ways, lengths, strict=True)]
        many = Counter(name.casefold() for name in names)  # some file systems do not tell A from a
        many[COMPARISON] += 1
        longer = [
            place
            for place, name in enumerate(names)
            if many[name.casefold()] > 1 and lengths[place] + 1 < len(ways[place])
        ]
        if not longer:
            break
        for place in longer:
            lengths[place] += 1
    taken = {COMPARISON}
    for place, name in enumerate(names):
        turns = (f"{name}-{turn}" for turn in count(2))
        names[place] = (
            name if name.casefold() not in taken else next(one for one in turns if one.casefold() not in taken)
        )
        taken.add(names[place].casefold())
    return names


def _ways(spec: str) -> list[str]:
    """How a checkpoint may be called, from the shortest to the longest."""
    path = Path(spec).expanduser()
    if not path.exists():  # a hub id
        repository, at, revision = spec.partition("@")
        return [_safe(repository.split("/")[-1] + at + revision), _safe(spec)]
    path = path.resolve()
    parts = [part for part in path.parts if part != path.anchor]
    if path.is_file():
        parts[-1:] = [] if path.stem == "ckpt" and len(parts) > 1 else [path.stem]
    least = 2 if _STEP.fullmatch(parts[-1]) and len(parts) > 1 else 1
    return [_safe("-".join(parts[-length:])) for length in range(least, len(parts) + 1)]


def _safe(name: str) -> str:
    return re.sub(r"[^\w.@+-]+", "-", name).strip("-.") or "model"
