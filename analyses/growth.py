"""Does the stream grow like the number of layers, and do layers hide each other's updates? Claims R1, R2, M1 and D2.

    python analyses/growth.py     # after pre_vs_post.py and `make weights`; some four minutes on one core

As fixed in `PREREGISTRATION.md`: pre-LN and post-LN of 12 blocks at ten initialisations and trained (the confirmation
runs of `pre_vs_post.py`, at equal tokens and at equal validation loss), and SmolLM2-135M and MiniLM, one model each,
as they are in .weights. Beyond that, as secondary numbers: pre-LN trained at post-LN's learning rate and warm-up. The
text is what `analyze` reads by default, so is what is measured; beside that, the identity path from x_0 to every state,
with the norms after a sum held at their statistics.

Writes a row a model and layer to --results as it goes; a run that was stopped goes on where it was, and measures what
there is while trained models are missing. Models whose checkpoints are gone are trained again, some two minutes each.
Tables, figures and findings are made from these rows alone, and into the README by `findings.py`.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import models
import numpy as np
import pandas as pd
import study
import torch
from matplotlib.axes import Axes
from models import END, LOSS, MATCHED, PLACEMENTS, Point, Trained
from runs import Run

from depthprobe.analysis import build_report
from depthprobe.contrast import over_seeds
from depthprobe.corpus import Corpus
from depthprobe.criteria import CRITERIA, INITIALISATIONS, Criterion
from depthprobe.depth.base import DepthSettings, batches
from depthprobe.depth.paths import Walk
from depthprobe.errors import OutputError, UsageError
from depthprobe.evidence import FITS
from depthprobe.lab import TrainSettings
from depthprobe.measure import Settings, measure
from depthprobe.probes.base import Dots, mean_tokens, ratio
from depthprobe.progress import Bar
from depthprobe.report import Report
from depthprobe.report.gradient_panels import PlainLog
from depthprobe.report.panels import LIGHT
from depthprobe.report.tables import number
from depthprobe.verify import Anatomy

NAME = "growth"
CLAIMS = ("R1", "R2", "M1", "D2")
BLOCKS, TOKENS, PUBLIC_TOKENS = 12, 8192, 4096
PUBLIC = {"SmolLM2-135M": ("pre", "SmolLM2-135M-Instruct.Q4_1.gguf", 30), "MiniLM": ("post", "all-MiniLM-L6-v2", 6)}
KEYS = ("source", "arm", "name", "blocks", "seed", "at")  # at: start, end (equal tokens), loss (equal loss), matched
BY_LAYER = (
    "residual_norm", "residual_norm_median",
    "update_norm", "update_ratio", "update_ratio_median", "update_share", "update_energy_share", "update_alignment",
    "block_influence", "interaction_error", "interaction_error_control",
)  # fmt: skip
OF_START = (
    "start_coefficient",  # ⟨c, x_0⟩ / ‖x_0‖², c what is left of x_0 in x_layer with the norms frozen; mean token
    "start_share",  # ‖c‖ / ‖x_layer‖
)
OF_MODEL = (
    "growth_power", "r2_power", "cross_share",
    "norms",  # that stand on the skips
    "step", "val_loss",  # of training, the loss on dev; between two checkpoints at equal loss
)  # fmt: skip
COLUMNS = (*KEYS, "layer", "unit", *BY_LAYER, *OF_START, *OF_MODEL)  # unit: block, attention, mlp; model; failed
UNITS = ("block", "attention", "mlp", "model")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of our models (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("data/results/pre_vs_post.csv"), help="the trained models")
    parser.add_argument("--work", type=Path, default=Path("reports/studies"), help="where their checkpoints are")
    parser.add_argument("--weights", type=Path, default=Path(".weights"), help="where the public models are")
    parser.add_argument("--results", type=Path, default=Path(f"data/results/{NAME}.csv"), help="the table")
    return study.guarded(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    """Measure what is there, show it, and then judge or say what is missing."""
    if options.blocks < 3:
        raise UsageError(f"--blocks {options.blocks}", "at least 3, which have thirds")
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    trained = Trained(options.runs, options.work, options.blocks)
    jobs = plan(trained)
    with Bar("Measuring", len(jobs), "models") as step:
        study.collect(options.results, COLUMNS, jobs, Measure(trained, options.weights), step)
    table = load(options.results, options.blocks)
    print(overview(table), more(table), sep="\n\n", end="\n\n")
    trained.require()
    shown = section(options.results.parent, options.results.name, options.blocks)
    print(shown.text(study.adjusted(shown.tests)))


def plan(trained: Trained) -> list[tuple[str, str, str, int, int, str]]:
    """What to measure, in the order of the table: what has to wait for training comes last."""
    public = [("public", arm, name, blocks, 0, END) for name, (arm, _, blocks) in PUBLIC.items()]
    starts = [
        ("init", arm, "lab", trained.blocks, seed, "start") for arm in PLACEMENTS for seed in range(INITIALISATIONS)
    ]
    return [*starts, *public, *(("trained", *job) for job in trained.jobs())]


# Measuring


@dataclass(frozen=True, eq=False)
class Measure:
    """The rows of one job: layer, unit and the columns after them."""

    trained: Trained
    weights: Path

    def __call__(
        self, source: str, arm: str, name: str, blocks: int, seed: int, at: str
    ) -> Iterator[tuple[int | float | str, ...]]:
        run = self.trained.run(arm, seed, at) if source == "trained" else None
        if run and run in self.trained.failed:
            return iter([(0, "failed", *[math.nan] * (len(COLUMNS) - len(KEYS) - 2))])
        if run:
            place = self.trained.place(arm, seed, at)
            parts = [(weight, checkpoint_rows(self.trained, run, point)) for weight, point in place.points]
            table = models.mixed(parts, ("layer", "unit"))
        elif source == "init":
            table = rows_of(*models.opened(models.fresh(arm, blocks, seed), TOKENS))
        else:
            table = rows_of(*models.opened(public(self.weights, name), PUBLIC_TOKENS))
        return table.itertuples(index=False, name=None)


def public(weights: Path, name: str) -> Path:
    """Where a public model is.

    Raises:
        OutputError: it is not there.
    """
    path = weights / PUBLIC[name][1]
    if not path.exists():
        raise OutputError(f"{path} is not there", f"the weights of {name}", "python scripts/fetch_weights.py")
    return path


@cache
def checkpoint_rows(trained: Trained, run: Run, point: Point) -> pd.DataFrame:
    """Those of one checkpoint of a trained model, which the end and equal loss often share."""
    table = rows_of(*models.opened(trained.model(run, point), TOKENS))
    step = run.steps if point.step is None else point.step
    table.loc[table["unit"] == "model", ["step", "val_loss"]] = step, point.loss
    return table


def rows_of(checkpoint: models.Checkpoint, corpus: Corpus, anatomy: Anatomy) -> pd.DataFrame:
    """Layer, unit and every metric of a model, as `analyze` has them, and the identity path of x_0."""
    settings, count = Settings(lens_positions=0), len(anatomy.stream)
    report = build_report(checkpoint, corpus, anatomy, measure(anatomy, corpus, settings), settings, {})
    found = report.layers[report.layers["metric"].isin(BY_LAYER)]
    wide = found.pivot(index=["layer", "unit"], columns="metric", values="value").reset_index()
    start = start_left(anatomy, corpus).assign(unit="block")
    power, end = report.growth["growth_power"], report.growth["decomposition"][-1]
    gained = end["stream"] - end["start"]  # of either sign: the report states a share only where the stream grows
    norms = sum(branch.norm is not None for block in anatomy.blocks for branch in block.branches)
    model = {
        "layer": 0, "unit": "model", "norms": float(norms), "growth_power": power["value"] if power else math.nan,
        "r2_power": math.nan if report.growth["r2_power"] is None else report.growth["r2_power"],
        "cross_share": end["cross"] / gained if gained else math.nan,
    }  # fmt: skip
    table = pd.concat([wide.merge(start, "left", ["layer", "unit"]), pd.DataFrame([model])], ignore_index=True)
    order = table["layer"] + (table["unit"] == "model") * count + table["unit"].map(UNITS.index) / len(UNITS)
    columns = [*COLUMNS[len(KEYS) :]]
    return table.iloc[np.argsort(order, kind="stable")].reindex(columns=columns).reset_index(drop=True)


def start_left(anatomy: Anatomy, corpus: Corpus) -> pd.DataFrame:
    """What is left of x_0 in every state: layer, and `OF_START`."""
    sums = np.zeros((len(anatomy.stream) + 1, 2))
    settings = DepthSettings()
    with torch.no_grad(), Walk(anatomy, "block") as walk:
        for _, inputs in batches(anatomy, corpus, settings):
            taken = walk.take(inputs)
            left = start = taken.entry.x.float()
            for layer, x in enumerate([*taken.reads, taken.last]):
                if layer:
                    left = taken.paths[layer - 1].carry(left)
                both, size = Dots(start, left), Dots(x, left)
                each = (ratio(both.su, both.ss), ratio(size.uu, size.ss).sqrt())
                sums[layer] += [mean_tokens(values, settings.skip_first).sum() for values in each]
    return pd.DataFrame(sums / corpus.sequences, columns=OF_START).rename_axis("layer").reset_index()


# From the table alone


def load(path: Path, blocks: int = BLOCKS) -> pd.DataFrame:
    """The table: our models of so many blocks, and the public ones."""
    table = study.read(path)
    table = table[(table["blocks"] == blocks) | (table["source"] == "public")]
    models.refuse_several(table[table["source"] != "public"], ("source", "arm", "seed", "at"), path)
    return table


def by_model(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each model, by seed."""
    return [one for _, one in rows[rows["unit"] != "failed"].groupby("seed")]


def reports(rows: pd.DataFrame) -> dict[int, Report]:
    """Each model's rows as a report, as far as criteria look at it, by seed."""
    return {int(one["seed"].iloc[0]): report_of(one) for one in by_model(rows)}


def report_of(rows: pd.DataFrame) -> Report:
    """Those of one model."""
    model = rows[rows["unit"] == "model"].iloc[0]
    layers = rows[rows["unit"] != "model"].melt(["layer", "unit"], BY_LAYER, "metric", "value").dropna()
    growth = {name: {"value": model[name], "ci_low": None, "ci_high": None} for name in ("growth_power", "cross_share")}
    growth = {name: value for name, value in growth.items() if not math.isnan(value["value"])}
    return Report(
        model={"blocks": int(model["blocks"])}, corpus={}, anatomy={}, verification=[],
        layers=layers.assign(ci_low=math.nan, ci_high=math.nan), pairs=pd.DataFrame(),
        growth=growth | {"r2_power": None if math.isnan(model["r2_power"]) else model["r2_power"]},
        sinks=[], skipped=[], resolution={}, cost={}, run={}, notes=[],
    )  # fmt: skip


def numbers(criterion: Criterion, found: dict[int, Report]) -> list[float] | str:
    """The number of a criterion by seed, or why some models do not have it."""
    values, lacks = [], []
    for report in found.values():
        value = criterion.measure(report)
        if isinstance(value, str):
            lacks.append((report.growth["r2_power"], value))
        else:
            values.append(value.value)
    if not lacks:
        return values
    fits = [r2 for r2, _ in lacks if criterion == criterion_of("R1", "power law") and r2 is not None]
    reason = f"R² {' and '.join(map(number, sorted(fits)))}, {FITS:g} needed" if fits else lacks[0][1]
    return f"{len(lacks)} of {len(found)} seeds: {reason}" if len(found) > 1 else reason


def criterion_of(claim: str, words: str) -> Criterion:
    """The criterion of a claim whose sentence has these words."""
    (found,) = (each for each in CRITERIA if each.claim == claim and words in each.sentence)
    return found


def primary(table: pd.DataFrame) -> list[study.Test]:
    """The tests of the preregistration."""
    return [*of_trained(table, END), weakened(table)]


def of_trained(table: pd.DataFrame, at: str) -> list[study.Test]:
    """R1, R2 and M1 of trained pre-LN."""
    pre = {"source": "trained", "arm": "pre", "at": at}
    why, rows = models.unjudged(table, pre, len(models.SEEDS)), study.arm(table, **pre)
    turn = over(criterion_of("R2", "1 − cos"), reports(rows), why, True, "1 − cos of neighbours, last third over first")
    error = over(criterion_of("M1", "is small:"), reports(rows), why, False, "interaction error in the last third")
    return [exponent(by_model(rows), why), turn, error]


def exponent(each: list[pd.DataFrame], why: str) -> study.Test:
    """R1: the power of growth. One that lies elsewhere is no less so where a power law fits badly."""
    criterion = criterion_of("R1", "power law")
    sentence, label = f"trained pre: {criterion.sentence}", "exponent of ‖x_l‖ over l"
    if why:
        return study.Unjudged("R1", sentence, why, label)
    values, fits = (tuple(of_model(name)(rows) for rows in each) for name in ("growth_power", "r2_power"))
    there = study.lies(over_seeds(values), criterion.low, criterion.high) != "outside"
    if there and not min(fits) >= FITS:
        reason = f"no power law fits the growth of every seed (least R² {min(fits):.2f})"
        return study.Unjudged("R1", sentence, reason, label)
    return study.Primary("R1", sentence, values, criterion.low, criterion.high, logs=False, label=label)


def over(criterion: Criterion, found: dict[int, Report], why: str, logs: bool, label: str) -> study.Test:
    """A criterion over training seeds, of a ratio by its logs; `why` they cannot be judged, if so."""
    sentence = f"trained pre: {criterion.sentence}"
    values = why or numbers(criterion, found)
    if isinstance(values, str):
        return study.Unjudged(criterion.claim, sentence, values, label)
    low, high = (-math.inf if end == 0 else end for end in (criterion.low, criterion.high))  # nothing is below 0
    if logs:
        values, high = [math.log(value) for value in values], math.log(high)
    return study.Primary(criterion.claim, sentence, tuple(values), low, high, logs, label=label)


def weakened(table: pd.DataFrame) -> study.Test:
    """D2: log₂ of the coefficient of x_0 in x_L over the number of norms, at initialisation."""
    arm = {"source": "init", "arm": "post", "at": "start"}
    sentence = "post at initialisation: log₂ of x_0's coefficient in x_L, norms frozen, per norm; predicted −½ ± 10 %, "
    sentence += "0 being no weakening"
    label = "log₂ of x_0's coefficient in x_L, per norm"
    if why := models.unjudged(table, arm, INITIALISATIONS):
        return study.Unjudged("D2", sentence, why, label)
    values = tuple(per_norm("start_coefficient")(one) for one in by_model(study.arm(table, **arm)))
    return study.Primary("D2", sentence, values, -0.55, -0.45, logs=False, label=label)


# Numbers of one model, from its rows


def column(rows: pd.DataFrame, metric: str, unit: str = "block") -> pd.Series:
    """A metric by layer."""
    return rows[rows["unit"] == unit].set_index("layer")[metric].dropna()


def per_norm(metric: str) -> Callable[[pd.DataFrame], float]:
    """log₂ at x_L over the number of norms; over that of branches where there are none on the skips."""

    def measure_one(rows: pd.DataFrame) -> float:
        norms = float(rows.loc[rows["unit"] == "model", "norms"].iloc[0])
        last = column(rows, metric)
        left = float(last.iloc[-1])  # gains of either sign may turn it round in training
        return math.log2(left) / (norms or 2 * (len(last) - 1)) if left > 0 else math.nan

    return measure_one


def power(metric: str) -> Callable[[pd.DataFrame], float]:
    """Slope of log(metric) over log(l + 1), without block 0, which alone would make it."""

    def measure_one(rows: pd.DataFrame) -> float:
        values = column(rows, metric).iloc[1:]
        if len(values) < 2:
            return math.nan
        return float(np.polyfit(np.log(values.index + 1), np.log(values), 1)[0])

    return measure_one


def third(metric: str, last: bool) -> Callable[[pd.DataFrame], float]:
    """The median over the first or the last third of the blocks."""

    def measure_one(rows: pd.DataFrame) -> float:
        values = column(rows, metric)
        place = (values.index + 0.5) / len(values) * 3
        return float(values[place > 2 if last else place < 1].median())

    return measure_one


def share(unit: str) -> Callable[[pd.DataFrame], float]:
    """Mean over blocks of the root of ‖u‖²/‖y‖²."""
    return lambda rows: float(np.sqrt(column(rows, "update_energy_share", unit)).mean())


def of_model(name: str) -> Callable[[pd.DataFrame], float]:
    return lambda rows: float(rows.loc[rows["unit"] == "model", name].iloc[0])


def fit(rows: pd.DataFrame) -> float:
    """R² of the power law of growth; none where nothing grows, and rounding alone would be fitted."""
    return of_model("r2_power")(rows) if abs(of_model("growth_power")(rows)) > 1e-6 else math.nan


MORE: dict[str, Callable[[pd.DataFrame], float]] = {
    "exponent of ‖x_l‖ over l, whether it fits or not": of_model("growth_power"),
    "R² of that, where anything grows": fit,
    "power of ‖Δ‖/‖x‖ over l + 1, from block 1 on (−½ or −1)": power("update_ratio_median"),
    "power of 1 − cos over l + 1, from block 1 on (−1)": power("block_influence"),
    "power of the interaction error over l + 1, from block 1 on (−½)": power("interaction_error"),
    "cos(Δ, x), first third": third("update_alignment", last=False),
    "cos(Δ, x), last third": third("update_alignment", last=True),
    "‖u‖/‖y‖ of attention": share("attention"),
    "‖u‖/‖y‖ of the MLP": share("mlp"),
    "log₂ of x_0's coefficient in x_L per norm (post: −½)": per_norm("start_coefficient"),
    "log₂ of x_0's share ‖c‖/‖x_L‖ per norm (post: −½)": per_norm("start_share"),
    "loss on dev, of the training log": of_model("val_loss"),
}


# Words


MATCHED_PRE = "trained pre, post-LN's setting"
GROUPS: dict[str, dict[str, str]] = {
    f"{source} {arm}{words}": {"source": source, "arm": arm, "at": at}
    for source, at, words in (("init", "start", ""), ("trained", END, ""), ("trained", LOSS, ", equal loss"))
    for arm in PLACEMENTS
} | {MATCHED_PRE: {"source": "trained", "arm": "pre", "at": MATCHED}}


def groups(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What is compared, of what is there."""
    public = {name: {"source": "public", "name": name} for name in PUBLIC}
    found = {name: study.arm(table, **wanted) for name, wanted in (GROUPS | public).items()}
    return {name: rows for name, rows in found.items() if by_model(rows)}


def named(name: str, rows: pd.DataFrame) -> str:
    """The head of a group's column, with how many seeds it rests on."""
    count = len(by_model(rows))
    return f"{name}, {count} seeds" if rows["source"].iloc[0] != "public" else name


def overview(table: pd.DataFrame) -> str:
    """Every criterion of the four claims in every group, in markdown."""
    there = {named(name, rows): (rows["arm"].iloc[0], reports(rows)) for name, rows in groups(table).items()}
    lines = [
        [f"{criterion.claim}: {criterion.sentence}", *(by_criterion(criterion, *each) for each in there.values())]
        for criterion in CRITERIA
        if criterion.claim in CLAIMS
    ]
    return study.markdown(["criterion", *there], lines)


def by_criterion(criterion: Criterion, arm: str, found: dict[int, Report]) -> str:
    """A group's cell; R1 has none in post-LN, where a norm leaves no growth to explain."""
    return "" if criterion.claim == "R1" and arm == "post" else cell(numbers(criterion, found), criterion)


def more(table: pd.DataFrame) -> str:
    """What is predicted or shown beside the criteria, in markdown."""
    there = groups(table)
    cells = {name: [cell([get(one) for one in by_model(rows)]) for rows in there.values()]
             for name, get in MORE.items()}  # fmt: skip
    heads = [named(name, rows) for name, rows in there.items()]
    return study.markdown(["", *heads], [[name, *each] for name, each in cells.items() if any(each)])


def cell(values: list[float] | str, criterion: Criterion | None = None) -> str:
    """A mean with its interval over seeds, the smallest effect, and where the interval lies; of one model its value."""
    if isinstance(values, str):
        return values
    if any(math.isnan(value) for value in values):
        return ""
    if len(values) == 1:
        return number(values[0])
    interval = over_seeds(values)
    where = f" {study.lies(interval, criterion.low, criterion.high)}" if criterion else ""
    return f"{study.span(interval)} ({study.least(values)}){where}"


def section(results: Path, name: str = f"{NAME}.csv", blocks: int = BLOCKS) -> study.Section:
    """The study's part of the findings, from its table alone."""
    table = load(results / name, blocks)
    models.refuse_partial(study.arm(table, source="trained"), results / name)

    def text(found: list[study.Verdict]) -> str:
        parts = [introduction(table), study.verdicts(found), FIGURES, secondary(table), overview(table)]
        return "\n\n".join([*parts, BESIDE, more(table)])

    figures = (
        study.Figure(NAME, partial(draw, table), 7.2, 3),
        study.Figure(f"{NAME}_public", partial(draw_public, table), 7.2, 3),
    )
    return study.Section(NAME, tuple(primary(table)), text, figures, MINDS, notes(table), CHANGED)


def notes(table: pd.DataFrame) -> dict[str, str]:
    """What the verdicts do not say."""
    mine = by_model(study.arm(table, source="trained", arm="pre", at=END))
    sizes = [column(rows, "residual_norm_median") for rows in mine]
    first = study.ratio([math.log(each.iloc[1] / each.iloc[0]) for each in sizes])
    rest = study.ratio([math.log(each.iloc[-1] / each.iloc[1]) for each in sizes])
    turns = [column(rows, "block_influence") for rows in mine]
    down = study.ratio([math.log(each.min() / each.iloc[0]) for each in turns])
    up = study.ratio([math.log(each.iloc[-1] / each.min()) for each in turns])
    fresh = by_model(study.arm(table, source="init", arm="post", at="start"))
    left = study.ratio([math.log(2) * per_norm("start_coefficient")(rows) for rows in fresh])
    told = {
        "R1": f"The exponent is over l ≥ 1: the median ‖x‖ grows × {first} over block 0 and × {rest} over all others "
        "(same seeds, geometric means).",
        "R2": f"1 − cos of the block that has the least is × {down} of the first block's, and the last block's × {up} "
        "of the least (same seeds, geometric means, as the test's).",
        "D2": f"What is left of x_0 at a norm is × {left}, a geometric mean; predicted was {number(2**-0.5)}, and 1 is "
        "no weakening.",
    }
    if not study.arm(table, source="trained", arm="pre", at=MATCHED).empty:
        for test in of_trained(table, MATCHED):
            word = {"inside": "as predicted", "outside": "not as predicted"}.get(where(test), "undecided")
            said = f"At post-LN's learning rate it is {study.effect(test)}, {word} (secondary, uncorrected)."
            told[test.claim] = f"{told.get(test.claim, '')} {said}".strip()
    return told


def where(test: study.Test) -> str:
    """Where the interval of a test lies, as `study.lies` says."""
    return study.lies(over_seeds(test.values), test.low, test.high) if isinstance(test, study.Primary) else ""


def introduction(table: pd.DataFrame) -> str:
    """What was measured on what."""
    drawn = study.arm(table, source="init")["seed"]
    return f"""### R1, R2, M1, D2: growth of the stream (`{NAME}.py`)

{BLOCKS} blocks, width 64, on {TOKENS:,} bytes of what `analyze` reads by default, position 0 left out. Initialisations
are drawn with seeds {drawn.min()} to {drawn.max()}; trained models are the confirmation runs of `pre_vs_post.py`, each
arm at the learning rate and warm-up that suit it best. Criteria are those of `depthprobe/criteria.py`, the seed being
the unit. Where the preregistration can be read in several ways: the tests of R1, R2 and M1 are at equal tokens, the end
of training; R1's exponent cannot support the claim where a power law explains less than 80 % of any seed's growth, but
it can contradict it (changed, see the preregistration); R2's "below" is by more than the margin, and its mean over
seeds the geometric one, as of all ratios in primary tests; D2's coefficient is ⟨c, x_0⟩/‖x_0‖², with c what the skips
and the norms after them, held at their statistics, leave of x_0 in x_L, the mean over tokens and sequences before the
logarithm."""


FIGURES = f"""![Median norm, turn and update ratio over depth, pre-LN and post-LN, at initialisation and trained, a thin
line a seed, thick their geometric mean](figures/{NAME}.png)
![The same of SmolLM2-135M and MiniLM, one line each, over relative depth](figures/{NAME}_public.png)"""


def secondary(table: pd.DataFrame) -> str:
    """What the numbers beside the tests are, and what they leave open."""
    text = """Secondary, with uncorrected intervals over seeds, which support nothing: mean over seeds [95 % interval]
(smallest effect). Means are arithmetic, of ratios too, so that R2's is not the number of its test. `inside`, `outside`
and `undecided` tell where the interval lies beside the criterion's region. Thirds of the blocks are by place: the
first, middle and last; "the largest third" is the one of the three with the largest median. R2 and M1 are not about
post-LN, which stands beside; R1 says nothing of it, since its norms leave no growth. The public models, SmolLM2 in its
instruction-tuned 4-bit weights, are one each, with no interval and so no smallest effect. At equal loss, each seed's
arms are compared at the higher of their two last losses, on the line between the checkpoints around it: the arm with
the higher one is at its end there, the other in the middle of its schedule."""
    if MATCHED_PRE in groups(table):
        return f"""{text}
Each arm has the learning rate and warm-up that suit it best, and the placement is not all
that differs, but for "{MATCHED_PRE}", which stands beside "trained post" for it: equal tokens, both at post-LN's,
which are not pre-LN's best; losses are not equal (the last row of the second table)."""
    return f"""{text}
Pre-LN and post-LN are compared at their own learning rates, everywhere: what differs is not the
placement alone. Pre-LN at post-LN's learning rate, which is trained for P1, was not measured here yet."""


BESIDE = f"""Beside the criteria, with what theory predicts in brackets; means are arithmetic. ‖u‖/‖y‖ is the root of
the mean square, averaged over blocks; where no norm stands on the skips, "per norm" is per branch. The loss is the one
that training logged, on {TrainSettings().eval_tokens:,} tokens of the dev half; P1's losses are of the test half. What
is 0 or 1 by algebra has no smallest effect to speak of."""
CHANGED = ("R1",)
LONGER = "longer training, or other widths and initialisations; only width 64 and two public models were tried"
MINDS = {
    "R1": LONGER, "R2": LONGER, "M1": LONGER,
    "D2": "an initialisation whose branches are as large as what they are added to, as the claim supposes",
}  # fmt: skip


# Figures


PANELS = (
    ("residual_norm_median", 0.0, r"median $\|x_l\|$"),
    ("block_influence", 0.5, r"1 − cos($x_l$, $x_{l+1}$)"),
    ("update_ratio_median", 0.5, r"median $\|\Delta_l\|/\|x_l\|$"),
)


def draw(table: pd.DataFrame, axes: list[Axes]) -> None:
    """Our models over depth: a line a seed, and the geometric mean."""
    for ax, (metric, shift, label) in zip(axes, PANELS, strict=True):
        for source, at, style in (("init", "start", "--"), ("trained", END, "-")):
            for arm, colour in zip(PLACEMENTS, LIGHT.lines, strict=False):
                ones = by_model(study.arm(table, source=source, arm=arm, at=at))
                if not ones:
                    continue
                wide = np.log(pd.concat([column(one, metric) for one in ones], axis=1))
                place = wide.index + shift
                ax.plot(place, np.exp(wide), style, color=colour, alpha=0.25, linewidth=0.7)
                words = f"{arm}, {'at initialisation' if source == 'init' else 'trained'}"
                ax.plot(place, np.exp(wide.mean(axis=1)), style, color=colour, linewidth=2, label=words)
        log_scale(ax, label)
    axes[0].legend(ncols=2)
    axes[-1].set_xlabel("l: a block is drawn between the states that it reads and writes")


def draw_public(table: pd.DataFrame, axes: list[Axes]) -> None:
    """The public models over relative depth."""
    for ax, (metric, shift, label) in zip(axes, PANELS, strict=True):
        for (name, (arm, _, blocks)), colour in zip(PUBLIC.items(), LIGHT.lines, strict=False):
            for one in by_model(study.arm(table, source="public", name=name)):
                values = column(one, metric)
                ax.plot((values.index + shift) / blocks, values, color=colour, linewidth=2, label=f"{name} ({arm})")
        log_scale(ax, label)
    axes[0].legend()
    axes[-1].set_xlabel("l / L")


def log_scale(ax: Axes, label: str) -> None:
    ax.set_ylabel(label)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(PlainLog())
    ax.yaxis.set_minor_formatter(PlainLog())


if __name__ == "__main__":
    sys.exit(main())
