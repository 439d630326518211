"""Are two neighbouring layers nearly one wider layer, in trained models and trained from scratch? Claims M2 and M3.

    python analyses/merge_twins.py             # after pre_vs_post.py; some ninety minutes on two cores
    python analyses/merge_twins.py --merges    # M2 alone: some five minutes on one core

As fixed in `PREREGISTRATION.md`. M2: in the confirmation runs of `pre_vs_post.py` of 12 blocks, at equal tokens and at
equal validation loss, ρ_l = KL(merge l, l + 1) / KL(skip l) by depth, with every way to combine that the placement
allows, beside what merges are judged against. Beyond that, as secondary numbers: pre-LN at post-LN's learning rate and
warm-up. M3, in `parallel_pairs.py`: parallel pairs trained from scratch.

Writes a row a changed model to merge_twins_rho.csv beside --results as it goes; a run that was stopped goes on where it
was. Models whose checkpoints are gone are trained again, some two minutes each. Table, figure and findings are made
from these rows alone, and into the README by `findings.py`.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import models
import numpy as np
import pandas as pd
import parallel_pairs
import runs
import study
import torch
from matplotlib.axes import Axes
from models import END, LOSS, MATCHED, PLACEMENTS, Point, Trained
from runs import Run

from depthprobe.ablation import default_schedules
from depthprobe.ablations.kinds import schedules
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import Schedule
from depthprobe.ablations.table import SILENT
from depthprobe.errors import OutputError
from depthprobe.progress import Bar
from depthprobe.report.gradient_panels import PlainLog
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number
from depthprobe.verify import Anatomy

NAME, RHO = parallel_pairs.NAME, f"{parallel_pairs.NAME}_rho.csv"
TOKENS = 4096
KEYS = ("arm", "name", "blocks", "seed", "at")  # at: end (equal tokens), loss (equal loss), matched
RHO_COLUMNS = (
    *KEYS, "schedule",
    "change",  # a way to merge, of `WAYS`; or what that is judged against, of `CONTROLS`
    "unit",  # of what is changed; `failed` for a run that did
    "layer",  # the first that is changed
    "kl", "delta_loss", "top1_agreement",
)  # fmt: skip
EFFECTS = RHO_COLUMNS[-3:]
WAYS = {  # unit and combination of merges; averaged weights are a baseline and no merge of the claim
    ("block", "sum"): "sum",
    ("block", "mean"): "mean",
    ("sublayer", "sum"): "attention first, sum",
    ("sublayer", "branch-sum"): "attention first, branch-sum",
    ("block", "weights"): "averaged weights",
}
BASELINE = "averaged weights"
AT = {END: "equal tokens", LOSS: "equal loss", MATCHED: "equal tokens, both with post-LN's setting"}
CONTROLS = ("skip", "skip both", "swap", "merge l, l + 2", "random vector")


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    parser.add_argument("--runs", type=Path, help="the trained models (default: pre_vs_post.csv beside --results)")
    parser.add_argument("--merges", action="store_true", help="only M2, which trains nothing")
    return runs.started(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    """Both claims: what merges cost in trained models, then pairs from scratch."""
    results, blocks = options.results.parent, runs.sized(options, parallel_pairs.SIZE)["blocks"]
    collect_rho(results / RHO, options.runs or results / f"{parallel_pairs.BESIDE}.csv", options.work, blocks)
    if not options.merges:
        parallel_pairs.collect(options)
    shown = section(results, blocks)
    print(shown.text(study.adjusted(shown.tests)))


def section(results: Path, blocks: int = parallel_pairs.SIZE["blocks"]) -> study.Section:
    """The study's part of the findings, from its tables alone: of each claim where its models were measured."""
    parts = [rho_part(results, blocks)] if (results / RHO).exists() else []
    parts += [pairs_part(results)] if has_pairs(results / f"{NAME}.csv") else []
    if not parts:
        raise OutputError(f"{results / RHO} is not there", fix="run its study first")

    def text(found: list[study.Verdict]) -> str:
        return "\n\n".join(part.text([each for each in found if each[0].claim in part.minds]) for part in parts)

    tests, figures = (tuple(one for part in parts for one in getattr(part, name)) for name in ("tests", "figures"))
    return study.Section(
        NAME, tests, text, figures, {claim: mind for part in parts for claim, mind in part.minds.items()},
        {claim: note for part in parts for claim, note in part.notes.items()},
        tuple(claim for part in parts for claim in part.changed),
    )  # fmt: skip


def has_pairs(path: Path) -> bool:
    """Whether the runs that judge M3 were made, or some of them."""
    return path.exists() and not study.arm(runs.load_table(path), stage="confirm").empty


def pairs_part(results: Path) -> study.Section:
    """M3."""
    tables = parallel_pairs.tables(results)

    def text(found: list[study.Verdict]) -> str:
        figure = f"![Losses of sequential, parallel and half as deep models](figures/{NAME}.png)"
        return "\n\n".join(
            [parallel_pairs.INTRODUCTION, study.verdicts(found), figure, parallel_pairs.overview(*tables)]
        )

    figure = study.Figure(NAME, partial(parallel_pairs.draw, *tables), 3.2, claims=("M3",))
    tests, told = tuple(parallel_pairs.primary(*tables)), {"M3": parallel_pairs.note(*tables)}
    return study.Section(NAME, tests, text, (figure,), {"M3": parallel_pairs.MIND}, told)


# M2: measuring


def collect_rho(path: Path, table: Path, work: Path, blocks: int) -> None:
    """Measure the trained models that there are.

    Raises:
        OutputError: some are missing.
    """
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    trained = Trained(table, work, blocks)
    if jobs := trained.jobs():
        with Bar("Merging", len(jobs), "models") as step:
            study.collect(path, RHO_COLUMNS, jobs, RhoRows(trained), step)
    trained.require()


@dataclass(frozen=True, eq=False)
class RhoRows:
    """The rows of one trained model: schedule, and the columns after it."""

    trained: Trained

    def __call__(self, arm: str, name: str, blocks: int, seed: int, at: str) -> Iterator[tuple[int | float | str, ...]]:
        run = self.trained.run(arm, seed, at)
        if run in self.trained.failed:
            return iter([("", "", "failed", 0, *[float("nan")] * len(EFFECTS))])
        parts = [
            (weight, checkpoint_rows(self.trained, run, point))
            for weight, point in self.trained.place(arm, seed, at).points
        ]
        table = models.mixed(parts, ("schedule", "change", "unit", "layer"))
        return table.itertuples(index=False, name=None)


@cache
def checkpoint_rows(trained: Trained, run: Run, point: Point) -> pd.DataFrame:
    """Those of one checkpoint, which the end and equal loss often share."""
    return rho_rows(trained.model(run, point))


def rho_rows(model: torch.nn.Module) -> pd.DataFrame:
    """What every change of a model costs."""
    _, corpus, anatomy = models.opened(model, TOKENS)
    changed = changes(anatomy)
    effects = sweep(anatomy, corpus, changed, SweepSettings()).effects
    rows = [
        (one.label, change_of(one), one.unit, one.changed[0], *(float(effects[name][:, k].mean()) for name in EFFECTS))
        for k, one in enumerate(changed)
    ]
    return pd.DataFrame(rows, columns=RHO_COLUMNS[len(KEYS) :])


def changes(anatomy: Anatomy) -> list[Schedule]:
    """Single skips, merges of neighbours in every way that the placement allows, and what these are judged against."""
    blocks = len(anatomy.stream)
    made = default_schedules(blocks, ("skip", "merge"), post_ln=anatomy.post_ln)
    if not anatomy.post_ln:
        made += schedules(blocks, ("merge",), combine="mean") + schedules(blocks, ("attention-first",))
    return made + schedules(blocks, ("merge",), combine="weights")


def change_of(schedule: Schedule) -> str:
    """One of `WAYS` or `CONTROLS`."""
    if schedule.kind == "merge":
        return WAYS[schedule.unit, schedule.combine]
    if schedule.kind == "control":
        return "merge l, l + 2" if schedule.merges else "random vector"
    return "skip both" if schedule.kind == "skip" and len(schedule.changed) == 2 else schedule.kind


# M2: from the table alone


def rho_part(results: Path, blocks: int) -> study.Section:
    """M2."""
    table = rho_table(results / RHO, blocks)
    models.refuse_partial(table, results / RHO)

    def text(found: list[study.Verdict]) -> str:
        parts = [RHO_INTRODUCTION, choices(table), study.verdicts(found), RHO_FIGURE, secondary(table), overview(table)]
        return "\n\n".join(filter(None, [*parts, sentences(table)]))

    figure = study.Figure(f"{NAME}_rho", partial(rho_draw, table), 5.4, 2, claims=("M2",))
    notes = rho_notes(table)
    return study.Section(NAME, tuple(rho_primary(table)), text, (figure,), {"M2": RHO_MIND}, notes, ("M2",))


def rho_notes(table: pd.DataFrame) -> dict[str, str]:
    """What the verdict, which is on the slope alone, does not say."""
    pre, post = (study.ratio(tuple(log_rho(table, arm, "sum").mean())) for arm in PLACEMENTS)
    blind = [study.ratio(tuple(log_rho(table, arm, "random vector").mean())) for arm in PLACEMENTS]
    note = (
        f"Over all depths the geometric mean of ρ is {pre} in pre-LN and {post} in post-LN, merged by sum; a random "
        f"vector as large as what a merge leaves out costs {blind[0]} and {blind[1]} of a skip (same seeds). "
        "Where that is about as much, a low ρ alone does not show that two blocks act like one."
    )
    if ways(table, "pre", MATCHED):
        falls = study.ratio(slopes(log_rho(table, "pre", "sum", MATCHED)))
        note += (
            f" At post-LN's learning rate the first test's number is {falls}, the second's "
            f"{study.ratio(difference(table, MATCHED))} (secondary, uncorrected)."
        )
    return {"M2": note}


def rho_table(path: Path, blocks: int) -> pd.DataFrame:
    """The table, its models of so many blocks."""
    table = study.read(path)
    table = table[table["blocks"] == blocks]
    models.refuse_several(table, ("arm", "seed", "at"), path)
    return table


def log_rho(table: pd.DataFrame, arm: str, change: str, at: str = END) -> pd.DataFrame:
    """log ρ of one way to merge (of a control: of its cost over the skip's), a row a layer, a column a seed.

    As in the library, a block whose skip costs no more than rounding is left out.
    """
    rows = study.arm(table, arm=arm, at=at)
    cost, skip = (
        study.arm(rows, change=name).pivot(index="layer", columns="seed", values="kl") for name in (change, "skip")
    )
    return np.log(cost / skip.where(skip > SILENT).reindex(cost.index))


def slope(logs: pd.Series) -> float:
    """Slope of log ρ over relative depth, l over the last l, of one model."""
    each = logs.dropna()
    return float(np.polyfit(each.index / each.index.max(), each, 1)[0])


def slopes(logs: pd.DataFrame) -> tuple[float, ...]:
    """Those of each seed."""
    return tuple(slope(logs[seed]) for seed in logs)


def ways(table: pd.DataFrame, arm: str, at: str = END) -> list[str]:
    """The ways to merge that an arm has, the baseline last."""
    there = set(study.arm(table, arm=arm, at=at)["change"])
    return [way for way in WAYS.values() if way in there]


def cheapest(table: pd.DataFrame, arm: str, at: str = END) -> str:
    """The way with the lowest mean of log ρ over layers and seeds; averaged weights do not take part."""
    merges = [way for way in ways(table, arm, at) if way != BASELINE]
    return min(merges, key=lambda way: log_rho(table, arm, way, at).stack().mean())


def by_others(table: pd.DataFrame, arm: str, at: str = END) -> dict[int, str]:
    """The cheapest way of each seed by all others, so that no seed is judged by a choice that it had a part in."""
    seeds = study.arm(table, arm=arm, at=at, change="skip")["seed"].unique()
    if len(seeds) < 2:
        return {}
    return {int(seed): cheapest(table[table["seed"] != seed], arm, at) for seed in seeds}


def rho_primary(table: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration."""
    first = "trained pre: ρ at the last block over ρ at the first, by the slope of its log, merged by sum; predicted "
    second = "the same in pre over post, each at its own learning rate, seeds merged in the way that is cheapest by "
    second += "the others; predicted "
    labels = (
        "ρ of pre, last block over first, merged by sum",
        "the same in pre over post, each at its own learning rate, merged in the cheapest way",
    )
    why = {arm: models.unjudged(table, {"arm": arm, "at": END}, len(models.SEEDS)) for arm in PLACEMENTS}
    below = (-np.inf, -study.LOG_MARGIN)
    tests: list[study.Test] = []
    if why["pre"]:
        tests.append(study.Unjudged("M2", f"{first}below 1/1.1", f"pre: {why['pre']}", labels[0]))
    else:
        values = slopes(log_rho(table, "pre", "sum"))
        tests.append(study.Primary("M2", f"{first}below 1/1.1", values, *below, label=labels[0]))
    lacks = "; ".join(f"{arm}: {words}" for arm, words in why.items() if words)
    if lacks:
        return [*tests, study.Unjudged("M2", f"{second}below 1/1.1", lacks, labels[1])]
    return [*tests, study.Primary("M2", f"{second}below 1/1.1", difference(table), *below, label=labels[1])]


def chosen(table: pd.DataFrame, arm: str, at: str) -> pd.DataFrame:
    """log ρ of an arm, a row a layer, a column a seed, each merged in the way that is cheapest by the others.

    Pre-LN at post-LN's setting stands beside the end of post-LN.
    """
    at = END if at == MATCHED and arm == "post" else at
    every = {seed: log_rho(table, arm, way, at)[seed] for seed, way in by_others(table, arm, at).items()}
    return pd.DataFrame(every)


def both(table: pd.DataFrame, at: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """log ρ of pre and of post, in the seeds that both have."""
    pre, post = (chosen(table, arm, at) for arm in PLACEMENTS)
    seeds = [seed for seed in pre if seed in post]
    return pre[seeds], post[seeds]


def difference(table: pd.DataFrame, at: str = END) -> tuple[float, ...]:
    """The slope in pre minus that in post of each seed, each merged in the way that is cheapest by the others."""
    pre, post = both(table, at)
    return tuple(np.subtract(slopes(pre), slopes(post)))


def choices(table: pd.DataFrame) -> str:
    """Which way each seed is merged in by the second test."""
    found = []
    for arm in PLACEMENTS:
        picked = by_others(table, arm)
        each = [
            f"{way} ({'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))})"
            for way in dict.fromkeys(picked.values())
            if (seeds := [seed for seed, other in picked.items() if other == way])
        ]
        found += [f"{arm}-LN, {' and '.join(each)}"] if each else []
    return f"Chosen so, the cheapest way is, in {'; in '.join(found)}." if found else ""


def overview(table: pd.DataFrame) -> str:
    """Every way to merge and every control, in markdown."""
    head = ["at", "placement", "change", "geometric mean of cost / KL(skip l)",
            "last block over first, on the fitted line", "changed?", "seeds",
            "smallest effect, mean and last over first"]  # fmt: skip
    lines = []
    for at, words in AT.items():
        for arm in PLACEMENTS:
            if not (found := ways(table, arm, at)):
                continue
            best = cheapest(table, arm, at)
            for change in [*found, *CONTROLS[1:]]:
                logs = log_rho(table, arm, change, at)
                named = f"{change} (cheapest)" if change == best else change
                means, falls = tuple(logs.mean()), slopes(logs) if len(logs) > 1 else ()
                cells = [study.ratio(falls), study.changed(falls)] if falls else ["", ""]
                shown = " and ".join(study.least(values, logs=True) for values in (means, falls) if values)
                lines.append([words, arm, named, study.ratio(means), *cells, str(logs.shape[1]), shown])
    return study.markdown(head, lines)


def sentences(table: pd.DataFrame) -> str:
    """What else the secondary numbers came to: pre over post."""
    lines = []
    for at, words in AT.items():
        if not (ways(table, "pre", at) and (at == MATCHED or ways(table, "post", at))):
            continue
        pre, post = both(table, at)
        means, falls = tuple(pre.mean() - post.mean()), difference(table, at)
        if len(falls) < 2:
            continue
        told = {"geometric mean of ρ": means}
        if at != END:  # there it is the test's
            told["ρ at the last block over ρ at the first"] = falls
        numbers = "; ".join(
            f"{what} {study.ratio(values)} ({study.changed(values)}, smallest effect {study.least(values, logs=True)})"
            for what, values in told.items()
        )
        lines.append(
            f"- Pre over post at {words}, each seed in the way that is cheapest by the others: {numbers}; "
            f"{len(falls)} seeds." + (" Its slope is the second test." if at == END else "")
        )
    there = [at for at in (END, MATCHED) if ways(table, "pre", at)]
    return "\n".join([*lines, *(against_noise(table, at) for at in there), *([NOISE, ends(table)] if there else [])])


def against_noise(table: pd.DataFrame, at: str) -> str:
    """Merging by sum over a random vector of the size of what that leaves out, in pre-LN."""
    logs = log_rho(table, "pre", "sum", at) - log_rho(table, "pre", "random vector", at)
    values = {"geometric mean": tuple(logs.mean()), "last block over first, on the fitted line": slopes(logs)}
    told = ", ".join(
        f"{what} {study.ratio(each)} (smallest effect {study.least(each, logs=True)})" for what, each in values.items()
    )
    return f"- Pre-LN at {AT[at]}, merging by sum over adding a random vector of the size of what is left out: {told}."


def ends(table: pd.DataFrame) -> str:
    """How far the fitted line's ends are from ρ itself, and how much the way to merge matters."""
    logs = log_rho(table, "pre", "sum")
    seen = tuple(logs.iloc[-1] - logs.iloc[0])
    by_way = {way: slopes(log_rho(table, "pre", way)) for way in ways(table, "pre") if way != BASELINE}
    told = ", ".join(f"{way} {number(math.exp(np.mean(values)))}" for way, values in by_way.items())
    return (
        f"- Pre-LN at equal tokens: ρ itself at the last block over ρ at the first, merged by sum, is "
        f"{study.ratio(seen)} (smallest effect {study.least(seen, logs=True)}); on the fitted "
        f"line, by the way of merging: {told}."
    )


RHO_INTRODUCTION = f"""### M2: merging neighbours in trained models (`{NAME}.py`)

12 blocks, width 64, at the end of training, on {TOKENS:,} bytes of what `analyze` reads by default, every
position scored. ρ_l = KL(merge l, l + 1) / KL(skip l). Where the preregistration can be read in several ways: the first
test is of the claim's own merge, `sum`, as in `depthprobe/criteria.py`; the cheapest way is the one with the lowest
mean of log ρ over layers and seeds, averaged weights left out, which are known to be poor, and for each seed it is
chosen by the others (changed, see the preregistration); relative depth is l over the last l, so that the slope of a
line through log ρ is the log of what the line has at the last block over the first; the second test pairs seeds."""
RHO_FIGURE = f"""![ρ over depth in pre-LN and post-LN, merged by sum and in the way that is cheapest over all seeds, a
thin line a seed, thick their geometric mean](figures/{NAME}_rho.png)"""


def secondary(table: pd.DataFrame) -> str:
    """What the numbers beside the tests are, and what they leave open."""
    text = """Secondary, with uncorrected intervals over seeds, which support nothing. Beside the merges stands
what they are judged against, over the skip of l as well; "cheapest" is by all seeds. `changed` is against 1, with the
margin of 10 %. At equal loss, each seed's arms are compared at the higher of their two last losses, costs being on the
line between the checkpoints around it."""
    if ways(table, "pre", MATCHED):
        return f"""{text}
At both, each arm has the learning rate and warm-up that suit it best, so that the placement is not all
that differs. "{AT[MATCHED]}" has pre-LN with those of post-LN, which are not pre-LN's best, beside
post-LN's rows at equal tokens; losses are not equal there."""
    return f"""{text}
Pre-LN and post-LN are compared at their own learning rates, everywhere: what differs is not the
placement alone. Pre-LN at post-LN's learning rate, which is trained for P1, was not measured here yet."""


NOISE = """- Where that is not below 1, a low ρ says no more than that what a merge leaves out is small beside what a
  skip leaves out, and a ρ that falls with depth that it is smaller late."""
RHO_MIND = (
    "an interval wholly on one side of the margin, with more seeds, wider models, longer training or other learning "
    "rates"
)


def rho_draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """ρ over depth, merged by sum and in each arm's cheapest way by all seeds: a line a seed, the geometric mean."""
    for place, ax in enumerate(axes):
        for arm, colour in zip(PLACEMENTS, LIGHT.lines, strict=False):
            if not ways(table, arm):
                continue
            way = cheapest(table, arm) if place else "sum"
            logs = log_rho(table, arm, way)
            ax.plot(logs.index + 0.5, np.exp(logs), color=colour, alpha=0.25, linewidth=0.7)
            ax.plot(logs.index + 0.5, np.exp(logs.mean(axis=1)), color=colour, linewidth=2, label=f"{arm}, {way}")
        ax.axhline(1, color=LIGHT.ink, linewidth=0.7)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(PlainLog())
        ax.yaxis.set_minor_formatter(PlainLog())
        ax.set_ylabel(r"$\rho_l$, " + ("cheapest way" if place else "merged by sum"))
        ax.legend()
    axes[-1].set_xlabel("l, drawn between the two blocks' first states")


if __name__ == "__main__":
    sys.exit(main())
