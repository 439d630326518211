"""Does post-LN fine-tune better than pre-LN from the same pretraining loss? Claim P2.

    python analyses/transfer.py        # some ten minutes on two cores, after pre_vs_post.py

As fixed in `PREREGISTRATION.md`: for each seed of `pre_vs_post.py`'s 12 blocks, the level is the higher of both arms'
final losses on dev; of each arm the saved checkpoint nearest to it is fine-tuned on other text for 200 steps at three
learning rates. Writes a row a fine-tuning to --results. No model was trained on that text before.
"""

import argparse
import json
import sys
from functools import cache, partial
from pathlib import Path

import pandas as pd
import pre_vs_post
import runs
import study
import torch
from matplotlib.axes import Axes
from runs import Run

from depthprobe.contrast import over_seeds
from depthprobe.documents import manual_topics
from depthprobe.errors import OutputError
from depthprobe.lab import Text, TrainSettings, read_text, train
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.progress import Bar
from depthprobe.report.panels import LIGHT

NAME = "transfer"
RATES, STEPS, EVERY = (1e-4, 3e-4, 1e-3), 200, 4
COLUMNS = (
    "arm", "seed", "lr",
    "step",  # of pretraining, that the fine-tuning began from
    "level", "pretrained",  # the loss on dev that was aimed at, and that of the checkpoint, as the training log has it
    "before", "dev", "test",  # of the new text: test before, dev and test after fine-tuning
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    return runs.started(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    table = runs.load_table(options.results.with_name(f"{pre_vs_post.NAME}.csv"))
    models, ended = pretrained(table), runs.ends(table)
    jobs = [(*key, lr) for key in models for lr in RATES]
    with Bar("Fine-tuning", len(jobs), "runs") as step:
        measure = partial(fine_tune, models, ended, options.work)
        study.collect(options.results, COLUMNS, jobs, measure, step, options.workers)
    shown = section(options.results.parent)
    print(shown.text(study.adjusted(shown.tests)))


def pretrained(table: pd.DataFrame) -> dict[tuple[str, int], Run]:
    """The confirmed models of `pre_vs_post.py` with the most blocks, and those without blocks, by arm and seed."""
    confirmed = study.arm(table, stage="confirm")
    deep = confirmed[confirmed["blocks"].isin([confirmed["blocks"].max()]) | (confirmed["arm"] == "embedding")]
    return {(job.arm, job.seed): job for job in runs.runs_of(deep)}


# Measuring


def fine_tune(
    models: dict[tuple[str, int], Run], ended: dict[Run, float], work: Path, arm: str, seed: int, lr: float
) -> list[tuple[int | float, ...]]:
    """The row of one fine-tuning, from `step` on."""
    torch.set_num_threads(1)
    job = models[arm, seed]
    both = {each: models[each, seed] for each in (*pre_vs_post.PLACEMENTS, arm)}
    curves = {each: losses(runs.ensure(run, work, ended[run])) for each, run in both.items()}
    level = max(min(curves[each].values()) for each in pre_vs_post.PLACEMENTS)
    if arm == "embedding":  # has no such loss: its last checkpoint
        step = max(curves[arm])
    else:
        step = nearest(curves[arm], level)
    last = step == job.steps
    source = work / job.name if last else work / job.name / f"step-{step}"
    model = runs.model_of(job, work, None if last else step)
    if arm == "embedding":
        for block in model.model.blocks:
            block.requires_grad_(False)
    parts = topics()
    before = runs.loss(model, *parts["test"])
    settings = TrainSettings(
        steps=STEPS, batch_size=runs.BATCH, seq_len=runs.TOKENS, lr=lr, warmup=STEPS // 10, eval_every=STEPS,
        eval_tokens=runs.TOKENS, margin=0.0, device="cpu", seed=seed,
    )  # fmt: skip
    home = work / f"{NAME}-{job.name}-{source.name}-{lr:g}"
    train(model, settings, home, text(), resume=(home / "run.json").exists())
    after = runs.load(home, device="cpu", dtype="float32").model
    return [(step, level, curves[arm][step], before, *(runs.loss(after, *parts[half]) for half in ("dev", "test")))]


def losses(home: Path) -> dict[int, float]:
    """The loss on dev at every step where a checkpoint was saved, but the first."""
    rows = [json.loads(line) for line in (home / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["val_loss"] for row in rows if row["step"] and row["val_loss"] is not None}


def nearest(curve: dict[int, float], level: float) -> int:
    """The step whose loss is nearest to a level."""
    return min(curve, key=lambda step: abs(curve[step] - level))


@cache
def split() -> tuple[list[str], list[str]]:
    """The manual's topics that no model was trained on: those to fine-tune on, and every fourth, which is held out."""
    every = list(manual_topics("analysis"))
    return [each for place, each in enumerate(every) if place % EVERY], every[::EVERY]


def repeated() -> float:
    """The share of the held-out topics' characters that are in paragraphs of those to fine-tune on."""
    used, held = ({" ".join(part.split()): None for topic in half for part in topic.split("\n\n")} for half in split())
    return sum(len(part) for part in held if part in used) / sum(map(len, held))


def joined(parts: list[str]) -> Text:
    """Some topics as a text to train on, one after another."""
    return read_text(["\n\n".join(parts)], byte_tokenizer(positions=runs.TOKENS), seq_len=runs.TOKENS)


@cache
def text() -> Text:
    """What is fine-tuned on; its own held-out tail is not used."""
    return joined(split()[0])


@cache
def topics() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of the held-out topics, `[sequences, 64]`: their first half, dev, and their second, test."""
    held = joined(split()[1])
    ids = torch.from_numpy(held.stream[: len(held.stream) // runs.TOKENS * runs.TOKENS].astype("int64"))
    rows = ids.view(-1, runs.TOKENS)
    half = len(rows) // 2
    return {"dev": (rows[:half], rows[:half]), "test": (rows[half:], rows[half:])}


# From the table alone


def chosen(table: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The runs of an arm at the learning rate with the lowest mean loss on dev, by seed."""
    rows = study.arm(table, arm=arm)
    return study.arm(rows, lr=rows.groupby("lr")["dev"].mean().idxmin()).sort_values("seed")


def primary(table: pd.DataFrame, before: pd.DataFrame) -> list[study.Test]:
    """The test of the preregistration; `before` are the runs of `pre_vs_post.py`."""
    pre, post, base = (chosen(table, arm) for arm in ("pre", "post", "embedding"))
    words, region = runs.predicted(margin := runs.share(base, pre), "below")
    about = f"loss on new text after fine-tuning, post − pre at equal loss before, nats; predicted {words}"
    deep = study.arm(before, stage="confirm")
    deep = deep[(deep["blocks"] == deep["blocks"].max()) & (deep["status"] == "failed")]
    if len(deep):
        failed = " and ".join(f"{len(rows)} of {arm}" for arm, rows in deep.groupby("arm"))
        return [study.Unjudged("P2", about, f"{failed} failed in pretraining, where no loss is equal")]
    if not margin > 0:
        return [study.Unjudged("P2", about, "no margin: pre-LN is no better than a model without blocks")]
    values = tuple(post["test"].to_numpy() - pre["test"].to_numpy())
    return [study.Primary("P2", about, values, *region, logs=False)]


def overview(table: pd.DataFrame) -> str:
    """Every arm and learning rate, in markdown."""
    head = ["arm", "learning rate", "chosen (edge of those tried)", "pretraining steps",
            "pretraining loss, less the level", "new text before", "new text after",
            "smallest effect, before and after", "seeds"]  # fmt: skip
    lines = []
    for (arm, lr), rows in table.groupby(["arm", "lr"], sort=False):
        edge = " (edge)" if lr in (table["lr"].min(), table["lr"].max()) else ""
        best = f"yes{edge}" if chosen(table, arm)["lr"].iloc[0] == lr else ""
        off = study.span(over_seeds(rows["pretrained"] - rows["level"])) if arm != "embedding" else "–"
        each = [rows[name].to_numpy() for name in ("before", "test")]
        spans, shown = [study.span(over_seeds(one)) for one in each], " and ".join(map(study.least, each))
        lines.append([arm, f"{lr:g}", best, steps_of(rows), off, *spans, shown, str(len(rows))])
    return study.markdown(head, lines)


def steps_of(rows: pd.DataFrame) -> str:
    """From which steps of pretraining fine-tuning began."""
    first, last = int(rows["step"].min()), int(rows["step"].max())
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def notes(table: pd.DataFrame) -> dict[str, str]:
    """What the verdict does not say."""
    arms = {arm: chosen(table, arm) for arm in pre_vs_post.PLACEMENTS}
    starts = ", ".join(f"{arm}-LN after {steps_of(rows)} steps" for arm, rows in arms.items())
    ends = table["lr"].min(), table["lr"].max()
    edges = [f"{arm}-LN" for arm, rows in arms.items() if rows["lr"].iloc[0] in ends]
    at_edge = f" The learning rate chosen for {' and '.join(edges)} is at the edge of those tried." if edges else ""
    return {"P2": f"Fine-tuning began where losses were nearest to equal, {starts} of pretraining.{at_edge}"}


def section(results: Path) -> study.Section:
    """The study's part of the findings, from its table alone."""
    table = study.read(results / f"{NAME}.csv")
    counts = table.groupby(["arm", "seed"])["lr"].nunique()
    if table["arm"].nunique() < 3 or counts.nunique() != 1:
        raise OutputError(f"{results / NAME}.csv lacks runs", "every arm, seed and learning rate", "run it to the end")

    def text(found: list[study.Verdict]) -> str:
        said = (
            f"{INTRODUCTION} {repeated():.0%} of the held-out topics' characters stand in the others too, for all arms."
        )
        return "\n\n".join([said, study.verdicts(found), FIGURE, overview(table)])

    figure = study.Figure(NAME, partial(draw, table), 3.2)
    before = runs.load_table(results / f"{pre_vs_post.NAME}.csv")
    return study.Section(NAME, tuple(primary(table, before)), text, (figure,), MINDS, notes(table))


INTRODUCTION = f"""### P2: fine-tuning from equal loss (`{NAME}.py`)

12 blocks, width 64. Each seed's level is the higher of both arms' lowest losses on dev in `pre_vs_post.py`; each arm
starts from its checkpoint nearest to it, {STEPS} steps on English that no model had seen, of which every {EVERY}th
topic is left out. The learning rate is chosen by the first half of these topics, losses are of the second, nats a byte,
paired by seed; the margin is 10 % of what separates pre-LN from a model without blocks, fine-tuned
likewise. An arm that had got below the level starts from the middle of its schedule, where the learning rate is still
high: what that does is not told apart from the placement."""
FIGURE = f"""![Loss on the new text after fine-tuning by learning rate, a thin line a seed, thick their
mean](figures/{NAME}.png)"""
MINDS = {
    "P2": "a fine-tuning task that is no language modelling, or models of a size at which fine-tuning is done",
}


def draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """Loss after fine-tuning over the learning rate, a line a seed."""
    for arm, colour in zip(pre_vs_post.PLACEMENTS, LIGHT.lines, strict=False):
        wide = study.arm(table, arm=arm).pivot(index="lr", columns="seed", values="test")
        axes[0].plot(wide.index, wide, color=colour, alpha=0.4, linewidth=0.8)
        axes[0].plot(wide.index, wide.mean(axis=1), "o-", color=colour, linewidth=2, label=arm)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("learning rate of the fine-tuning")
    axes[0].set_ylabel("loss on new text, nats a byte")
    axes[0].legend()


if __name__ == "__main__":
    sys.exit(main())
