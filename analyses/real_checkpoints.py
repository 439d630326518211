"""What of published findings on layers repeats on SmolLM2-135M and MiniLM, offline?

    python analyses/real_checkpoints.py             # some ten minutes on one core, after `make weights`

Fixed in `PREREGISTRATION.md`: top-1 agreement after deleting or swapping one middle block (Lad et al. 2024); the
rankings by block influence (Men et al. 2024) and by angular distance (Gromov et al. 2024) against the measured cost of
removal; the order of five changes of the middle half (Sun, Pickett et al. 2024); the last sign change of cos(u, x)
(Csordás et al. 2025); positions with more than 50 times the median norm (Sun, Chen et al. 2024). There is no test:
published value, its setting, ours with an interval over documents, and whether they agree (`real_findings.py`).

Three measurements a model, each a job: `removal` runs it without each block, with each two neighbours swapped and
without each run of a fifth of its blocks; `order` changes the middle half; `states` watches the unmodified model. Rows
go to --results after each job; a run that was stopped goes on after the last one. Table, figure and findings are made
from these rows alone, and into the README by `findings.py`.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import painters
import pandas as pd
import study
import torch
from matplotlib.axes import Axes
from real_findings import KEPT, Floats, Model, angles, counts, influence, middle, overview, sentences, span
from scipy import stats
from torch import Tensor

from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import Schedule, skip, swap
from depthprobe.corpus import Corpus
from depthprobe.errors import CheckpointError, OutputError, UsageError
from depthprobe.measure import Settings, measure
from depthprobe.prepare import prepare
from depthprobe.probes.growth import SINK_RATIO
from depthprobe.progress import Bar
from depthprobe.report.panels import LIGHT
from depthprobe.verify import Anatomy

NAME = "real_checkpoints"
WEIGHTS = Path(__file__).resolve().parents[1] / ".weights"
MODELS = {
    "SmolLM2-135M": WEIGHTS / "SmolLM2-135M-Instruct.Q4_1.gguf",
    "MiniLM": WEIGHTS / "all-MiniLM-L6-v2",
}
MEASUREMENTS = ("removal", "order", "states")
SEQUENCES, TOKENS, SCORED, SHUFFLES = 32, 64, 0.5, 10
AT_ONCE = 4  # sequences in a walk over the states

KEYS = ("model", "measurement", "sequences", "tokens")
PLACE = ("change", "count", "layer", "seed", "sequence", "document")  # layer: the first of `count` changed blocks
EFFECTS = ("delta_loss", "kl", "top1_agreement", "state_distance")
WATCHED = ("block_influence", "block_influence_later", "cosine", "cosine_attention", "cosine_mlp")
ANGLES = ("angle", "angle_span")  # between the last token's states before and after one block, or a fifth of them
SIZES = ("sinks_first", "sinks_later", "norm_ratio", "largest", "largest_ratio")
COLUMNS = (*KEYS, *PLACE, *EFFECTS, *WATCHED, *ANGLES, *SIZES)
Row = tuple[str | int | float, ...]
Change = tuple[str, int, Schedule]  # its name, the seed of a shuffle or 0, and what runs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="which (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="how many (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sequence (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path(f"data/results/{NAME}.csv"), help="the table")
    return study.guarded(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    jobs = plan(options)
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    with Bar("Measuring", len(jobs), "measurements") as step:
        study.collect(options.results, COLUMNS, jobs, measured, step)
    print(section(options.results.parent, options.results.name).text([]))


def plan(options: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """What to measure, in the order of the table."""
    chosen = [name.strip() for name in options.models.split(",")]
    if odd := [name for name in chosen if name not in MODELS]:
        raise UsageError(f"--models {odd[0]}", ", ".join(MODELS))
    if options.sequences < 2 or options.tokens < 4:
        raise UsageError(f"--sequences {options.sequences} --tokens {options.tokens}", "at least 2, and at least 4")
    if missing := [MODELS[name] for name in chosen if not MODELS[name].exists()]:
        raise CheckpointError(f"there is no {missing[0].name} in {missing[0].parent.name}", fix="run `make weights`")
    return [(name, what, options.sequences, options.tokens) for name in chosen for what in MEASUREMENTS]


# Measuring


def measured(model: str, measurement: str, sequences: int, tokens: int) -> Iterator[Row]:
    """The rows of one measurement of one model: the columns after the job's own."""
    anatomy, corpus = opened(model, sequences, tokens)
    blocks = len(anatomy.stream)
    if measurement == "states":
        return states(anatomy, corpus)
    return changed(anatomy, corpus, removals(blocks) if measurement == "removal" else orders(blocks))


@cache
def opened(model: str, sequences: int, tokens: int) -> tuple[Anatomy, Corpus]:
    """The model, verified, and its text: what `analyze` reads by default, a part of all of it."""
    _, every, anatomy = prepare(MODELS[model], None, tokens=2**30, seq_len=tokens, device="cpu")
    return anatomy, several(every, sequences)


def several(corpus: Corpus, count: int) -> Corpus:
    """So many sequences of as many documents as there are: one of each, drawn, then a second one of each, and so on."""
    order = np.random.default_rng(0).permutation(corpus.sequences)
    if corpus.documents is not None:
        owners = corpus.documents[order]
        order = order[np.argsort(pd.Series(owners).groupby(owners).cumcount().to_numpy(), kind="stable")]
    return corpus.take(np.sort(order[:count]))


def removals(blocks: int) -> list[Change]:
    """Each block deleted, each two neighbours swapped, each run of a fifth of the blocks deleted."""
    runs = [range(i, i + count) for count in (1, span(blocks)) for i in range(blocks - count + 1)]
    deleted: list[Change] = [("delete", 0, skip(blocks, layers)) for layers in runs]
    return deleted + [("swap", 0, swap(blocks, i, i + 1)) for i in range(blocks - 1)]


def orders(blocks: int) -> list[Change]:
    """The painters' changes of the middle half."""
    return painters.painted(blocks, middle(blocks), range(SHUFFLES))


def changed(anatomy: Anatomy, corpus: Corpus, changes: Sequence[Change]) -> Iterator[Row]:
    """A row a change and sequence, from one shared sweep."""
    swept = sweep(anatomy, corpus, [schedule for *_, schedule in changes], SweepSettings(SCORED))
    absent = np.full((corpus.sequences, len(changes)), math.nan)
    effects = [swept.effects.get(name, absent) for name in EFFECTS]
    for place, (name, seed, schedule) in enumerate(changes):
        for sequence in range(corpus.sequences):
            where = (name, len(schedule.changed), schedule.changed[0], seed, sequence, document(corpus, sequence))
            values = (float(column[sequence, place]) for column in effects)
            yield *where, *values, *(math.nan for _ in (*WATCHED, *ANGLES, *SIZES))


def states(anatomy: Anatomy, corpus: Corpus) -> Iterator[Row]:
    """A row a state and sequence: what block `layer` does to x_layer, and how x_layer is."""
    values = watched(anatomy, corpus) | walked(anatomy, corpus)
    for layer in range(len(anatomy.stream) + 1):
        for sequence in range(corpus.sequences):
            found = (float(values[name][sequence, layer]) for name in (*WATCHED, *ANGLES, *SIZES))
            where = ("states", 0, layer, 0, sequence, document(corpus, sequence))
            yield *where, *(math.nan for _ in EFFECTS), *found


def document(corpus: Corpus, sequence: int) -> int:
    return sequence if corpus.documents is None else int(corpus.documents[sequence])


def watched(anatomy: Anatomy, corpus: Corpus) -> dict[str, Floats]:
    """`WATCHED` by the library's probes, `[sequences, L + 1]`; x_L, which no block reads, has none.

    Block influence is 1 − cos(x_l, x_{l+1}) over all tokens, as published; `_later` leaves out position 0, and so do
    the cosines of updates with the state that they are added to.
    """
    means = measure(anatomy, corpus, Settings(interaction=False, lens_positions=0)).means.values
    absent = np.full(corpus.sequences, math.nan)

    def by_layer(metric: str, unit: str = "block") -> Floats:
        return np.stack([means.get((metric, unit, i), absent) for i in range(len(anatomy.stream) + 1)], axis=1)

    return {
        "block_influence": 1 - by_layer("_cosine_adjacent_including"),
        "block_influence_later": by_layer("block_influence"),
        "cosine": by_layer("update_alignment"),
        "cosine_attention": by_layer("update_alignment", "attention"),
        "cosine_mlp": by_layer("update_alignment", "mlp"),
    }


def walked(anatomy: Anatomy, corpus: Corpus) -> dict[str, Floats]:
    """`ANGLES` and `SIZES` from a walk over the states, `[sequences, L + 1]`."""
    stream, blocks = anatomy.stream, len(anatomy.stream)
    found = {name: np.full((corpus.sequences, blocks + 1), math.nan) for name in (*ANGLES, *SIZES)}
    for start in range(0, corpus.sequences, AT_ONCE):
        rows, last = slice(start, start + AT_ONCE), []
        with torch.no_grad():
            for layer, x in enumerate(stream.states(stream.enter(corpus.inputs[rows]))):
                last.append(x[:, -1].double())
                for name, values in zip(SIZES, sizes(x), strict=True):
                    found[name][rows, layer] = values.double().numpy()
        ends = torch.stack(last, dim=1)
        for name, apart in zip(ANGLES, (1, span(blocks)), strict=True):
            cosines = torch.cosine_similarity(ends[:, :-apart], ends[:, apart:], dim=-1).clamp(-1, 1)
            found[name][rows, :-apart] = (cosines.arccos() / math.pi).numpy()
    return found


def sizes(x: Tensor) -> tuple[Tensor, ...]:
    """`SIZES` of a state `[batch, tokens, width]`, each `[batch]`.

    Whether position 0's norm is more than 50 times the sequence's median norm, how many other positions' are, and the
    largest such ratio; the largest activation, and its ratio to the sequence's median activation, both as magnitudes.
    """
    norm = torch.linalg.vector_norm(x.float(), dim=-1)
    over = norm / norm.median(dim=1, keepdim=True).values
    large = over > SINK_RATIO
    activations = x.float().abs().flatten(1)
    largest = activations.amax(dim=1)
    return large[:, 0], large[:, 1:].sum(dim=1), over.amax(dim=1), largest, largest / activations.median(dim=1).values


# From the table alone


def load_table(path: Path) -> pd.DataFrame:
    """The table, if it has whole models of one size."""
    table = study.read(path)
    if len(table[["sequences", "tokens"]].drop_duplicates()) != 1:
        raise OutputError(f"{path} has rows of several sizes, or none", "one size", "choose another --results")
    if any({*rows["measurement"]} != {*MEASUREMENTS} for _, rows in table.groupby("model")):
        raise OutputError(f"{path} lacks a measurement of a model", "all three", "run it again")
    return table


def models(table: pd.DataFrame) -> list[Model]:
    return [Model(str(name), rows) for name, rows in table.groupby("model", sort=False)]


def section(results: Path, name: str = f"{NAME}.csv") -> study.Section:
    """The study's part of the findings, from its table alone; it tests no claim."""
    table = load_table(results / name)
    panels = 2 + len(models(table))
    figure = study.Figure(NAME, partial(draw, table), 2.5 * panels, panels)
    return study.Section(NAME, (), lambda found: findings(table), (figure,), {})


def findings(table: pd.DataFrame) -> str:
    """What goes into the README: the setting, the comparisons, then what no verdict rests on."""
    found = models(table)
    more = "\n".join(sentences(model) for model in found)
    return "\n\n".join([introduction(table), overview(found), NOTE, FIGURE, SECONDARY, more, CHANGE])


def introduction(table: pd.DataFrame) -> str:
    """What was measured on what."""
    sequences, tokens = (int(table[name].iloc[0]) for name in ("sequences", "tokens"))
    lines = [
        f"- {model.name}: {model.blocks} blocks, middle half {middle(model.blocks).start} to "
        f"{middle(model.blocks).stop - 1}, {span(model.blocks)} blocks for a fifth; {model.documents} topics. "
        f"{counts(model)}"
        for model in models(table)
    ]
    return "\n".join([f"""### Published findings on two public checkpoints (`{NAME}.py`)

{sequences} sequences of {tokens} tokens of Python's manual, spread over its topics; loss and agreement at
{100 * SCORED:.0f} % of the positions. SmolLM2-135M is the instruction-tuned checkpoint with its weights in 4 bits, run
in float32, without a BOS; MiniLM is all-MiniLM-L6-v2, a post-LN encoder of sentences without a language-model head.
Intervals resample topics, which are few, and say nothing of other texts or models: each row is about one checkpoint,
and there are no seeds by which to say what effect could have been missed. Every setting differs from the published one
in model and text.
""", *lines])  # fmt: skip


NOTE = """`same`: the interval contains the published number or lies in the published range; `different`: it does not,
or lies outside; `undecided`: an end of the range lies in it. Where no number was published, the range is the
direction; "about the middle" is taken as the middle third. A `number` is a number or a range, an `order` an order or a
sign, for which much less has to agree, and `presence` is whether something is there at all. Findings are not
independent: the share of pairs in the painters' order counts the four comparisons below it again. Blocks and states
count from 0. † Not in the preregistration: nothing shows that these were chosen before their results, and those about
massive activations were chosen when some of SmolLM2's states had been seen. That the painters' order, which is in it,
is measured by a share of pairs was chosen with the result, since neighbours in it do not tell how far a change
moved."""
FIGURE = f"""![What is kept without each block and with neighbours swapped, and rankings of blocks by what their removal
costs, their influence and their angle, over depth](figures/{NAME}.png)"""
SECONDARY = "Beside the table, from the same rows, means over sequences where there is no interval:"
CHANGE = """What would change our mind: other texts, weights in full precision, the base model, or larger models of the
same family. Benchmarks, training after the change and looped layers were not tried."""


def draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """What is kept over depth for all models, then each model's rankings over depth with their correlations."""
    found = models(table)
    for ax, change in zip(axes, ("delete", "swap"), strict=False):
        for model, colour in zip(found, LIGHT.lines, strict=False):
            value, low, high = model.draws.intervals(model.kept(change))
            place = np.arange(len(value)) / (model.blocks - 1)
            what = "top-1" if model.head else "cosine of the last state"
            ax.fill_between(place, low, high, color=colour, alpha=0.2, linewidth=0)
            ax.plot(place, value, color=colour, marker="o", markersize=3, label=f"{model.name}, {what}")
        ax.axhspan(*KEPT, color=LIGHT.faint, alpha=0.6, zorder=0, label="{} to {}, Lad et al.".format(*KEPT))
        ax.set_ylim(-0.02, 1.02)
        ax.set_ylabel("kept without block l" if change == "delete" else "kept, l and\nl + 1 swapped")
    beside = {"loc": "lower left", "bbox_to_anchor": (0, 1), "fontsize": 7, "frameon": False}
    beside |= {"columnspacing": 1, "handlelength": 1}
    axes[0].legend(ncols=3, **beside)
    for ax, model in zip(axes[2:], found, strict=True):
        ranks = {
            f"{'loss' if model.head else '1 − cos'} without l": model.grid(model.cost, "delete", 1),
            f"influence, ρ {study.span(influence(model))}": model.grid("block_influence"),
            f"angle, ρ {study.span(angles(model, 1))}": model.grid("angle"),
        }
        for (label, columns), colour in zip(ranks.items(), LIGHT.lines, strict=False):
            place = np.arange(columns.shape[1]) / (model.blocks - 1)
            ax.plot(place, stats.rankdata(columns.mean(axis=0)), color=colour, marker="o", markersize=3, label=label)
        ax.set_ylabel(f"rank, 1 least\n({model.name})")
        ax.legend(ncols=3, **beside)
    axes[-1].set_xlabel("place of block l: 0 the first, 1 the last")


if __name__ == "__main__":
    sys.exit(main())
