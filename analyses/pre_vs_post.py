"""Which is better, pre-LN or post-LN, each at its best, and which uses more of its depth? Claims P1, D1, D3, D4.

    python analyses/pre_vs_post.py             # some two hours on two cores; goes on where it was stopped

As fixed in `PREREGISTRATION.md`: a grid of learning rates and warm-ups for each placement and depth with seed 0, then
the best point of each with fresh seeds, and with 12 blocks the best point of the other placement too (P1). Effective
depth of the confirmed models beside its controls (D1, D4), to data/results/pre_vs_post_depth.csv. Models of three
shapes and as many parameters, at the best point of `warmup.py` (D3).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import runs
import study
import trained_depth
from matplotlib.axes import Axes
from runs import Run

from depthprobe.contrast import over_seeds
from depthprobe.progress import say
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME = "pre_vs_post"
PLACEMENTS = ("pre", "post")
RATES, WARMUPS, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (50, 500), runs.SEEDS
SIZE = {"blocks": 12, "width": 64, "steps": 2000}
ISO = ((6, 90), (12, 64), (24, 45))  # blocks and widths of about as many parameters
ISO_STEPS, ISO_SEEDS = 600, (1, 2, 3)


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    return runs.started(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    size = runs.sized(options, SIZE)
    jobs: list[Run] = []
    for blocks in depths(size):
        jobs += grid(size, blocks)
        table = runs.collect(options.results, jobs, options, f"Choosing, {blocks} blocks")
        jobs += confirmations(table, blocks, deepest=blocks == depths(size)[0])
        runs.collect(options.results, jobs, options, f"Confirming, {blocks} blocks")
    beside = options.results.with_name("warmup.csv")
    if beside.exists():
        runs.collect(options.results, [*jobs, *shapes(runs.load_table(beside), size)], options, "Shapes")
    else:
        say(f"D3 needs {beside}: run warmup.py, and then this again")
    trained_depth.collect(options.results.parent, runs.load_table(options.results), options.work)
    shown = section(options.results.parent)
    print(shown.text(study.adjusted(shown.tests)))


def depths(size: dict[str, int]) -> list[int]:
    """The numbers of blocks, the large one first, since it takes longest."""
    return [size["blocks"], size["blocks"] // 2]


def grid(size: dict[str, int], blocks: int) -> list[Run]:
    """The runs that choose: the same for both placements."""
    scale = size["steps"] / SIZE["steps"]
    return [
        Run("grid", arm, blocks, size["width"], "adamw", lr, round(warmup * scale), size["steps"], 0)
        for warmup in WARMUPS
        for lr in RATES
        for arm in PLACEMENTS
    ]


def confirmations(table: pd.DataFrame, blocks: int, deepest: bool) -> list[Run]:
    """Fresh seeds: of each at its best; of the deepest also of each at the best of the other, and the baseline."""
    best = {arm: runs.best(table, arm=arm, blocks=blocks) for arm in PLACEMENTS}
    jobs = pairs(best["pre"], best["post"])
    if deepest:
        for other, arm in (PLACEMENTS, PLACEMENTS[::-1]):
            jobs += runs.again(best[other], "swapped", SEEDS, arm=arm)
        jobs += runs.again(best["pre"], "confirm", SEEDS, arm="embedding", blocks=1)
    return jobs


def pairs(*chosen: pd.Series) -> list[Run]:
    """Both arms of each seed, one after another, so that a stopped run leaves whole pairs."""
    return [job for seed in SEEDS for row in chosen for job in runs.again(row, "confirm", [seed])]


def shapes(beside: pd.DataFrame, size: dict[str, int]) -> list[Run]:
    """Models of equal size and different shape, each placement at the best point of `warmup.py`'s AdamW grid."""
    scale = size["width"] / SIZE["width"]
    best = {arm: runs.best(beside, arm=arm, optimizer="adamw") for arm in PLACEMENTS}
    return [
        job
        for blocks, width in ISO
        for arm in PLACEMENTS
        for job in runs.again(
            best[arm],
            "shape",
            ISO_SEEDS,
            blocks=round(blocks * size["blocks"] / SIZE["blocks"]),
            width=round(width * scale),
        )
    ]


# From the tables alone


def confirmed(table: pd.DataFrame, arm: str, blocks: int, stage: str = "confirm") -> pd.DataFrame:
    """The runs of an arm that judge, by seed."""
    return study.arm(table, stage=stage, arm=arm, blocks=blocks).sort_values("seed")


def judged_depths(table: pd.DataFrame) -> list[int]:
    """The numbers of blocks that were confirmed, the largest first."""
    rows = study.arm(table, stage="confirm")
    return sorted({int(blocks) for blocks in rows[rows["arm"] != "embedding"]["blocks"]}, reverse=True)


def primary(table: pd.DataFrame, deep: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration, of the larger number of blocks."""
    blocks = int(study.arm(table, stage="grid")["blocks"].max())
    pre, post = (confirmed(table, arm, blocks) for arm in PLACEMENTS)
    swapped = confirmed(table, "post", blocks, "swapped")
    margin = runs.margin(table, pre)
    what = f"loss post − pre, {blocks} blocks"
    return [
        runs.compared("P1", f"{what}, both at pre-LN's best setting", swapped, pre, margin, "above"),
        runs.compared("P1", f"{what}, each at its best", post, pre, margin, "below"),
        trained_depth.of_depth(deep, blocks),
        study.Unjudged(
            "D3", "loss of 6, 12 and 24 blocks with equal parameters", "said beforehand: no more than a sign",
            primary=False,
        ),
        study.Unjudged(
            "D4", "does depth predict loss beyond placement?", "said beforehand: printed only", primary=False
        ),
    ]  # fmt: skip


def overview(table: pd.DataFrame) -> str:
    """All arms, what was chosen and what it came to, in markdown."""
    lines = []
    for blocks in judged_depths(table):
        for stage, words in (("confirm", "its own best"), ("swapped", "the other's best")):
            for arm in PLACEMENTS:
                tried, rows = (study.arm(table, stage=each, arm=arm, blocks=blocks) for each in ("grid", stage))
                if len(rows):
                    lines.append([str(blocks), arm, words, *runs.summary(tried, rows)])
    base = study.arm(table, stage="confirm", arm="embedding")
    setting = [str(base["warmup"].iloc[0]), "–", f"{base['lr'].iloc[0]:g}", "–"]
    lines.append(["0", "no blocks", "pre-LN's best", *setting, *runs.scored(base)])
    return study.markdown(["blocks", "arm", "setting", *runs.SUMMARY], lines)


def shape_table(table: pd.DataFrame, beside: pd.DataFrame | None) -> str:
    """D3: loss by shape, beside that of models without blocks of `warmup.py`, in markdown."""
    rows = study.arm(table, stage="shape")
    if rows.empty:
        return "D3: not run yet."
    lines = []
    for (arm, blocks, width), each in rows.groupby(["arm", "blocks", "width"], sort=False):
        lines.append([arm, str(blocks), str(width), *runs.scored(each)])
    base = pd.DataFrame() if beside is None else study.arm(beside, stage="confirm", arm="embedding")
    if len(base):
        lines.append(["no blocks", "0", str(base["width"].iloc[0]), *runs.scored(base)])
    head = ["arm", "blocks", "width", *runs.SCORES]
    sizes = rows["parameters"].max() / rows["parameters"].min() - 1
    text = (
        f"D3, a sign at most: {ISO_STEPS} steps, equal tokens, about equal parameters (within {100 * sizes:.1f} %). "
        "Losses are of the runs that did not fail. Each placement has the learning rate and warm-up that were best "
        "with 12 blocks of width 64, whatever its shape, so that a shape that does worse may only want another; heads "
        "are 5, 4 and 5. Models without blocks, of width 64 alone, are `warmup.py`'s, and so are those of 12 blocks, "
        f"made again{made_again(rows, beside)}."
    )
    figure = f"![Loss by shape, a dot a seed, × failed; grey: without blocks](figures/{NAME}_shapes.png)"
    return "\n\n".join([text, figure, study.markdown(head, lines)])


def made_again(rows: pd.DataFrame, beside: pd.DataFrame | None) -> str:
    """How far runs of `warmup.py` were from where they had ended."""
    if beside is None:
        return ""
    keys = [name for name in runs.KEYS if name != "stage"]
    both = rows.merge(study.arm(beside, stage="confirm"), on=keys, suffixes=("", "_before")).dropna(subset=["test"])
    apart = (both["test"] - both["test_before"]).abs()
    if both.empty or apart.max() == 0:
        return ""
    return (
        f": {len(both)} runs of the same seeds end up to {number(apart.max())} nats elsewhere, {number(apart.mean())} "
        "in the mean, as on another machine"
    )


def by_depth(table: pd.DataFrame) -> str:
    """Post − pre by the number of blocks, each at its best, paired by seed: secondary."""
    found = []
    for blocks in judged_depths(table):
        pre, post = (confirmed(table, arm, blocks) for arm in PLACEMENTS)
        lost = [f"{(rows['status'] == 'failed').sum()} of {len(rows)}" for rows in (pre, post)]
        if not (pd.concat([pre, post])["status"] == "done").all():
            found.append(f"{blocks} blocks: failed {lost[0]} of pre-LN, {lost[1]} of post-LN")
        elif [*pre["seed"]] == [*post["seed"]]:
            apart = post["test"].to_numpy() - pre["test"].to_numpy()
            said = f"{study.span(over_seeds(apart))} ({len(apart)} seeds, smallest effect {study.least(apart)})"
            found.append(f"{blocks} blocks: {said}, where the margin is {number(runs.margin(table, pre))}")
    return f"Loss post − pre, each at its best, nats, uncorrected: {'; '.join(found)}." if found else ""


def deeper(table: pd.DataFrame) -> str:
    """What the deeper models of each placement gain on the others, paired by seed: secondary."""
    most, *rest = judged_depths(table)
    found = []
    for arm in PLACEMENTS:
        for blocks in rest:
            both = confirmed(table, arm, most).merge(confirmed(table, arm, blocks), on="seed", suffixes=("", "_less"))
            if len(both) > 1 and (both[["status", "status_less"]] == "done").all(axis=None):
                apart = (both["test"] - both["test_less"]).to_numpy()
                least = f"{len(apart)} seeds, smallest effect {study.least(apart)}"
                found.append(f"{arm} {most} − {blocks} blocks {study.span(over_seeds(apart))} ({least})")
    return f"By depth, each at its best: {'; '.join(found)}." if found else ""


def section(results: Path) -> study.Section:
    """The study's part of the findings, from its tables alone."""
    table = runs.judged(results / f"{NAME}.csv")
    deep = trained_depth.load(results, table)
    path = results / "warmup.csv"
    beside = runs.load_table(path) if path.exists() else None

    def text(found: list[study.Verdict]) -> str:
        parts = [INTRODUCTION, study.verdicts(found), FIGURE, overview(table), f"{by_depth(table)} {deeper(table)}"]
        parts += [trained_depth.INTRODUCTION, trained_depth.FIGURE, trained_depth.depth_table(table, deep)]
        return "\n\n".join([*parts, shape_table(table, beside)])

    panels, deep_ones = len(judged_depths(table)), deep["blocks"].nunique()
    figures = [study.Figure(NAME, partial(draw, table), 2.8 * panels, panels, claims=("P1",))]
    made = trained_depth.drawing(table, deep)
    figures.append(study.Figure(trained_depth.NAME, made, 2.8 * deep_ones, deep_ones, claims=("D1", "D4")))
    if not study.arm(table, stage="shape").empty:
        figures.append(study.Figure(f"{NAME}_shapes", partial(draw_shapes, table, beside), 3.0, claims=("D3",)))
    return study.Section(NAME, tuple(primary(table, deep)), text, tuple(figures), MINDS, notes(table, deep))


def notes(table: pd.DataFrame, deep: pd.DataFrame) -> dict[str, str]:
    """What the verdicts do not say."""
    blocks = judged_depths(table)[0]
    same = (
        confirmed(table, "post", blocks)["test"].to_numpy()
        - confirmed(table, "pre", blocks, "swapped")["test"].to_numpy()
    )
    lost = {arm: int((confirmed(table, arm, blocks, stage)["status"] == "failed").sum())
            for arm, stage in (("pre", "confirm"), ("post", "swapped"))}  # fmt: skip
    lr = confirmed(table, "pre", blocks)["lr"].iloc[0] / confirmed(table, "post", blocks)["lr"].iloc[0]
    return {
        "P1": f"At pre-LN's best setting {lost['post']} runs of post-LN failed and {lost['pre']} of pre-LN. At "
        f"post-LN's best, post − pre is {study.span(over_seeds(same))} ({len(same)} seeds, smallest effect "
        f"{study.least(same)}). Pre-LN's best learning rate is {lr:g} times as high. Longer warm-ups than a quarter of "
        f"the steps were not tried. {by_depth(table)} {deeper(table)}".strip(),
        "D1": trained_depth.note(deep),
    }


INTRODUCTION = f"""### P1, D1, D3, D4: pre-LN and post-LN, each at its best (`{NAME}.py`)

Width 64, {SIZE["steps"]:,} steps, AdamW. Every arm is tuned on 5 learning rates × 2 warm-ups (50 and 500) with seed 0
and judged with seeds 1 to 5, differences paired by seed; D3 alone is not tuned, and of seeds 1 to 3. Losses on the test
half, nats a byte; the margin is 10 % of what separates pre-LN from a model without blocks."""
FIGURE = f"""![Loss on dev over learning rate and warm-up, seed 0, and of the confirmed seeds, failed runs at the loss
that they ended with](figures/{NAME}.png)"""
MINDS = {
    "P1": "a grid that does not end where an arm is best, more training, or a model of the size of those in the papers",
    "D3": "runs tuned by shape, at a size where all of them learn",
    **trained_depth.MINDS,
}


def draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """Loss of the grids over the learning rate, a panel a number of blocks; confirmed losses as dots."""
    rows = study.arm(table, stage="grid")
    for ax, blocks in zip(axes, judged_depths(table), strict=True):
        for arm, colour in zip(PLACEMENTS, LIGHT.lines, strict=False):
            for warm, style in zip(sorted(rows["warmup"].unique()), ("--", "-"), strict=False):
                each = study.arm(rows, arm=arm, blocks=blocks, warmup=warm).sort_values("lr")
                ax.plot(each["lr"], each["dev"], style, color=colour, label=f"{arm}, warm-up {warm}", linewidth=1.3)
            for stage, mark in (("confirm", "o"), ("swapped", "x")):
                judged = confirmed(table, arm, blocks, stage)
                ax.plot(judged["lr"], judged["dev"], mark, color=colour, markersize=4, alpha=0.7)
        ax.set_xscale("log")
        ax.set_ylabel(f"{blocks} blocks\nloss on dev, nats")
    axes[-1].set_xlabel("learning rate (● own best, × the other's best, fresh seeds)")
    axes[0].legend(fontsize="small")


def draw_shapes(table: pd.DataFrame, beside: pd.DataFrame | None, axes: list[Axes]) -> None:
    """Loss by the number of blocks, of models of about equal parameters."""
    rows = study.arm(table, stage="shape")
    shapes = rows[["blocks", "width"]].drop_duplicates().sort_values("blocks")
    places = {blocks: place for place, blocks in enumerate(shapes["blocks"])}
    for shift, (arm, colour) in enumerate(zip(PLACEMENTS, LIGHT.lines, strict=False)):
        for status, mark in (("done", "o"), ("failed", "x")):
            each = study.arm(rows, arm=arm, status=status)
            label = arm if status == "done" else None
            at = each["blocks"].map(places) + 0.1 * (2 * shift - 1)
            axes[0].plot(at, each["test"], mark, color=colour, label=label)
    if beside is not None:
        base = study.arm(beside, stage="confirm", arm="embedding")
        axes[0].axhline(base["test"].mean(), color="grey", linewidth=0.7)
    axes[0].set_xticks(range(len(shapes)), [f"{row.blocks} blocks × {row.width}" for row in shapes.itertuples()])
    axes[0].set_ylabel("loss on test, nats")
    axes[0].legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(main())
