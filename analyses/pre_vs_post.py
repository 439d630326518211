"""Which is better, pre-LN or post-LN, each at its best, and which uses more of its depth? Claims P1, D1, D3, D4.

    python analyses/pre_vs_post.py             # some two hours on two cores; goes on where it was stopped
    python analyses/pre_vs_post.py --write     # the same, and the findings into analyses/README.md

As fixed in `PREREGISTRATION.md`: a grid of learning rates and warm-ups for each placement and depth with seed 0, then
the best point of each with fresh seeds, and with 12 blocks the best point of the other placement too.
"""

import argparse
import sys

import pandas as pd
import runs
from runs import Run

NAME = "pre_vs_post"
PLACEMENTS = ("pre", "post")
RATES, WARMUPS, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (50, 500), (1, 2, 3, 4, 5)
SIZE = {"blocks": 12, "width": 64, "steps": 2000}
ISO = ((6, 90), (12, 64), (24, 45))  # blocks and widths of about as many parameters
ISO_STEPS, ISO_SEEDS = 600, (1, 2, 3)


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    return runs.guarded(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    collect(options)


def collect(options: argparse.Namespace) -> pd.DataFrame:
    """All runs of the study, chosen and confirmed."""
    size = runs.sized(options, SIZE)
    table = runs.collect(options.results, grid(size), options, "Choosing")
    return runs.collect(options.results, [*grid(size), *confirmations(table, size)], options, "Confirming")


def depths(size: dict[str, int]) -> list[int]:
    """The numbers of blocks, the large one first, since it takes longest."""
    return [size["blocks"], size["blocks"] // 2]


def grid(size: dict[str, int]) -> list[Run]:
    """The runs that choose: the same for both placements."""
    scale = size["steps"] / SIZE["steps"]
    return [
        Run("grid", arm, blocks, size["width"], "adamw", lr, round(warmup * scale), size["steps"], 0)
        for blocks in depths(size)
        for warmup in WARMUPS
        for lr in RATES
        for arm in PLACEMENTS
    ]


def confirmations(table: pd.DataFrame, size: dict[str, int]) -> list[Run]:
    """Fresh seeds: of each at its best, then of each at the best of the other, and the baseline; the shallow last."""
    deep, shallow = depths(size)
    best = {(arm, blocks): runs.best(table, arm=arm, blocks=blocks) for arm in PLACEMENTS for blocks in (deep, shallow)}
    jobs = pairs(best["pre", deep], best["post", deep])
    for other, arm in (PLACEMENTS, PLACEMENTS[::-1]):
        jobs += runs.again(best[other, deep], "swapped", SEEDS, arm=arm)
    jobs += runs.again(best["pre", deep], "confirm", SEEDS, arm="embedding", blocks=1)
    return jobs + pairs(best["pre", shallow], best["post", shallow])


def pairs(*chosen: pd.Series) -> list[Run]:
    """Both arms of each seed, one after another, so that a stopped run leaves whole pairs."""
    return [job for seed in SEEDS for row in chosen for job in runs.again(row, "confirm", [seed])]


if __name__ == "__main__":
    sys.exit(main())
