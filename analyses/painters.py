"""Do a model's middle layers share one language? After "Transformer Layers as Painters" (Sun et al. 2024).

    python analyses/painters.py data/gpt2-manual
    python analyses/painters.py CKPT --middle 6-23 --step 3 --shuffles 5 --tokens 4096 --out reports/painters

A window of blocks in the middle of the model is changed, from two blocks to all between the first and the last fifth:
`skip` leaves it out; `repeat` runs its centre block as often as the window is long; `reverse` runs it backwards;
`shuffle` in random orders; `parallel` gives all its blocks the same input and takes the mean of what they write.

Writes OUT/painters.csv (the columns of ablations.csv, after variant, number of blocks changed and seed) and a figure of
each effect against how many blocks are changed. A run that was stopped goes on when the same command is given again.
"""

import argparse
import os
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
import seaborn.objects as so
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from depthprobe.ablation import Ablations, run_ablations
from depthprobe.ablations.run import SweepSettings
from depthprobe.ablations.schedule import Schedule, Unit, merge, reverse, shuffle, skip
from depthprobe.ablations.sweep import planned_evaluations
from depthprobe.ablations.table import COLUMNS
from depthprobe.errors import DepthprobeError, OutputError, UsageError
from depthprobe.estimate import Resampler
from depthprobe.prepare import prepare
from depthprobe.progress import Bar, say
from depthprobe.report.files import check_writable

VARIANTS = ("shuffle", "reverse", "parallel", "skip", "repeat")
PUBLISHED = (
    "Published, by benchmark scores of Llama2-7B and BERT-Large (Sun et al. 2024, sections 3.4, 3.5 and 3.8), least\n"
    "harmful first: shuffle, reverse, parallel, skip, repeat. Above are losses of this model, not those scores."
)
NAMES = {
    "delta_loss": "change of the loss (nats a token)",
    "kl": "KL from the unchanged model (nats)",
    "top1_agreement": "top-1 agreement",
    "state_distance": "1 − cos of the last state",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="hub id, directory, .gguf or .pt")
    parser.add_argument("--middle", help="first and last block that may be changed (default: first to last fifth)")
    parser.add_argument("--step", type=int, default=2, help="windows grow by so many blocks (default: %(default)s)")
    parser.add_argument("--shuffles", type=int, default=3, help="random orders a window (default: %(default)s)")
    parser.add_argument("--data", help="text or token ids; the English of Python's own manual where it is left out")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the corpus (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (default: 256 or what the model takes)")
    parser.add_argument("--score-positions", type=float, default=0.25, help="share of positions scored (%(default)s)")
    parser.add_argument("--batch-size", type=int, help="sequences at once (default: what fits in 2 GiB)")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, the positions and the shuffles")
    parser.add_argument("--out", type=Path, default=Path("reports/painters"))
    options = parser.parse_args(argv)
    try:
        run(options)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace) -> None:
    settings = SweepSettings(options.score_positions, options.seed, options.batch_size)
    settings.check()
    if options.step < 1 or options.shuffles < 1:
        raise UsageError(f"--step {options.step} --shuffles {options.shuffles}", "at least 1 of each")
    check_writable(options.out)
    say(f"Loading {options.checkpoint}")
    checkpoint, corpus, anatomy = prepare(
        options.checkpoint, options.data, tokens=options.tokens, seq_len=options.seq_len, seed=options.seed
    )
    blocks = len(anatomy.stream)
    first, last = middle(blocks, options.middle)
    changes = [
        change
        for window in windows(first, last, options.step)
        for change in painted(blocks, window, range(options.seed, options.seed + options.shuffles))
    ]
    labels = pd.DataFrame(
        [(variant, len(s.changed), seed) for variant, seed, s in changes], columns=["variant", "blocks_changed", "seed"]
    )
    schedules = [schedule for _, _, schedule in changes]
    shared, plain = planned_evaluations(schedules, blocks)
    say(f"Blocks {first}-{last} of {blocks}; {len(schedules)} schedules, {shared} block evaluations instead of {plain}")
    kept = options.out / ".chunks"
    with Bar(checkpoint.name, shared, "block evaluations") as progress:
        found = run_ablations(anatomy, corpus, schedules, settings, progress, kept)
    metrics = len(found.swept.effects)
    table = pd.concat([pd.concat([labels] * metrics, ignore_index=True), found.to_frame()], axis=1)
    write(table[[*labels.columns, *COLUMNS]], options.out / "painters.csv")
    resampler = Resampler(corpus.sequences, corpus.documents, options.seed)
    draw(means(labels, found, resampler), options.out / "painters.png")
    print(f"{checkpoint.name}, blocks {first}-{last} of {blocks}, {corpus.sequences} × {corpus.tokens} tokens")
    show(labels, found, resampler)
    print(f"\nWrote {options.out / 'painters.csv'} and painters.png.")
    shutil.rmtree(kept, ignore_errors=True)


def middle(blocks: int, text: str | None) -> tuple[int, int]:
    """First and last block of the middle."""
    if text is None:
        first, last = blocks // 5, blocks - 1 - blocks // 5
    elif match := re.fullmatch(r"(\d{1,5})-(\d{1,5})", text):
        first, last = int(match[1]), int(match[2])
    else:
        raise UsageError(f"--middle {text}", "first and last block, such as 6-23")
    if not 0 <= first < last < blocks:
        raise UsageError(f"--middle {first}-{last}", f"at least two blocks within 0-{blocks - 1}")
    return first, last


def windows(first: int, last: int, step: int) -> list[range]:
    """Windows around the centre of the middle, from the smallest of two or more blocks to the whole."""
    whole = last - first + 1
    sizes = sorted(range(whole, 1, -step))
    return [range(first + (whole - size) // 2, first + (whole - size) // 2 + size) for size in sizes]


def painted(blocks: int, window: range, seeds: Sequence[int]) -> list[tuple[str, int, Schedule]]:
    """Every variant of one window: name, seed (of shuffles, else 0) and schedule."""
    start, stop = window.start, window.stop
    before, after = [(Unit(i),) for i in range(start)], [(Unit(i),) for i in range(stop, blocks)]
    centre = [(Unit(window[len(window) // 2]),)] * len(window)
    made = [
        ("skip", 0, skip(blocks, window)),
        ("repeat", 0, Schedule((*before, *centre, *after), kind="repeat", changed=tuple(window))),
        ("reverse", 0, reverse(blocks, start, stop)),
        ("parallel", 0, merge(blocks, window, "mean")),
    ]
    return made + [("shuffle", seed, shuffle(blocks, start, stop, seed)) for seed in seeds]


def over_seeds(labels: pd.DataFrame, values: np.ndarray, variant: str, size: int) -> np.ndarray:
    """One variant of one window size, mean over seeds, `[sequences]` from `[sequences, schedules]`."""
    chosen = (labels["variant"] == variant) & (labels["blocks_changed"] == size)
    return values[:, np.flatnonzero(chosen)].mean(axis=1)


def means(labels: pd.DataFrame, found: Ablations, resampler: Resampler) -> pd.DataFrame:
    """What is drawn: metric, variant, blocks_changed, value and interval, shuffles averaged over their seeds."""
    rows = []
    for metric, values in found.swept.effects.items():
        for variant in VARIANTS:
            for size in sorted(set(labels["blocks_changed"])):
                column = over_seeds(labels, values, variant, size)
                value, low, high = (float(v[0]) for v in resampler.intervals(column[:, None]))
                rows.append((metric, variant, size, value, low, high))
    return pd.DataFrame(rows, columns=["metric", "variant", "blocks_changed", "value", "ci_low", "ci_high"])


def draw(rows: pd.DataFrame, path: Path) -> None:
    """A panel an effect, a line a variant."""
    panels = [name for name in NAMES if (rows["metric"] == name).any()]
    rows = rows.assign(panel=rows["metric"].map(NAMES))
    plot = (
        so.Plot(rows, x="blocks_changed", y="value", color="variant")
        .facet(col="panel", order=[NAMES[name] for name in panels], wrap=2)
        .share(y=False)
        .add(so.Line(marker="o", pointsize=4))
        .add(so.Band(alpha=0.15), ymin="ci_low", ymax="ci_high")
        .theme(sns.axes_style("whitegrid"))
        .label(x="blocks changed", y="", color="", col="")
    )
    # The legend stands right of the panels.
    height = 3.2 * ((len(panels) + 1) // 2) + 0.4
    figure = Figure(
        figsize=(4.2 * min(len(panels), 2) + 1.4, height), layout=ConstrainedLayoutEngine(rect=(0, 0, 0.97, 1))
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The copy keyword is deprecated")  # seaborn 0.13 with pandas 3
        plot.on(figure).plot()
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        figure.savefig(temporary, dpi=160, bbox_inches="tight")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}", fix="choose another --out") from None


def show(labels: pd.DataFrame, found: Ablations, resampler: Resampler) -> None:
    """The order of the variants, over all sizes and for the whole middle, and how sure it is."""
    effects = found.swept.effects
    metric = "delta_loss" if "delta_loss" in effects else "state_distance"
    sizes = sorted(set(labels["blocks_changed"]))
    for title, chosen in ((f"mean over {len(sizes)} windows of {sizes[0]} to {sizes[-1]} blocks", sizes),
                          (f"the whole middle, {sizes[-1]} blocks", sizes[-1:])):  # fmt: skip
        columns = np.stack(
            [np.mean([over_seeds(labels, effects[metric], v, size) for size in chosen], axis=0) for v in VARIANTS],
            axis=1,
        )
        values, low, high = resampler.intervals(columns)
        order = np.argsort(values)
        print(f"\n{NAMES[metric]}, {title}, least harmful first  [95 % over sequences]")
        for place in order:
            print(f"  {VARIANTS[place]:<9} {values[place]:+.3f}  [{low[place]:+.3f}, {high[place]:+.3f}]")
        for better, worse in pairwise(order):
            gap = resampler.function(columns[:, [better, worse]], lambda m: m[:, 1] - m[:, 0])
            if not gap.low > 0:
                print(
                    f"  {VARIANTS[better]} before {VARIANTS[worse]} is not certain: {gap.low:+.3f} to {gap.high:+.3f}"
                )
    orders = labels[labels["variant"] == "shuffle"]["seed"].nunique()
    print(f"\nShuffles are means over {orders} random orders.\n{PUBLISHED}")


def write(table: pd.DataFrame, path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        table.to_csv(temporary, index=False, lineterminator="\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}", fix="choose another --out") from None


if __name__ == "__main__":
    sys.exit(main())
