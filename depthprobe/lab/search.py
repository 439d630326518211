"""Find the smallest number of blocks that learns a task: from the runs made so far to those to make next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from depthprobe.lab.config import LabConfig
from depthprobe.lab.runlog import save_model
from depthprobe.lab.settings import TrainSettings
from depthprobe.lab.task_training import train_task
from depthprobe.lab.tasks import make_task

__all__ = [
    "BEYOND",
    "RECIPES",
    "Found",
    "Job",
    "Line",
    "Recipe",
    "Run",
    "answers",
    "end_with",
    "judge",
    "learn",
    "wanted",
]

BEYOND = 2  # how many blocks more than the k before needed are tried


@dataclass(frozen=True)
class Recipe:
    """How a task is learned, with any number of blocks.

    Attributes:
        steps: updates at most, for each of the task's k steps.
        batch_size: sequences of an update.
        lr: the learning rate after warm-up.
        warmup: updates until then.
        mlp_ratio: inner width of the MLP over the width.
        qk_norm: a norm on queries and keys.
        width: of the residual stream.
        heads: of a block.
        eval_every: updates between two tests.
    """

    steps: int
    batch_size: int
    lr: float
    warmup: int
    mlp_ratio: float
    qk_norm: bool
    width: int = 64
    heads: int = 4
    eval_every: int = 100


RECIPES = {
    ("chase", "pre"): Recipe(1000, 32, 3e-3, 100, 1.0, True),
    ("chase", "post"): Recipe(1000, 32, 1e-3, 300, 1.0, True),
    ("moves", "pre"): Recipe(2000, 128, 3e-3, 100, 2.0, False),
    ("moves", "post"): Recipe(2000, 128, 3e-3, 300, 2.0, False),
    ("products", "pre"): Recipe(1300, 64, 3e-3, 100, 4.0, True),
    ("products", "post"): Recipe(1300, 64, 3e-3, 300, 4.0, True),
}


@dataclass(frozen=True)
class Line:
    """A line of search: a task, a placement, and the k in rising order."""

    task: str
    placement: str
    ks: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """A run to make, with so many updates at most."""

    task: str
    k: int
    placement: str
    blocks: int
    seed: int
    budget: int

    @property
    def name(self) -> str:
        """Of the folder with its model."""
        return f"{self.task}-{self.k}-{self.placement}-{self.blocks}-{self.seed}"


@dataclass(frozen=True)
class Run:
    """A run that was made, a row of the table; `task_training.TaskResult` says what the columns are.

    `learned` is 1 or 0, `budget` the updates that it could have made, `parameters` those of the model.
    """

    task: str
    k: int
    placement: str
    blocks: int
    seed: int
    learned: int
    status: str
    accuracy: float
    accuracy_all: float
    loss: float | None
    steps: int
    budget: int
    parameters: int
    seconds: float


Found = dict[tuple[str, int, str], int | None]
"""The smallest sufficient number of blocks by task, k and placement; None where none that was tried is."""


def judge(runs: Sequence[Run], task: str, k: int, placement: str, blocks: int, seeds: int) -> bool | None:
    """Whether so many blocks are sufficient; None if more runs are needed to tell.

    One run that learned the task is enough; without one, all the seeds must have failed.
    """
    made = [run for run in runs if (run.task, run.k, run.placement, run.blocks) == (task, k, placement, blocks)]
    if any(run.learned for run in made):
        return True
    return False if len({run.seed for run in made}) >= seeds else None


def _next(runs: Sequence[Run], line: Line, k: int, first: int, seeds: int) -> tuple[bool, int | None]:
    """For one k: whether the search is through, and its answer, or else the number of blocks to run next.

    It goes up from `first` until a number of blocks is sufficient, and then down until one is not.
    """
    blocks = first
    while (sufficient := judge(runs, line.task, k, line.placement, blocks, seeds)) is False:
        if blocks == first + BEYOND:
            return True, None
        blocks += 1
    if sufficient is None:
        return False, blocks
    while blocks > 1:
        sufficient = judge(runs, line.task, k, line.placement, blocks - 1, seeds)
        if sufficient is None:
            return False, blocks - 1
        if not sufficient:
            break
        blocks -= 1
    return True, blocks


def answers(runs: Sequence[Run], line: Line, seeds: int) -> dict[int, int | None]:
    """The smallest sufficient number of blocks for every k that the search is through with; None where none was."""
    found: dict[int, int | None] = {}
    for k in line.ks:
        done, blocks = _next(runs, line, k, _first(found), seeds)
        if not done:
            break
        found[k] = blocks
    return found


def _first(found: dict[int, int | None]) -> int:
    """Where the next k begins: more steps do not need fewer blocks."""
    return max([1, *(blocks for blocks in found.values() if blocks is not None)])


def wanted(runs: Sequence[Run], lines: Sequence[Line], seeds: int, steps: int | None = None) -> list[Job]:
    """Runs that the search needs next: the first of each line, then further seeds of the same, for idle workers.

    Args:
        runs: that were made so far.
        lines: of search.
        seeds: how many runs must fail before a number of blocks is called insufficient.
        steps: updates for each of the task's k steps, instead of the recipe's.
    """
    jobs: list[list[Job]] = []
    for line in lines:
        found = answers(runs, line, seeds)
        if len(found) == len(line.ks):
            continue
        k = line.ks[len(found)]
        _, blocks = _next(runs, line, k, _first(found), seeds)
        assert blocks is not None
        budget = k * (steps or RECIPES[line.task, line.placement].steps)
        every = [Job(line.task, k, line.placement, blocks, seed, budget) for seed in range(seeds)]
        made = {(run.task, run.k, run.placement, run.blocks, run.seed) for run in runs}
        jobs.append([job for job in every if (job.task, k, job.placement, blocks, job.seed) not in made])
    return [job for rank in range(seeds) for line_jobs in jobs for job in line_jobs[rank : rank + 1]]


def end_with(parent: int) -> None:
    """End this process when its parent is no more: a worker whose search was killed would wait for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def learn(job: Job, folder: Path) -> Run:
    """Make a run, on one thread, and save its model below the folder if it learned the task."""
    import torch

    torch.set_num_threads(1)
    recipe = RECIPES[job.task, job.placement]
    config = LabConfig(
        hidden_size=recipe.width,
        num_hidden_layers=job.blocks,
        num_attention_heads=recipe.heads,
        mlp_ratio=recipe.mlp_ratio,
        placement=job.placement,
        qk_norm=recipe.qk_norm,
    )
    settings = TrainSettings(
        steps=job.budget,
        batch_size=recipe.batch_size,
        lr=recipe.lr,
        warmup=min(recipe.warmup, job.budget),
        weight_decay=0.0,
        eval_every=min(recipe.eval_every, job.budget),
        seed=job.seed,
        device="cpu",
    )
    result, model = train_task(make_task(job.task, job.k), config, settings)
    learned = result.status == "learned"
    if learned:
        save_model(model, None, folder / job.name)
    return Run(
        **asdict(job),
        learned=int(learned),
        status=result.status,
        accuracy=round(result.accuracy, 4),
        accuracy_all=round(result.accuracy_all, 4),
        loss=None if result.loss is None else round(result.loss, 4),
        steps=result.steps,
        parameters=model.num_parameters(),
        seconds=round(result.seconds, 1),
    )
