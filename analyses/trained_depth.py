"""Do trained pre-LN and post-LN models use as much of their depth? Claims D1 and D4; `pre_vs_post.py` runs it.

Effective depth of the models that `pre_vs_post.py` confirmed, beside random twins and random tokens. Those that failed
have learned nothing that depth could be used for, and are left out.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import runs
import study
import torch
from matplotlib.axes import Axes
from runs import Run
from scipy import stats

from depthprobe.contrast import over_seeds
from depthprobe.criteria import MARGIN
from depthprobe.documents import manual_topics
from depthprobe.effective import effective_depth
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME = "pre_vs_post_depth"
PLACEMENTS = ("pre", "post")
TOKENS, EXCERPT, FEWEST = 2048, 320, 3  # tokens, bytes of each topic, seeds that must pass the gate in both arms
KEYS = ["arm", "blocks", "seed"]
COLUMNS = (*KEYS, "name", "variant", "value", "ci_low", "ci_high", "passes", "twin", "tokens", "note")


def collect(results: Path, table: pd.DataFrame, work: Path) -> None:
    """Measure the confirmed models that there are."""
    by_key = {(job.arm, job.blocks, job.seed): (job, test) for job, test in runs.ends(measurable(table)).items()}
    study.collect(results / f"{NAME}.csv", COLUMNS, list(by_key), lambda *key: depth(*by_key[key], work))


def measurable(table: pd.DataFrame) -> pd.DataFrame:
    """The confirmed models that learned something, of which an effective depth has a meaning."""
    rows = study.arm(table, stage="confirm", status="done")
    return rows[rows["arm"].isin(PLACEMENTS)]


def depth(run: Run, test: float, work: Path) -> list[tuple[str | float | int, ...]]:
    """The estimates of depth whose kind may pass the gate, of a confirmed model that ended at `test`, and controls."""
    torch.set_num_threads(1)
    runs.ensure(run, work, test)
    texts = [topic[:EXCERPT] for topic in manual_topics("analysis")]  # many documents, since the interval is over them
    found = effective_depth(
        work / run.name, texts, estimators=("dependence",), tokens=TOKENS, seq_len=runs.TOKENS, seed=run.seed,
        device="cpu",
    )  # fmt: skip
    rows = []
    for row in found.table.to_dict("records"):
        beside = {
            control["control"]: control["value"]
            for control in found.details["controls"]
            if (control["name"], control["variant"]) == (row["name"], row["variant"])
        }
        rows.append((
            row["name"], row["variant"], row["value"], row["ci_low"], row["ci_high"], int(row["passes_gate"]),
            beside.get("random-init", math.nan), beside.get("random-tokens", math.nan), row["note"],
        ))  # fmt: skip
    return rows


# From the tables alone


def load(results: Path, table: pd.DataFrame) -> pd.DataFrame:
    """What was measured of the models that learned something."""
    return study.read(results / f"{NAME}.csv").merge(measurable(table)[KEYS])


def of_depth(deep: pd.DataFrame, blocks: int) -> study.Test:
    """D1: each seed's excess over its random twins as a share of N, pre − post, where the gate lets both speak."""
    rows = first_power(deep, blocks)
    passes = (
        rows.pivot(index="seed", columns="arm", values="passes").reindex(columns=[*PLACEMENTS]).dropna().min(axis=1)
    )
    about = f"dependence less that of random twins, over N, pre − post; predicted below −{MARGIN:g}"
    if passes.sum() < FEWEST:
        found = f"the estimate passes the gate in both arms for {int(passes.sum())} of {len(passes)} seeds"
        return study.Unjudged("D1", about, f"{found}, {FEWEST} are needed")
    values = pre_less_post(rows, blocks).loc[passes.index[passes == 1]]
    return study.Primary("D1", about, tuple(values), -math.inf, -MARGIN, logs=False)


def depth_table(table: pd.DataFrame, deep: pd.DataFrame) -> str:
    """Effective depth beside its controls, in markdown; and how it goes with loss."""
    head = ["blocks", "arm", "estimate", "value [95 % over seeds]", "random twins", "random tokens",
            "smallest effect, of the three", "passes the gate", "seeds"]  # fmt: skip
    lines = []
    for (blocks, arm, name, variant), rows in deep.fillna({"variant": ""}).groupby(
        ["blocks", "arm", "name", "variant"], sort=False
    ):
        each = [rows[column].to_numpy() for column in ("value", "twin", "tokens")]
        spans, shown = [study.span(over_seeds(one)) for one in each], ", ".join(map(study.least, each))
        passed = f"{int(rows['passes'].sum())} of {len(rows)}"
        lines.append([str(blocks), arm, f"{name} {variant}".strip(), *spans, shown, passed, str(len(rows))])
    lost = study.arm(table, stage="confirm", status="failed")
    counts = lost[lost["arm"].isin(PLACEMENTS)].groupby(["arm", "blocks"]).size()
    said = "; ".join(f"{count} of {arm} with {blocks} blocks" for (arm, blocks), count in counts.items()) or "none"
    note = f"{compared(deep)} Left out, since they failed: {said}."
    return "\n\n".join([study.markdown(head, lines), note, correlation(table, deep)])


def compared(deep: pd.DataFrame) -> str:
    """How much of what separates the arms' depths separates their random twins already."""
    found = []
    for blocks, rows in first_power(deep).groupby("blocks"):
        means = rows.groupby("arm")[["value", "twin"]].mean().reindex([*PLACEMENTS])
        apart = means.loc["post"] - means.loc["pre"]
        found.append(f"{blocks} blocks {number(apart['value'])}, of random twins {number(apart['twin'])}")
    return f"Mean depth (first power) of post-LN minus pre-LN: {'; '.join(found)}. No difference in raw depth counts."


def correlation(table: pd.DataFrame, deep: pd.DataFrame) -> str:
    """D4: how an estimate of depth and loss go together over all arms and seeds."""
    both = first_power(deep).merge(measurable(table), on=KEYS)
    found = []
    for blocks, each in both.groupby("blocks"):
        plain = stats.spearmanr(each["value"], each["test"]).statistic
        apart = ", ".join(
            f"{arm} {number(float(stats.spearmanr(part['value'], part['test']).statistic))} ({len(part)})"
            for arm, part in each.groupby("arm", sort=False)
        )
        found.append(
            f"{blocks} blocks: {number(float(plain))} over {len(each)} models, partial for placement "
            f"{number(partial_spearman(each))}, within a placement {apart}"
        )
    return (
        "D4, printed only, without interval or smallest effect, since one seed has no correlation: Spearman of depth "
        f"(dependence, first power) with loss on test. {'; '.join(found)}. The claim predicts that it is negative. "
        f"{int((both['passes'] == 0).sum())} of these {len(both)} estimates do not pass the gate. Each arm is at its "
        "own learning rate, and nothing is compared at equal loss; pre-LN at post-LN's best was not measured."
    )


def partial_spearman(rows: pd.DataFrame) -> float:
    """Correlation of the ranks of depth and of loss, once the means of both in each placement are taken out."""
    ranks = rows[["value", "test"]].rank()
    rest = ranks - ranks.groupby(rows["arm"]).transform("mean")
    return float(rest["value"].corr(rest["test"]))


def note(deep: pd.DataFrame) -> str:
    """D1 without the gate, and where the gate lets an arm speak."""
    found = []
    for blocks, rows in sorted(first_power(deep).groupby("blocks"), reverse=True):
        apart = pre_less_post(rows, int(blocks)).to_numpy()
        if len(apart) < 2:
            continue
        passed = ", ".join(f"{arm} {int(study.arm(rows, arm=arm)['passes'].sum())}" for arm in PLACEMENTS)
        of_seeds = f"{len(apart)} seeds, smallest effect {study.least(apart)}"
        found.append(f"{blocks} blocks {study.span(over_seeds(apart))} ({of_seeds}; models that pass: {passed})")
    return f"Less random twins, over N, pre − post without the gate: {'; '.join(found) or 'no two seeds'}."


def pre_less_post(rows: pd.DataFrame, blocks: int) -> pd.Series:
    """Pre − post of what is left of depth without the random twins', a share of N, by the seeds that both have."""
    excess = rows.assign(excess=(rows["value"] - rows["twin"]) / blocks)
    wide = excess.pivot(index="seed", columns="arm", values="excess").reindex(columns=[*PLACEMENTS]).dropna()
    return wide["pre"] - wide["post"]


def first_power(deep: pd.DataFrame, blocks: int | None = None) -> pd.DataFrame:
    """The rows of the estimate that D1 and D4 are about."""
    rows = study.arm(deep, name="dependence", variant="first power")
    return rows if blocks is None else study.arm(rows, blocks=blocks)


FIGURE = f"""![Loss over effective depth, a dot a trained model, and the depth of its random twins as a small cross at
the same loss](figures/{NAME}.png)"""
INTRODUCTION = f"""Effective depth in blocks. Twins have the same configuration and random weights; their mean and that
of random tokens are over the same seeds. {TOKENS:,} tokens, {EXCERPT} bytes of each topic of the manual. `dependence`
itself failed its calibration and cannot pass the gate; the tests are of its first power. There are three twins of each
model, whose mean is shown; the gate asks for more than each of them, and for more than random tokens give."""
MINDS = {
    "D1": "an estimate that tells trained pre-LN models from their random twins",
    "D4": "arms whose depth differs by design while all else is the same",
}


def drawing(table: pd.DataFrame, deep: pd.DataFrame) -> Callable[[list[Axes]], None]:
    """Loss over effective depth, a panel a number of blocks."""
    both = first_power(deep).merge(measurable(table), on=KEYS)

    def draw(axes: list[Axes]) -> None:
        for ax, (blocks, rows) in zip(axes, sorted(both.groupby("blocks"), reverse=True), strict=True):
            for arm, colour in zip(PLACEMENTS, LIGHT.lines, strict=False):
                each = study.arm(rows, arm=arm)
                ax.plot(each["value"], each["test"], "o", color=colour, label=arm, markersize=5, alpha=0.7)
                ax.plot(each["twin"], each["test"], "x", color=colour, markersize=4, alpha=0.7)
            ax.set_ylabel(f"{blocks} blocks\nloss on test, nats")
        axes[-1].set_xlabel("effective depth, blocks (dependence, first power; × random twins)")
        axes[0].legend(fontsize="small")

    return draw
