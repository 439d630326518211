"""What does it cost to merge neighbouring layers, by depth, span and way of merging? Several checkpoints side by side.

    python analyses/layer_merge.py data/gpt2-manual
    python analyses/layer_merge.py CKPT CKPT --spans 2,3,4 --combine sum,mean --tokens 4096 --out reports/layer_merge

Ways of merging l … l + span − 1 on one input x: `sum` x + Σ F_i(x); `mean` of the blocks' outputs; `weights`, one block
with the mean of their weights (known to be poor); `attention-first`, all attentions on x and then all MLPs on the next
state; `branch-sum`, the same with one norm a stage, for post-LN models. Beside the merges of two run the controls: skip
one, skip both, swap, merge blocks that are no neighbours, add a random vector of the dropped interaction's norm.

Writes OUT/layer_merge.csv (the columns of ablations.csv, after the checkpoint) and two figures for each cost. A run
that was stopped goes on where it was when the same command is given again.
"""

import argparse
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import seaborn.objects as so
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from depthprobe.ablation import Ablations, run_ablations
from depthprobe.ablations.kinds import controls
from depthprobe.ablations.run import SweepSettings
from depthprobe.ablations.schedule import Schedule, attention_first, merge
from depthprobe.ablations.sweep import planned_evaluations
from depthprobe.ablations.table import COLUMNS
from depthprobe.ablations.units import Units
from depthprobe.errors import DepthprobeError, OutputError, UsageError
from depthprobe.estimate import Resampler
from depthprobe.prepare import prepare
from depthprobe.progress import Bar, say
from depthprobe.report.files import check_writable
from depthprobe.verify import Anatomy

MODES = ("sum", "mean", "weights", "attention-first", "branch-sum")
NAMES = {"kl": "KL from the unchanged model (nats)", "state_distance": "1 − cos of the last state"}
FLOOR = 1e-6  # costs that a logarithmic axis does not tell apart: rounding makes more


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="hub id, directory, .gguf or .pt")
    parser.add_argument("--spans", default="2,3,4", help="how many neighbours a merge joins (default: %(default)s)")
    parser.add_argument(
        "--combine",
        default=",".join(MODES),
        help="ways of merging; those that a model's placement of norms excludes are left out (default: %(default)s)",
    )
    parser.add_argument("--data", help="text or token ids; the English of Python's own manual where it is left out")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the corpus (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (default: 256 or what the model takes)")
    parser.add_argument("--score-positions", type=float, default=0.25, help="share of positions scored (%(default)s)")
    parser.add_argument("--batch-size", type=int, help="sequences at once (default: what fits in 2 GiB)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/layer_merge"))
    options = parser.parse_args(argv)
    try:
        run(options)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace) -> None:
    spans, modes = numbers(options.spans), [word.strip() for word in options.combine.split(",")]
    if odd := [mode for mode in modes if mode not in MODES]:
        raise UsageError(f"--combine {odd[0]}", ", ".join(MODES))
    if len(set(options.checkpoints)) < len(options.checkpoints):
        raise UsageError("a checkpoint was given twice", "different ones")
    settings = SweepSettings(options.score_positions, options.seed, options.batch_size)
    settings.check()
    check_writable(options.out)
    kept = options.out / ".chunks"
    frames: list[pd.DataFrame] = []
    costs: list[dict[str, Any]] = []
    rhos: list[dict[str, Any]] = []
    for place, spec in enumerate(options.checkpoints):
        say(f"Loading {spec}")
        checkpoint, corpus, anatomy = prepare(
            spec, options.data, tokens=options.tokens, seq_len=options.seq_len, seed=options.seed
        )
        twin = sum(Path(other).name == Path(spec).name for other in options.checkpoints) > 1
        name = spec if twin else checkpoint.name
        schedules = list(chosen(anatomy, spans, modes))
        shared, plain = planned_evaluations(schedules, len(anatomy.stream))
        say(f"{name}: {len(schedules)} schedules, {shared} block evaluations a batch instead of {plain}")
        home = kept / f"{place}-{re.sub('[^A-Za-z0-9._-]', '_', spec)[-80:]}"
        with Bar(name, shared, "block evaluations") as progress:
            found = run_ablations(anatomy, corpus, schedules, settings, progress, home)
        resampler = Resampler(corpus.sequences, corpus.documents, options.seed)
        frame = found.to_frame()
        frame.insert(0, "checkpoint", name)
        frame["blocks"] = len(anatomy.stream)
        frames.append(frame)
        costs += medians(name, found, resampler)
        rhos += rho(name, found)
    table = pd.concat(frames, ignore_index=True)
    write(table[["checkpoint", *COLUMNS]], options.out / "layer_merge.csv")
    for metric in [metric for metric in NAMES if (table["metric"] == metric).any()]:
        rows = prepared(table, metric)
        draw_modes(rows, metric, options.out / f"merge_{metric}.png")
        draw_controls(rows, metric, options.out / f"controls_{metric}.png")
    show(costs, rhos)
    print(f"\nWrote {options.out / 'layer_merge.csv'} and its figures merge_*.png and controls_*.png.")
    shutil.rmtree(kept, ignore_errors=True)


def chosen(anatomy: Anatomy, spans: list[int], modes: list[str]) -> list[Schedule]:
    """Every merge of every span and mode that the model can run, and the controls; each once."""
    blocks, units = len(anatomy.stream), Units(anatomy)
    made: dict[tuple[object, str], Schedule] = {}
    for span in spans:
        for mode in modes:
            if span > blocks:
                say(f"Left out: merges of {span}, the model has {blocks} blocks.")
                break
            candidates = [merged(blocks, range(i, i + span), mode) for i in range(blocks - span + 1)]
            try:
                for schedule in candidates:
                    units.check(schedule)
            except UsageError as error:
                say(f"Left out: {mode} of {span}: {error}")
                continue
            made |= {(s.stages, s.combine): s for s in candidates}
    for schedule in controls(blocks) if blocks > 1 else []:
        made.setdefault((schedule.stages, schedule.combine), schedule)
    return list(made.values())


def merged(blocks: int, layers: range, mode: str) -> Schedule:
    """The merge of some neighbours in one of `MODES`."""
    if mode == "attention-first":
        return attention_first(blocks, layers)
    if mode == "branch-sum":
        return attention_first(blocks, layers, "branch-sum")
    return merge(blocks, layers, mode)  # type: ignore[arg-type]


def mode_of(kind: str, unit: str, combine: str) -> str:
    """The name in `MODES` of a row of the table; empty for what is no merge of neighbours."""
    if kind != "merge":
        return ""
    return {"sum": "attention-first"}.get(combine, combine) if unit == "sublayer" else combine


def prepared(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of one metric, with what the figures are drawn by: mode or control, span, relative depth of the first
    changed block."""
    rows = table[table["metric"] == metric].copy()
    layers = rows["layers"].str.split(",")
    rows["span"] = layers.str.len()
    rows["first"] = layers.str[0].astype(int)
    rows["depth"] = rows["first"] / (rows["blocks"] - 1).clip(lower=1)
    keys = zip(rows["kind"], rows["unit"], rows["combine"], strict=True)
    rows["mode"] = [mode_of(*key) for key in keys]
    rows["control"] = [control_of(kind, span, words) for kind, span, words in
                       zip(rows["kind"], rows["span"], rows["schedule"], strict=True)]  # fmt: skip
    bounds = ["value", "ci_low", "ci_high"]
    rows[bounds] = rows[bounds].clip(lower=FLOOR)
    return rows


def control_of(kind: str, span: int, words: str) -> str:
    """What a figure calls a control; empty for a merge."""
    if kind == "control":
        return "random vector" if words.startswith("random") else "merge l, l + 2"
    return {("skip", 1): "skip l", ("skip", 2): "skip both", ("swap", 2): "swap"}.get((kind, span), "")


def draw_modes(rows: pd.DataFrame, metric: str, path: Path) -> None:
    """Cost against relative depth: a panel a span, a line a mode and checkpoint."""
    rows = rows[rows["mode"] != ""].assign(panel=lambda r: "merges of " + r["span"].astype(str)).sort_values("span")
    panels = list(dict.fromkeys(rows["panel"]))
    figure = plot(rows, "mode", metric, several=rows["checkpoint"].nunique() > 1).facet(col="panel", order=panels)
    save(figure, path, len(panels))


def draw_controls(rows: pd.DataFrame, metric: str, path: Path) -> None:
    """Merges of two, sum, against their controls: a panel a checkpoint."""
    two = (rows["mode"] == "sum") & (rows["span"] == 2)
    rows = rows.assign(change=rows["control"].mask(two, "merge l, l + 1")).query("change != ''")
    if rows.empty:
        return
    panels = list(dict.fromkeys(rows["checkpoint"]))
    figure = plot(rows, "change", metric, several=False).facet(col="checkpoint", order=panels)
    save(figure, path, len(panels))


def plot(rows: pd.DataFrame, by: str, metric: str, several: bool) -> so.Plot:
    """Lines with their intervals; where there are several checkpoints, each has its own dashes."""
    dashes = {"linestyle": "checkpoint", "group": "checkpoint"} if several else {}  # bands know no dashes
    return (
        so.Plot(rows, x="depth", y="value", color=by, **dashes)
        .add(so.Line(marker="o", pointsize=3))
        .add(so.Band(alpha=0.12), ymin="ci_low", ymax="ci_high")
        .theme(sns.axes_style("whitegrid"))
        .label(x="relative depth of the first block", y=NAMES[metric], color=by, linestyle="checkpoint", col="")
    )


def save(plot: so.Plot, path: Path, panels: int) -> None:
    # The legend stands right of the panels.
    figure = Figure(figsize=(3.4 * panels + 1.8, 3.8), layout=ConstrainedLayoutEngine(rect=(0, 0, 0.97, 1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The copy keyword is deprecated")  # seaborn 0.13 with pandas 3
        plot.on(figure).plot()
    for axes in figure.axes:
        axes.set_yscale("log")  # here, since seaborn 0.13 draws bands in the wrong place where it scales by itself
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        figure.savefig(temporary, dpi=160, bbox_inches="tight")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}", fix="choose another --out") from None


def write(table: pd.DataFrame, path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        table.to_csv(temporary, index=False, lineterminator="\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}", fix="choose another --out") from None


def medians(name: str, found: Ablations, resampler: Resampler) -> list[dict[str, Any]]:
    """The median over places of each mode and span, its interval over sequences."""
    swept = found.swept
    metric = "kl" if "kl" in swept.effects else "state_distance"
    groups: dict[tuple[str, int], list[int]] = {}
    for column, s in enumerate(swept.schedules):
        if mode := mode_of(s.kind, s.unit, s.combine if s.merges else ""):
            groups.setdefault((mode, len(s.changed)), []).append(column)
    rows = []
    for (mode, span), columns in groups.items():
        interval = resampler.function(swept.effects[metric][:, columns], lambda m: np.median(m, axis=1))
        text = f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
        rows.append({"checkpoint": name, "cost": metric, "mode": mode, "span": span, "median": text})
    return rows


def rho(name: str, found: Ablations) -> list[dict[str, Any]]:
    """ρ = cost(merge l, l + 1) / cost(skip l): its median over layers, and the slope of log ρ over relative depth."""
    known = found.merging["rho"]
    if known is None:
        return []
    row: dict[str, Any] = {"checkpoint": name, "cost": known["cost"]}
    for part, title in (("median", "median ρ"), ("slope", "slope of log ρ")):
        row[title] = "{value:.3f} [{ci_low:.3f}, {ci_high:.3f}]".format(**known[part])
    return [row]


def show(costs: list[dict[str, Any]], rhos: list[dict[str, Any]]) -> None:
    table = pd.DataFrame(costs).pivot(index=["checkpoint", "cost", "mode"], columns="span", values="median")
    print("Median cost over places, by how many blocks are merged  [95 % over sequences]\n")
    print(table.fillna("").to_string())
    if rhos:
        print(
            "\nρ = cost(merge l, l + 1) / cost(skip l); below 1: hiding block l from its next reader alone costs less\n"
        )
        print(pd.DataFrame(rhos).to_string(index=False))


def numbers(text: str) -> list[int]:
    try:
        spans = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise UsageError(f"--spans {text}", "numbers of blocks, such as 2,3,4") from None
    if spans[0] < 2:
        raise UsageError(f"--spans {text}", "at least two blocks a merge")
    return spans


if __name__ == "__main__":
    sys.exit(main())
