"""Training runs of the studies: what an arm is, how it is trained, its loss on both halves of the validation text.

A run is told by its values alone (`Run`), and made again by them: on one thread, with everything drawn by its seed. Its
folder below --work keeps the checkpoints that later measurements take; a run whose folder is gone is made anew.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import study
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from depthprobe.checkpoint import load
from depthprobe.contrast import over_seeds
from depthprobe.criteria import MARGIN
from depthprobe.errors import OutputError
from depthprobe.lab import LabConfig, LabForCausalLM, Text, TrainResult, TrainSettings, read_text, train
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.lab.runlog import errors_of
from depthprobe.progress import Bar, say

TOKENS, BATCH = 64, 16
SCORED = 1024  # sequences of each half of the validation text that a loss is taken on
FAILED = 0.98  # of what the frequencies of the tokens give
SAME = 1e-5  # relative, of losses that differ in what a table's digits leave out
SEEDS = (1, 2, 3, 4, 5)  # that judge
SGD_PLAIN = "sgd-0"  # SGD without decay, which torch adds to the gradient, where momentum multiplies it by ten
TENTHS = 10
ARMS = {
    "pre": {"placement": "pre"},
    "post": {"placement": "post"},
    "branch": {"placement": "branch"},
    "branch-qk": {"placement": "branch", "qk_norm": True},
    "admin": {"placement": "post", "initialisation": "admin"},
    "realformer": {"placement": "post", "residual_attention": True},
    "pre-parallel": {"placement": "pre", "parallel_pairs": "sublayers"},
    "post-parallel": {"placement": "post", "parallel_pairs": "sublayers"},
    "post-parallel-norms": {"placement": "post", "parallel_pairs": "blocks"},
    "pre-rms": {"placement": "pre", "norm": "rmsnorm"},
    "post-rms": {"placement": "post", "norm": "rmsnorm"},
    "pre-batch": {"placement": "pre", "norm": "batchnorm", "causal": False},
    "post-batch": {"placement": "post", "norm": "batchnorm", "causal": False},
    "pre-instance": {"placement": "pre", "norm": "instancenorm", "causal": False},
    "post-instance": {"placement": "post", "norm": "instancenorm", "causal": False},
    "pre-masked": {"placement": "pre", "causal": False},
    "post-masked": {"placement": "post", "causal": False},
    "embedding": {"placement": "pre"},  # no block
    "post-equal": {"placement": "post"},  # the gradient of every block is scaled to the same norm at every step
}
OUTCOMES = ("status", "dev", "test", "unigram", "parameters", "tokens", "reason")


@dataclass(frozen=True)
class Run:
    """One model to train; the columns of a table of runs begin with these.

    Attributes:
        stage: why: `grid` to choose the learning rate and warm-up, `confirm` to judge, or what a study says.
        arm: of `ARMS`.
        blocks, width: of the model.
        optimizer, lr, warmup, steps: of the trainer.
        seed: of the weights and the order of the data.
    """

    stage: str
    arm: str
    blocks: int
    width: int
    optimizer: str
    lr: float
    warmup: int
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """Of its folder. The stage changes nothing about a run, but for the checkpoints kept."""
        return "-".join(study.text_of(value) for value in astuple(self)[1:])


KEYS = tuple(field.name for field in fields(Run))
COLUMNS = (*KEYS, *OUTCOMES)


def perform(run: Run, work: Path) -> TrainResult:
    """Train, on one thread, or read what became of it before. All but those of a grid keep a checkpoint a tenth."""
    torch.set_num_threads(1)
    arm = dict(ARMS[run.arm])
    config = LabConfig(
        vocab_size=len(byte_tokenizer(masked=arm.get("causal") is False)), max_position_embeddings=TOKENS,
        hidden_size=run.width, num_hidden_layers=run.blocks, num_attention_heads=heads(run.width), **arm,
    )  # fmt: skip
    tenth = max(1, run.steps // TENTHS)
    saved = {"grid": (), "updates": tuple(range(min(run.steps, 11)))}.get(run.stage, tuple(range(0, run.steps, tenth)))
    settings = TrainSettings(
        steps=run.steps, batch_size=BATCH, seq_len=TOKENS, optimizer=run.optimizer, lr=run.lr, warmup=run.warmup,
        eval_every=run.steps if run.stage == "grid" else tenth, margin=0.0, device="cpu", seed=run.seed, save_at=saved,
    )  # fmt: skip
    if run.optimizer == SGD_PLAIN:
        settings = replace(settings, optimizer="sgd", weight_decay=0.0)
    home = work / run.name
    resume = (home / "run.json").exists()
    with changed(config, run) as model:
        return train(model, settings, home, text(config.causal), resume=resume)


def heads(width: int) -> int:
    """Four, or what divides the width of a model that has the parameters of another one."""
    return next(count for count in (4, 5, 3) if width % count == 0)


@contextmanager
def changed(config: LabConfig, run: Run) -> Iterator[LabConfig | nn.Module]:
    """What is trained: a model of the configuration, or one that something is done to."""
    if run.arm not in ("embedding", "post-equal"):
        yield config
        return
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        model = LabForCausalLM(config)
    if run.arm == "post-equal":
        hook = register_optimizer_step_pre_hook(lambda *_: equalise(model))
        try:
            yield model
        finally:
            hook.remove()
        return
    for block in model.model.blocks:  # it adds nothing, and never will
        block.requires_grad_(False)
        for matrix in (block.attention.output, block.mlp.outer):
            nn.init.zeros_(matrix.weight)
    yield model


@torch.no_grad()
def equalise(model: nn.Module) -> None:
    """Scale the gradient of every block to their root mean square norm."""
    parts = [[weight.grad for weight in block.parameters()] for block in model.model.blocks]
    sizes = torch.stack([torch.linalg.vector_norm(torch.stack([part.norm() for part in block])) for block in parts])
    for block, size in zip(parts, sizes, strict=True):
        for part in block:
            part *= sizes.square().mean().sqrt() / size.clamp_min(1e-30)


@cache
def whole(causal: bool) -> Text:
    """What the lab trains on by default."""
    tokenizer = byte_tokenizer(masked=not causal, positions=TOKENS)
    return read_text(None, tokenizer, seq_len=TOKENS, objective="causal" if causal else "masked")


@cache
def text(causal: bool = True) -> Text:
    """The same, with the first half of the held-out part for validation: dev."""
    held = whole(causal).held_out
    return replace(whole(causal), held_out=held[: len(held) // 2])


@cache
def halves(causal: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
    """Ids and labels of dev and test, `[sequences, 64]` each, the same for all runs."""
    held = whole(causal).held_out
    test = replace(whole(causal), held_out=held[len(held) // 2 :])
    return {
        name: tuple(x[:SCORED] for x in part.validation)  # type: ignore[misc]
        for name, part in (("dev", text(causal)), ("test", test))
    }


@torch.no_grad()
def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy, nats a predicted token; every sequence has as many."""
    model.eval()
    parts = [model(input_ids=i, labels=j).loss for i, j in zip(ids.split(BATCH), labels.split(BATCH), strict=True)]
    sizes = torch.tensor([len(part) for part in ids.split(BATCH)], dtype=torch.float64)
    return float((torch.stack(parts).double() * sizes).sum() / sizes.sum())


def unigram(causal: bool = True) -> float:
    """What the frequencies of the training tokens give on dev, nats a predicted token."""
    labels = halves(causal)["dev"][1]
    asked = labels[:, 1:] if causal else labels
    return float(-np.log(text(causal).frequencies[asked[asked >= 0].numpy()]).mean())


def outcome(work: Path, *values: str | int | float) -> list[tuple[str | int | float, ...]]:
    """Make a run; the rest of its row, `OUTCOMES`."""
    run = Run(*values)  # type: ignore[arg-type]
    result = perform(run, work)
    causal = is_causal(run.arm)
    dev = test = math.nan
    if (work / run.name / "config.json").exists():
        model = model_of(run, work)
        dev, test = (loss(model, *halves(causal)[half]) for half in ("dev", "test"))
    alone = unigram(causal)
    reason = result.reason if result.reason and result.reason.startswith("diverged") else ""
    if not reason and not (math.isfinite(dev) and dev <= FAILED * alone):
        reason = "no better than the frequencies of the tokens"
    row = ("failed" if reason else "done", dev, test, alone, result.parameters, result.tokens, reason)
    return [row]


def model_of(run: Run, work: Path, step: int | None = None) -> nn.Module:
    """The model of a run that was made, after so many steps or at its end."""
    home = work / run.name if step is None else work / run.name / f"step-{step}"
    return load(home, device="cpu", dtype="float32").model.eval()


def ensure(run: Run, work: Path, test: float | None = None) -> Path:
    """The folder of a run, which is made again where its checkpoints are gone.

    A run made again ends with the same loss on the same machine and versions; where it is not `test`, that of its row,
    what is measured on it belongs to another run than that row, and that is said.
    """
    home = work / run.name
    if (home / "config.json").exists():
        return home
    perform(run, work)
    if test is not None and (home / "config.json").exists():
        found = loss(model_of(run, work), *halves(is_causal(run.arm))["test"])
        if not math.isclose(found, test, rel_tol=SAME):
            say(
                f"{run.name} was made again and ends with a loss of {found:.6g} where its table has {test:.6g}: what "
                "is measured now is of another run, as on another machine. Make the table again too"
            )
    return home


def is_causal(arm: str) -> bool:
    """Whether the models of an arm see only what came before."""
    return bool(ARMS[arm].get("causal", True))


# A study's runs


def collect(path: Path, jobs: Sequence[Run], options: argparse.Namespace, what: str) -> pd.DataFrame:
    """Make the runs that the table does not have, some at a time; the table."""
    with Bar(what, len(jobs), "runs") as step:
        study.collect(path, COLUMNS, [astuple(job) for job in jobs], Outcome(options.work), step, options.workers)
    return load_table(path)


@dataclass(frozen=True)
class Outcome:
    """`outcome` with its folder, to be sent to another process."""

    work: Path

    def __call__(self, *values: str | int | float) -> list[tuple[str | int | float, ...]]:
        return outcome(self.work, *values)


def load_table(path: Path) -> pd.DataFrame:
    """A table of runs."""
    with errors_of(path):
        table = pd.read_csv(path, keep_default_na=False, na_values={"dev": "", "test": ""})
    if tuple(table.columns) != COLUMNS:
        raise OutputError(f"{path} is no table of runs", f"columns {', '.join(COLUMNS)}", "move it away")
    return table


def judged(path: Path) -> pd.DataFrame:
    """A table of runs that has what judges.

    Raises:
        OutputError: it has none of it yet.
    """
    if not path.exists():
        raise OutputError(f"{path} is not there", fix="run its study first")
    table = load_table(path)
    if study.arm(table, stage="confirm").empty:
        raise OutputError(f"{path} has no confirmation runs yet", fix="run its study to the end")
    return table


def best(table: pd.DataFrame, **arm: str | int) -> pd.Series:
    """The run of an arm's grid that is confirmed."""
    return lowest(study.arm(table, stage="grid", **arm))


def lowest(rows: pd.DataFrame) -> pd.Series:
    """The run with the lowest loss on dev, a failed one only where all failed; of what has no loss, the first."""
    if rows.empty:
        raise OutputError("a grid without runs", "at least one")
    done = rows[rows["status"] == "done"]
    losses = (rows if done.empty else done)["dev"].fillna(math.inf)
    return rows.loc[losses.idxmin()]


def again(row: pd.Series, stage: str, seeds: Sequence[int], **other: str | int | float) -> list[Run]:
    """The setting of a row with other seeds, and what else is to differ."""
    values = {field.name: row[field.name] for field in fields(Run)} | {"stage": stage} | other
    for name in ("blocks", "width", "warmup", "steps"):
        values[name] = int(values[name])
    return [Run(**values | {"lr": float(values["lr"]), "seed": seed}) for seed in seeds]


def runs_of(table: pd.DataFrame) -> list[Run]:
    """The runs in a table, as they were asked for."""
    return [again(row, row["stage"], [int(row["seed"])])[0] for _, row in table.iterrows()]


def ends(table: pd.DataFrame) -> dict[Run, float]:
    """The loss on test of every run in a table."""
    return dict(zip(runs_of(table), table["test"], strict=True))


# From a table of runs


def margin(table: pd.DataFrame, reference: pd.DataFrame) -> float:
    """10 % of what separates the reference arm's loss from that of a model without blocks, nats.

    Below 0 where the reference is worse than that model, and nan where it has no loss.

    Raises:
        OutputError: the model without blocks was not trained yet.
    """
    base = study.arm(table, stage="confirm", arm="embedding")
    if base.empty:
        raise OutputError("the model without blocks was not trained yet", fix="run the study to the end")
    return share(base, reference)


def share(base: pd.DataFrame, reference: pd.DataFrame) -> float:
    """10 % of the distance between the mean losses of two arms, below 0 where the reference is the worse one."""
    return MARGIN * float(base["test"].mean() - reference["test"].mean())


def compared(
    claim: str, what: str, arm: pd.DataFrame, reference: pd.DataFrame, margin: float,
    where: Literal["above", "below", "within"], fails: bool = False,
) -> study.Test:  # fmt: skip
    """The test of an arm's loss minus a reference's, by seed.

    Args:
        claim: its number.
        what: is measured.
        arm, reference: confirmation runs of the seeds `SEEDS`.
        margin: nats; where it is not above 0, the reference is no better than a model without blocks, and there is
            nothing that a difference could be measured by.
        where: the mean difference is predicted: above the margin, below minus the margin, or within both.
        fails: whether the claim also predicts that the arm fails.
    """
    said, region = predicted(margin, where)
    sentence = f"{what}, nats; predicted {said}"
    arm, reference = arm.sort_values("seed"), reference.sort_values("seed")
    there = [[int(seed) for seed in rows["seed"]] for rows in (arm, reference)]
    if there != [[*SEEDS]] * 2:
        reason = f"runs are missing: seeds {there[0]} and {there[1]} of {[*SEEDS]}" if any(there) else "not run yet"
        return study.Unjudged(claim, sentence, reason)
    failed, spared = (int((rows["status"] == "failed").sum()) for rows in (arm, reference))
    mine, other = (rows["arm"].iloc[0] for rows in (arm, reference))
    words = {"arm": f"of {mine}", "other": f"of {other}"} if mine != other else {}
    if mine == other and not (arm["warmup"] > 0).any() and (reference["warmup"] > 0).all():
        words = {"other": "with warm-up"}
    counted = study.Counted(claim, f"{sentence}, or failures", failed, spared, len(arm), **words)
    if fails and failed > spared:
        return counted
    if failed or spared:
        return study.Unjudged(claim, sentence, study.effect(counted))
    if not margin > 0:
        apart = arm["test"].to_numpy() - reference["test"].to_numpy()
        reason = (
            f"{study.span(over_seeds(apart))} nats ({len(apart)} seeds, smallest effect {study.least(apart)}), but no "
            "margin: the arm that it is compared with is no better than a model without blocks at pre-LN's best setting"
        )
        return study.Unjudged(claim, sentence, reason)
    return study.Primary(
        claim, sentence, tuple(arm["test"].to_numpy() - reference["test"].to_numpy()), *region, logs=False
    )


def predicted(margin: float, where: Literal["above", "below", "within"]) -> tuple[str, tuple[float, float]]:
    """Where a difference is predicted, in words, and between which nats."""
    words = {"above": "above {}", "below": "below −{}", "within": "within ± {}"}[where]
    region = {"above": (margin, math.inf), "below": (-math.inf, -margin), "within": (-margin, margin)}[where]
    return words.format(f"{margin:.3f}" if margin > 0 else "the margin").replace("−the", "minus the"), region


SUMMARY = (
    "warm-up steps", "failed in the grid", "learning rate", "where in the grid", "loss on test, nats",
    "smallest effect", "failed", "seeds", "parameters",
)  # fmt: skip
SCORES = SUMMARY[4:]


def summary(tried: pd.DataFrame, rows: pd.DataFrame, grid: pd.DataFrame | None = None) -> list[str]:
    """Cells on an arm: those of `SUMMARY`; losses are of the runs that did not fail.

    Args:
        tried: of the grid, what was chosen from.
        rows: the confirmed runs.
        grid: all of the arm's, whose edges count, where that is more than `tried`.
    """
    grid = tried if grid is None else grid
    if rows.empty:
        return ["", f"{(tried['status'] == 'failed').sum()} of {len(tried)}", *[""] * (len(SUMMARY) - 2)]
    edges = [
        name for name in ("lr", "warmup")
        if grid[name].nunique() > 1 and rows[name].iloc[0] in (grid[name].min() or None, grid[name].max())
    ]  # fmt: skip
    words = {"lr": "rate", "warmup": "warm-up"}
    lr, at = rows["lr"].iloc[0], f"edge: {' and '.join(words[name] for name in edges)}" if edges else "inside"
    at = "all failed" if (tried["status"] == "failed").all() else at
    return [str(rows["warmup"].iloc[0]), f"{(tried['status'] == 'failed').sum()} of {len(tried)}", f"{lr:g}", at,
            *scored(rows)]  # fmt: skip


def scored(rows: pd.DataFrame) -> list[str]:
    """The cells of `SCORES`."""
    done = rows.loc[rows["status"] == "done", "test"].to_numpy()
    value = study.span(over_seeds(done)) if len(done) else "–"
    least = study.least(done) if len(done) > 1 else "–"
    sizes = " and ".join(f"{size:,}" for size in rows["parameters"].unique())
    sizes += ", those of a block that writes nothing included" if (rows["arm"] == "embedding").any() else ""
    return [value, least, f"{len(rows) - len(done)} of {len(rows)}", str(rows["seed"].nunique()), sizes]


# The command line


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """The options that all studies with training have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path,
        help=f"the table of runs (default: data/results/{name}.csv; with --full below data/results/full, with --steps "
        "below reports/tried)",
    )  # fmt: skip
    parser.set_defaults(name=name)
    parser.add_argument("--work", type=Path, default=Path("reports/studies"), help="where checkpoints go")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help="width 128, 24 blocks, five times the steps")
    parser.add_argument("--steps", type=int, help="updates of a run, to try the script out")
    return parser


def started(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: list[str] | None) -> int:
    """Run a study with its options. Runs of another size have a folder of tables of their own."""

    def placed(options: argparse.Namespace) -> None:
        if options.results is None:
            home = "reports/tried" if options.steps else "data/results/full" if options.full else "data/results"
            options.results = Path(home) / f"{options.name}.csv"
        run(options)

    return study.guarded(parser, placed, argv)


def sized(options: argparse.Namespace, size: Mapping[str, int]) -> dict[str, int]:
    """Blocks, width and steps as the options want them."""
    found = dict(size)
    if options.full:
        found |= {"blocks": 24, "width": 128, "steps": 5 * size["steps"]}
    return found | ({"steps": options.steps} if options.steps else {})
