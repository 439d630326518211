"""Does x + N(F(x)) block the residual path, need warm-up, and do worse than pre-LN? Claim V1.

    python analyses/branch_norm.py        # some half an hour on two cores, after warmup.py

As fixed in `PREREGISTRATION.md`: branch-norm of 12 blocks, with and without QK-norm, on the grid of `warmup.py`'s AdamW
arms but for warm-up 50, then each at its best, and without warm-up, with fresh seeds. Pre-LN and post-LN are the runs
of `warmup.py`. Writes a row a run to --results and what the blocks do to
data/results/branch_norm_states.csv.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gradient_norms
import numpy as np
import pandas as pd
import runs
import study
import torch
import warmup
from matplotlib.axes import Axes
from runs import Run
from torch import Tensor, nn

from depthprobe.contrast import over_seeds
from depthprobe.lab import LabConfig, LabForCausalLM
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.report.panels import LIGHT

NAME = "branch_norm"
ARMS, WARMUPS, SEEDS, SEQUENCES = ("branch", "branch-qk"), (0, 200), runs.SEEDS, 64
STATES = "branch_norm_states.csv"
COLUMNS = (
    "arm", "when", "seed",  # init, or trained at the arm's best setting
    "block",
    "squared",  # ‖x_l‖², mean over tokens but the first; block L is the last state
    "expected",  # ‖x_0‖² + 2 l d: two branches of squared norm d a block, uncorrelated with the stream
    "written",  # ‖F‖ of the MLP before its norm
    "entropy",  # of an attention's weights over the log of the number of positions it sees, mean over heads and tokens
    "coefficient",  # of x_0 in the last state with every branch frozen; stands at block L
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    return runs.started(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    size = runs.sized(options, warmup.SIZE)
    jobs = warmup.grid(size, ARMS, ("adamw",), WARMUPS)
    table = runs.collect(options.results, jobs, options, "Choosing")
    confirm = confirmations(table)
    table = runs.collect(options.results, [*jobs, *confirm], options, "Confirming")
    with_best = [job for job in confirm if bool(job.warmup) == bool(runs.best(table, arm=job.arm)["warmup"])]
    states = options.results.with_name(STATES)
    study.collect(states, COLUMNS, [("branch", "init", seed) for seed in range(10)], initial)
    trained = {(job.arm, "trained", job.seed): job for job in with_best}
    study.collect(
        states, COLUMNS, list(trained), lambda *key: measure(runs.model_of(trained[key], options.work), key[2])
    )
    shown = section(options.results.parent)
    print(shown.text(study.adjusted(shown.tests)))


def confirmations(table: pd.DataFrame) -> list[Run]:
    """Fresh seeds of each arm, with warm-up and without."""
    chosen = [warmup.best(table, arm, "adamw", warm) for arm in ARMS for warm in (False, True)]
    return [job for seed in SEEDS for row in chosen for job in runs.again(row, "confirm", [seed])]


# Measuring


def initial(arm: str, when: str, seed: int) -> list[tuple[int | float, ...]]:
    """The rows of a model that was not trained."""
    config = LabConfig(
        vocab_size=len(byte_tokenizer()), max_position_embeddings=runs.TOKENS, num_hidden_layers=12, **runs.ARMS[arm]
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LabForCausalLM(config)
    return measure(model.eval(), seed)


@torch.no_grad()
def measure(model: nn.Module, seed: int) -> list[tuple[int | float, ...]]:
    """From one forward pass, and one with frozen branches, the columns from `block` on."""
    torch.set_num_threads(1)
    ids = gradient_norms.batch("manual", SEQUENCES, seed)
    states: list[Tensor] = []
    entropies: list[float] = []
    written: list[Tensor] = []
    blocks = list(model.model.blocks)
    hooks = [block.register_forward_pre_hook(lambda _, given: states.append(given[0])) for block in blocks]
    hooks += [
        block.attention.register_forward_pre_hook(lambda module, given: entropies.append(entropy(module, given[0])))
        for block in blocks
    ]
    hooks += [block.mlp.register_forward_hook(lambda _, given, made: written.append(made)) for block in blocks]
    hooks.append(model.model.final_norm.register_forward_pre_hook(lambda _, given: states.append(given[0])))
    try:
        model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    squares = [float(state[:, 1:].double().square().sum(dim=-1).mean()) for state in states]
    width, nan = states[0].shape[-1], math.nan
    rows: list[tuple[int | float, ...]] = []
    for block in range(len(blocks)):
        size = float(torch.linalg.vector_norm(written[block][:, 1:].double(), dim=-1).mean())
        rows.append((block, squares[block], squares[0] + 2 * block * width, size, entropies[block], nan))
    count = len(blocks)
    return [*rows, (count, squares[-1], squares[0] + 2 * count * width, nan, nan, coefficient(model, ids, seed))]


def entropy(attention: nn.Module, x: Tensor) -> float:
    """Of the weights of every position but the first, over the log of how many positions it sees: 1 is even."""
    batch, tokens, _ = x.shape
    query, key, _ = attention.qkv(x).view(batch, tokens, 3, attention.heads, -1).permute(2, 0, 3, 1, 4).unbind()
    if attention.query_norm is not None:
        query, key = attention.query_norm(query), attention.key_norm(key)
    scores = (query @ key.transpose(-2, -1)).double() / math.sqrt(query.shape[-1])
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    each = torch.special.entr(scores.masked_fill(~seen, -math.inf).softmax(dim=-1)).sum(dim=-1)
    most = torch.arange(1, tokens + 1, dtype=torch.float64).log()
    return float((each[..., 1:] / most[1:]).mean())


def coefficient(model: nn.Module, ids: Tensor, seed: int) -> float:
    """What is left in the last state of a change of x_0 while every branch writes, after its norm, what it wrote."""
    norms = [skip.norm_update for block in model.model.blocks for skip in (block.attention_skip, block.mlp_skip)]
    kept: list[Tensor] = []
    last: list[Tensor] = []
    rows = model.get_input_embeddings()(ids)
    change = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    end = model.model.final_norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    hooks = [norm.register_forward_hook(lambda _, given, made: kept.append(made)) for norm in norms]
    try:
        model(inputs_embeds=rows)
        for hook in hooks:
            hook.remove()
        replay = iter(kept)
        hooks = [norm.register_forward_hook(lambda _, given, made: next(replay)) for norm in norms]
        model(inputs_embeds=rows + change)
    finally:
        for hook in (*hooks, end):
            hook.remove()
    moved = (last[1] - last[0]).double()
    return float((moved * change).sum() / change.double().square().sum())


# From the tables alone


def primary(table: pd.DataFrame, beside: pd.DataFrame, states: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration."""
    without, warm = (warmup.confirmed(table, "branch", "adamw", each) for each in (False, True))
    fails = [int((rows["status"] == "failed").sum()) for rows in (without, warm)]
    pre = warmup.at_best(beside, "pre")
    frozen = study.arm(states, arm="branch", when="init").dropna(subset=["coefficient"])["coefficient"]
    fail = "runs of branch-norm that fail, and not only do worse, without warm-up; predicted more than with it"
    there = all(list(rows["seed"]) == [*SEEDS] for rows in (without, warm))
    counted = study.Counted("V1", fail, *fails, len(without), "with warm-up")
    path = "coefficient of x_0 in x_L at initialisation, branches frozen; predicted 0 (blocked), by algebra 1"
    return [
        counted if there else study.Unjudged("V1", fail, "runs are missing"),
        runs.compared(
            "V1",
            "loss of branch-norm minus pre-LN, each at its best",
            warmup.at_best(table, "branch"),
            pre,
            runs.margin(beside, pre),
            "above",
        ),
        study.Primary(
            "V1", path, tuple(frozen), -0.1, 0.1, logs=False, label="coefficient of x_0 in x_L, branches frozen"
        ),
    ]


def overview(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """What was chosen and what it came to, in markdown."""
    lines = []
    for arm, source in (("pre", beside), ("post", beside), ("branch", table), ("branch-qk", table)):
        whole = study.arm(source, stage="grid", arm=arm, optimizer="adamw")
        for warm in (False, True):
            rows = warmup.confirmed(source, arm, "adamw", warm)
            cells = runs.summary(warmup.with_or_without(whole, warm), rows, whole)
            lines.append([arm, warmup.WITH[warm], *cells])
    return study.markdown(["arm", "warm-up", *runs.SUMMARY], lines)


def sentences(states: pd.DataFrame) -> Iterator[str]:
    """What the secondary numbers came to."""
    for (arm, when), rows in states.groupby(["arm", "when"], sort=False):
        last = rows["block"].max()
        ends, inner = rows[rows["block"] == last], rows[rows["block"] < last]
        growth = np.log(ends["squared"] / ends["expected"]).to_numpy()
        wrote = inner.pivot(index="seed", columns="block", values="written")
        input_ = np.log(wrote[last - 1] / wrote[0]).to_numpy()
        even = inner.groupby("seed")["entropy"].agg(["mean", "min"])
        shown = [study.least(each, logs=True) for each in (growth, input_)]
        shown += [study.least(even[name].to_numpy()) for name in even]
        yield (
            f"- {arm}, {when}: ‖x_L‖² over ‖x_0‖² + 2 L d is {study.ratio(growth)}; ‖F‖ of the last MLP before its "
            f"norm, over that of the first, {study.ratio(input_)}; entropy of attention over its largest, mean of all "
            f"blocks, {study.span(over_seeds(even['mean']))}, in its least even block "
            f"{study.span(over_seeds(even['min']))} ({len(ends)} seeds, smallest effects {', '.join(shown)})."
        )


def section(results: Path) -> study.Section:
    """The study's part of the findings, from its tables and `warmup.py`'s alone."""
    table, beside = (runs.judged(results / f"{name}.csv") for name in (NAME, warmup.NAME))
    states = study.read(results / STATES)

    def text(found: list[study.Verdict]) -> str:
        notes = "\n".join(sentences(states))
        return "\n\n".join([INTRODUCTION, study.verdicts(found), FIGURE, overview(table, beside), SECONDARY, notes])

    figure = study.Figure(NAME, partial(draw, table, beside, states), 6.0, 2, shared=False)
    return study.Section(NAME, tuple(primary(table, beside, states)), text, (figure,), MINDS, notes(table, beside))


def notes(table: pd.DataFrame, beside: pd.DataFrame) -> dict[str, str]:
    """What the verdict does not say; added when the rows were known."""
    normed, pre = (warmup.at_best(*each) for each in ((table, "branch-qk"), (beside, "pre")))
    gains = []
    for arm in ARMS:
        cold, warm = (warmup.confirmed(table, arm, "adamw", each) for each in (False, True))
        rates = dict.fromkeys(f"{rows['lr'].iloc[0]:g}" for rows in (cold, warm))
        gains.append(f"{arm} {study.nats(cold['test'].to_numpy() - warm['test'].to_numpy())} at {' and '.join(rates)}")
    share = runs.margin(beside, warmup.confirmed(table, "branch", "adamw", warm=True))
    return {
        "V1": "That the path of x_0 is blocked is contradicted by algebra, before any run: x_L = x_0 + Σ N(F_l). So "
        "the claim as a whole could not be supported, and what training has to say is in the first two tests. That no "
        "run failed is not that warm-up does nothing: the loss without it less that with it is, by arm and learning "
        f"rate, {'; '.join(gains)}. W1's margin would be {share:.3f} for branch-norm. With QK-norm, branch-norm less "
        f"pre-LN, which was given none, is {study.nats(normed['test'].to_numpy() - pre['test'].to_numpy())}."
    }


INTRODUCTION = f"""### V1: x + N(F(x)) (`{NAME}.py`)

12 blocks, width 64, 600 steps; pre-LN and post-LN are the AdamW runs of `warmup.py`, branch-norm has its grid but for
warm-up 50. Losses on the test half, nats a byte, paired by seed; the margin is 10 % of what separates pre-LN from a
model without blocks. The claim makes three predictions, tested on branch-norm without QK-norm; the third is decided by
algebra, and its test is one of the code."""
FIGURE = f"![Loss on dev over learning rate, seed 0, and ‖x_l‖² over depth, of branch-norm](figures/{NAME}.png)"
SECONDARY = """Secondary, with uncorrected intervals over seeds, which support nothing: the trained states are of
each arm's own setting and loss, not at equal loss. Gradients of branch-norm over depth are in the part on G1 and G2."""
MINDS = {
    "V1": "nothing, on the residual path; on the rest, deeper or wider models, or longer training",
}


def draw(table: pd.DataFrame, beside: pd.DataFrame, states: pd.DataFrame, axes: list[Axes]) -> None:
    """Loss of the grid over the learning rate; growth of the stream."""
    both = pd.concat([study.arm(beside, optimizer="adamw"), table])
    for arm, colour in zip(("pre", "post", *ARMS), LIGHT.lines, strict=False):
        for warm, style in zip(WARMUPS, (":", "-"), strict=True):
            rows = study.arm(both, stage="grid", arm=arm, warmup=warm).sort_values("lr")
            axes[0].plot(rows["lr"], rows["dev"], style, color=colour, label=f"{arm}, warm-up {warm}", linewidth=1.3)
            bad = rows[rows["status"] == "failed"]
            axes[0].plot(bad["lr"], bad["dev"], "x", color=colour)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("learning rate (× failed)")
    axes[0].set_ylabel("loss on dev, nats")
    axes[0].legend(fontsize="small", ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    for (arm, when), rows in states.groupby(["arm", "when"], sort=False):
        wide = rows.pivot(index="block", columns="seed", values="squared")
        colour, style = LIGHT.lines[2 + ARMS.index(arm)], "--" if when == "init" else "-"
        axes[1].plot(wide.index, wide, color=colour, alpha=0.3, linewidth=0.7)
        axes[1].plot(wide.index, wide.mean(axis=1), style, color=colour, linewidth=2, label=f"{arm}, {when}")
        expected = rows.groupby("block")["expected"].mean()
        axes[1].plot(expected.index, expected, ":", color=colour)
    axes[1].set_xlabel("l")
    axes[1].set_ylabel("‖x_l‖²; dotted: ‖x_0‖² + 2 l d")
    axes[1].legend()


if __name__ == "__main__":
    sys.exit(main())
