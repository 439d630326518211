"""What a calibration of the estimators of depth is made of: measuring with all of them, checks, and the gate's rows."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats as statistics

from depthprobe.corpus import Corpus
from depthprobe.depth import dependence, participation, path_elasticity, path_elasticity_raw, path_spectrum, published
from depthprobe.depth import stages as staging
from depthprobe.depth.base import Depth, DepthSettings, Estimate, Floats
from depthprobe.depth.effects import run_skips
from depthprobe.verify import Anatomy

__all__ = [
    "ESTIMATED",
    "EXACT",
    "PARTS",
    "VARIANTS",
    "ZERO",
    "Row",
    "Values",
    "checked",
    "gate_rows",
    "gate_table",
    "measure",
    "ordered",
    "ranked",
    "read_rows",
    "said",
    "write_table",
]

PARTS = ("table", "rewrite", "tasks", "control", "beyond")
JUDGED = PARTS[:3]  # by the gate
ZERO = 1e-4  # stands for κ → 0: far above rounding, far below what a needed block costs
KAPPAS = (ZERO, 0.01, 0.03, 0.1)
VARIANTS: dict[str, tuple[str, ...]] = {
    "stages": tuple(f"{100 * kappa:g}%" for kappa in KAPPAS),
    "dependence": ("", "first power"),
    "participation": ("",),
    "cosine_crossing": ("",),
    "lens_kl_depth": ("",),
    "lens_overlap_depth": ("",),
    "depth_score": ("",),
    "path_elasticity_raw": ("",),
    "path_elasticity": ("",),
    "path_spectrum": ("",),
}
EXACT = 1e-3
# Traces by random vectors: 64 of them on 128 tokens leave an error of about 0.01 in an elasticity of 3.
ESTIMATED = {"path_elasticity": 0.03}
Values = dict[tuple[str, str], Depth]


@dataclass(frozen=True)
class Row:
    """A check: a row of calibration.csv.

    Attributes:
        part: of `PARTS`.
        network: what was measured, in words or by its folder.
        name, unit, variant: of the estimator, as in depth.csv.
        expected: the right answer; None where there is none.
        measured, ci_low, ci_high: what the estimator gave; of ranks, the correlation and its interval over models.
        tolerance: how far off it may be, None where that is not what decides.
        passed: None for what is shown only.
        note: what a reader should know.
    """

    part: str
    network: str
    name: str
    unit: str
    variant: str
    expected: float | None
    measured: float
    ci_low: float
    ci_high: float
    tolerance: float | None
    passed: bool | None
    note: str


def measure(anatomy: Anatomy, corpus: Corpus, names: Sequence[str], settings: DepthSettings) -> Values:
    """(name, variant) → the row of every estimator that was asked for, of whole blocks."""
    found: Values = {}
    for estimate, given in RUNS.values():
        if not set(given) & set(names):
            continue
        for row in estimate(anatomy, corpus, "block", settings).rows:
            if row.name in names and row.variant in VARIANTS[row.name]:
                found[row.name, row.variant] = row
    return found


def _of_skips(anatomy: Anatomy, corpus: Corpus, unit: str, settings: DepthSettings) -> Estimate:
    """Both that are made of the same runs."""
    skips = run_skips(anatomy, corpus, unit, settings, later=False)
    makers = (participation.participation, published.depth_score)
    return Estimate([row for make in makers for row in make(anatomy, corpus, unit, settings, skips=skips).rows])


RUNS: dict[str, tuple[Callable[..., Estimate], tuple[str, ...]]] = {
    "stages": (partial(staging.stages, kappas=KAPPAS), ("stages",)),
    "dependence": (dependence.dependence, ("dependence",)),
    "skips": (_of_skips, ("participation", "depth_score")),
    "crossing": (published.cosine_crossing, ("cosine_crossing",)),
    "lens": (published.lens_depths, ("lens_kl_depth", "lens_overlap_depth")),
    "raw": (path_elasticity_raw.path_elasticity_raw, ("path_elasticity_raw",)),
    "elasticity": (path_elasticity.path_elasticity, ("path_elasticity",)),
    "spectrum": (path_spectrum.path_spectrum, ("path_spectrum",)),
}


def checked(
    part: str, network: str, d: Depth, expected: float, tolerance: float, note: str = "", below: bool = False
) -> Row:
    """Within the tolerance; `below`: less than it below, since between two counts the line is taken."""
    error = d.value - expected
    passed = -tolerance < error <= EXACT if below else abs(error) <= tolerance
    return Row(
        part, network, d.name, d.unit, d.variant, expected, d.value, d.ci_low, d.ci_high, tolerance, passed, note
    )


def ranked(need: Floats, values: Floats, resamples: int = 2000) -> tuple[float, float, float]:
    """Spearman's rank correlation with its 95 % interval over models; of equal values it is 0: they order nothing."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(need), (resamples, len(need)))
    found = [_spearman(need[rows], values[rows]) for rows in drawn if np.ptp(need[rows]) > 0]
    low, high = np.quantile(found, [0.025, 0.975])
    return _spearman(need, values), float(low), float(high)


def ordered(need: Floats, values: Floats, lines: Sequence[str]) -> tuple[float, int, float]:
    """(right − wrong) / all pairs of one line with different needs, how many pairs, and the chance of that or more.

    The chance is exact: the share of all ways to deal each line's values out to its models that are as right.

    Args:
        need, values: of each model.
        lines: which line it belongs to.

    Returns:
        NaN, 0 and 1 where no two models of a line need differently.
    """
    total, pairs, chances = 0, 0, {0: 1.0}  # score → its chance, over the lines so far
    for line in sorted(set(lines)):
        mine = [place for place, other in enumerate(lines) if other == line]
        found = [_right(need[mine], values[list(dealt)]) for dealt in permutations(mine)]
        total += found[0]
        pairs += sum(need[a] < need[b] for a in mine for b in mine)
        after: dict[int, float] = {}
        for before, chance in chances.items():
            for score, count in Counter(found).items():
                after[before + score] = after.get(before + score, 0.0) + chance * count / len(found)
        chances = after
    if not pairs:
        return math.nan, 0, 1.0
    return total / pairs, int(pairs), sum(chance for score, chance in chances.items() if score >= total)


def _right(need: Floats, values: Floats) -> int:
    """Pairs in the right order less those in the wrong one."""
    ahead = need[:, None] < need[None, :]
    return int(np.sign(values[None, :] - values[:, None])[ahead].sum())


def _spearman(a: Floats, b: Floats) -> float:
    return float(statistics.spearmanr(a, b).statistic) if np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0


def gate_rows(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Rows of gate.csv: of each part whether all that was judged passed, and which did not."""
    judged = [row for row in rows if row.passed is not None]
    found = []
    for name, variants in VARIANTS.items():
        for variant in variants:
            states, reasons = [], []
            for part in JUDGED:
                mine = [row for row in judged if (row.part, row.name, row.variant) == (part, name, variant)]
                failed = [row for row in mine if not row.passed]
                states.append("not judged" if not mine else "failed" if failed else "passed")
                if failed:
                    reasons.append(
                        f"{part}: {failed[0].network}, {said(failed[0])}; {len(failed)} of {len(mine)} failed"
                    )
                elif not mine:
                    reasons.append(f"{part}: not judged")
            found.append((name, variant, *states, ". ".join(reasons)))
    return found


def gate_table(rows: Iterable[Row]) -> str:
    """What passed and how much of it failed, in markdown; the README shows it."""
    judged = [row for row in rows if row.passed is not None]
    lines = ["| estimate | known answers | rewrites | tasks | gate |", "|---|---|---|---|---|"]
    for name, variants in VARIANTS.items():
        for variant in variants:
            cells = []
            for part in JUDGED:
                mine = [row for row in judged if (row.part, row.name, row.variant) == (part, name, variant)]
                failed = sum(not row.passed for row in mine)
                cells.append(f"{failed} of {len(mine)} failed" if failed else f"all {len(mine)} passed")
            passed = all(cell.startswith("all ") and cell != "all 0 passed" for cell in cells)
            label = f"`{name}`{', ' if variant else ''}{variant}"
            lines.append(f"| {label} | {' | '.join(cells)} | {'passes' if passed else '–'} |")
    return "\n".join(lines)


def said(row: Row) -> str:
    """Expected and measured, in words."""
    interval = "" if math.isnan(row.ci_low) else f" ({row.ci_low:.3f} to {row.ci_high:.3f})"
    expected = "" if row.expected is None else f"expected {row.expected:.4g}, "
    return f"{expected}measured {row.measured:.4g}{interval}"


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table, whole or not at all; numbers to six digits, nothing for what is no number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)
    temporary.replace(path)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier run."""
    if not path.exists():
        return []
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            made: dict[str, Any] = dict(row)
            for key in ("expected", "measured", "ci_low", "ci_high", "tolerance"):
                made[key] = float(row[key]) if row[key] else math.nan if key.startswith("ci") else None
            made["passed"] = {"True": True, "False": False, "": None}[row["passed"]]
            found.append(Row(**made))
    return found
