"""Trained from scratch, are pairs of parallel blocks as good as sequential ones? Claim M3; `merge_twins.py` runs it.

As fixed in `PREREGISTRATION.md`: 12 blocks in parallel pairs, pre-LN and post-LN, the latter with one norm after each
sum of two branches, and with as many norms as sequential; each on the learning rates of `RATES` with warm-up 500 of
2,000 steps, then with fresh seeds. Sequential and half as deep models are those of `pre_vs_post.py` with warm-up 500,
and are trained here where that study confirmed another point of its grid.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
import runs
import study
from matplotlib.axes import Axes
from runs import Run

from depthprobe.contrast import over_seeds
from depthprobe.errors import OutputError
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME, BESIDE = "merge_twins", "pre_vs_post"
SIZE = {"blocks": 12, "width": 64, "steps": 2000}
RATES, WARMUP, SEEDS = (3e-4, 1e-3, 3e-3, 1e-2), 500, runs.SEEDS
PARALLEL = {"pre-parallel": "pre", "post-parallel": "post", "post-parallel-norms": "post"}
WORDS = {
    "pre-parallel": "pre-LN",
    "post-parallel": "post-LN, one norm a sum",
    "post-parallel-norms": "post-LN, as many norms",
}
LIMIT = 0.1


def collect(options: argparse.Namespace) -> None:
    """All runs of M3: after those of `pre_vs_post.py`."""
    size = runs.sized(options, SIZE)
    warmup = round(WARMUP * size["steps"] / SIZE["steps"])
    jobs = [
        Run("grid", arm, size["blocks"], size["width"], "adamw", lr, warmup, size["steps"], 0)
        for lr in RATES for arm in PARALLEL
    ]  # fmt: skip
    table = runs.collect(options.results, jobs, options, "Choosing")
    jobs += [
        job for seed in SEEDS for arm in PARALLEL for job in runs.again(runs.best(table, arm=arm), "confirm", [seed])
    ]
    beside = runs.judged(options.results.with_name(f"{BESIDE}.csv"))
    for arm in ("pre", "post"):
        for blocks in (size["blocks"], size["blocks"] // 2):
            chosen = sequential(beside, arm, blocks)
            if same(beside, chosen).empty:
                jobs += runs.again(chosen, "confirm", SEEDS)
    runs.collect(options.results, jobs, options, "Confirming")


def sequential(beside: pd.DataFrame, arm: str, blocks: int) -> pd.Series:
    """The best point of `pre_vs_post.py`'s grid, of those that the parallel arms have too.

    Raises:
        OutputError: that grid is not done yet.
    """
    rows = study.arm(beside, stage="grid", arm=arm, blocks=blocks)
    rows = rows[(rows["warmup"] == (WARMUP * rows["steps"] / SIZE["steps"]).round()) & (rows["lr"] >= min(RATES))]
    if len(rows) != len(RATES):
        raise OutputError(
            f"{len(rows)} of {len(RATES)} runs of the grid of {arm} with {blocks} blocks", fix=f"run {BESIDE}.py first"
        )
    return runs.lowest(rows)


def same(table: pd.DataFrame, chosen: pd.Series) -> pd.DataFrame:
    """The confirmation runs with this setting, by seed."""
    keys = {name: chosen[name] for name in ("arm", "blocks", "lr", "warmup", "steps")}
    return study.arm(table, stage="confirm", **keys).sort_values("seed")


# From the tables alone


def beside_runs(table: pd.DataFrame, beside: pd.DataFrame, arm: str, blocks: int) -> pd.DataFrame:
    """The confirmed sequential runs, from whichever table has them."""
    chosen = sequential(beside, arm, blocks)
    found = same(beside, chosen)
    return same(table, chosen) if found.empty else found


def primary(table: pd.DataFrame, beside: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration; the post-LN arm with as many norms is secondary."""
    return [of_arm(table, beside, arm) for arm in ("pre-parallel", "post-parallel")]


def of_arm(table: pd.DataFrame, beside: pd.DataFrame, arm: str) -> study.Test:
    """(parallel − sequential) / (half as deep − sequential) in loss, by seed."""
    placement = PARALLEL[arm]
    region = (-LIMIT, LIMIT) if placement == "pre" else (LIMIT, math.inf)
    predicted = f"within ± {LIMIT}" if placement == "pre" else f"above {LIMIT}"
    about = f"{WORDS[arm]}: (parallel − sequential) / (half as deep − sequential) in loss; predicted {predicted}"
    parts = compared(table, beside, arm)
    seeds = [[int(seed) for seed in part["seed"]] for part in parts]
    if seeds != [[*SEEDS]] * len(parts):
        return study.Unjudged("M3", about, f"runs are missing: seeds {seeds}")
    failed = [int((part["status"] == "failed").sum()) for part in parts]
    if any(failed):
        return study.Unjudged("M3", about, "failed: {} parallel, {} sequential, {} half as deep".format(*failed))
    parallel, whole, half = (part["test"].to_numpy() for part in parts)
    if over_seeds(half - whole).low <= 0 or min(half - whole) <= 0:  # a ratio of such a gap means nothing
        better = max(half - whole) < 0
        words = "better than sequential in every seed, so that the ratio means nothing" if better else (
            "not worse than sequential by more than chance, in every seed"
        )  # fmt: skip
        return study.Unjudged("M3", about, f"half as deep is {words}: half minus sequential {study.nats(half - whole)}")
    return study.Primary("M3", about, tuple((parallel - whole) / (half - whole)), *region, logs=False)


def compared(table: pd.DataFrame, beside: pd.DataFrame, arm: str) -> list[pd.DataFrame]:
    """The judging runs of a parallel arm, and of the sequential ones as deep and half as deep, by seed."""
    deep = int(table["blocks"].max())
    sequential = [beside_runs(table, beside, PARALLEL[arm], blocks) for blocks in (deep, deep // 2)]
    return [study.arm(table, stage="confirm", arm=arm).sort_values("seed"), *sequential]


def note(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """What parallel pairs cost in nats, which the ratio does not say; of the arms whose runs all learned."""
    found = []
    for arm, words in WORDS.items():
        parallel, whole, _ = compared(table, beside, arm)
        done = [(each["status"] == "done").all() for each in (parallel, whole)]
        if len(parallel) and [*parallel["seed"]] == [*whole["seed"]] and all(done):
            rates = " against ".join(f"{rows['lr'].iloc[0]:g}" for rows in (parallel, whole))
            said = study.nats(parallel["test"].to_numpy() - whole["test"].to_numpy())
            found.append(f"{words}, at learning rates of {rates}, {said}")
    first = f"Loss of parallel minus sequential, each at its best: {'; '.join(found)}." if found else ""
    return f"{first}{beyond(table, beside)}".strip()


def beyond(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """What half the depth costs pre-LN, and how post-LN's arms compare at one learning rate."""
    _, whole, half = compared(table, beside, "pre-parallel")
    said = ""
    if len(whole) == len(half) and (pd.concat([whole, half])["status"] == "done").all():
        gap = study.nats(half["test"].to_numpy() - whole["test"].to_numpy())
        said += f" Half as deep minus sequential in pre-LN: {gap}."
    deep = int(table["blocks"].max())
    lr = sequential(beside, "post", deep)["lr"]
    point = {"stage": "grid", "lr": lr, "warmup": table["warmup"].max()}
    arms = {"half as deep": study.arm(beside, arm="post", blocks=deep // 2, **point)}
    arms |= {WORDS[arm]: study.arm(table, arm=arm, **point) for arm, of in PARALLEL.items() if of == "post"}
    base = study.arm(beside, arm="post", blocks=deep, **point)
    if len(base) and all(len(rows) and (rows["status"] == "done").all() for rows in (base, *arms.values())):
        gaps = [f"{words} {number(float(rows['test'].iloc[0] - base['test'].iloc[0]))}" for words, rows in arms.items()]
        said += f" At sequential post-LN's learning rate (the grid's seed 0), minus sequential: {', '.join(gaps)} nats."
    return said


def overview(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """All arms, in markdown."""
    deep = int(table["blocks"].max())
    lines = []
    for placement in ("pre", "post"):
        for words, blocks in (("sequential", deep), ("half as deep", deep // 2)):
            rows = beside_runs(table, beside, placement, blocks)
            tried = study.arm(beside, stage="grid", arm=placement, blocks=blocks, warmup=beside["warmup"].max())
            lines.append([placement, words, *runs.summary(tried[tried["lr"] >= min(RATES)], rows)])
        for arm in (arm for arm, of in PARALLEL.items() if of == placement):
            tried, rows = (study.arm(table, stage=stage, arm=arm) for stage in ("grid", "confirm"))
            lines.append([placement, f"parallel: {WORDS[arm]}", *runs.summary(tried, rows)])
    other = of_arm(table, beside, "post-parallel-norms")
    told = f"{other.sentence}: {study.effect(other)}"
    if isinstance(other, study.Primary):
        told += f" (seeds {study.seeds_of(other)}, smallest effect {study.least_effect(other)})"
    arms = study.markdown(["placement", "arm", *runs.SUMMARY], lines)
    return f"{arms}\n\nSecondary, with an uncorrected interval: {told}."


def draw(table: pd.DataFrame, beside: pd.DataFrame, axes: list[Axes]) -> None:
    """Losses of the confirmed runs, a dot a seed; those that failed are left out, and said."""
    deep = int(table["blocks"].max())
    rows = []
    for place, placement in enumerate(("pre", "post")):
        for words, blocks in (("sequential", deep), ("half as deep", deep // 2)):
            rows.append((f"{placement}, {words}", beside_runs(table, beside, placement, blocks), place))
        rows += [
            (f"{placement}, parallel" + (", as many norms" if "norms" in arm else ""),
             study.arm(table, stage="confirm", arm=arm), place)
            for arm, of in PARALLEL.items() if of == placement
        ]  # fmt: skip
    for height, (_, each, place) in enumerate(rows):
        done = each[each["status"] == "done"]
        axes[0].plot(done["test"], np.full(len(done), height), "o", color=LIGHT.lines[place], alpha=0.7, markersize=5)
    lost = [int((each["status"] == "failed").sum()) for _, each, _ in rows]
    words = [f"{words}, {count} failed" if count else words for (words, *_), count in zip(rows, lost, strict=True)]
    axes[0].set_yticks(range(len(rows)), words)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("loss on test, nats a byte (a dot a seed)")


def tables(results: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both tables, judged runs included."""
    return runs.judged(results / f"{NAME}.csv"), runs.judged(results / f"{BESIDE}.csv")


INTRODUCTION = f"""### M3: parallel pairs from scratch (`{NAME}.py`)

12 blocks, width 64, 2,000 steps, warm-up {WARMUP}. Losses on the test half, nats a byte, paired by seed. In the ratio,
0 is as good as sequential and 1 as bad as a model of half the blocks. Parallel and sequential have the same parameters,
but for post-LN with one norm a sum; half as deep has half of those of the blocks. Mean losses are of the runs that did
not fail. "One norm a sum" has both attentions, then both MLPs, on one state; "as many norms" adds the updates of two
whole blocks, so that norms are not all that differs. Arms come from two tables, and may come from several machines."""
MIND = (
    "models that lose more by half their depth than seeds differ; rates between those tried, longer "
    "training, or a scale at which parallel blocks are used"
)
