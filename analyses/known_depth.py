"""How many blocks does a task need? For each k the smallest number that learns it from scratch, pre-LN and post-LN.

    nice -n 10 python analyses/known_depth.py                        # an hour or two on two cores
    python analyses/known_depth.py --tasks chase --ks 1,2 --placements pre

Tasks (depthprobe/lab/tasks.py): `chase` follows k pointers, `moves` moves a point by k permutations, `products`
multiplies k permutations. A number of blocks is *sufficient* if a run answers 99 % of the test rightly after k steps,
and *insufficient* if every seed used up its updates without that; how many these are depends on the task, the
placement and k alone. The answer is a sufficient number of blocks of which the next smaller one is insufficient.

Then each task that has an answer is learned with --deep blocks too: models of equal size whose tasks need more or less.

Writes a row a run to --results as it goes, and keeps the model of each answer in OUT/TASK-K/PLACEMENT, the deeper one
in OUT/TASK-K/PLACEMENT-deep, beside the ids and the labels of the test. A search that was stopped goes on when the same
command is given again; runs that it was in begin anew.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, fields
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from depthprobe.errors import DepthprobeError, OutputError, UsageError
from depthprobe.formats import undisturbed
from depthprobe.lab import LabForCausalLM
from depthprobe.lab.runlog import errors_of, save_model
from depthprobe.lab.search import RECIPES, Found, Job, Line, Recipe, Run, answers, end_with, learn, wanted
from depthprobe.lab.task_training import LEARNED, accuracy
from depthprobe.lab.tasks import TASKS, make_task
from depthprobe.progress import say

PLACEMENTS = ("pre", "post")
KS = {"chase": (1, 2, 3), "moves": (2, 3, 4), "products": (3, 4, 6)}
READERS: dict[str, Callable[[str], object]] = {
    "int": int,
    "str": str,
    "float": float,
    "float | None": lambda text: float(text) if text else None,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(KS), help="which (default: %(default)s)")
    parser.add_argument("--ks", help="which k, for every task (default: chase 1-3, moves 2-4, products 3, 4 and 6)")
    parser.add_argument("--placements", default=",".join(PLACEMENTS), help="which (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs before a number of blocks is called insufficient")
    parser.add_argument("--deep", type=int, default=4, help="blocks of the deeper models, 0 for none (default: 4)")
    parser.add_argument("--steps", type=int, help="updates for each of the k steps (default: by the recipe)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("data/known-depth"), help="where the models go")
    parser.add_argument("--results", type=Path, default=Path("data/results/known_depth.csv"), help="the table")
    parser.add_argument("--work", type=Path, default=Path("reports/known-depth"), help="models that may yet be kept")
    options = parser.parse_args(argv)
    try:
        run(options)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace) -> None:
    lines = plan(options)
    if min(options.seeds, options.workers, 1 if options.steps is None else options.steps) < 1 or options.deep < 0:
        raise UsageError("--seeds, --workers or --steps below 1, or --deep below 0", "at least 1, or 0 for --deep")
    runs = read(options.results, options.steps)
    for path in (options.results.parent, options.work, options.out):
        with errors_of(path):
            path.mkdir(parents=True, exist_ok=True)
    running: dict[Future[Run], Job] = {}
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, spawn, initializer=end_with, initargs=(os.getpid(),))
    try:
        while True:
            for job in wanted(runs, lines, options.seeds, options.steps) or deeper(runs, lines, options):
                if len(running) < options.workers and job not in running.values():
                    running[pool.submit(learn, job, options.work)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                running.pop(future)
                runs.append(future.result())
                write(runs, options.results)
                say(sentence(runs[-1]))
    finally:
        pool.shutdown(cancel_futures=True)
    found: Found = {
        (line.task, k, line.placement): blocks
        for line in made_lines(runs)
        for k, blocks in answers(runs, line, options.seeds).items()
    }
    keep(runs, found, options)
    print(table(runs, found))
    print(f"\nWrote {options.results}; the models are in {options.out}.")


def deeper(runs: Sequence[Run], lines: Sequence[Line], options: argparse.Namespace) -> list[Job]:
    """For every answer a run with more blocks than it takes, of the first seed that may yet learn it."""
    jobs = []
    for line in lines:
        for k, blocks in answers(runs, line, options.seeds).items():
            made = of(runs, line.task, k, line.placement, options.deep)
            if blocks is None or blocks >= options.deep or len(made) == options.seeds or any(r.learned for r in made):
                continue
            budget = k * (options.steps or RECIPES[line.task, line.placement].steps)
            jobs.append(Job(line.task, k, line.placement, options.deep, len(made), budget))
    return jobs


def plan(options: argparse.Namespace) -> list[Line]:
    """The lines of search that were asked for."""
    tasks, placements = options.tasks.split(","), options.placements.split(",")
    if odd := [name for name in placements if name not in PLACEMENTS]:
        raise UsageError(f"--placements {odd[0]}", " or ".join(PLACEMENTS))
    if odd := [name for name in tasks if name not in TASKS]:
        raise UsageError(f"--tasks {odd[0]}", ", ".join(TASKS))
    try:
        given = None if options.ks is None else tuple(sorted({int(k) for k in options.ks.split(",")}))
    except ValueError:
        raise UsageError(f"--ks {options.ks}", "whole numbers, such as 1,2,3") from None
    lines = [Line(task, placement, given or KS[task]) for task in tasks for placement in placements]
    for line in lines:
        for k in line.ks:
            make_task(line.task, k)
    return lines


def made_lines(runs: Sequence[Run]) -> list[Line]:
    """The lines of search of all runs in the table, those of earlier starts included."""
    every = sorted({(made.task, PLACEMENTS.index(made.placement)) for made in runs})
    return [
        Line(
            task,
            PLACEMENTS[place],
            tuple(sorted({r.k for r in runs if (r.task, r.placement) == (task, PLACEMENTS[place])})),
        )
        for task, place in every
    ]


# What is written


def read(path: Path, steps: int | None) -> list[Run]:
    """The runs of an earlier start, which must have been made with as many updates."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            rows = [{f.name: READERS[str(f.type)](row[f.name]) for f in fields(Run)} for row in csv.DictReader(file)]
        runs = [Run(**row) for row in rows]  # type: ignore[arg-type]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise OutputError(f"{path} is not a table of runs ({error})", fix="choose another --results") from error
    for made in runs:
        recipe = RECIPES.get((made.task, made.placement))
        if recipe is None or made.budget != made.k * (steps or recipe.steps):
            raise OutputError(
                f"{path} has a run of {made.task} with k = {made.k} and {made.budget:,} updates at most",
                "as many as now",
                "choose another --results",
            )
    return runs


def write(runs: Sequence[Run], path: Path) -> None:
    """The table, whole or not at all."""
    temporary = path.with_suffix(".part")
    with errors_of(path):
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Run)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(made) for made in sorted(runs, key=order))
        os.replace(temporary, path)


def order(made: Run) -> tuple[str, int, int, int, int]:
    return made.task, PLACEMENTS.index(made.placement), made.k, made.blocks, made.seed


def sentence(made: Run) -> str:
    """What a run came to."""
    blocks = "1 block" if made.blocks == 1 else f"{made.blocks} blocks"
    return (
        f"{made.task}, k = {made.k}, {made.placement}, {blocks}, seed {made.seed}: {made.status}, "
        f"{made.accuracy:.3f} after {made.steps:,} of {made.budget:,} updates, {made.seconds:,.0f} s"
    )


def of(runs: Sequence[Run], task: str, k: int, placement: str, blocks: int) -> list[Run]:
    """The runs with so many blocks, by seed."""
    return sorted((r for r in runs if (r.task, r.k, r.placement, r.blocks) == (task, k, placement, blocks)), key=order)


def keep(runs: Sequence[Run], found: Found, options: argparse.Namespace) -> None:
    """The model of each answer, and the deeper one, in float16, to be loaded as float32; the tests beside."""
    for (name, k, placement), blocks in found.items():
        if blocks is None:
            continue
        folder, task = options.out / f"{name}-{k}", make_task(name, k)
        keep_model(next(made for made in of(runs, name, k, placement, blocks) if made.learned), folder, "", options)
        if blocks < options.deep:
            for made in [made for made in of(runs, name, k, placement, options.deep) if made.learned][:1]:
                keep_model(made, folder, "-deep", options)
        ids, labels = task.validation
        np.save(folder / "ids.npy", ids.numpy().astype(np.uint8))
        np.save(folder / "labels.npy", labels.numpy().astype(np.int16))
        np.save(folder / "depths.npy", task.depths.numpy().astype(np.uint8))
    with errors_of(options.out):
        (options.out / "README.md").write_text(readme(runs, found))


def keep_model(made: Run, folder: Path, suffix: str, options: argparse.Namespace) -> None:
    """Copy the model of a run, unless an earlier start did."""
    source = options.work / Job(made.task, made.k, made.placement, made.blocks, made.seed, made.budget).name
    target = folder / f"{made.placement}{suffix}"
    if not (source / "config.json").exists():
        if (target / "config.json").exists():
            return
        raise OutputError(f"{source} is not there", "the model of a run that learned its task", "remove its row")
    shutil.rmtree(target, ignore_errors=True)
    with undisturbed(local=True):
        model = LabForCausalLM.from_pretrained(source).half()
    save_model(model, None, target)
    config = json.loads((target / "config.json").read_text()) | {"dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (stored := accuracy(model.float(), make_task(made.task, made.k))[0]) < LEARNED:
        say(f"{target}: {stored:.4f} with weights in float16")


def table(runs: Sequence[Run], found: Found) -> str:
    """The answers, in markdown."""
    rows = [
        "| task | k | placement | blocks needed | accuracy | updates | at most | with a block less, by seed | deeper |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, k, placement), blocks in found.items():
        if blocks is None:
            tried = [made.blocks for made in runs if (made.task, made.k, made.placement) == (task, k, placement)]
            best = max(made.accuracy for made in of(runs, task, k, placement, max(tried)))
            rows.append(f"| {task} | {k} | {placement} | not learned with {max(tried)} | {best:.3f} | | | | |")
            continue
        made = next(made for made in of(runs, task, k, placement, blocks) if made.learned)
        less = ", ".join(f"{other.accuracy:.3f}" for other in of(runs, task, k, placement, blocks - 1))
        rows.append(
            f"| {task} | {k} | {placement} | {blocks} | {made.accuracy:.3f} | {made.steps:,} | {made.budget:,} "
            f"| {less or '–'} | {beyond(runs, made)} |"
        )
    return "\n".join(rows)


def beyond(runs: Sequence[Run], least: Run) -> str:
    """What became of more blocks than needed."""
    more = [made for made in runs if (made.task, made.k, made.placement) == (least.task, least.k, least.placement)]
    deepest = max(more, key=lambda made: (made.blocks, made.learned))
    if deepest.blocks <= least.blocks:
        return "–"
    return f"{deepest.blocks} blocks: {deepest.accuracy:.3f} after {deepest.steps:,}"


def readme(runs: Sequence[Run], found: Found) -> str:
    recipes = [
        f"| {task} | {placement} | {' | '.join(f'{value:g}' for value in asdict(recipe).values())} |"
        for (task, placement), recipe in RECIPES.items()
        if any((made.task, made.placement) == (task, placement) for made in runs)
    ]
    folders = list(dict.fromkeys((task, k) for task, k, _ in found))
    example = next(((task, k, placement) for (task, k, placement), blocks in found.items() if blocks), ("TASK", 1, ""))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "numpy"))
    return README.format(
        table=table(runs, found),
        recipes="\n".join(recipes),
        names=" | ".join(field.name.replace("_", " ") for field in fields(Recipe)),
        rule="|".join("---" for _ in fields(Recipe)),
        hashes="\n".join(f"- {task}-{k}: `{make_task(task, k).sha256}`" for task, k in folders),
        versions=f"Python {platform.python_version()}, {versions}",
        seconds=sum(made.seconds for made in runs),
        runs=len(runs),
        folder=f"{example[0]}-{example[1]}",
        placement=example[2],
    )


README = """# Tasks of known depth

Small models, each with the smallest number of blocks that learned its task: ground truth for estimators of effective
depth, which must put them in the order of these numbers. Made by `python analyses/known_depth.py`; every run is in
`data/results/known_depth.csv`, and what the tasks are is said in `depthprobe/lab/tasks.py`.

{table}

Accuracies are those of the answers after k steps, on 1,024 sequences whose lists or words no training sequence has. The
column before the last is what the runs with one block less reached when their updates were used up; where nothing
stands there, one block is enough. The last column is about the models in the folders whose names end in -deep, which
have more blocks than their task needs. A longer or better training may learn a task with fewer blocks: the numbers hold
for these recipes, which were chosen by hand on some of the k before the search.

What a run with one block less lacks need not be depth. The two-letter words of moves are few enough for one block to
remember many of those that it saw: with k = 3 it gives at least 0.74 to 0.98 of the answers after two letters, by run
(3 × accuracy_all − 1 − accuracy in the table of runs). It fails on words that were kept out, so that for k = 2 the
number is of generalising. And a run may fail with blocks enough, as that of products with k = 4, post-LN and four
blocks does: two failed seeds are no proof that a number of blocks is too small.

| task | placement | {names} |
|---|---|{rule}|
{recipes}

Steps are the updates at most, for each of the k steps. AdamW with betas 0.9 and 0.98, no weight decay, gradients
clipped to 1, the learning rate on a cosine down to a tenth, Xavier's initialisation. A run ends at the first test with
99 %. Answers after j + 1 steps are asked for once nine of ten answers after j are right. Weights are stored as float16
and loaded as float32. {versions}; {runs} runs, {seconds:,.0f} s of CPU time on one thread each.

Each folder TASK-K has the test: `ids.npy`; `labels.npy`, of which the one at t is to be predicted at t − 1, if it is
not −100; and `depths.npy`, after how many steps each label is the answer, 0 if it is none. For example

    depthprobe analyze data/known-depth/{folder}/{placement} --data data/known-depth/{folder}/ids.npy

The answers are no tokens of the sequences: losses in such a report mean nothing, KL and agreement do.

sha256 of the ids and labels of each test, as little-endian int64:

{hashes}
"""


if __name__ == "__main__":
    sys.exit(main())
