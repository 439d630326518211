"""What bfloat16 saves on this CPU, and what it changes: `analyze` in float32 and in bfloat16, in turns, in one process.

    OMP_WAIT_POLICY=PASSIVE python analyses/bench_dtype.py                 # medians of 5 rounds
    python analyses/bench_dtype.py data/checkpoints/pre --tokens 512 --repeats 1

Each part of `analyze` is timed by the clock and in CPU time, which other jobs on the machine disturb less; what counts
is bfloat16's time over float32's in one round. The weights are the same, but for their rounding; loading is not timed.
OUT is written after every round, so that a run that was stopped keeps what it has.
"""

import argparse
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from benchmark import machine
from study import guarded, markdown

from depthprobe import Checkpoint, Report, analyze, load
from depthprobe.ablation import default_sweep
from depthprobe.analysis import build_report
from depthprobe.corpus import Corpus
from depthprobe.depth.base import QUICK_LEN, DepthSettings, shortened
from depthprobe.effective import with_effective, with_phases
from depthprobe.errors import UsageError
from depthprobe.gradient import GradientSettings, with_gradients
from depthprobe.measure import Settings, measure
from depthprobe.placement import bfloat16_instructions
from depthprobe.prepare import prepare
from depthprobe.progress import say
from depthprobe.report.files import write_whole

CHECKPOINTS = (".weights/SmolLM2-135M-Instruct.Q4_1.gguf", "data/checkpoints/pre", "data/checkpoints/post")
DTYPES = ("float32", "bfloat16")
PARTS = ("probes", "gradients", "depth", "ablations")
PACKAGES = ("depthprobe", "torch", "transformers", "numpy")
KEYS = {
    "layers": ["layer", "unit"],
    "pairs": ["i", "j"],
    "ablations": ["schedule", "kind", "unit", "layers", "combine"],
    "depth": ["unit", "variant"],
}
USUAL = {name: each.default for name, each in inspect.signature(analyze).parameters.items()}
Times = dict[str, list[float]]  # part → seconds by the clock and of CPU time
Entry = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", default=list(CHECKPOINTS))
    parser.add_argument("--tokens", type=int, default=USUAL["tokens"], help="of the text (default: %(default)s)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="beside probes, always there")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("data/results/dtype.json"), help="(default: %(default)s)")
    return guarded(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    """Compare all checkpoints, print tables and write OUT."""
    if options.repeats < 1 or options.threads < 1:
        raise UsageError(f"--repeats {options.repeats} --threads {options.threads}", "at least 1 of each")
    torch.set_num_threads(options.threads)
    found: Entry = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "machine": machine(options.threads) | {"bfloat16": bfloat16_instructions()},
        "repeats": options.repeats,
        "tokens": options.tokens,
        "checkpoints": [],
    }
    for name in options.checkpoints:
        models = {dtype: load(name, device="cpu", dtype=dtype) for dtype in DTYPES}
        _, corpus, _ = prepare(models["float32"], tokens=options.tokens)
        entry: Entry = {"checkpoint": name, "corpus": [corpus.sequences, corpus.tokens], "rounds": []}
        found["checkpoints"].append(entry)
        for turn in range(options.repeats):
            reports, times = both(models, corpus, options.parts, turn)
            entry["rounds"].append(times)
            entry["ratios"] = ratios(entry["rounds"])
            if turn == 0:  # the numbers of all rounds are the same
                entry["floors"] = reports["bfloat16"].resolution
                entry["changes"] = changes(reports["float32"], reports["bfloat16"])
            text = json.dumps(found, indent=1, allow_nan=False) + "\n"
            write_whole({options.out.name: text.encode()}, options.out.parent)
        show(entry)


def both(
    models: dict[str, Checkpoint], corpus: Corpus, parts: Sequence[str], turn: int
) -> tuple[dict[str, Report], dict[str, Times]]:
    """A round, which begins with the other precision than the one before."""
    reports, times = {}, {}
    for dtype in DTYPES if turn % 2 == 0 else DTYPES[::-1]:
        reports[dtype], times[dtype] = analysed(models[dtype], corpus, parts)
        clock, cpu = (sum(each) for each in zip(*times[dtype].values(), strict=True))
        say(f"{models[dtype].name}, round {turn + 1}: {dtype} {clock:.1f} s, CPU {cpu:.1f} s")
    return reports, times


def analysed(model: Checkpoint, corpus: Corpus, parts: Sequence[str]) -> tuple[Report, Times]:
    """What `analyze` does, part by part, with the time of each."""
    times: Times = {}
    settings, deep = Settings(), DepthSettings()
    with timed(times, "verification"):
        _, _, anatomy = prepare(model, corpus)
    with timed(times, "probes"):
        report = build_report(model, corpus, anatomy, measure(anatomy, corpus, settings), settings, {})
    if "gradients" in parts:
        with timed(times, "gradients"):
            report = with_gradients(report, anatomy, corpus.spread(USUAL["gradient_tokens"]), GradientSettings())
    if "depth" in parts:
        with timed(times, "depth"):
            part = shortened(corpus, USUAL["depth_tokens"], QUICK_LEN)
            report = with_phases(with_effective(report, anatomy, part, deep), anatomy, corpus, deep)
    if "ablations" in parts:
        with timed(times, "ablations"):
            part = corpus.spread(USUAL["ablation_tokens"])
            swept = default_sweep(anatomy, part, settings.seed, report.layers, report.pairs)
            report = replace(report, ablations=swept.table, merging=swept.merging)
    return report, times


@contextmanager
def timed(times: Times, part: str) -> Iterator[None]:
    """Keep what a part takes."""
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    times[part] = [time.perf_counter() - clock, time.process_time() - cpu]


def ratios(rounds: Sequence[dict[str, Times]]) -> Entry:
    """bfloat16's time over float32's by part, and of all parts: median, least and largest of the rounds."""
    found: Entry = {}
    for part in (*rounds[0]["float32"], "whole"):
        found[part] = {}
        for kind, name in enumerate(("clock", "cpu")):
            seconds = [[_seconds(done[dtype], part, kind) for dtype in DTYPES] for done in rounds]
            each = [half / full for full, half in seconds]
            found[part][name] = {"ratio": statistics.median(each), "low": min(each), "high": max(each)}
            found[part][f"{name}_seconds"] = [statistics.median(side) for side in zip(*seconds, strict=True)]
    return found


def _seconds(times: Times, part: str, kind: int) -> float:
    return sum(each[kind] for each in times.values()) if part == "whole" else times[part][kind]


def changes(full: Report, half: Report) -> list[Entry]:
    """How far every metric is from its value in float32, over all layers, pairs or schedules that it has.

    `relative` is the largest |change| over |value|, `of_largest` that over the metric's largest |value|, which says
    more of what crosses 0; `inside` the share of values that are within float32's interval. `rows` counts what is
    compared, `below` what is not, for being no larger than what rounding alone gives, or 0.
    """
    found = []
    for table, keys in KEYS.items():
        name = "name" if table == "depth" else "metric"
        both = getattr(full, table).merge(getattr(half, table), on=[*keys, name], suffixes=("", "_half"))
        both = both.dropna(subset=["value", "value_half"])
        for metric, rows in both.groupby(name, sort=False):
            found.append({"table": table, "metric": metric} | _change(rows, half.resolution.get(str(metric), 0.0)))
    return found


def _change(rows: pd.DataFrame, floor: float) -> Entry:
    value, there = rows["value"].to_numpy(float), rows["value_half"].to_numpy(float)
    above = np.abs(value) > floor
    result: Entry = {"rows": int(above.sum()), "below": int((~above).sum())}
    if not above.any():
        return result | dict.fromkeys(("relative", "of_largest", "inside"))
    away = np.abs(there - value)[above]
    low, high = (rows[side].to_numpy(float)[above] for side in ("ci_low", "ci_high"))
    known, inside = ~np.isnan(low), (low <= there[above]) & (there[above] <= high)
    return result | {
        "relative": float((away / np.abs(value[above])).max()),
        "of_largest": float(away.max() / np.abs(value).max()),
        "inside": float(inside[known].mean()) if known.any() else None,
    }


def show(entry: Entry) -> None:
    """Print what a checkpoint came to."""
    print(f"\n{entry['checkpoint']}, {entry['corpus'][0]} × {entry['corpus'][1]} tokens: bfloat16 / float32\n")
    head = ["part", "by the clock", "CPU time", "float32, CPU s", "bfloat16, CPU s"]
    rows = [
        [part, *("{ratio:.2f} ({low:.2f} to {high:.2f})".format(**each[kind]) for kind in ("clock", "cpu"))]
        + [f"{seconds:.1f}" for seconds in each["cpu_seconds"]]
        for part, each in entry["ratios"].items()
    ]
    print(markdown(head, rows), "\n")
    head = ["metric", "change / value", "change / largest value", "within the interval", "rows", "below"]
    names = ("relative", "of_largest", "inside")
    table = [
        [f"{each['table']}: {each['metric']}", *(_short(each[name]) for name in names)]
        + [str(each[name]) for name in ("rows", "below")]
        for each in entry["changes"]
    ]
    print(markdown(head, table), flush=True)


def _short(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
