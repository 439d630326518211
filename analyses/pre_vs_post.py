"""Which is better, pre-LN or post-LN, each at its best, and which uses more of its depth? Claims P1, D1, D3, D4.

    python analyses/pre_vs_post.py             # some two hours on two cores; goes on where it was stopped

As fixed in `PREREGISTRATION.md`: a grid of learning rates and warm-ups for each placement and depth with seed 0, then
the best point of each with fresh seeds, and with 12 blocks the best point of the other placement too (P1). Effective
depth of the confirmed models beside its controls (D1, D4), to data/results/pre_vs_post_depth.csv. Models of three
shapes and as many parameters, at the best point of `warmup.py` (D3).
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import runs
import study
import torch
from matplotlib.axes import Axes
from runs import Run
from scipy import stats

from depthprobe.contrast import over_seeds
from depthprobe.criteria import MARGIN
from depthprobe.documents import manual_topics
from depthprobe.effective import effective_depth
from depthprobe.progress import say
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME = "pre_vs_post"
PLACEMENTS = ("pre", "post")
RATES, WARMUPS, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (50, 500), runs.SEEDS
SIZE = {"blocks": 12, "width": 64, "steps": 2000}
ISO = ((6, 90), (12, 64), (24, 45))  # blocks and widths of about as many parameters
ISO_STEPS, ISO_SEEDS = 600, (1, 2, 3)
DEPTHS = f"{NAME}_depth.csv"
DEPTH_TOKENS, EXCERPT, FEWEST = 2048, 320, 3  # tokens, bytes of each topic, seeds that must pass the gate in both arms
KEYS = ["arm", "blocks", "seed"]
COLUMNS = (*KEYS, "name", "variant", "value", "ci_low", "ci_high", "passes", "twin", "tokens", "note")


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
    table = runs.load_table(options.results)
    by_key = {(job.arm, job.blocks, job.seed): job for job in runs.runs_of(measurable(table))}
    depths_path = options.results.with_name(DEPTHS)
    study.collect(depths_path, COLUMNS, list(by_key), lambda *key: depth(by_key[key], options.work))
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


# Measuring


def measurable(table: pd.DataFrame) -> pd.DataFrame:
    """The confirmed models that learned something, of which an effective depth has a meaning."""
    rows = study.arm(table, stage="confirm", status="done")
    return rows[rows["arm"].isin(PLACEMENTS)]


def depth(run: Run, work: Path) -> list[tuple[str | float | int, ...]]:
    """The estimates of depth whose kind may pass the gate, of a confirmed model, beside their controls."""
    torch.set_num_threads(1)
    runs.ensure(run, work)
    texts = [topic[:EXCERPT] for topic in manual_topics("analysis")]  # many documents, since the interval is over them
    found = effective_depth(
        work / run.name, texts, estimators=("dependence",), tokens=DEPTH_TOKENS, seq_len=runs.TOKENS, seed=run.seed,
        device="cpu",
    )  # fmt: skip
    rows = []
    for row in found.table.to_dict("records"):
        beside = {
            control["control"]: control["value"]
            for control in found.details["controls"]
            if (control["name"], control["variant"]) == (row["name"], row["variant"])
        }
        rows.append((
            row["name"], row["variant"], row["value"], row["ci_low"], row["ci_high"], int(row["passes_gate"]),
            beside.get("random-init", math.nan), beside.get("random-tokens", math.nan), row["note"],
        ))  # fmt: skip
    return rows


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
    return [
        runs.compared("P1", "loss post − pre, both at pre-LN's best setting", swapped, pre, margin, "above"),
        runs.compared("P1", "loss post − pre, each at its best", post, pre, margin, "below"),
        of_depth(deep, blocks),
        study.Unjudged(
            "D3", "loss of 6, 12 and 24 blocks with equal parameters", "said beforehand: no more than a sign",
            primary=False,
        ),
        study.Unjudged(
            "D4", "does depth predict loss beyond placement?", "said beforehand: printed only", primary=False
        ),
    ]  # fmt: skip


def of_depth(deep: pd.DataFrame, blocks: int) -> study.Test:
    """D1: each seed's excess over its random twins as a share of N, pre − post, where the gate lets both speak."""
    rows = study.arm(deep, name="dependence", variant="first power", blocks=blocks)
    passes = (
        rows.pivot(index="seed", columns="arm", values="passes").reindex(columns=[*PLACEMENTS]).dropna().min(axis=1)
    )
    about = f"dependence less that of random twins, over N, pre − post; predicted below −{MARGIN:g}"
    if passes.sum() < FEWEST:
        found = f"the estimate passes the gate in both arms for {int(passes.sum())} of {len(passes)} seeds"
        return study.Unjudged("D1", about, f"{found}, {FEWEST} are needed")
    wide = rows.assign(excess=(rows["value"] - rows["twin"]) / blocks).pivot(
        index="seed", columns="arm", values="excess"
    )
    values = (wide["pre"] - wide["post"]).loc[passes.index[passes == 1]]
    return study.Primary("D1", about, tuple(values), -math.inf, -MARGIN, logs=False)


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


def depth_table(table: pd.DataFrame, deep: pd.DataFrame) -> str:
    """Effective depth beside its controls, in markdown; and how it goes with loss."""
    head = ["blocks", "arm", "estimate", "value [95 % over seeds]", "random twins", "random tokens",
            "smallest effect, of the three", "passes the gate", "seeds"]  # fmt: skip
    lines = []
    for (blocks, arm, name, variant), rows in deep.fillna({"variant": ""}).groupby(
        ["blocks", "arm", "name", "variant"], sort=False
    ):
        each = [rows[column].to_numpy() for column in ("value", "twin", "tokens")]
        spans, shown = [study.span(over_seeds(one)) for one in each], ", ".join(map(study.least, each))
        passed = f"{int(rows['passes'].sum())} of {len(rows)}"
        lines.append([str(blocks), arm, f"{name} {variant}".strip(), *spans, shown, passed, str(len(rows))])
    lost = study.arm(table, stage="confirm", status="failed")
    counts = lost[lost["arm"].isin(PLACEMENTS)].groupby(["arm", "blocks"]).size()
    said = "; ".join(f"{count} of {arm} with {blocks} blocks" for (arm, blocks), count in counts.items()) or "none"
    note = f"Left out, since they failed: {said}."
    return "\n\n".join([study.markdown(head, lines), note, correlation(table, deep)])


def correlation(table: pd.DataFrame, deep: pd.DataFrame) -> str:
    """D4: how an estimate of depth and loss go together over all arms and seeds."""
    rows = study.arm(deep, name="dependence", variant="first power")
    both = rows.merge(measurable(table), on=KEYS)
    both = both.assign(share=both["value"] / both["blocks"])
    found = []
    for blocks, each in both.groupby("blocks"):
        plain = stats.spearmanr(each["value"], each["test"]).statistic
        apart = ", ".join(
            f"{arm} {number(float(stats.spearmanr(part['value'], part['test']).statistic))} ({len(part)})"
            for arm, part in each.groupby("arm", sort=False)
        )
        found.append(
            f"{blocks} blocks: {number(float(plain))} over {len(each)} models, partial for placement "
            f"{number(partial_spearman(each))}, within a placement {apart}"
        )
    return (
        "D4, printed only, without interval or smallest effect, since one seed has no correlation: Spearman of depth "
        f"(dependence, first power) with loss on test. {'; '.join(found)}. The claim predicts that it is negative."
    )


def partial_spearman(rows: pd.DataFrame) -> float:
    """Correlation of the ranks of depth and of loss, once the means of both in each placement are taken out."""
    ranks = rows[["value", "test"]].rank()
    rest = ranks - ranks.groupby(rows["arm"]).transform("mean")
    return float(rest["value"].corr(rest["test"]))


def shape_table(table: pd.DataFrame, base: pd.DataFrame | None) -> str:
    """D3: loss by shape, beside that of models without blocks, in markdown."""
    rows = study.arm(table, stage="shape")
    if rows.empty:
        return "D3: not run yet."
    lines = []
    for (arm, blocks, width), each in rows.groupby(["arm", "blocks", "width"], sort=False):
        lines.append([arm, str(blocks), str(width), *runs.scored(each)])
    if base is not None:
        lines.append(["no blocks", "0", str(base["width"].iloc[0]), *runs.scored(base)])
    head = ["arm", "blocks", "width", *runs.SCORES]
    sizes = rows["parameters"].max() / rows["parameters"].min() - 1
    text = (
        f"D3, a sign at most: {ISO_STEPS} steps, equal tokens, about equal parameters (within {100 * sizes:.1f} %). "
        "Losses are of the runs that did not fail. Each placement has the learning rate and warm-up that were best "
        "with 12 blocks of width 64, whatever its shape; models of that shape are `warmup.py`'s made again, and those "
        "without blocks are from there."
    )
    return f"{text}\n\n{study.markdown(head, lines)}"


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
            found.append(f"{blocks} blocks: {said}")
    return f"Loss post − pre, each at its best, nats, uncorrected: {'; '.join(found)}."


def section(results: Path) -> study.Section:
    """The study's part of the findings, from its tables alone."""
    table = runs.judged(results / f"{NAME}.csv")
    deep = study.read(results / DEPTHS).merge(measurable(table)[KEYS])
    beside = results / "warmup.csv"
    base = study.arm(runs.load_table(beside), stage="confirm", arm="embedding") if beside.exists() else None

    def text(found: list[study.Verdict]) -> str:
        parts = [INTRODUCTION, study.verdicts(found), FIGURE, overview(table), by_depth(table), SECONDARY]
        return "\n\n".join([*parts, depth_table(table, deep), shape_table(table, base)])

    panels = len(judged_depths(table))
    figure = study.Figure(NAME, partial(draw, table), 2.8 * panels, panels)
    return study.Section(NAME, tuple(primary(table, deep)), text, (figure,), MINDS, notes(table, deep))


def notes(table: pd.DataFrame, deep: pd.DataFrame) -> dict[str, str]:
    """What the verdicts do not say."""
    blocks = judged_depths(table)[0]
    same = (
        confirmed(table, "post", blocks)["test"].to_numpy()
        - confirmed(table, "pre", blocks, "swapped")["test"].to_numpy()
    )
    rows = study.arm(deep, name="dependence", variant="first power", blocks=blocks)
    excess = (rows["value"] - rows["twin"]) / blocks
    each = {arm: study.span(over_seeds(excess[rows["arm"] == arm].to_numpy())) for arm in PLACEMENTS}
    lost = {arm: int((confirmed(table, arm, blocks, stage)["status"] == "failed").sum())
            for arm, stage in (("pre", "confirm"), ("post", "swapped"))}  # fmt: skip
    lr = confirmed(table, "pre", blocks)["lr"].iloc[0] / confirmed(table, "post", blocks)["lr"].iloc[0]
    return {
        "P1": f"At pre-LN's best setting {lost['post']} runs of post-LN failed and {lost['pre']} of pre-LN. At "
        f"post-LN's best, post − pre is {study.span(over_seeds(same))} ({len(same)} seeds, smallest effect "
        f"{study.least(same)}). Pre-LN's best learning rate is {lr:g} times as high. Longer warm-ups than a quarter of "
        "the steps were not tried.",
        "D1": f"Less random twins, over N, and without the gate: pre {each['pre']}, post {each['post']} "
        f"({rows['seed'].nunique()} seeds each).",
    }


INTRODUCTION = f"""### P1, D1, D3, D4: pre-LN and post-LN, each at its best (`{NAME}.py`)

Width 64, {SIZE["steps"]:,} steps, AdamW. Every arm is tuned on 5 learning rates × 2 warm-ups with seed 0 and judged
with seeds 1 to 5, differences paired by seed. Losses on the test half, nats a byte; the margin is 10 % of what
separates pre-LN from a model without blocks."""
FIGURE = f"""![Loss on dev over learning rate and warm-up, seed 0, and of the confirmed seeds, failed runs at the loss
that they ended with](figures/{NAME}.png)"""
SECONDARY = f"""Effective depth in blocks. Twins have the same configuration and random weights; their mean and that of
random tokens are over the same seeds. {DEPTH_TOKENS:,} tokens, {EXCERPT} bytes of each topic of the manual."""
MINDS = {
    "P1": "a grid that does not end where an arm is best, more training, or a model of the size of those in the papers",
    "D1": "another estimate that passes the gate, or deeper models",
    "D3": "runs tuned by shape, at a size where all of them learn",
    "D4": "arms whose depth differs by design while all else is the same",
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


if __name__ == "__main__":
    sys.exit(main())
