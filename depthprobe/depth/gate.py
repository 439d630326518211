"""The gate: which estimators of depth may speak on the first screen and in a verdict, and why the others may not.

An estimator passes if it gave the known answers of analytic networks (`table`), did not move where the function did not
(`rewrites`), put trained models of known depth in their order (`tasks`), all of which `analyses/calibration.py` finds
out and gate.csv holds, and if on the model at hand it says more than of the model's randomly initialised twin and more
than of the model on random tokens, beyond the intervals.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from depthprobe.estimate import Interval

__all__ = ["COLUMNS", "CONTROLS", "FEWEST", "PARTS", "Static", "Verdict", "judge", "static_gate"]

CONTROLS = ("random-init", "random-tokens")
PARTS = {
    "table": "known answers of networks",
    "rewrites": "rewrites that keep the function",
    "tasks": "order of models of known depth",
}
COLUMNS = ("name", "variant", *PARTS, "reason")
PASSED = "passed"
FEWEST = 8  # documents or sequences: an interval over two or three is no interval


@dataclass(frozen=True)
class Static:
    """A row of gate.csv: what the calibration found of one variant of an estimator.

    Attributes:
        name, variant: as in depth.csv.
        table, rewrites, tasks: `passed`, `failed` or `not judged`.
        reason: what failed, in words; empty where nothing did.
    """

    name: str
    variant: str
    table: str
    rewrites: str
    tasks: str
    reason: str

    @property
    def passed(self) -> bool:
        """Whether nothing is missing."""
        return (self.table, self.rewrites, self.tasks) == (PASSED,) * 3

    @property
    def missing(self) -> str:
        """Which parts did not pass, in words; empty if all did."""
        states = zip(PARTS.values(), (self.table, self.rewrites, self.tasks), strict=True)
        return "; ".join(part if state == "failed" else f"{part}: {state}" for part, state in states if state != PASSED)


@dataclass(frozen=True)
class Verdict:
    """Whether an estimator may speak of the model at hand.

    Attributes:
        passed: it passed all of the gate.
        reason: what it did not pass, or by what it passed, in words.
    """

    passed: bool
    reason: str


@cache
def static_gate() -> dict[tuple[str, str], Static]:
    """gate.csv, by (name, variant)."""
    text = resources.files("depthprobe.depth").joinpath("gate.csv").read_text(encoding="utf-8")
    rows = [Static(**row) for row in csv.DictReader(text.splitlines())]
    return {(row.name, row.variant): row for row in rows}


def judge(
    name: str, variant: str, model: Interval, controls: Mapping[str, Interval | str], clusters: int = FEWEST
) -> Verdict:
    """Whether an estimator passes the gate on the model at hand. Higher is taken to mean deeper.

    Args:
        name, variant: of the row of depth.csv. A variant that was not calibrated is judged as the default one, the
            empty variant, if the estimator has one.
        model: the estimate, with its interval over sequences.
        controls: the same of each of `CONTROLS`; of one that could not be made, why, as a string.
        clusters: how many documents, or sequences where there are no documents, the intervals are over.
    """
    rows = static_gate()
    static = rows.get((name, variant)) or rows.get((name, ""))
    if static is None:
        return Verdict(False, "never calibrated")
    if not static.passed:
        return Verdict(False, f"failed its calibration: {static.missing}")
    if not controls:
        return Verdict(False, "no control was run")
    for missing in (control for control in CONTROLS if control not in controls):
        return Verdict(False, f"the control {missing} was not run")
    if 1 < clusters < FEWEST:
        return Verdict(False, f"its interval rests on {clusters} documents or sequences, and {FEWEST} are the least")
    if math.isnan(model.low):
        return Verdict(False, "it has no interval: one sequence says nothing of the others")
    for control, found in controls.items():
        if isinstance(found, str):
            return Verdict(False, f"the control {control} could not be made: {found}")
        if math.isnan(found.high):
            return Verdict(False, f"the control {control} has no interval: one sequence says nothing of the others")
        if not model.low > found.high:
            return Verdict(False, f"not above {control}: {_words(model)} against {_words(found)}")
    return Verdict(True, f"above {' and '.join(controls)}")


def _words(interval: Interval) -> str:
    return f"{interval.value:#.3g} ({interval.low:#.3g} to {interval.high:#.3g})"
