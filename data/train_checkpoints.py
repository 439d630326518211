"""Train the matched family in data/checkpoints: pre, post, branch and sandwich, alike in everything but the norms.

    python data/train_checkpoints.py                 # about an hour on two cores; goes on where it was stopped

Each placement gets the same grid of learning rates and warm-ups, of shorter runs with seed 0, and is then trained for
longer, with a seed of its own, at the point of the grid with the lowest validation loss. Every run, the failed ones
too, stands in data/checkpoints/grid.csv. Text, tokenizer, order of the data and tokens are the same for all.
"""

import argparse
import csv
import json
import multiprocessing
import os
import platform
import shutil
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two runs of one thread get more done than one of two

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from depthprobe.lab import LabConfig, TrainSettings, train
from depthprobe.progress import say

HERE = Path(__file__).resolve().parent
PLACEMENTS = ("pre", "post", "branch", "sandwich")
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
WARMUPS = (50, 300)
BLOCKS, WIDTH = 12, 64
GRID = TrainSettings(steps=1000, device="cpu", seed=0, eval_every=250, eval_tokens=65536)
FINAL = replace(GRID, steps=3000, seed=1)
CHOICE = ("placement", "lr", "warmup", "seed")
OUTCOME = ("steps", "tokens", "parameters", "status", "val_loss", "unigram", "reason")


TEMPLATE = """# A matched family

Four lab models of {blocks} blocks, width {width}, 4 heads and {positions} positions that differ in where their norms
stand, and in the learning rate and warm-up that suit each best. The same text, byte tokenizer, order of the data (seed
{final.seed}) and {tokens:,} training tokens.

| placement | parameters | learning rate | warm-up | validation loss | the same in the grid |
|---|---|---|---|---|---|
{table}

Losses are nats a byte; the frequencies of the bytes alone give {unigram:.3f}. The parameters differ by the norms alone:
pre, branch and sandwich end in a final norm, sandwich has two norms a branch.

Each was chosen from the same {points} points: learning rates {rates} × warm-ups {warmups}, {grid.steps:,} steps with
seed {grid.seed}, one run each, by validation loss; then {final.steps:,} steps with seed {final.seed}. {failed} of the
{runs} runs failed; `grid.csv` has them all. One seed a model: these are checkpoints to look into, and their losses rank
nothing. A choice at the edge of the grid may not be the best there is.

- Command: `python data/{script}`.
- {versions};
  {machine}, CPU, one thread.
- Text: {text}, sha256
  `{sha}`.
  It is not kept here, and holds nothing that `analyze` reads by default. It is under Python's licence (PSF-2.0), the
  weights are under this repository's.
- Weights are stored as float16 and loaded as float32. `run.json` beside each has every setting.
"""


@dataclass(frozen=True)
class Run:
    """One model to train.

    Attributes:
        placement: of its norms.
        settings: of the trainer.
    """

    placement: str
    settings: TrainSettings

    @property
    def name(self) -> str:
        """Of its folder."""
        s = self.settings
        return f"{self.placement}-{s.lr:g}-{s.warmup}-{s.steps}-seed{s.seed}"


def grid() -> list[Run]:
    """The runs that choose, the same for every placement."""
    points = [replace(GRID, lr=lr, warmup=warmup) for warmup in WARMUPS for lr in RATES]
    return [Run(placement, point) for point in points for placement in PLACEMENTS]


def chosen(rows: list[dict[str, Any]]) -> list[Run]:
    """A longer run of each placement at its best point of the grid."""
    runs = []
    for placement in PLACEMENTS:
        good = [row for row in rows if row["placement"] == placement and row["status"] == "done"]
        best = min(good, key=lambda row: row["val_loss"])
        runs.append(Run(placement, replace(FINAL, lr=best["lr"], warmup=best["warmup"])))
    return runs


def perform(work: tuple[Run, Path]) -> dict[str, Any]:
    """Train one model, or read what became of it before."""
    run, folder = work
    torch.set_num_threads(1)
    config = LabConfig(placement=run.placement, num_hidden_layers=BLOCKS, hidden_size=WIDTH)
    result = train(config, run.settings, folder / run.name, resume=(folder / run.name / "run.json").exists())
    row = {"placement": run.placement} | {name: getattr(run.settings, name) for name in CHOICE[1:]}
    return row | {name: getattr(result, name) for name in OUTCOME}


def perform_all(runs: Iterable[Run], folder: Path, workers: int) -> list[dict[str, Any]]:
    """Some at a time, each in a process of its own."""
    runs, rows = list(runs), []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(perform, [(run, folder) for run in runs]):
            rows.append(row)
            loss = "none" if row["val_loss"] is None else f"{row['val_loss']:.3f}"
            what = f"{row['placement']} {row['lr']:g}, warm-up {row['warmup']}"
            say(f"{len(rows)}/{len(runs)} {what}: {row['status']}, validation loss {loss}")
    return rows


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """As a csv."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CHOICE + OUTCOME, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def ship(run: Run, source: Path, target: Path) -> None:
    """The checkpoint with its weights rounded to float16, to be loaded as float32, beside its record and its log."""
    shutil.rmtree(target, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(source).half()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    record = json.loads((source / "run.json").read_text()) | {"command": f"python data/{Path(__file__).name}"}
    (target / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    shutil.copy(source / "loss.png", target)


def readme(runs: list[Run], finals: list[dict[str, Any]], rows: list[dict[str, Any]], record: dict[str, Any]) -> str:
    """What the checkpoints are and how each was chosen."""
    table = []
    for run, final in zip(runs, finals, strict=True):
        best = min(row["val_loss"] for row in rows if row["placement"] == run.placement and row["status"] == "done")
        table.append(
            f"| {run.placement} | {final['parameters']:,} | {run.settings.lr:g} | {run.settings.warmup} "
            f"| {final['val_loss']:.3f} | {best:.3f} |"
        )
    text, versions = record["text"], ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rates, warmups = (" ".join(f"{value:g}" for value in values) for values in (RATES, WARMUPS))
    return TEMPLATE.format(
        blocks=BLOCKS,
        width=WIDTH,
        positions=FINAL.seq_len,
        final=FINAL,
        grid=GRID,
        tokens=finals[0]["tokens"],
        table="\n".join(table),
        unigram=finals[0]["unigram"],
        points=len(RATES) * len(WARMUPS),
        rates=rates,
        warmups=warmups,
        failed=sum(row["status"] == "failed" for row in rows),
        runs=len(rows),
        script=Path(__file__).name,
        versions=versions,
        machine=platform.machine(),
        text=text["name"],
        sha=text["sha256"],
    )


def main() -> None:
    """Run, choose, run longer, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("lab/checkpoints"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=HERE / "checkpoints", help="where the chosen models go")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a thread each")
    options = parser.parse_args()
    logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = perform_all(grid(), options.work, options.workers)
    write_rows(rows, options.out / "grid.csv")
    runs = chosen(rows)
    finals = perform_all(runs, options.work, options.workers)
    write_rows(finals, options.out / "chosen.csv")
    for run in runs:
        ship(run, options.work / run.name, options.out / run.placement)
    record = json.loads((options.work / runs[0].name / "run.json").read_text())
    (options.out / "README.md").write_text(readme(runs, finals, rows, record))


if __name__ == "__main__":
    main()
