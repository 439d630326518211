"""Are two neighbouring layers nearly one wider layer, in trained models and trained from scratch? Claims M2 and M3.

    python analyses/merge_twins.py             # after pre_vs_post.py; some ninety minutes on two cores
    python analyses/merge_twins.py --merges    # M2 alone: some five minutes on one core

As fixed in `PREREGISTRATION.md`. M2: in the confirmation runs of `pre_vs_post.py` of 12 blocks, at equal tokens and at
equal validation loss, ρ_l = KL(merge l, l + 1) / KL(skip l) by depth, with every way to combine that the placement
allows, beside what merges are judged against. M3, in `parallel_pairs.py`: parallel pairs trained from scratch.

Writes a row a changed model to merge_twins_rho.csv beside --results as it goes; a run that was stopped goes on where it
was. Table, figure and findings are made from these rows alone, and into the README by `findings.py`.
"""

import argparse
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
from models import END, LOSS, PLACEMENTS, Point, Trained

from depthprobe.ablation import default_schedules
from depthprobe.ablations.kinds import schedules
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import Schedule
from depthprobe.ablations.table import SILENT
from depthprobe.errors import OutputError
from depthprobe.progress import Bar
from depthprobe.report.gradient_panels import PlainLog
from depthprobe.report.panels import LIGHT
from depthprobe.verify import Anatomy

NAME, RHO = parallel_pairs.NAME, f"{parallel_pairs.NAME}_rho.csv"
TOKENS = 4096
KEYS = ("arm", "name", "blocks", "seed", "at")  # at: end (equal tokens), loss (equal loss)
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

    figure = study.Figure(NAME, partial(parallel_pairs.draw, *tables), 3.2)
    return study.Section(NAME, tuple(parallel_pairs.primary(*tables)), text, (figure,), {"M3": parallel_pairs.MIND})


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
        if (arm, seed) in self.trained.failed:
            return iter([("", "", "failed", 0, *[float("nan")] * len(EFFECTS))])
        parts = [
            (weight, checkpoint_rows(self.trained, arm, seed, point))
            for weight, point in self.trained.place(arm, seed, at).points
        ]
        table = models.mixed(parts, ("schedule", "change", "unit", "layer"))
        return table.itertuples(index=False, name=None)


@cache
def checkpoint_rows(trained: Trained, arm: str, seed: int, point: Point) -> pd.DataFrame:
    """Those of one checkpoint, which the end and equal loss often share."""
    return rho_rows(trained.model(arm, seed, point))


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
        parts = [RHO_INTRODUCTION, study.verdicts(found), RHO_FIGURE, RHO_SECONDARY, overview(table), sentences(table)]
        return "\n\n".join(filter(None, parts))

    figure = study.Figure(f"{NAME}_rho", partial(rho_draw, table), 5.4, 2)
    return study.Section(NAME, tuple(rho_primary(table)), text, (figure,), {"M2": RHO_MIND}, rho_notes(table))


def rho_notes(table: pd.DataFrame) -> dict[str, str]:
    """What the verdict, which is on the slope alone, does not say."""
    pre, post = (study.ratio(tuple(log_rho(table, arm, "sum").mean())) for arm in PLACEMENTS)
    blind = study.ratio(tuple(log_rho(table, "pre", "random vector").mean()))
    note = (
        f"Over all depths ρ is {pre} in pre-LN and {post} in post-LN, merged by sum; a random vector as large as what "
    )
    return {"M2": note + f"a merge leaves out costs {blind} of a skip in pre-LN."}


def rho_table(path: Path, blocks: int) -> pd.DataFrame:
    """The table, its models of so many blocks."""
    table = study.read(path)
    table = table[table["blocks"] == blocks]
    models.refuse_several(table, ("arm", "seed"), path)
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


def slopes(logs: pd.DataFrame) -> tuple[float, ...]:
    """Slope of log ρ over relative depth, l over the last l, of each seed."""
    found = []
    for seed in logs:
        each = logs[seed].dropna()
        found.append(float(np.polyfit(each.index / each.index.max(), each, 1)[0]))
    return tuple(found)


def ways(table: pd.DataFrame, arm: str, at: str = END) -> list[str]:
    """The ways to merge that an arm has, the baseline last."""
    there = set(study.arm(table, arm=arm, at=at)["change"])
    return [way for way in WAYS.values() if way in there]


def cheapest(table: pd.DataFrame, arm: str, at: str = END) -> str:
    """The way with the lowest mean of log ρ over layers and seeds; averaged weights do not take part."""
    merges = [way for way in ways(table, arm, at) if way != BASELINE]
    return min(merges, key=lambda way: log_rho(table, arm, way, at).stack().mean())


def rho_primary(table: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration."""
    first = "trained pre: ρ at the last block over ρ at the first, by the slope of its log, merged by sum; predicted "
    second = "the same in pre over post, each merged in its cheapest way; predicted "
    why = {arm: models.unjudged(table, {"arm": arm, "at": END}, len(models.SEEDS)) for arm in PLACEMENTS}
    below = (-np.inf, -study.LOG_MARGIN)
    tests: list[study.Test] = []
    if why["pre"]:
        tests.append(study.Unjudged("M2", f"{first}below 1/1.1", f"pre: {why['pre']}"))
    else:
        tests.append(study.Primary("M2", f"{first}below 1/1.1", slopes(log_rho(table, "pre", "sum")), *below))
    lacks = "; ".join(f"{arm}: {words}" for arm, words in why.items() if words)
    if lacks:
        return [*tests, study.Unjudged("M2", f"{second}below 1/1.1", lacks)]
    return [*tests, study.Primary("M2", f"{second}below 1/1.1", difference(table), *below)]


def difference(table: pd.DataFrame, at: str = END) -> tuple[float, ...]:
    """The slope in pre minus that in post of each seed, each merged in its cheapest way."""
    pre, post = (log_rho(table, arm, cheapest(table, arm, at), at) for arm in PLACEMENTS)
    seeds = [seed for seed in pre if seed in post]
    return tuple(np.subtract(slopes(pre[seeds]), slopes(post[seeds])))


def overview(table: pd.DataFrame) -> str:
    """Every way to merge and every control, in markdown."""
    head = ["at", "placement", "change", "geometric mean of cost / KL(skip l)", "at the last block over at the first",
            "", "seeds"]  # fmt: skip
    lines = []
    for at, words in ((END, "equal tokens"), (LOSS, "equal loss")):
        for arm in PLACEMENTS:
            if not (found := ways(table, arm, at)):
                continue
            best = cheapest(table, arm, at)
            for change in [*found, *CONTROLS[1:]]:
                logs = log_rho(table, arm, change, at)
                named = f"{change} (cheapest)" if change == best else change
                slope = slopes(logs) if len(logs) > 1 else ()
                falls = [study.ratio(slope), study.changed(slope)] if slope else ["", ""]
                lines.append([words, arm, named, study.ratio(tuple(logs.mean())), *falls, str(logs.shape[1])])
    return study.markdown(head, lines)


def sentences(table: pd.DataFrame) -> str:
    """What else the secondary numbers came to."""
    if not all(ways(table, arm, LOSS) for arm in PLACEMENTS):
        return ""
    values = difference(table, LOSS)
    return f"- At equal loss, pre over post, each in its cheapest way: {study.ratio(values)} ({study.changed(values)})."


RHO_INTRODUCTION = f"""### M2: merging neighbours in trained models (`{NAME}.py`)

12 blocks, width 64, at the end of training, on {TOKENS:,} bytes of what `analyze` reads by default, every
position scored. ρ_l = KL(merge l, l + 1) / KL(skip l). Where the preregistration can be read in several ways: the first
test is of the claim's own merge, `sum`, as in `depthprobe/criteria.py`; the cheapest way of an arm is the one with the
lowest mean of log ρ over its layers and seeds, averaged weights left out, which are known to be poor; relative depth is
l over the last l, so that a slope of log ρ is the log of the last ρ over the first; the second test pairs seeds."""
RHO_FIGURE = f"![ρ over depth in pre-LN and post-LN](figures/{NAME}_rho.png)"
RHO_SECONDARY = """Secondary, with uncorrected intervals over seeds, which support nothing. Beside the merges stands
what they are judged against, over the skip of l as well. `changed` is against 1, with the margin of 10 %. At equal
loss, each seed's arms are compared at the higher of their two last losses, costs being on the line between the
checkpoints around it."""
RHO_MIND = "a slope on the other side of the margin in wider models or after longer training; only width 64 was tried"


def rho_draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """ρ over depth, merged by sum and in each arm's cheapest way: a line a seed, and the geometric mean."""
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
