"""The models that studies measure beside training any: as initialised, and trained ones at equal tokens and equal loss.

Trained ones are the confirmation runs in the table of `pre_vs_post.py`. Its arms are compared at the end of training,
where both have seen as many tokens, and at equal validation loss: of each seed at the higher of the two arms' last
losses. What is measured there lies on the line between the two checkpoints that enclose this loss; where a run crosses
it several times, at the last one. The losses are those of the runs' logs, on the dev text, always the same sequences.

In both, each arm has the learning rate and warm-up that suit it best. So pre-LN is measured a third time, at the end of
the runs that have post-LN's (`swapped` in the table): beside post-LN's end, what differs is the placement alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pandas as pd
import runs
import study
import torch
from runs import Run
from torch import nn

from depthprobe.checkpoint import Checkpoint, load
from depthprobe.corpus import Corpus
from depthprobe.errors import OutputError
from depthprobe.lab import LabConfig, LabForCausalLM
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.lab.runlog import errors_of
from depthprobe.prepare import prepare
from depthprobe.verify import Anatomy

PLACEMENTS = ("pre", "post")
SEEDS = (1, 2, 3, 4, 5)  # of the confirmation runs
END, LOSS = "end", "loss"  # at which a trained model is measured: equal tokens, equal loss
MATCHED = "matched"  # equal tokens, pre-LN at post-LN's learning rate and warm-up; of post-LN that is its END


def fresh(placement: str, blocks: int, seed: int, width: int = 64) -> nn.Module:
    """The lab's model before its first update, Xavier's initialisation."""
    config = LabConfig(
        vocab_size=len(byte_tokenizer()), max_position_embeddings=runs.TOKENS, hidden_size=width,
        num_hidden_layers=blocks, num_attention_heads=runs.heads(width), placement=placement,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LabForCausalLM(config)


def opened(model: nn.Module | Path, tokens: int) -> tuple[Checkpoint, Corpus, Anatomy]:
    """The model, verified, and what `analyze` reads by default for it; a module is a lab's, which reads bytes."""
    tokenizer = byte_tokenizer(positions=runs.TOKENS) if isinstance(model, nn.Module) else None
    return prepare(load(model, device="cpu", dtype="float32", tokenizer=tokenizer), tokens=tokens)


# Trained models


@dataclass(frozen=True)
class Point:
    """A checkpoint of a run: its step, None for the end, and the loss on dev."""

    step: int | None
    loss: float


@dataclass(frozen=True)
class Place:
    """Where a run is measured: on the line from one checkpoint (weight 0) to another (weight 1)."""

    before: Point
    after: Point
    weight: float

    @property
    def points(self) -> list[tuple[float, Point]]:
        """What each checkpoint counts; only those that do."""
        both = ((1 - self.weight, self.before), (self.weight, self.after))
        return [(weight, point) for weight, point in both if weight > 0]


class Trained:
    """The confirmation runs of pre-LN and post-LN in a table of runs, of seeds that both arms have.

    Args:
        path: of the table of `pre_vs_post.py`.
        work: where its checkpoints are; a run whose folder is gone is made again.
        blocks: of the models.
    """

    def __init__(self, path: Path, work: Path, blocks: int) -> None:
        self.path, self.work, self.blocks = path, work, blocks
        self.runs: dict[tuple[str, int], Run] = {}
        self.matched: dict[int, Run] = {}  # pre-LN at the setting of post-LN's run with this seed
        self.failed: set[Run] = set()
        self.losses: dict[Run, float] = {}  # on test, as the table has them
        if not path.exists():
            return
        rows = study.arm(runs.load_table(path), blocks=blocks)
        rows = rows[rows["arm"].isin(PLACEMENTS) & rows["stage"].isin(["confirm", "swapped"])]
        every = runs.runs_of(rows)
        self.losses = runs.ends(rows)
        self.failed = {run for run, status in zip(every, rows["status"], strict=True) if status == "failed"}
        for run in every:
            if run.stage == "confirm":
                if (run.arm, run.seed) in self.runs:
                    raise OutputError(f"{path} has several runs of {run.arm} with seed {run.seed}", "one of each")
                self.runs[run.arm, run.seed] = run
        for run in every:
            other = self.runs.get(("post", run.seed))
            if other and run == replace(other, stage="swapped", arm="pre"):
                self.matched[run.seed] = run

    @property
    def seeds(self) -> list[int]:
        """Those that both arms have."""
        first, second = ({seed for arm, seed in self.runs if arm == placement} for placement in PLACEMENTS)
        return sorted(first & second)

    def missing(self) -> str:
        """What the table lacks, a phrase; empty where it has all."""
        lacks = [f"{arm} {seed}" for seed in SEEDS for arm in PLACEMENTS if (arm, seed) not in self.runs]
        if not lacks:
            return ""
        there = "has no" if self.path.exists() else "is not there: no"
        return f"{self.path} {there} confirmation runs of {self.blocks} blocks for {', '.join(lacks)}"

    def require(self) -> None:
        """Raises:
        OutputError: a run is missing.
        """
        if lacks := self.missing():
            seeds = ", ".join(map(str, SEEDS))
            raise OutputError(lacks, f"pre and post with seeds {seeds}", "run analyses/pre_vs_post.py, then this again")

    def run(self, arm: str, seed: int, at: str) -> Run:
        """The run of an arm that is measured."""
        return self.matched[seed] if at == MATCHED else self.runs[arm, seed]

    def jobs(self) -> list[tuple[str, str, int, int, str]]:
        """Arm, name, blocks, seed, and at what, a seed after the other; no equal loss where one of the two failed.

        Pre-LN at post-LN's setting comes last, once all others are there, so that the order of a table of rows does not
        depend on when its runs were made.
        """
        found = [
            (arm, seed, at)
            for seed in self.seeds
            for arm in PLACEMENTS
            for at in (END, LOSS)
            if at == END or not any(self.runs[other, seed] in self.failed for other in PLACEMENTS)
        ]
        if not self.missing():
            found += [("pre", seed, MATCHED) for seed in sorted(self.matched)]
        return [(arm, self.run(arm, seed, at).name, self.blocks, seed, at) for arm, seed, at in found]

    def place(self, arm: str, seed: int, at: str) -> Place:
        """Where the run of an arm is measured."""
        line = self.points(self.run(arm, seed, at))
        if at != LOSS:
            return Place(line[-1], line[-1], 1.0)
        return enclosing(line, max(self.points(self.runs[other, seed])[-1].loss for other in PLACEMENTS))

    def points(self, run: Run) -> list[Point]:
        """The checkpoints of a run, which is made again where they are gone."""
        return points(run, runs.ensure(run, self.work, self.losses[run]))

    def model(self, run: Run, point: Point) -> nn.Module:
        """The model of a checkpoint of a run."""
        return runs.model_of(run, self.work, point.step)


def points(run: Run, home: Path) -> list[Point]:
    """The checkpoints of a run in its folder in their order, the last one at its end.

    Raises:
        OutputError: none was kept on the way, or the log does not tell their losses.
    """
    with errors_of(home):
        rows = [json.loads(line) for line in (home / "log.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None}
    found = [Point(step, loss) for step, loss in losses.items() if (home / f"step-{step}" / "config.json").exists()]
    if not found or run.steps not in losses:
        raise OutputError(f"{home} has no checkpoints with their losses", "one a tenth of the run", "move it away")
    return [*(point for point in found if point.step != run.steps), Point(None, losses[run.steps])]


def enclosing(line: Sequence[Point], loss: float) -> Place:
    """Between which checkpoints a run last had a loss.

    Raises:
        OutputError: it never had.
    """
    if line[-1].loss == loss:
        return Place(line[-1], line[-1], 1.0)
    for before, after in reversed(list(pairwise(line))):
        if min(before.loss, after.loss) <= loss <= max(before.loss, after.loss):
            return Place(before, after, (loss - before.loss) / (after.loss - before.loss))
    ends = f"{line[0].loss:.4g} to {line[-1].loss:.4g}"
    raise OutputError(f"no two checkpoints enclose a loss of {loss:.4g}: theirs go from {ends}", "one that is crossed")


def mixed(parts: Sequence[tuple[float, pd.DataFrame]], keys: Sequence[str]) -> pd.DataFrame:
    """Tables of the same rows, each times its weight, added; keys stay."""
    first = parts[0][1]
    total = sum(weight * table.drop(columns=[*keys]) for weight, table in parts)
    return pd.concat([first[[*keys]], total], axis=1)


def unjudged(table: pd.DataFrame, wanted: Mapping[str, str], seeds: int) -> str:
    """Why an arm of a table cannot be judged: a seed is missing or its training failed; empty where it can.

    Args:
        table: rows with `seed` and `unit`, which is `failed` for a run that did.
        wanted: the values of the arm's columns.
        seeds: how many there should be.
    """
    rows = study.arm(table, **wanted)
    count, failed = rows["seed"].nunique(), rows.loc[rows["unit"] == "failed", "seed"].nunique()
    if failed:
        return f"training failed with {failed} of {count} seeds"
    return "" if count == seeds else f"{count} of {seeds} seeds are there"


def refuse_partial(table: pd.DataFrame, path: Path) -> None:
    """Raises:
    OutputError: a table lacks seeds of the trained models at equal tokens.
    """
    for arm in PLACEMENTS:
        count = study.arm(table, arm=arm, at=END)["seed"].nunique()
        if count < len(SEEDS):
            raise OutputError(
                f"{path} has {count} of {len(SEEDS)} trained {arm} models", fix="run its study to the end"
            )


def refuse_several(table: pd.DataFrame, keys: Sequence[str], path: Path) -> None:
    """Raises:
    OutputError: a table has rows of several models with the same keys, as after another choice of learning rate.
    """
    names = table.groupby([*keys])["name"].unique()
    for key, each in names.items():
        if len(each) > 1:
            which = " ".join(map(str, key))
            raise OutputError(f"{path} has {' and '.join(each)} as {which}", "one model", "remove the rows of old runs")
