"""Does post-LN need warm-up, whatever the optimiser, and is that all that pre-LN is better for? Claims W1 and W2.

    python analyses/warmup.py        # some ninety minutes on two cores; goes on where it was stopped

As fixed in `PREREGISTRATION.md`: pre-LN and post-LN of 12 blocks, AdamW, RAdam and SGD with momentum, three warm-ups
and five learning rates each with seed 0; then each at its best with and without warm-up, with fresh seeds; and, for the
reason given there under "Changes", all of SGD again without weight decay. Writes a row a run to --results; tables,
figure and findings are made from these rows alone, and into the README by `findings.py`.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
import oscillation
import pandas as pd
import runs
import study
from matplotlib.axes import Axes
from runs import Run

from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME = "warmup"
PLACEMENTS, PLANNED, LATER = ("pre", "post"), ("adamw", "radam", "sgd"), (runs.SGD_PLAIN,)
OPTIMIZERS, JUDGED = (*PLANNED, *LATER), ("adamw", "radam", runs.SGD_PLAIN)
RATES = {
    "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "radam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "sgd": (0.03, 0.1, 0.3, 1, 3),
    runs.SGD_PLAIN: (0.03, 0.1, 0.3, 1, 3),
}
WARMUPS, SEEDS = (0, 50, 200), runs.SEEDS
SIZE = {"blocks": 12, "width": 64, "steps": 600}
WITH = {False: "without", True: "with"}
WORDS = {
    "adamw": "AdamW", "radam": "RAdam",
    "sgd": "SGD with momentum, decay", runs.SGD_PLAIN: "SGD with momentum, no decay",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    return runs.started(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    size, jobs = runs.sized(options, SIZE), []
    for optimizers in (PLANNED, LATER):
        jobs += grid(size, optimizers=optimizers)
        table = runs.collect(options.results, jobs, options, "Choosing")
        jobs += confirmations(table, optimizers)
        runs.collect(options.results, jobs, options, "Confirming")
    shown = section(options.results.parent)
    print(shown.text(study.adjusted(shown.tests)))


def grid(size: dict[str, int], arms: tuple[str, ...] = PLACEMENTS, optimizers: tuple[str, ...] = PLANNED,
         warmups: tuple[int, ...] = WARMUPS) -> list[Run]:  # fmt: skip
    """The runs that choose, the same for all arms."""
    steps, scale = size["steps"], size["steps"] / SIZE["steps"]
    return [
        Run("grid", arm, size["blocks"], size["width"], optimizer, lr, round(warmup * scale), steps, 0)
        for optimizer in optimizers
        for warmup in warmups
        for lr in RATES[optimizer]
        for arm in arms
    ]


def confirmations(table: pd.DataFrame, optimizers: tuple[str, ...] = PLANNED) -> list[Run]:
    """Fresh seeds for each at its best with and without warm-up, and for the baseline."""
    jobs: list[Run] = []
    for optimizer in optimizers:
        chosen = [best(table, arm, optimizer, warm) for arm in PLACEMENTS for warm in (False, True)]
        jobs += [job for seed in SEEDS for row in chosen for job in runs.again(row, "confirm", [seed])]
        if optimizer == "adamw":
            base = min(chosen[:2], key=lambda row: row["dev"])
            jobs += runs.again(base, "confirm", SEEDS, arm="embedding", blocks=1)
    return jobs


def best(table: pd.DataFrame, arm: str, optimizer: str, warm: bool) -> pd.Series:
    """The point of a grid that is confirmed."""
    return runs.lowest(with_or_without(study.arm(table, stage="grid", arm=arm, optimizer=optimizer), warm))


def with_or_without(rows: pd.DataFrame, warm: bool) -> pd.DataFrame:
    """Those with warm-up, or those without."""
    return rows[(rows["warmup"] > 0) == warm]


# From the table alone


def confirmed(table: pd.DataFrame, arm: str, optimizer: str, warm: bool) -> pd.DataFrame:
    """The runs that judge, by seed."""
    rows = study.arm(table, stage="confirm", arm=arm, optimizer=optimizer)
    return with_or_without(rows, warm).sort_values("seed")


def at_best(table: pd.DataFrame, arm: str, optimizer: str = "adamw") -> pd.DataFrame:
    """The runs that judge, of with and without warm-up whichever was better in the grid."""
    chosen = runs.best(table, arm=arm, optimizer=optimizer)
    return confirmed(table, arm, optimizer, warm=bool(chosen["warmup"]))


def primary(table: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration."""
    tests: list[study.Test] = []
    for optimizer in JUDGED:
        for arm, where in (("post", "above"), ("pre", "within")):
            without, warm = (confirmed(table, arm, optimizer, warm) for warm in (False, True))
            about = f"{WORDS[optimizer]}, {arm}: loss without warm-up minus with"
            fails = arm == "post"
            tests.append(runs.compared("W1", about, without, warm, runs.margin(table, warm), where, fails))  # type: ignore[arg-type]
    pre, post = (at_best(table, arm) for arm in PLACEMENTS)
    about = "AdamW, each at its best learning rate and warm-up: loss pre − post"
    tests.append(runs.compared("W2", about, pre, post, runs.margin(table, pre), "within"))
    return tests


def overview(table: pd.DataFrame) -> str:
    """What was chosen and what it came to, in markdown."""
    lines = []
    for optimizer in OPTIMIZERS:
        for arm in PLACEMENTS:
            whole = study.arm(table, stage="grid", arm=arm, optimizer=optimizer)
            for warm in (False, True) if len(whole) else ():
                tried, rows = with_or_without(whole, warm), confirmed(table, arm, optimizer, warm)
                lines.append([WORDS[optimizer], arm, WITH[warm], *runs.summary(tried, rows, whole)])
    base = study.arm(table, stage="confirm", arm="embedding")
    setting = [str(base["warmup"].iloc[0]), "–", f"{base['lr'].iloc[0]:g}", "pre-LN's best"]
    lines.append([WORDS["adamw"], "no blocks", WITH[bool(base["warmup"].iloc[0])], *setting, *runs.scored(base)])
    return study.markdown(["optimiser", "placement", "warm-up", *runs.SUMMARY], lines)


def section(results: Path) -> study.Section:
    """The study's part of the findings, from its table alone."""
    table = runs.judged(results / f"{NAME}.csv")

    def text(found: list[study.Verdict]) -> str:
        said = f"{INTRODUCTION} {of_sgd(table)}"
        return "\n\n".join([said, study.verdicts(found), FIGURE, overview(table)])

    count = table.loc[table["stage"] == "grid", "optimizer"].nunique()
    figure = study.Figure(NAME, partial(draw, table), 2.8 * count, count, shared=False)
    return study.Section(NAME, tuple(primary(table)), text, (figure,), MINDS, notes(table, results), CHANGED)


def notes(table: pd.DataFrame, results: Path) -> dict[str, str]:
    """What the verdicts do not say; added when the rows were known."""
    found = {arm: [confirmed(table, arm, "adamw", warm) for warm in (False, True)] for arm in PLACEMENTS}
    losses = {arm: [rows["test"].to_numpy() for rows in pair] for arm, pair in found.items()}
    rates = [f"{rows['lr'].iloc[0]:g} {WITH[warm]}" for warm, rows in enumerate(found["pre"])]
    equal = [
        study.arm(table, stage="grid", arm="pre", optimizer="adamw", lr=found["pre"][0]["lr"].iloc[0], warmup=steps)
        for steps in (0, found["pre"][1]["warmup"].iloc[0])
    ]
    first = (
        f"AdamW's pre-LN is compared at its own learning rates ({', '.join(rates)}; at the former in both, one seed, "
        f"{number(float(equal[0]['test'].iloc[0] - equal[1]['test'].iloc[0]))}), so that warm-up includes the higher "
        "rate that it allows. With every optimiser the better of ten runs of a grid with warm-up stands against that "
        "of five without."
    )
    post, base = at_best(table, "post"), study.arm(table, stage="confirm", arm="embedding")
    chosen = runs.best(table, arm="post", optimizer="adamw")
    luck = int((post["test"] > chosen["test"]).sum())
    ends = [study.nats(rows["test"].to_numpy()) for rows in (post, base)]
    worse = "worse" if post["test"].mean() > base["test"].mean() else "better"
    cold = losses["pre"][0] - losses["post"][0]
    warm = at_best(table, "pre")["test"].to_numpy() - post["test"].to_numpy()
    second = (
        f"Post-LN at its best ends at {ends[0]}, {worse} than a model without blocks at pre-LN's best setting, "
        f"{ends[1]}. Its setting was chosen by seed 0, which did better there than {luck} of the {len(post)} that "
        f"judge. With no warm-up in either, pre − post is {study.nats(cold)}; warm-up changes that by "
        f"{study.nats(warm - cold)}."
    )
    if at_edge(table):
        second += " Both are best at the longest warm-up that was tried."
    said = (by_whom(table), first, unwarmed(table, results), failing(table))
    return {"W1": " ".join(filter(None, said)), "W2": second}


def of_sgd(table: pd.DataFrame) -> str:
    """How many SGD models learned more than one without blocks, with decay and without, which may be why."""
    base = study.arm(table, stage="confirm", arm="embedding")
    if base.empty:
        return ""
    most = base["test"].mean()
    said = []
    for optimizer, words in (("sgd", "with decay"), (runs.SGD_PLAIN, "without")):
        rows = study.arm(table, stage="confirm", optimizer=optimizer)
        better = ", ".join(
            f"{int(((each['test'] < most) & (each['status'] != 'failed')).sum())} of {len(each)} of {arm}-LN"
            + (f" ({lost} of them failed)" if (lost := int((each["status"] == "failed").sum())) else "")
            for arm, each in rows.groupby("arm")
        )
        said.append(f"{words} {better or 'not run yet'}")
    return f"Confirmed SGD models that are better than the mean of AdamW's without blocks: {'; '.join(said)}."


def failing(table: pd.DataFrame) -> str:
    """What the failed runs of post-LN with SGD and no decay say, and what they do not."""
    cold, warm = (confirmed(table, "post", runs.SGD_PLAIN, warm) for warm in (False, True))
    grid = study.arm(table, stage="grid", arm="post", optimizer=runs.SGD_PLAIN)
    lost, spared = (int((rows["status"] == "failed").sum()) for rows in (cold, warm))
    if not lost > spared:
        return ""
    tried, rates = with_or_without(grid, warm=False), sorted(grid["lr"].unique())
    at, better = cold["lr"].iloc[0], warm["lr"].iloc[0]
    warmed = study.arm(grid, lr=at)
    warmed = warmed.loc[(warmed["warmup"] > 0) & (warmed["status"] == "failed"), "warmup"]
    same = study.arm(grid, lr=better)
    trained = [f"{row.warmup} steps" if row.warmup else "none" for row in same.itertuples() if row.status != "failed"]
    base = study.arm(table, stage="confirm", arm="embedding")["test"].mean()
    decayed = [confirmed(table, "post", "sgd", warm) for warm in (False, True)]
    apart = study.nats(decayed[0]["test"].to_numpy() - decayed[1]["test"].to_numpy())
    said = [
        f"SGD's post-LN without decay fails without warm-up at {(tried['status'] == 'failed').sum()} of the "
        f"{len(tried)} learning rates tried, {rates[0]:g} to {rates[-1]:g} (seed 0).",
        f"The runs that judge it are at {at:g}, the best of these"
        + (f", where it fails with {' and '.join(map(str, warmed))} steps of warm-up too" if len(warmed) else "")
        + f"; those with warm-up are at {better:g}, where it trains with {' and '.join(trained)} (seed 0).",
        f"{int((warm['test'] < base).sum())} of these {len(warm)} are better than AdamW's model without blocks.",
    ]
    if better == rates[0]:
        said.append(f"Below {rates[0]:g} nothing was tried, so that a rate at which it needs none is not ruled out.")
    said.append(
        f"{lost} failures against {spared} are the most that {len(cold)} seeds can show, whatever Holm's correction "
        "over all tests leaves of it."
        if lost - spared == len(cold) else ""
    )  # fmt: skip
    said.append(
        f"With decay {int((decayed[0]['status'] == 'failed').sum())} of {len(decayed[0])} fail without warm-up at "
        f"{decayed[0]['lr'].iloc[0]:g}, and the loss without it less that with is {apart}; "
        f"{sum(int((rows['test'] < base).sum()) for rows in decayed)} of these {sum(map(len, decayed))} are better "
        "than AdamW's model without blocks."
    )
    return " ".join(filter(None, said))


def at_edge(table: pd.DataFrame) -> bool:
    """Whether both placements were best, with AdamW, at the longest warm-up."""
    rows = study.arm(table, stage="grid", optimizer="adamw")
    return all(runs.best(rows, arm=arm)["warmup"] == rows["warmup"].max() for arm in PLACEMENTS)


def unwarmed(table: pd.DataFrame, results: Path) -> str:
    """How many runs of post-LN failed without warm-up, and with it, at the learning rate that suits it with warm-up."""
    path, warm = results / oscillation.RUNS, confirmed(table, "post", "adamw", warm=True)
    if not path.exists() or warm["lr"].iloc[0] != oscillation.RATE:
        return ""
    cold = study.arm(runs.load_table(path), arm="post")
    lost = [f"{(rows['status'] == 'failed').sum()} of {len(rows)}" for rows in (cold, warm)]
    said = (
        f"At a learning rate of {oscillation.RATE:g}, {lost[0]} runs of post-LN with AdamW fail without warm-up (those "
        f"of G4) and {lost[1]} with {warm['warmup'].iloc[0]} steps."
    )
    return said


def by_whom(table: pd.DataFrame) -> str:
    """Which placement contradicts W1, where one alone does: of the other, the claim may still hold."""
    words = {
        arm: [study.verdict(test, 1.0) for test in primary(table) if f", {arm}:" in test.sentence]
        for arm in PLACEMENTS
    }  # fmt: skip
    if "contradicted" in words["post"] or "contradicted" not in words["pre"]:
        return ""
    said = "What contradicts the claim is pre-LN alone, which gains more than the margin by warm-up"
    grid = study.arm(table, stage="grid", arm="pre")
    lost = grid[(grid["status"] == "failed") & grid["optimizer"].isin(JUDGED)].groupby(["optimizer", "lr"])
    if all(set(each["warmup"]) == set(WARMUPS) for _, each in lost):
        at = ", ".join(f"{WORDS[optimizer]}, at {lr:g}" for (optimizer, lr), _ in lost)
        said += " but fails nowhere for want of it" + (f" (it fails with {at}, with warm-up and without)" if at else "")
    open_ = words["post"].count("cannot be judged here")
    return (
        f"{said}. Nothing here says that post-LN can do without warm-up: of its {len(words['post'])} tests {open_} "
        f"could not be made, and none contradicts the claim."
    )


INTRODUCTION = f"""### W1, W2: warm-up (`{NAME}.py`)

12 blocks, width 64, 600 steps. Losses on the test half, nats a byte; each arm is tuned on 5 learning rates × 3 warm-ups
(0, 50, 200) with seed 0 and judged with seeds 1 to 5, differences paired by seed. The margin is 10 % of what separates
the arm with warm-up (W2: pre-LN) from a model without blocks, which is trained with AdamW at pre-LN's best setting.
Where that arm is no better than such a model there is no margin, and no loss is judged (changed, see the
preregistration). Where more runs of post-LN fail without warm-up than with it, their number is judged, margin or not.
W1 holds only if all six tests do. "With" is the better of 50 and 200 steps. The decay of 0.1 is decoupled in AdamW and
RAdam; SGD adds it to the gradient, so that with momentum it takes 3 % of a weight and more a step at these learning
rates, where AdamW takes 0.1 % at most. W1's two tests of SGD are of runs without that decay (changed)."""
CHANGED = ("W1",)
FIGURE = f"""![Loss on dev over learning rate, seed 0, failed runs at the unigram entropy at most; and the confirmed
seeds as dots](figures/{NAME}.png)"""
MINDS = {
    "W1": "longer training (600 steps leave post-LN far from its end), a finer grid, lower learning rates of SGD, or "
    "deeper and wider models",
    "W2": "training longer than the 2,000 steps of P1, or best points that are not at the edge of their grids",
}


def draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """Loss of the grid over the learning rate, a panel an optimiser; crosses are failed runs, at most the unigrams'."""
    rows = study.arm(table, stage="grid")
    for ax, optimizer in zip(axes, rows["optimizer"].unique(), strict=True):
        for arm, colour in zip(PLACEMENTS, LIGHT.lines, strict=False):
            for warmup, style in zip(sorted(rows["warmup"].unique()), (":", "--", "-"), strict=False):
                each = study.arm(rows, arm=arm, optimizer=optimizer, warmup=warmup).sort_values("lr")
                each = each.assign(dev=np.minimum(each["dev"].fillna(np.inf), each["unigram"]))
                ax.plot(each["lr"], each["dev"], style, color=colour, label=f"{arm}, warm-up {warmup}", linewidth=1.3)
                bad = each[each["status"] == "failed"]
                ax.plot(bad["lr"], bad["dev"], "x", color=colour)
            judged = study.arm(table, stage="confirm", arm=arm, optimizer=optimizer)
            for status, marker in (("done", "o"), ("failed", "x")):
                shown = judged[judged["status"] == status]
                heights = np.minimum(shown["dev"].fillna(np.inf), shown["unigram"])
                ax.plot(shown["lr"], heights, marker, color=colour, markersize=3.5, alpha=0.6)
        ax.set_xscale("log")
        ax.set_ylabel(f"{WORDS[optimizer]}\nloss on dev, nats")
        ax.set_xlabel("learning rate (× failed, ● fresh seeds at the chosen points)")
    axes[0].legend(fontsize="small", ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


if __name__ == "__main__":
    sys.exit(main())
