"""What the studies of the claims share: rows that outlive a stop, tests over seeds, and sections of the README.

The rules are those of `PREREGISTRATION.md`. Every primary test asks whether the mean over seeds lies in the region that
a claim predicts: below −log 1.1 where a ratio is to fall, between −log 1.1 and log 1.1 where it is to stay the same. So
differences and equivalence go through one rule.
"""

import argparse
import csv
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from depthprobe.contrast import over_seeds, smallest_effect
from depthprobe.criteria import MARGIN
from depthprobe.errors import DepthprobeError, OutputError
from depthprobe.estimate import Interval
from depthprobe.lab.runlog import errors_of
from depthprobe.lab.search import end_with
from depthprobe.report.figures import drawn
from depthprobe.report.tables import number

__all__ = [
    "LOG_MARGIN",
    "UNJUDGED",
    "Counted",
    "Figure",
    "Primary",
    "Ruled",
    "Section",
    "Test",
    "Unjudged",
    "Verdict",
    "adjusted",
    "arm",
    "changed",
    "collect",
    "effect",
    "guarded",
    "holm",
    "in_holm",
    "label",
    "least",
    "least_effect",
    "lies",
    "markdown",
    "nats",
    "of_claim",
    "probability",
    "ratio",
    "read",
    "region",
    "section",
    "seeds_of",
    "smallest",
    "span",
    "text_of",
    "verdict",
    "verdicts",
    "write_figures",
    "write_section",
]

LOG_MARGIN = math.log(1 + MARGIN)
LEVEL = 0.05
DPI = 110
UNJUDGED = "cannot be judged here"
Job = tuple[str | int | float, ...]
Row = Sequence[str | int | float]


# Rows


def collect(
    path: Path, columns: Sequence[str], jobs: Sequence[Job], measure: Callable[..., Iterable[Row]],
    step: Callable[[int, int], None] = lambda done, total: None, workers: int = 1,
) -> None:  # fmt: skip
    """Measure each job that the table does not have, in the order given, and write its rows as soon as it is done.

    The file always holds whole jobs: it is replaced, not appended to. So a run that was stopped goes on where it was,
    and the table that it ends with is that of a run that was not.

    Args:
        path: of the csv.
        columns: the first ones are the job's own values, by which it is recognised.
        jobs: what to measure.
        measure: called with a job's values; returns the rest of each of its rows.
        step: called with (jobs done, in all) after each.
        workers: jobs at a time, each in a process of its own.

    Raises:
        OutputError: the file is of another study or cannot be written.
    """
    text = ",".join(columns) + "\n"
    if path.exists():
        with errors_of(path):
            text = path.read_text()
        if not text.endswith("\n") or text.splitlines()[0] != ",".join(columns):
            raise OutputError(f"{path} is no table with the columns {', '.join(columns)}", fix="move it away")
    width = len(jobs[0])
    done = {tuple(row[:width]) for row in csv.reader(text.splitlines()[1:])}
    todo = [job for job in jobs if tuple(map(text_of, job)) not in done]
    with errors_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _pool(workers if len(todo) > 1 else 1) as run_all:
        for count, (job, found) in enumerate(zip(todo, run_all(_Measured(measure), todo), strict=True), 1):
            buffer = io.StringIO()
            rows = [[*map(text_of, job), *map(text_of, row)] for row in found]
            if any(len(row) != len(columns) for row in rows):
                raise ValueError(f"rows of {len(rows[0])} values for {len(columns)} columns")
            csv.writer(buffer, lineterminator="\n").writerows(rows)
            text += buffer.getvalue()
            temporary = path.with_suffix(".part")
            with errors_of(path):
                temporary.write_text(text)
                os.replace(temporary, path)
            step(len(jobs) - len(todo) + count, len(jobs))


@dataclass(frozen=True)
class _Measured:
    """The rows of a job at once, as another process has to return them."""

    measure: Callable[..., Iterable[Row]]

    def __call__(self, job: Job) -> list[Row]:
        return list(self.measure(*job))


@contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Iterator[list[Row]]]]:
    """`map`, in this process or over several, which end with this one."""
    if workers < 2:
        yield map
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=end_with, initargs=(os.getpid(),))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def text_of(value: str | int | float) -> str:
    """As it stands in a table: six significant digits, and nothing for what does not exist."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def read(path: Path) -> pd.DataFrame:
    """A table of rows.

    Raises:
        OutputError: it is not there.
    """
    if not path.exists():
        raise OutputError(f"{path} is not there", fix="run its study first")
    with errors_of(path):
        return pd.read_csv(path)


def arm(table: pd.DataFrame, **wanted: str | int | float) -> pd.DataFrame:
    """The rows that have these values."""
    return table[np.logical_and.reduce([table[name] == value for name, value in wanted.items()])]


def guarded(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: list[str] | None) -> int:
    """Run a script with its options; an error is one line. Returns the exit status."""
    options = parser.parse_args(argv)
    try:
        run(options)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


# Tests over seeds


@dataclass(frozen=True)
class Primary:
    """A primary test of the preregistration by a mean over seeds.

    Attributes:
        claim: its number.
        sentence: what is measured and what was predicted.
        values: of the seeds, in logs where it is about a ratio.
        low, high: between which the mean lies if the prediction holds.
        logs: whether the values are logs of a ratio.
        against: the region is not what the claim predicts, but what contradicts it.
        label: what is measured, where the sentence is too long to say it in a few words.
    """

    claim: str
    sentence: str
    values: tuple[float, ...]
    low: float
    high: float
    logs: bool = True
    against: bool = False
    label: str = ""


@dataclass(frozen=True)
class Ruled:
    """A verdict by a rule of the preregistration that is no test.

    Attributes:
        claim: its number.
        sentence: the rule.
        word: the verdict.
        found: what was found.
        seeds: that it rests on.
        label: as of `Primary`.
    """

    claim: str
    sentence: str
    word: str
    found: str
    seeds: int
    label: str = ""


@dataclass(frozen=True)
class Counted:
    """A primary test that failed runs decide: more of one arm than of the other are predicted.

    Attributes:
        claim: its number.
        sentence: what is counted and what was predicted.
        failed: runs of the arm that is to fail that did.
        spared: runs of the other arm that failed.
        seeds: runs of each.
        other: the other arm, in words.
        arm: the arm that is to fail, in words, where it has a name of its own.
    """

    claim: str
    sentence: str
    failed: int
    spared: int
    seeds: int
    other: str = "of the other arm"
    arm: str = ""


@dataclass(frozen=True)
class Unjudged:
    """A primary test that could not be made.

    Attributes:
        claim: its number.
        sentence: what was to be measured.
        reason: why it was not.
        label: as of `Primary`.
        primary: it was one. What the preregistration marks as no test takes no part in Holm.
    """

    claim: str
    sentence: str
    reason: str
    label: str = ""
    primary: bool = True


Test = Primary | Counted | Ruled | Unjudged


def probability(test: Test) -> float:
    """p of the hypothesis that what is predicted is not so.

    By Student's t that the mean lies outside the predicted region: twice the one-sided p, and of two boundaries the
    larger one (two one-sided tests, Schuirmann 1987), so that it is below 0.05 just where the 95 % interval lies in the
    region. By Fisher's exact test, two-sided, that failures are as likely in both arms. 1 where nothing was tested.
    """
    if isinstance(test, Unjudged | Ruled):
        return 1.0
    if isinstance(test, Counted):
        pair = [[each, test.seeds - each] for each in (test.failed, test.spared)]
        return float(stats.fisher_exact(pair).pvalue) if test.failed > test.spared else 1.0
    values = np.asarray(test.values, dtype=np.float64)
    error, mean = values.std(ddof=1) / math.sqrt(len(values)), values.mean()
    if error == 0:
        return 0.0 if test.low < mean < test.high else 1.0
    gap = min(mean - test.low, test.high - mean)
    return min(1.0, 2 * float(stats.t.sf(gap / error, len(values) - 1)))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Each p as adjusted for all of them, step down (Holm 1979)."""
    count, before = len(probabilities), 0.0
    found = [0.0] * count
    for rank, place in enumerate(np.argsort(probabilities, kind="stable")):
        before = max(before, min(1.0, (count - rank) * probabilities[place]))
        found[place] = before
    return found


def verdict(test: Test, corrected: float) -> str:
    """The preregistration's word for one test, from its interval and its p after Holm."""
    if isinstance(test, Unjudged):
        return UNJUDGED
    if isinstance(test, Ruled):
        return test.word
    if isinstance(test, Primary) and test.against:
        return "contradicted" if corrected < LEVEL else "undecided"
    if corrected < LEVEL:
        return "supported"
    if isinstance(test, Counted):
        return "contradicted" if test.failed == 0 else "undecided"
    return "contradicted" if lies(over_seeds(test.values), test.low, test.high) == "outside" else "undecided"


def of_claim(words: Sequence[str]) -> str:
    """The word for a claim that makes several predictions: all must hold, and one that does not is enough."""
    for word in ("contradicted", UNJUDGED, "undecided"):
        if word in words:
            return word
    return "supported"


def lies(interval: Interval, low: float, high: float) -> str:
    """Whether an interval lies `inside` a region, `outside`, or neither: `undecided`."""
    if low < interval.low and interval.high < high:
        return "inside"
    return "outside" if interval.high < low or interval.low > high else "undecided"


def changed(values: Sequence[float]) -> str:
    """Whether a ratio, given as its log by seed, differs from 1, by its 95 % interval and the margin of 10 %."""
    words = {"inside": "unchanged", "outside": "changed", "undecided": "undecided"}
    return words[lies(over_seeds(values), -LOG_MARGIN, LOG_MARGIN)]


def smallest(values: Sequence[float]) -> float:
    """The smallest effect that so many seeds, as far apart as these, show at 80 % power (two-sided, 5 %)."""
    return smallest_effect(len(values)) * float(np.std(values, ddof=1))


def in_holm(test: Test) -> bool:
    """Whether it is one of the tests that are corrected for, which verdicts by a rule are not."""
    return not isinstance(test, Ruled) and (not isinstance(test, Unjudged) or test.primary)


Verdict = tuple[Test, float, str]


def adjusted(tests: Sequence[Test]) -> list[Verdict]:
    """Each test with its p after Holm over all of them, and its verdict."""
    takes = [in_holm(test) for test in tests]
    corrected = iter(holm([probability(test) for test, part in zip(tests, takes, strict=True) if part]))
    every = [(test, next(corrected) if part else 1.0) for test, part in zip(tests, takes, strict=True)]
    return [(test, p, verdict(test, p)) for test, p in every]


# What a study has to say


@dataclass(frozen=True)
class Figure:
    """A figure of a study.

    Attributes:
        name: of its file, without the ending.
        draw: puts it onto its axes.
        height: in inches.
        rows: of axes.
        shared: they have the same x.
        claims: that it shows; none for all of the study.
    """

    name: str
    draw: Callable[[list[Axes]], None]
    height: float
    rows: int = 1
    shared: bool = True
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A study's part of the findings.

    Attributes:
        name: by which it is marked in the README.
        tests: the primary ones.
        text: made of the tests with their verdicts, in markdown.
        figures: that the text shows.
        minds: of each claim, what would change it.
        notes: of some claims, what else a reader of the verdict must know, from the same rows.
        changed: claims whose test was changed when its rows were known, as the preregistration says.
    """

    name: str
    tests: tuple[Test, ...]
    text: Callable[[list[Verdict]], str]
    figures: tuple[Figure, ...]
    minds: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)
    changed: tuple[str, ...] = ()


def write_figures(section: Section, folder: Path) -> None:
    """The figures of a section, as png.

    Raises:
        OutputError: they cannot be written.
    """
    with errors_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for one in section.figures:
            made = drawn(one.draw, one.height, one.rows, shared=one.shared, dpi=DPI)
            (folder / f"{one.name}.png").write_bytes(made)


# Words


def verdicts(found: Sequence[Verdict]) -> str:
    """The primary tests of a study, in markdown, each with the verdict on its claim."""
    rows = []
    for test, p, word in found:
        claim = of_claim([other for each, _, other in found if each.claim == test.claim])
        chance = "–" if isinstance(test, Unjudged | Ruled) else "< 0.001" if p < 1e-3 else number(p)
        rows.append(
            [test.claim, f"**{claim}**", test.sentence, effect(test), word, chance, seeds_of(test), least_effect(test)]
        )
    head = ["claim", "verdict", "test", "mean [95 % interval over seeds]", "this test", "p after Holm", "seeds",
            "smallest effect"]  # fmt: skip
    return markdown(head, rows)


def effect(test: Test) -> str:
    """What a test found."""
    if isinstance(test, Unjudged):
        return test.reason
    if isinstance(test, Ruled):
        return test.found
    if isinstance(test, Counted):
        mine = f" {test.arm}" if test.arm else ""
        return f"{test.failed} of {test.seeds} runs{mine} failed, and {test.spared} of {test.seeds} {test.other}"
    return ratio(test.values) if test.logs else span(over_seeds(test.values))


def seeds_of(test: Test) -> str:
    """How many seeds a test rests on."""
    if isinstance(test, Unjudged):
        return "–"
    return str(len(test.values) if isinstance(test, Primary) else test.seeds)


def least_effect(test: Test) -> str:
    """The smallest effect that a test could have shown, before Holm."""
    if isinstance(test, Unjudged | Ruled):
        return "–"
    if isinstance(test, Counted):
        fewest = next((n for n in range(test.seeds + 1) if _fisher(n, test.seeds) < LEVEL), None)
        if fewest is None:
            return "none"
        most = f"{test.seeds} against 0 give p = {number(_fisher(test.seeds, test.seeds))} before Holm"
        return f"{fewest} failures against 0; {most}"
    return least(test.values, test.logs)


def least(values: Sequence[float], logs: bool = False) -> str:
    """The smallest effect that these seeds could have shown, as a table has it: a factor where they are logs."""
    shown = smallest(values)
    if shown == 0:  # what is the same for every seed is no measurement
        return "–"
    return f"× {number(math.exp(shown))}" if logs else number(shown)


def label(test: Test) -> str:
    """What a test measures, in a few words."""
    return (test.label if not isinstance(test, Counted) else "") or test.sentence.partition("; predicted")[0]


def region(test: Primary) -> str:
    """Where the mean was predicted to lie, in words."""
    low, high = (math.exp(end) if test.logs else end for end in (test.low, test.high))
    if math.isinf(test.low):
        where = f"below {number(high)}"
    elif math.isinf(test.high):
        where = f"above {number(low)}"
    else:
        where = f"{number(low)} to {number(high)}"
    return f"{where} contradicts the claim" if test.against else f"predicted {where}"


def _fisher(failed: int, seeds: int) -> float:
    return float(stats.fisher_exact([[failed, seeds - failed], [0, seeds]]).pvalue)


def ratio(values: Sequence[float]) -> str:
    """The geometric mean of a ratio and its interval over seeds, from its logs."""
    logs = over_seeds(values)
    return span(Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high)))


def span(interval: Interval) -> str:
    """A value and its interval, as a table has them."""
    return f"{number(interval.value)} [{number(interval.low)}, {number(interval.high)}]"


def nats(values: Sequence[float]) -> str:
    """A mean in nats with its interval, seeds and smallest effect."""
    return f"{span(over_seeds(values))} nats ({len(values)} seeds, smallest effect {least(values)})"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# Sections of the README


def section(readme: str, name: str) -> str:
    """What stands between the markers of a study.

    Raises:
        OutputError: the markers are not there.
    """
    return _around(readme, name)[1]


def write_section(path: Path, name: str, text: str) -> None:
    """Put a text between the markers of a study; nothing else of the file changes.

    Raises:
        OutputError: the markers are not there, or the file cannot be written.
    """
    with errors_of(path):
        before, _, after = _around(path.read_text(), name)
        temporary = path.with_suffix(".part")
        temporary.write_text(f"{before}{text}{after}")
        os.replace(temporary, path)


def _around(readme: str, name: str) -> tuple[str, str, str]:
    start, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    before, found, rest = readme.partition(start)
    text, ended, after = rest.partition(end)
    if not (found and ended):
        raise OutputError(f"no section of {name}", f"the lines {start.strip()} and {end.strip()}")
    return before + start, text, end + after
