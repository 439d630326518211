"""What given models say of the claims: each criterion's number against the region of its criterion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pandas as pd

from depthprobe.contrast import difference, over_seeds, paired, same_seeds, smallest_effect, unpaired
from depthprobe.criteria import CLAIMS, CRITERIA, INITIALISATIONS, Claim, Criterion
from depthprobe.depth.gate import FEWEST
from depthprobe.estimate import Interval
from depthprobe.evidence import clusters, placement
from depthprobe.report import Report
from depthprobe.report.compare_schema import VERDICT_COLUMNS
from depthprobe.report.tables import number

__all__ = ["CANNOT", "VERDICTS", "Case", "judge", "verdict"]

CANNOT = "cannot be judged here"
VERDICTS = ("supported", "contradicted", "undecided", CANNOT)


@dataclass(frozen=True, eq=False)
class Case:
    """A model that is judged: one, or several training seeds of it.

    Attributes:
        name: of the run or the group.
        reports: one a seed.
        seeds: of the training, None where unknown.
        tokens: that each was trained on, None where unknown.
        failed: why its training counts as failed; None if it does not.
    """

    name: str
    reports: tuple[Report, ...]
    seeds: tuple[int | None, ...] = (None,)
    tokens: int | None = None
    failed: str | None = None

    @property
    def placement(self) -> str:
        """Of its norms; empty where it was not found, or differs between seeds."""
        found = {placement(report) for report in self.reports}
        return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class _Row:
    run: str
    criterion: Criterion
    verdict: str
    reason: str
    interval: Interval | None = None


def judge(interval: Interval, low: float, high: float) -> str:
    """Supported if the whole 95 % interval lies in the region, contradicted if all of it lies outside, else undecided.

    Within a region with two ends this is a test of equivalence by the 95 % interval, stricter than two one-sided tests
    at 5 %. A value with no interval decides nothing.
    """
    if math.isnan(interval.low) or math.isnan(interval.high):
        return "undecided"
    if low < interval.low and interval.high < high:
        return "supported"
    return "contradicted" if interval.high <= low or interval.low >= high else "undecided"


def verdict(cases: Sequence[Case]) -> pd.DataFrame:
    """The rows of verdict.csv: every claim, by every criterion that the models can be judged by; at least one row each.

    Args:
        cases: models and groups of seeds. Of a group the interval is one over its seeds, of a single model that of its
            report, over sequences: it says nothing of other training runs.

    Returns:
        claim, run, criterion, source, value, ci_low, ci_high, verdict, reason. A claim that none of the models can be
        judged by has a single row that says why.
    """
    rows = [row for claim in CLAIMS for row in _judged(claim, cases)]
    return pd.DataFrame(rows, columns=list(VERDICT_COLUMNS)).astype(VERDICT_COLUMNS)


def _judged(claim: Claim, cases: Sequence[Case]) -> list[tuple[object, ...]]:
    if claim.beyond:
        return [(claim.name, "", claim.sentence, "", math.nan, math.nan, math.nan, CANNOT, claim.beyond)]
    found = []
    for criterion in (criterion for criterion in CRITERIA if criterion.claim == claim.name):
        found += [_one(criterion, case) for case in cases] if criterion.of == "model" else _pairs(criterion, cases)
    known = [row for row in found if row.verdict != CANNOT]
    if known:
        # what a model lacks is said once for it, unless it has something to say by another criterion
        told = {row.run for row in known}
        silent = {row.run: row for row in reversed(found) if row.run not in told and " − " not in row.run}
        return [_plain(claim, row) for row in [*known, *silent.values()]]
    reasons = dict.fromkeys(row.reason for row in found)
    reason = "; ".join(list(reasons)[:3]) or "no model to judge"
    return [(claim.name, "", claim.sentence, "", math.nan, math.nan, math.nan, CANNOT, reason)]


def _plain(claim: Claim, row: _Row) -> tuple[object, ...]:
    ends = (math.nan,) * 3 if row.interval is None else (row.interval.value, row.interval.low, row.interval.high)
    return (claim.name, row.run, row.criterion.sentence, row.criterion.source, *ends, row.verdict, row.reason)


def _one(criterion: Criterion, case: Case) -> _Row:
    values = _numbers(criterion, case)
    if isinstance(values, str):
        return _Row(case.name, criterion, CANNOT, values)
    if len(values) == 1:
        seeds = len(case.reports[0].gradients.get("fresh") or []) if criterion.state == "fresh" else 0
        if seeds:
            return _told(case.name, criterion, values[0], f"over {seeds} initialisations")
        count, what = clusters(case.reports[0], criterion.part)
        return _told(case.name, criterion, values[0], f"over the {count} {what} of one model", few=count < FEWEST)
    shown = f"over {len(values)} seeds, which show effects from {smallest_effect(len(values)):.1f} SD on"
    return _told(case.name, criterion, over_seeds([each.value for each in values]), shown)


def _pairs(criterion: Criterion, cases: Sequence[Case]) -> list[_Row]:
    """The criterion on every pre-LN model beside every post-LN one."""
    sides = [[case for case in cases if case.placement == wanted] for wanted in ("pre", "post")]
    if not all(sides):
        lacking = " and ".join(name for name, side in zip(("pre-LN", "post-LN"), sides, strict=True) if not side)
        return [_Row("", criterion, CANNOT, f"no {lacking} model among those given")]
    return [_pair(criterion, pre, post) for pre, post in product(*sides)]


def _pair(criterion: Criterion, pre: Case, post: Case) -> _Row:
    name = f"{pre.name} − {post.name}"
    for case in (pre, post):
        if len(case.reports) < criterion.seeds:
            reason = f"one seed of {case.name}: {criterion.seeds} or more are needed, five show only effects ≥ 1.7 SD"
            return _Row(name, criterion, CANNOT, reason)
    if pre.reports[0].model["blocks"] != post.reports[0].model["blocks"]:
        return _Row(name, criterion, CANNOT, "the two have different numbers of blocks")
    if criterion.equal_tokens and (pre.tokens is None or pre.tokens != post.tokens):
        how = "unknown" if pre.tokens is None or post.tokens is None else "different"
        return _Row(name, criterion, CANNOT, f"the tokens that they were trained on are {how}")
    reports = (*pre.reports, *post.reports)
    costs = {str(rho.get("cost")) for report in reports if (rho := report.merging.get("rho"))}
    if criterion.part == "merging" and len(costs) > 1:
        return _Row(
            name, criterion, CANNOT, f"the costs of changes are of different kinds ({', '.join(sorted(costs))})"
        )
    numbers = [_numbers(criterion, case) for case in (pre, post)]
    for found in numbers:
        if isinstance(found, str):
            return _Row(name, criterion, CANNOT, found)
    first, second = (found for found in numbers if not isinstance(found, str))
    if len(first) == len(second) == 1:
        counts = [clusters(case.reports[0], criterion.part) for case in (pre, post)]
        over = " and ".join(f"the {count} {what} of {case.name}"
                            for (count, what), case in zip(counts, (pre, post), strict=True))  # fmt: skip
        few = min(count for count, _ in counts) < FEWEST
        return _told(name, criterion, difference(first[0], second[0]), f"over {over}", few)
    values, others = ([each.value for each in side] for side in (first, second))
    if (places := same_seeds(pre.seeds, post.seeds)) is not None:
        others = [others[place] for place in places]
        shown = f"over {len(values)} pairs of seeds, which show effects from {smallest_effect(len(values)):.1f} SD on"
        return _told(name, criterion, paired(values, others), shown)
    effect = smallest_effect(len(values), len(others))
    shown = f"over {len(values)} and {len(others)} seeds, which show effects from {effect:.1f} SD on"
    return _told(name, criterion, unpaired(values, others), shown)


def _numbers(criterion: Criterion, case: Case) -> list[Interval] | str:
    """The number of each seed, or why the criterion does not go with the model."""
    if case.failed:
        return f"its training failed: {case.failed}"
    if not case.placement and (criterion.placements or criterion.of == "pair"):
        return "its norm placement is not known"
    if criterion.placements and case.placement not in criterion.placements:
        return f"the claim is not about {_LN.get(case.placement, case.placement)}"
    fresh = [len(report.gradients.get("fresh") or []) or int(case.tokens == 0) for report in case.reports]
    if criterion.state == "fresh" and max(fresh) == 0:
        return "a trained model: the claim is about initialisation, which `depthprobe gradients --fresh` measures"
    if criterion.state == "fresh" and min(fresh) < INITIALISATIONS:
        return f"{min(fresh)} initialisations, {INITIALISATIONS} are needed"
    if criterion.state == "trained" and max(fresh) > 0:
        return "a random initialisation: the claim is about trained models"
    found: list[Interval] = []
    for report in case.reports:
        one = criterion.measure(report)
        if isinstance(one, str):
            return one
        found.append(one)
    return found


def _told(run: str, criterion: Criterion, interval: Interval, over: str, few: bool = False) -> _Row:
    """The row of a criterion; `few` where the interval rests on so little that it decides nothing."""
    if few and not math.isnan(interval.low):
        return _Row(
            run, criterion, "undecided", f"{over}, of which {FEWEST} are the least: more text has more", interval
        )
    said = judge(interval, criterion.low, criterion.high)
    region = _region(criterion)
    reasons = {
        "supported": f"the 95 % interval lies {region}",
        "contradicted": f"no part of the 95 % interval lies {region}",
        "undecided": f"a part of the 95 % interval lies {region}, a part does not",
    }
    reason = "there is no interval" if math.isnan(interval.low) else reasons[said]
    return _Row(run, criterion, said, f"{reason}; {over}", interval)


def _region(criterion: Criterion) -> str:
    low, high = criterion.low, criterion.high
    if math.isinf(low) or (low == 0.0 and not math.isinf(high)):
        return f"below {number(high)}"
    return f"above {number(low)}" if math.isinf(high) else f"between {number(low)} and {number(high)}"


_LN = {"pre": "pre-LN", "post": "post-LN", "none": "a model without norms", "": "a model of unknown placement"}
