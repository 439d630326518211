"""Does the top-heavy gradient of post-LN cause what goes wrong without warm-up? Claim G4; `gradient_norms.py` runs it.

Runs of post-LN without warm-up, 12 blocks, 600 steps at 1e-3: AdamW, and AdamW with the gradient of every block scaled
to the same norm at every step, which should train if the claim is right. From the weights after each of the first 10
steps: RMS(ΔW)/RMS(W), all matrices of a block together. At initialisation: how far the last state moves when every
weight moves by 1 % of its matrix's RMS at random, by the number of blocks.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import runs
import study
import torch
from matplotlib.axes import Axes
from runs import Run
from torch import nn

from depthprobe.contrast import over_seeds
from depthprobe.lab import LabConfig, LabForCausalLM
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.report.panels import LIGHT

RUNS, SIZES, SHIFTS = "oscillation.csv", "oscillation_updates.csv", "oscillation_shifts.csv"
SEEDS, STEPS, RATE, FIRST = (1, 2, 3, 4, 5), 600, 1e-3, 10
NOISE, DEPTHS, INITIAL_SEEDS = 0.01, (6, 12, 24), 10
FACTOR = 1.5
ARMS = {"post": "AdamW", "post-equal": "AdamW, gradients of equal norm"}


def collect(results: Path, options: argparse.Namespace) -> None:
    """All rows of the three tables."""
    jobs = [Run("updates", arm, 12, 64, "adamw", RATE, 0, STEPS, seed) for seed in SEEDS for arm in ARMS]
    runs.collect(results / RUNS, jobs, options, "Training")
    by_key = {(job.arm, job.seed): job for job in jobs}
    study.collect(results / SIZES, ("arm", "seed", "step", "block", "relative"), list(by_key),
                  lambda *key: updates(by_key[key], options.work))  # fmt: skip
    noisy = [(arm, blocks, seed) for arm in ("pre", "post") for blocks in DEPTHS for seed in range(INITIAL_SEEDS)]
    study.collect(results / SHIFTS, ("arm", "blocks", "seed", "shift"), noisy, shift)


# Measuring


def updates(job: Run, work: Path) -> list[tuple[int, int, float]]:
    """RMS(ΔW)/RMS(W) of each block over each of the first steps."""
    runs.ensure(job, work)
    rows = []
    before = matrices(runs.model_of(job, work, 0))
    for step in range(1, FIRST + 1):
        after = matrices(runs.model_of(job, work, step))
        for block, (old, new) in enumerate(zip(before, after, strict=True)):
            rows.append((step, block, float(torch.linalg.vector_norm(new - old) / torch.linalg.vector_norm(old))))
        before = after
    return rows


def matrices(model: nn.Module) -> list[torch.Tensor]:
    """All matrices of each block, in one row, in float64."""
    with torch.no_grad():
        return [
            torch.cat([w.double().flatten() for w in block.parameters() if w.ndim > 1]) for block in model.model.blocks
        ]


@torch.no_grad()
def shift(arm: str, blocks: int, seed: int) -> list[tuple[float]]:
    """‖Δx_L‖/‖x_L‖ of the median token, position 0 apart, under noise on every matrix of the blocks."""
    torch.set_num_threads(1)
    config = LabConfig(
        vocab_size=len(byte_tokenizer()),
        max_position_embeddings=runs.TOKENS,
        num_hidden_layers=blocks,
        **runs.ARMS[arm],
    )
    ids = runs.text().batch(seed, 0, runs.BATCH)[0]
    last: list[torch.Tensor] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LabForCausalLM(config).eval()
        hook = model.model.blocks[-1].register_forward_hook(lambda _, given, made: last.append(made.double()))
        model(input_ids=ids)
        for weight in model.model.blocks.parameters():
            if weight.ndim > 1:
                weight += NOISE * weight.square().mean().sqrt() * torch.randn_like(weight)
        model(input_ids=ids)
        hook.remove()
    clean, noisy = (state[:, 1:] for state in last)
    moved = torch.linalg.vector_norm(noisy - clean, dim=-1) / torch.linalg.vector_norm(clean, dim=-1)
    return [(float(moved.median()),)]


# From the tables alone


def load(results: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The tables of runs, of updates and of shifts."""
    return runs.load_table(results / RUNS), study.read(results / SIZES), study.read(results / SHIFTS)


def ratios(sizes: pd.DataFrame, arm: str) -> tuple[float, ...]:
    """log of RMS(ΔW)/RMS(W) of the first block over the last's, mean of the first steps, by seed."""
    rows = study.arm(sizes, arm=arm)
    wide = np.log(rows.pivot(index=["seed", "step"], columns="block", values="relative"))
    each = wide.iloc[:, 0] - wide.iloc[:, -1]
    return tuple(each.groupby("seed").mean().sort_index())


def primary(table: pd.DataFrame, sizes: pd.DataFrame) -> list[study.Test]:
    """The test of the preregistration."""
    rows = study.arm(table, arm="post")
    failed = int((rows["status"] == "failed").sum())
    label = "RMS(ΔW)/RMS(W) of the first steps, first block over last"
    about = f"post without warm-up: RMS(ΔW)/RMS(W) of the first {FIRST} steps, first block over last; within a factor "
    about += f"{FACTOR} although all runs fail contradicts the claim ({failed} of {len(rows)} failed)"
    if failed < len(rows):
        return [study.Ruled("G4", about, "undecided", study.ratio(ratios(sizes, "post")), len(rows), label)]
    limit = float(np.log(FACTOR))
    return [study.Primary("G4", about, ratios(sizes, "post"), -limit, limit, against=True, label=label)]


def exponent(shifts: pd.DataFrame, arm: str) -> tuple[float, ...]:
    """Slope of log shift over log L, by seed."""
    wide = np.log(study.arm(shifts, arm=arm).pivot(index="blocks", columns="seed", values="shift"))
    return tuple(np.polyfit(np.log(wide.index.to_numpy(dtype=float)), wide.to_numpy(), 1)[0])


def sentences(table: pd.DataFrame, sizes: pd.DataFrame, shifts: pd.DataFrame) -> str:
    """What the secondary numbers came to."""
    lines = []
    for arm, words in ARMS.items():
        rows = study.arm(table, arm=arm)
        failed = int((rows["status"] == "failed").sum())
        end, sizes_of = rows["test"].dropna().to_numpy(), ratios(sizes, arm)
        lines.append(
            f"- {words}: {failed} of {len(rows)} runs failed, loss on test {study.span(over_seeds(end))} ({len(end)} "
            f"seeds); RMS(ΔW)/RMS(W), first block over last, {study.ratio(sizes_of)} ({len(sizes_of)} seeds). Smallest "
            f"effects {study.least(end)} and {study.least(sizes_of, logs=True)}."
        )
    powers = ", ".join(
        f"{arm} {study.span(over_seeds(values))} (smallest effect {study.least(values)})"
        for arm in ("pre", "post")
        if (values := exponent(shifts, arm))
    )
    depths = ", ".join(map(str, sorted(shifts["blocks"].unique())))
    lines.append(
        f"- Shift of the last state under noise of {100 * NOISE:g} % on every matrix of the blocks, power of L over "
        f"{depths} "
        f"({shifts['seed'].nunique()} initialisations; in relative size √L would be ½): {powers}; at 12 blocks "
        + ", ".join(
            f"{arm} {study.span(over_seeds(study.arm(shifts, arm=arm, blocks=12)['shift'].to_numpy()))}"
            for arm in ("pre", "post")
        )
        + "."
    )
    return "\n".join(lines)


def draw(sizes: pd.DataFrame, axes: list[Axes]) -> None:
    """Relative size of the first updates by block, a line a seed."""
    means = sizes.groupby(["arm", "seed", "block"])["relative"].apply(lambda x: np.exp(np.log(x).mean())).reset_index()
    for (arm, words), colour in zip(ARMS.items(), LIGHT.lines, strict=False):
        for place, (_, each) in enumerate(study.arm(means, arm=arm).groupby("seed")):
            label = None if place else words
            axes[0].plot(each["block"] + 1, each["relative"], color=colour, linewidth=1, label=label)
    axes[0].set_xlabel("block")
    axes[0].set_ylabel(f"RMS(ΔW)/RMS(W), first {FIRST} steps")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize="small")


def text(tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame], found: list[study.Verdict]) -> str:
    """What goes into the README."""
    return "\n\n".join([INTRODUCTION, study.verdicts(found), FIGURE, SECONDARY, sentences(*tables)])


INTRODUCTION = f"""### G4: what a top-heavy gradient does without warm-up (`gradient_norms.py`)

Post-LN, 12 blocks, width 64, {STEPS} steps at {RATE:g} without warm-up, seeds 1 to 5. Adam divides by the size of the
gradient, so that the first blocks should move as much as the last whatever their gradients."""
FIGURE = "![Relative size of the first updates by block, without warm-up, a line a seed](figures/oscillation.png)"
SECONDARY = "Secondary, with uncorrected intervals over seeds, which support nothing."
MIND = "runs that train once only the top blocks' updates are made smaller, or ratios of updates far from 1 elsewhere"
