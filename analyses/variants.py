"""Do other initialisations, other attention and other norms change the picture? Claims S1 and N1.

    python analyses/variants.py        # some forty minutes on two cores, after warmup.py

As fixed in `PREREGISTRATION.md`. S1: Admin's initialisation and RealFormer's residual attention on post-LN, tuned as
the AdamW arms of `warmup.py`, whose pre-LN runs they are compared with. N1: the criteria of R1, R2 and M1 on pre-LN
models with RMSNorm, and bidirectional ones with LayerNorm, BatchNorm and InstanceNorm; gradient ratios at
initialisation. Writes a row a run to --results, and what was measured for N1 to data/results/variants_norms.csv.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import gradient_norms
import growth
import numpy as np
import pandas as pd
import runs
import study
import torch
import warmup
from matplotlib.axes import Axes
from runs import Run

from depthprobe.analysis import analyze
from depthprobe.contrast import over_seeds
from depthprobe.criteria import CRITERIA, LESS, Criterion
from depthprobe.evidence import FITS
from depthprobe.lab import LabConfig, LabForCausalLM, LabForMaskedLM
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number

NAME = "variants"
TUNED, SEEDS, INITIAL_SEEDS, METRIC_TOKENS = ("admin", "realformer"), runs.SEEDS, 10, 4096
NORMS = {  # of what a norm's verdicts are compared with
    "rms": "", "batch": "masked", "instance": "masked",
}  # fmt: skip
NORM_FILE = "variants_norms.csv"
COLUMNS = ("arm", "seed", "claim", "criterion", "value", "fit")  # fit: R², of what is a power law
WORDS = {
    "": "LayerNorm", "rms": "RMSNorm", "masked": "LayerNorm, bidirectional", "batch": "BatchNorm, bidirectional",
    "instance": "InstanceNorm, bidirectional",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = runs.arguments(NAME, __doc__ or "")
    return runs.started(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    beside = runs.load_table(options.results.with_name(f"{warmup.NAME}.csv"))
    jobs = warmup.grid(runs.sized(options, warmup.SIZE), TUNED, ("adamw",))
    table = runs.collect(options.results, jobs, options, "Choosing")
    jobs += [job for seed in SEEDS for arm in TUNED for job in runs.again(runs.best(table, arm=arm), "confirm", [seed])]
    chosen = runs.best(beside, arm="pre", optimizer="adamw")
    trained = [job for suffix in WORDS if suffix for job in runs.again(chosen, "norm", SEEDS, arm=f"pre-{suffix}")]
    table = runs.collect(options.results, [*jobs, *trained], options, "Confirming")
    models = [*runs.again(chosen, "confirm", SEEDS), *trained]
    by_key = {(job.arm, job.seed): job for job in models}
    path, ended = options.results.with_name(NORM_FILE), runs.ends(beside) | runs.ends(table)
    study.collect(path, COLUMNS, list(by_key), lambda *key: judged(by_key[key], options.work, ended.get(by_key[key])))
    initial = [
        (f"{arm}{'-' if suffix else ''}{suffix}", 100 + seed)
        for suffix in WORDS for arm in ("pre", "post") for seed in range(INITIAL_SEEDS)
    ]  # fmt: skip
    study.collect(path, COLUMNS, initial, lambda arm, seed: gradients(arm, seed - 100))
    shown = section(options.results.parent)
    print(shown.text(study.adjusted(shown.tests)))


# Measuring


def criteria() -> list[Criterion]:
    """Those of N1 that trained models are judged by."""
    return [each for each in CRITERIA if each.claim in ("R1", "R2", "M1")]


def judged(run: Run, work: Path, test: float | None) -> list[tuple[str, str, float, float]]:
    """The number of each criterion, on a trained model; nan where the report does not have it.

    R1's exponent is there however well a power law fits, as in `growth.py`.
    """
    runs.ensure(run, work, test)
    torch.set_num_threads(1)
    report = analyze(
        work / run.name, tokens=METRIC_TOKENS, ablations=False, gradient_tokens=0, depth_tokens=0, lens_positions=0,
        device="cpu",
    )  # fmt: skip
    rows = []
    for each in criteria():
        fit = math.nan
        if each == growth.criterion_of("R1", "power law"):
            power, r2 = report.growth["growth_power"], report.growth["r2_power"]
            number, fit = power["value"] if power else math.nan, math.nan if r2 is None else r2
        else:
            value = each.measure(report)
            number = math.nan if isinstance(value, str) else value.value
        rows.append((each.claim, each.sentence, number, fit))
    return rows


def gradients(arm: str, seed: int) -> list[tuple[str, str, float, float]]:
    """Both gradient ratios of an untrained model, as `gradient_norms.py` takes them, as logs."""
    torch.set_num_threads(1)
    kind = dict(runs.ARMS[arm])
    masked = kind.get("causal") is False
    config = LabConfig(
        vocab_size=len(byte_tokenizer(masked=masked)), max_position_embeddings=runs.TOKENS, num_hidden_layers=12, **kind
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (LabForMaskedLM if masked else LabForCausalLM)(config)
    ids = gradient_norms.batch("manual", gradient_norms.MAIN["sequences"], seed)
    names = ("layer", *gradient_norms.COLUMNS[6:])
    rows = pd.DataFrame(gradient_norms.norms(model.train(), ids), columns=names).assign(seed=seed)
    return [
        ("G1" if kind["placement"] == "post" else "G2", metric, gradient_norms.logs(rows, metric)[0], math.nan)
        for metric in gradient_norms.RATIOS
    ]


# From the tables alone


def primary(table: pd.DataFrame, beside: pd.DataFrame, norms: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration."""
    pre = warmup.at_best(beside, "pre")
    margin = runs.margin(beside, pre)
    tests: list[study.Test] = []
    for arm, words in zip(TUNED, ("Admin", "residual attention"), strict=True):
        about = f"{words} on post-LN minus pre-LN, each at its best: loss"
        rows = study.arm(table, stage="confirm", arm=arm)
        tests.append(runs.compared("S1", about, rows, pre, margin, "below"))
    failed, models = failures(table, beside), judged_models(table, beside)
    pairs = [pair for *_, pair in pairs_of(norms, failed)]
    counts = {word: pairs.count(word) for word in ("contradicted", "undecided", study.UNJUDGED)}
    found = (
        f"of {len(pairs)} verdicts {counts['contradicted']} are the opposite of LayerNorm's, {counts['undecided']} "
        f"differ in being undecided, {counts[study.UNJUDGED]} cannot be compared; {sum(failed.values())} of the "
        f"{len(models)} trained models failed"
    )
    rule = "verdicts on R1, R2, M1 and the gradient ratios; predicted the same as LayerNorm's for every norm"
    return [*tests, study.Ruled("N1", rule, study.of_claim(pairs), found, len(SEEDS), "verdicts by norm")]


def failures(table: pd.DataFrame, beside: pd.DataFrame) -> dict[str, int]:
    """How many of an arm's trained models failed."""
    rows = judged_models(table, beside)
    return (rows["status"] == "failed").groupby(rows["arm"]).sum().astype(int).to_dict()


def judged_models(table: pd.DataFrame, beside: pd.DataFrame) -> pd.DataFrame:
    """The trained models of N1."""
    return pd.concat([study.arm(table, stage="norm"), warmup.at_best(beside, "pre")])


def verdict_of(
    norms: pd.DataFrame, arm: str, claim: str, criterion: str, failed: dict[str, int]
) -> tuple[str, str, np.ndarray, bool]:
    """The verdict on a criterion, the value with its interval, the values, and whether these are logs of a ratio.

    A ratio is judged by its logs. There is no verdict where a model failed or does not have the number.
    """
    of_start = claim in ("G1", "G2")
    rows = study.arm(norms, arm=arm, claim=claim, criterion=criterion)
    each = None if of_start else next(one for one in criteria() if (one.claim, one.sentence) == (claim, criterion))
    logs = each is None or LESS in (each.low, each.high)  # an exponent is no ratio
    values = rows["value"].dropna().to_numpy()
    if each is None:
        low, high = (-math.inf, -study.LOG_MARGIN) if claim == "G1" else (-study.LOG_MARGIN, study.LOG_MARGIN)
    else:
        low, high = each.low or -math.inf, each.high  # nothing is below 0
        if logs:
            values, low, high = np.log(values), math.log(low) if low > 0 else low, math.log(high)
    if len(values) < 2:
        return study.UNJUDGED, "–", values, logs
    interval = over_seeds(values)
    word, value = study.lies(interval, low, high), study.ratio(values) if logs else study.span(interval)
    unfit = word != "outside" and bool((rows["fit"] < FITS).any())
    if len(values) < (INITIAL_SEEDS if of_start else len(SEEDS)) or (not of_start and failed.get(arm)) or unfit:
        return study.UNJUDGED, value, values, logs
    return {"inside": "supported", "outside": "contradicted", "undecided": "undecided"}[word], value, values, logs


def pairs_of(norms: pd.DataFrame, failed: dict[str, int]) -> list[tuple[str, str, str]]:
    """Every norm's arm and criterion, and what its verdict is beside LayerNorm's in the same kind of model.

    The same is `supported`, supported beside contradicted is `contradicted`, and undecided in one alone `undecided`.
    """
    rows = []
    for suffix, beside in NORMS.items():
        for placement in ("pre", "post"):
            arm, other = f"{placement}-{suffix}", f"{placement}{'-' if beside else ''}{beside}"
            for claim, criterion in kinds(placement):
                words = {verdict_of(norms, each, claim, criterion, failed)[0] for each in (arm, other)}
                rows.append((arm, criterion, beside_each_other(words)))
    return rows


def beside_each_other(words: set[str]) -> str:
    """What two verdicts come to."""
    if study.UNJUDGED in words:
        return study.UNJUDGED
    if len(words) == 1:
        return "supported"
    return "undecided" if "undecided" in words else "contradicted"


def kinds(placement: str) -> list[tuple[str, str]]:
    """Claims and criteria that a placement is compared by."""
    trained = [(each.claim, each.sentence) for each in criteria()] if placement == "pre" else []
    return [*trained, *(("G1" if placement == "post" else "G2", metric) for metric in gradient_norms.RATIOS)]


def overview(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """The arms of S1 beside pre-LN and post-LN, in markdown."""
    lines = []
    for arm in ("pre", "post"):
        tried = study.arm(beside, stage="grid", arm=arm, optimizer="adamw")
        lines.append([arm, *runs.summary(tried, warmup.at_best(beside, arm))])
    for arm in TUNED:
        tried, rows = (study.arm(table, stage=stage, arm=arm) for stage in ("grid", "confirm"))
        lines.append([arm, *runs.summary(tried, rows)])
    return study.markdown(["arm", *runs.SUMMARY], lines)


def norm_table(norms: pd.DataFrame, table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """Every norm's value and verdict on each criterion, in markdown."""
    lines, failed = [], failures(table, beside)
    for suffix, words in WORDS.items():
        for placement in ("pre", "post"):
            arm = f"{placement}{'-' if suffix else ''}{suffix}"
            for claim, criterion in kinds(placement):
                word, value, values, logs = verdict_of(norms, arm, claim, criterion, failed)
                short = gradient_norms.LABELS.get(criterion) or criterion.split(":")[0]
                least = study.least(values, logs) if len(values) > 1 else "–"
                seeds = f"{len(values)} of {len(study.arm(norms, arm=arm, criterion=criterion))}"
                lines.append([claim, short, words, placement, value, least, word, seeds])
    lines.sort(key=lambda line: (line[0], line[1], line[3]))
    lost = ", ".join(f"{count} of {arm}" for arm, count in failed.items() if count) or "none"
    note = f"\n\nTrained models of N1 that failed, whose arm is not judged: {lost}."
    head = ["claim", "number", "norm", "placement", "value [95 % interval over seeds]", "smallest effect", "verdict",
            "seeds measured, failed ones included"]  # fmt: skip
    return study.markdown(head, lines) + note


def learned(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """How much the trained models of N1 learned, in markdown."""
    rows, lines = judged_models(table, beside), []
    for suffix, words in WORDS.items():
        each = study.arm(rows, arm=f"pre{'-' if suffix else ''}{suffix}")
        shares = each["dev"] / each["unigram"]
        span = f"{number(shares.min())} to {number(shares.max())}" if len(each) else "not run yet"
        lines.append([words, span, *(runs.scored(each) if len(each) else [""] * len(runs.SCORES))])
    return study.markdown(["norm", "loss on dev over the unigrams'", *runs.SCORES], lines)


def section(results: Path) -> study.Section:
    """The study's part of the findings, from its tables and `warmup.py`'s alone."""
    table, beside = (runs.judged(results / f"{name}.csv") for name in (NAME, warmup.NAME))
    norms = study.read(results / NORM_FILE)

    def text(found: list[study.Verdict]) -> str:
        arms, each = overview(table, beside), norm_table(norms, table, beside)
        parts = [INTRODUCTION, study.verdicts(found), FIGURE, arms, LEARNED, learned(table, beside), SECONDARY, each]
        return "\n\n".join(parts)

    figure = study.Figure(NAME, partial(draw, table, beside, norms), 6.0, 2, shared=False)
    told = notes(table, beside, norms)
    return study.Section(NAME, tuple(primary(table, beside, norms)), text, (figure,), MINDS, told)


def notes(table: pd.DataFrame, beside: pd.DataFrame, norms: pd.DataFrame) -> dict[str, str]:
    """What the verdicts do not say; added when the rows were known."""
    base, post = study.arm(beside, stage="confirm", arm="embedding"), warmup.at_best(beside, "post")
    against = {"Minus post-LN's loss, each at its best": post, "Minus that of a model without blocks": base}
    said = []
    for words, other in against.items():
        gains = []
        for arm in TUNED:
            rows = study.arm(table, stage="confirm", arm=arm).sort_values("seed")
            if [*rows["seed"]] == [*other["seed"]] and (rows["status"] == "done").all():
                gains.append(f"{arm} {study.nats(rows['test'].to_numpy() - other['test'].to_numpy())}")
        said += [f"{words}: {'; '.join(gains)}."] if gains else []
    failed = failures(table, beside)
    found = pairs_of(norms, failed)
    by_norm = {suffix: [word for arm, _, word in found if arm.endswith(f"-{suffix}")] for suffix in NORMS}
    same = "; ".join(
        f"{WORDS[suffix]} {pairs.count('supported')} of {len(pairs) - pairs.count(study.UNJUDGED)}"
        for suffix, pairs in by_norm.items()
    )
    second = f"Verdicts that are the same as LayerNorm's, of those that can be compared: {same}."
    if any(failed.values()):
        lost = "; ".join(
            f"{count} with {WORDS[arm.removeprefix('pre').strip('-')]}" for arm, count in failed.items() if count
        )
        second += f" Models that failed: {lost}. An arm that has one cannot be compared, nor what is compared with it."
    return {"S1": " ".join([*said, at_equal_settings(table, beside)]).strip(), "N1": f"{second} {UNMASKED}"}


def at_equal_settings(table: pd.DataFrame, beside: pd.DataFrame) -> str:
    """How Admin's grid compares with pre-LN's, point by point, which shows how much its verdict owes to the grid."""
    point, arms = ["lr", "warmup"], {"admin": table, "pre": study.arm(beside, optimizer="adamw")}
    rows = {arm: study.arm(whole, stage="grid", arm=arm) for arm, whole in arms.items()}
    both = rows["admin"].merge(rows["pre"], on=point, suffixes=("", "_pre"))
    both = both[(both["status"] == "done") & (both["status_pre"] == "done")]
    best = {arm: runs.best(grid, arm=arm) for arm, grid in rows.items()}
    there = both[both["lr"] <= best["admin"]["lr"]]
    if there.empty:
        return ""
    apart = there["dev"] - there["dev_pre"]
    at = study.arm(rows["admin"], lr=best["pre"]["lr"])
    ends = sorted(float(each["lr"]) for each in best.values())
    tried = rows["admin"]["lr"].drop_duplicates()
    between = tried.between(*ends, inclusive="neither").sum()
    rates = " and ".join(f"{best[arm]['lr']:g}" for arm in ("admin", "pre"))
    said = (
        f"At equal settings up to Admin's best learning rate (dev, seed 0, {len(there)} of the grid's points) Admin "
        f"minus pre-LN is {number(apart.min())} to {number(apart.max())} nats. Their best learning rates are {rates}; "
        f"at pre-LN's, {(at['status'] == 'failed').sum()} of {len(at)} runs of Admin failed; {between} rates between "
        "were tried."
    )
    longest = {arm: rows[arm]["warmup"].max() == best[arm]["warmup"] for arm in rows}
    return f"{said} Both are best at the longest warm-up that was tried." if all(longest.values()) else said


INTRODUCTION = f"""### S1, N1: other initialisations, attention and norms (`{NAME}.py`)

12 blocks, width 64, 600 steps. S1: losses on the test half, nats a byte, paired by seed; pre-LN and post-LN are the
AdamW runs of `warmup.py`, the others have its grid. The margin is 10 % of what separates pre-LN from a model without
blocks. N1 is by a rule, not a test: an opposite verdict contradicts it, and one that is undecided for one norm alone
leaves it undecided; where there is no opposite and a comparison cannot be made, the claim cannot be judged (an order
that the preregistration did not fix). Trained models have causal pre-LN's learning rate and warm-up whatever their
norm, at equal tokens, of which a masked model is asked about 15 %."""
FIGURE = f"""![Loss on dev over learning rate, seed 0, × failed, and the confirmed seeds as dots; and the gradient ratio
at initialisation by norm, a dot each of ten seeds, left of 1 where the gradient falls towards the first
block](figures/{NAME}.png)"""
LEARNED = f"""The trained models of N1. At a loss of 1 times the unigrams' a model has learned no more than how often
each token comes, and above {runs.FAILED:g} it counts as failed; what is said below of one that is near is said of a
model that has hardly learned anything."""
SECONDARY = """N1, number by number, with uncorrected intervals; `undecided` of both norms counts as no difference.
Means are arithmetic, of ratios geometric; thirds of the blocks are by place. BatchNorm and InstanceNorm are
compared with LayerNorm in the bidirectional model; there the loss of the gradient ratios is that of every position's
own token, which is not what the model trains on. BatchNorm has the statistics of its batch for gradients and its
running averages for what is measured on trained models. Models have 600 steps and 4,096 tokens are measured, where
`growth.py` has 2,000 steps, 8,192 tokens and a setting of its own, so that LayerNorm's numbers are not those of R1, R2
and M1."""
UNMASKED = (
    "The gradient ratios of bidirectional models are of the loss on their own tokens, a task of copying, and are "
    "compared among these models alone."
)
MINDS = {
    "S1": "longer training, longer warm-up, rates between those tried, or deeper models",
    "N1": "other verdicts once each norm has a learning rate of its own, with which all of them learn",
}


def draw(table: pd.DataFrame, beside: pd.DataFrame, norms: pd.DataFrame, axes: list[Axes]) -> None:
    """Loss over the learning rate at the arm's best warm-up, at most the unigrams'; gradient ratios by norm."""
    both = pd.concat([study.arm(beside, optimizer="adamw"), table])
    for arm, colour in zip(("pre", "post", *TUNED), LIGHT.lines, strict=False):
        chosen = runs.best(both, arm=arm)
        rows = study.arm(both, stage="grid", arm=arm, warmup=chosen["warmup"]).sort_values("lr")
        rows = rows.assign(dev=np.minimum(rows["dev"].fillna(np.inf), rows["unigram"]))
        label = f"{arm}, warm-up {chosen['warmup']}"
        axes[0].plot(rows["lr"], rows["dev"], "-", color=colour, label=label, linewidth=1.3)
        bad = rows[rows["status"] == "failed"]
        axes[0].plot(bad["lr"], bad["dev"], "x", color=colour)
        sure = study.arm(both, stage="confirm", arm=arm, lr=chosen["lr"], warmup=chosen["warmup"])
        axes[0].plot(sure["lr"], sure["dev"], "o", color=colour, markersize=3.5, alpha=0.6)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("learning rate (× failed, ● fresh seeds at the chosen points)")
    axes[0].set_ylabel("loss on dev, nats")
    axes[0].legend(fontsize="small", ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    for place, placement in enumerate(("pre", "post")):
        for row, suffix in enumerate(WORDS):
            arm = f"{placement}{'-' if suffix else ''}{suffix}"
            values = study.arm(norms, arm=arm, criterion="median")["value"].to_numpy()
            axes[1].plot(np.exp(values), np.full(len(values), row + 0.15 - 0.3 * place), "o", color=LIGHT.lines[place],
                         markersize=3, label=placement if row == 0 else None)  # fmt: skip
    axes[1].axvline(1, color="grey", linewidth=0.7)
    axes[1].set_xscale("log")
    axes[1].set_yticks(range(len(WORDS)), WORDS.values())
    axes[1].set_xlabel("median token's ‖∂ℓ/∂x‖ at initialisation, x_1 over x_L")
    axes[1].legend()


if __name__ == "__main__":
    sys.exit(main())
