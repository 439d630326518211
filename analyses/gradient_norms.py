"""How does the gradient change over the layers of a transformer that was not trained yet? Claims G1, G2 and G4.

    python analyses/gradient_norms.py                 # some ten minutes on two cores
    python analyses/gradient_norms.py --untrained     # two of them, without G4

Pre-LN, post-LN and branch-norm of 6, 12 and 24 blocks, ten initialisations each, at batches of 4, 16 and 64 sequences
of 64 bytes, as fixed in `PREREGISTRATION.md`. One backward pass a model and batch, of the batch's mean loss: norms of
the gradients by the MLP's second matrix of every block, and by every state, position 0 apart. The text is what
`analyze` reads by default; at 16 sequences also the one that the lab trains on, as a check.

Writes a row a block to --results as it goes; a run that was stopped goes on where it was. Tables, figure and findings
are made from these rows alone, and into the README by `findings.py`. G4 is in `oscillation.py`.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import oscillation
import pandas as pd
import study
import torch
from matplotlib.axes import Axes
from torch import Tensor

from depthprobe.contrast import over_seeds
from depthprobe.corpus import read
from depthprobe.criteria import MARGIN
from depthprobe.errors import NonFiniteError, OutputError, UsageError
from depthprobe.lab import LabConfig, LabForCausalLM, read_text
from depthprobe.lab.blocks import Block
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.progress import Bar
from depthprobe.report.gradient_panels import PlainLog
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME = "gradient_norms"
PLACEMENTS = ("pre", "post", "branch")
DEPTHS, SEEDS, BATCHES, TOKENS = (6, 12, 24), 10, (4, 16, 64), 64
MAIN = {"text": "manual", "blocks": 12, "sequences": 16}  # what the primary tests look at
KEYS = ("text", "placement", "blocks", "sequences", "seed")
COLUMNS = (
    *KEYS, "layer",
    "weight",  # ‖∂ℓ/∂W‖_F, W the second matrix of block `layer`'s MLP, ℓ the mean loss of the batch
    "weight_rest",  # the same without what comes through position 0
    "median", "mean",  # of ‖∂ℓ/∂x_layer‖ over the tokens of a sequence but the first and the last, mean over sequences
    "first_share",  # of Σ ‖∂ℓ/∂x_layer‖² over a sequence that is at position 0
    "skip_attention", "skip_mlp",  # post-LN: ‖s‖/‖y‖, what is left of the state in what is normalised; median token
)  # fmt: skip
LABELS = {"weight": "gradient of weights, first block over last", "median": "gradient of states, x_1 over x_L"}
RATIOS = {
    "weight": "weights: ‖∂ℓ/∂W‖ of the MLP's second matrix, first block over last",
    "median": "states: the median token's ‖∂ℓ/∂x‖, x_1 over x_L",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="numbers of blocks (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="initialisations of each (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path(f"data/results/{NAME}.csv"), help="the table")
    parser.add_argument("--work", type=Path, default=Path("reports/studies"), help="where checkpoints go")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each (default: %(default)s)")
    parser.add_argument("--untrained", action="store_true", help="leave out G4, which takes training runs")
    return study.guarded(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    jobs = plan(options)
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    with Bar("Measuring", len(jobs), "backward passes") as step:
        study.collect(options.results, COLUMNS, jobs, measure, step)
    if not options.untrained:
        oscillation.collect(options.results.parent, options)
    print(overview(load(options.results)), end="\n\n")
    shown = section(options.results.parent, options.results.name)
    print(shown.text(study.adjusted(shown.tests)))


def plan(options: argparse.Namespace) -> list[tuple[str, str, int, int, int]]:
    """What to measure, in the order of the table."""
    try:
        depths = [int(blocks) for blocks in options.depths.split(",")]
    except ValueError:
        raise UsageError(f"--depths {options.depths}", "whole numbers, such as 6,12") from None
    if options.seeds < 2 or min(depths) < 2:
        raise UsageError("--seeds or one of --depths below 2", "at least 2, for an interval and for two ends")
    batches = [("manual", sequences) for sequences in BATCHES] + [("library", MAIN["sequences"])]
    return [
        (text, placement, blocks, sequences, seed)
        for text, sequences in batches
        for placement in PLACEMENTS
        for blocks in depths
        for seed in range(options.seeds)
    ]


# Measuring


def measure(text: str, placement: str, blocks: int, sequences: int, seed: int) -> Iterator[tuple[int | float, ...]]:
    """The rows of one model and batch: layer, and the columns after it."""
    config = LabConfig(
        vocab_size=len(byte_tokenizer()), max_position_embeddings=TOKENS, hidden_size=64, num_hidden_layers=blocks,
        placement=placement,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LabForCausalLM(config)
    return norms(model, batch(text, sequences, seed))


def batch(text: str, sequences: int, seed: int) -> Tensor:
    """Ids `[sequences, 64]` by seed; a smaller batch is the beginning of a larger one."""
    if text == "library":
        return library().batch(seed, 0, max(BATCHES))[0][:sequences]
    every = manual()
    chosen = np.random.default_rng((seed, 0)).permutation(len(every))[:sequences]
    return every[torch.from_numpy(chosen)]


@cache
def manual() -> Tensor:
    """What `analyze` reads by default, all of it, `[sequences, 64]`."""
    return read(None, byte_tokenizer(positions=TOKENS), tokens=2**30, seq_len=TOKENS).inputs


@cache
def library():
    """What the lab trains on by default."""
    return read_text(None, byte_tokenizer(positions=TOKENS), seq_len=TOKENS)


def norms(model: LabForCausalLM, ids: Tensor) -> Iterator[tuple[int | float, ...]]:
    """From one backward pass of the mean loss of `ids` `[sequences, tokens]` the columns from `layer` on, by layer.

    Raises:
        NonFiniteError: a gradient is not finite.
    """
    blocks = [block for block in model.model.blocks if isinstance(block, Block)]
    states: list[Tensor] = []
    sums: list[tuple[Tensor, Tensor]] = []  # (y, N(y)) of every norm that stands after a sum
    products: list[tuple[Tensor, Tensor]] = []  # (h, h Wᵀ) of every MLP's second matrix W
    hooks = [block.register_forward_pre_hook(lambda _, given: states.append(given[0])) for block in blocks]
    hooks.append(blocks[-1].register_forward_hook(lambda _, given, made: states.append(made)))
    for block in blocks:
        for norm in (block.attention_skip.norm_after, block.mlp_skip.norm_after):
            if norm is not None:
                hooks.append(norm.register_forward_hook(lambda _, given, made: sums.append((given[0], made))))
        hooks.append(block.mlp.outer.register_forward_hook(lambda _, given, made: products.append((given[0], made))))
    try:
        loss = model(ids, labels=ids).loss
    finally:
        for hook in hooks:
            hook.remove()
    count = len(blocks)
    weights, made = [block.mlp.outer.weight for block in blocks], [made for _, made in products]
    found = torch.autograd.grad(loss, [*weights, *made, *states])
    if not all(bool(gradient.isfinite().all()) for gradient in found):
        raise NonFiniteError("a gradient is not finite", "finite gradients")
    skips = [float("nan")] * 2 * count
    if sums:
        before = [states[0], *(normed for _, normed in sums[:-1])]
        skips = [typical(length(s)[:, 1:] / length(y)[:, 1:]) for s, (y, _) in zip(before, sums, strict=True)]
    for layer, gradient in enumerate(found[2 * count :]):
        of_block = (float("nan"),) * 2, (float("nan"),) * 2
        if layer < count:
            rest = torch.einsum("sto,sti->oi", found[count + layer][:, 1:], products[layer][0][:, 1:])
            of_block = (size_of(found[layer]), size_of(rest)), tuple(skips[2 * layer : 2 * layer + 2])
        size = length(gradient)
        inner = size[:, 1:-1]  # position 0 apart; the last predicts nothing
        share = float((size[:, 0].square() / size.square().sum(dim=1)).mean())
        yield layer, *of_block[0], typical(inner), float(inner.mean()), share, *of_block[1]


def size_of(gradient: Tensor) -> float:
    """The Frobenius norm, in float64."""
    return float(torch.linalg.vector_norm(gradient.detach().double()))


def length(x: Tensor) -> Tensor:
    """The norm of each token, `[sequences, tokens]`, in float64."""
    return torch.linalg.vector_norm(x.detach().double(), dim=-1)


def typical(values: Tensor) -> float:
    """The median of each row, averaged over rows; of an even number the mean of the middle two."""
    return float(np.median(values.numpy(), axis=1).mean())


# From the table alone


def load(path: Path) -> pd.DataFrame:
    """The table, if it has what the findings need."""
    table = study.read(path)
    if study.arm(table, placement="post", **MAIN).empty:
        raise OutputError(f"{path} has no models of {MAIN['blocks']} blocks", fix="include them in --depths")
    return table


def at(rows: pd.DataFrame, metric: str, layer: int) -> pd.Series:
    """One metric at one layer, by seed."""
    return rows[rows["layer"] == layer].set_index("seed")[metric].sort_index()


def logs(rows: pd.DataFrame, metric: str) -> tuple[float, ...]:
    """log(bottom / top) of each seed: first block over last for weights, x_1 over x_L for states."""
    last = int(rows["layer"].max())
    low, high = (1, last) if metric == "median" else (0, last - 1)
    return tuple(np.log(at(rows, metric, low) / at(rows, metric, high)))


def log_product(rows: pd.DataFrame, start: int = 1) -> tuple[float, ...]:
    """log Π ‖s‖/‖y‖ over the norms between x_start and x_L, of each seed: what the skips alone would leave."""
    each = np.log(rows["skip_attention"] * rows["skip_mlp"]).where(rows["layer"] >= start)
    return tuple(each.groupby(rows["seed"]).sum().sort_index())  # x_L, which no norm is above, has none


def top_slope(table: pd.DataFrame, metric: str) -> tuple[float, ...]:
    """Slope of log(gradient at the top of pre-LN) over log L, of each seed."""
    depths = sorted(table["blocks"].unique())
    tops = []
    for blocks in depths:
        rows = study.arm(table, placement="pre", **MAIN | {"blocks": blocks})
        tops.append(np.log(at(rows, metric, blocks - (metric == "weight"))))
    return tuple(np.polyfit(np.log(depths), np.stack(tops), 1)[0])


def primary(table: pd.DataFrame, **instead: str) -> list[study.Primary]:
    """The tests of the preregistration, G4's left out; with another arm `instead`."""
    below, same = (-math.inf, -study.LOG_MARGIN), (-study.LOG_MARGIN, study.LOG_MARGIN)
    predicted = (("G1", "post", "below 1/1.1", below), ("G2", "pre", "between 1/1.1 and 1.1", same))
    tests = []
    for claim, placement, region, limits in predicted:
        rows = study.arm(table, placement=placement, **MAIN | instead)
        for metric, words in RATIOS.items():
            about = f"{placement}, {words}; predicted {region}"
            tests.append(study.Primary(claim, about, logs(rows, metric), *limits, label=LABELS[metric]))
    return tests


def overview(table: pd.DataFrame, alike: int = 0) -> str:
    """Arms with both ratios, in markdown.

    Args:
        table: all rows.
        alike: in how many of text, L and sequences an arm must be like the primary tests' to be shown.
    """
    head = ["text", "sequences", "L", "placement", "weights, first / last", "", "median token, x_1 / x_L", "",
            "Π ‖s‖/‖y‖", "position 0's share at x_1", "seeds", "smallest effect, in this order"]  # fmt: skip
    lines = []
    for (text, placement, blocks, sequences), rows in table.groupby([*KEYS[:4]], sort=False):
        if sum(MAIN[name] == rows[name].iloc[0] for name in MAIN) < alike:
            continue
        found = [logs(rows, metric) for metric in RATIOS]
        ratios = [cell for each in found for cell in (study.ratio(each), study.changed(each))]
        skips = [log_product(rows)] if placement == "post" else []
        product = study.ratio(skips[0]) if skips else ""
        share = at(rows, "first_share", 1).to_numpy()
        effects = ", ".join([*(study.least(each, logs=True) for each in [*found, *skips]), study.least(share)])
        about = [TEXTS[text], str(sequences), str(blocks), placement]
        lines.append([*about, *ratios, product, study.span(over_seeds(share)), str(len(found[0])), effects])
    return study.markdown(head, lines)


def section(results: Path, name: str = f"{NAME}.csv") -> study.Section:
    """The study's part of the findings, from its tables alone; G4 where its runs were made."""
    table = load(results / name)
    trained = oscillation.load(results) if (results / oscillation.SHIFTS).exists() else None
    more = oscillation.primary(*trained[:2]) if trained else []

    def text(found: list[study.Verdict]) -> str:
        mine, theirs = ([each for each in found if (each[0].claim == "G4") is of_g4] for of_g4 in (False, True))
        parts = [introduction(table), study.verdicts(mine), FIGURE, SECONDARY, overview(table, alike=2)]
        return "\n\n".join([*parts, sentences(table), *([oscillation.text(trained, theirs)] if trained else [])])

    figures = [study.Figure(NAME, partial(draw, table), 5.4, 2, claims=("G1", "G2"))]
    if trained:
        figures.append(study.Figure("oscillation", partial(oscillation.draw, trained[1]), 3.0, claims=("G4",)))
    return study.Section(NAME, (*primary(table), *more), text, tuple(figures), MINDS, notes(table))


def notes(table: pd.DataFrame) -> dict[str, str]:
    """What the verdicts do not say."""
    top = over_seeds(top_slope(table, "weight"))
    rest = {arm: logs(study.arm(table, placement=arm, **MAIN), "weight_rest") for arm in ("post", "pre")}
    apart = {arm: f"{study.ratio(values)} without what comes through position 0" for arm, values in rest.items()}
    return {
        "G1": f"Of weights, the ratio is {apart['post']} (the preregistration can be read either way).",
        "G2": f'"Small at the top" is not among the tests: exponent of the last block\'s over L, predicted −½, '
        f"{study.span(top)}. Of weights, the ratio is {apart['pre']}.",
    }


def sentences(table: pd.DataFrame) -> str:
    """What the secondary numbers came to."""
    post, pre = (study.arm(table, placement=placement, **MAIN) for placement in ("post", "pre"))
    product = log_product(post)
    slopes = {metric: top_slope(table, metric) for metric in RATIOS}
    where = {m: study.lies(over_seeds(each), -0.5 - MARGIN / 2, -0.5 + MARGIN / 2) for m, each in slopes.items()}
    powers = {
        m: f"{study.span(over_seeds(each))} ({where[m]}, smallest effect {study.least(each)})"
        for m, each in slopes.items()
    }
    depths = ", ".join(str(blocks) for blocks in sorted(table["blocks"].unique()))
    elsewhere = [f"{test.claim} {word}" for test, _, word in study.adjusted(primary(table, text="library"))]
    branches = np.subtract(logs(post, "median"), product)
    rest = study.Primary("G1", "", logs(post, "weight_rest"), -math.inf, -study.LOG_MARGIN)
    other = study.probability(rest)
    return f"""- G1: the skips alone would leave Π ‖s‖/‖y‖ = {study.ratio(product)} of the gradient at
  L = {MAIN["blocks"]}; the median token's ratio is {study.ratio(branches)} times that (smallest effect
  {study.least(branches, logs=True)}).
- G2: exponent of the gradient at the top over L = {depths}, predicted −½ ± 10 %: {powers["weight"]}
  for the last block's weight, {powers["median"]} for x_L.
- The four tests with the training text instead, after Holm over these four: {", ".join(elsewhere)}.
- Without what comes through position 0, which "position 0 apart" may also mean for the weights, their first / last is
  {study.ratio(rest.values)} in post-LN and {study.ratio(logs(pre, "weight_rest"))} in pre-LN (smallest effects
  {study.least(rest.values, logs=True)} and {study.least(logs(pre, "weight_rest"), logs=True)}). By that reading G1's
  test of weights has p = {number(other)} before Holm.

All of these are over the same {post["seed"].nunique()} seeds."""


TEXTS = {"manual": "for metrics", "library": "for training"}
FIGURE = f"""![Gradient over depth at initialisation, relative to the top, in pre-LN, post-LN and branch-norm, a thin
line a seed, thick their geometric mean](figures/{NAME}.png)"""
SECONDARY = f"""Secondary, with uncorrected intervals over seeds, which support nothing: one thing changed at a time.
`changed` is against 1, with the margin of 10 %. ‖s‖/‖y‖ is what is left of the state in the sum that a norm is given,
median token. Position 0's share is of Σ ‖∂ℓ/∂x_1‖² over a sequence; were all alike, it would be 1/{TOKENS}."""


def introduction(table: pd.DataFrame) -> str:
    """What was measured on what."""
    return f"""### G1, G2: gradients at initialisation (`{NAME}.py`)

Width 64, Xavier, {MAIN["blocks"]} blocks, {MAIN["sequences"]} sequences of {TOKENS} bytes. Ratios are geometric means
over seeds {table["seed"].min()} to {table["seed"].max()}, each an initialisation and a draw of sequences. A claim is
supported if both of its tests are, and contradicted if one of them is. p is that of a mean outside the predicted
region. An interval wider than from 1/1.1 to 1.1 cannot show that nothing changed, wherever it lies."""


ELSEWHERE = "an interval on the other side of the margin, with another width, initialisation, head or text"
MINDS = {"G1": ELSEWHERE, "G2": ELSEWHERE, "G4": oscillation.MIND}


def draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """Gradients over depth, relative to the top: a line a seed, and the geometric mean."""
    blocks = MAIN["blocks"]
    for ax, metric in zip(axes, RATIOS, strict=True):
        for placement, colour in zip(PLACEMENTS, LIGHT.lines, strict=False):
            rows = study.arm(table, placement=placement, **MAIN).dropna(subset=[metric])
            rows = rows[rows["layer"] > 0] if metric == "median" else rows  # x_0 tells of the embedding's scale
            wide = np.log(rows.pivot(index="layer", columns="seed", values=metric))
            wide -= wide.iloc[-1]
            place = wide.index + (metric == "weight")  # block l writes x_{l+1}
            ax.plot(place, np.exp(wide), color=colour, alpha=0.25, linewidth=0.7)
            ax.plot(place, np.exp(wide.mean(axis=1)), color=colour, linewidth=2, label=placement)
            if placement == "post" and metric == "median":
                alone = [np.mean(log_product(rows, layer)) for layer in wide.index]
                ax.plot(place, np.exp(alone), color=colour, linestyle=":", label="post, skips alone: Π ‖s‖/‖y‖")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(PlainLog())
        ax.yaxis.set_minor_formatter(PlainLog())
    axes[0].set_ylabel("‖∂ℓ/∂W‖ of block l,\nover the last block's")
    axes[1].set_ylabel("median ‖∂ℓ/∂x_l‖,\nover that at x_L")
    axes[1].set_xlabel(f"l, of {blocks}: a block is drawn at the state that it writes")
    axes[0].legend(title=f"{table['seed'].nunique()} initialisations")
    axes[1].legend(handles=[one for one in axes[1].get_lines() if "alone" in one.get_label()])


if __name__ == "__main__":
    sys.exit(main())
