"""Is an estimator of effective depth right where the answer is known? Expected beside measured, passed or failed.

    nice -n 10 python analyses/calibration.py                       # some ten minutes on one core
    python analyses/calibration.py --parts table,rewrite --names dependence,path_elasticity

- table: networks whose depth is known on paper (depthprobe/lab/known.py).
- rewrite: what keeps a network's function must keep its depth, on analytic networks and on data/checkpoints/pre.
- tasks: models of data/known-depth, whose needed number of blocks is known: the rank correlation of estimate and need.
- control: data/checkpoints against their randomly initialised twins and random tokens.
- beyond: chains that are written with skips, and a gain on the stream where no branch can be found.

The first three decide about the gate; the last two are shown.

Units are blocks. Writes a row a check to --results, and to --gate what it means for the first screen and for verdicts:
depthprobe/depth/gate.py reads it. Of an estimator that was not run, or a part, the rows of an earlier run stay.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import nn

from depthprobe.controls import TWINS, of_draws, random_init, random_tokens
from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings
from depthprobe.depth.gate import COLUMNS as GATE
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.lab import exact, rewrites
from depthprobe.lab.checks import (
    ESTIMATED,
    EXACT,
    PARTS,
    VARIANTS,
    Row,
    Values,
    checked,
    gate_rows,
    gate_table,
    measure,
    ordered,
    ranked,
    read_rows,
    said,
    write_table,
)
from depthprobe.lab.config import LabConfig
from depthprobe.lab.known import Known, known
from depthprobe.lab.known import beyond as known_beyond
from depthprobe.prepare import prepare

DATA = Path(__file__).resolve().parents[1] / "data"
GATE_CSV = DATA.parent / "depthprobe" / "depth" / "gate.csv"
MANY = DepthSettings(probes=64)
DEEP = "-deep"  # ends the name of a folder of a model with more blocks than its task needs
JUDGING = (("minimal", "together"), ("deep", "within"))
CHANCE = 0.05
NEAR_ZERO = VARIANTS["stages"][0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which (default: %(default)s)")
    parser.add_argument("--names", default=",".join(VARIANTS), help="which estimators (default: all)")
    parser.add_argument("--known-depth", type=Path, default=DATA / "known-depth", help="the models of known depth")
    parser.add_argument("--sequences", type=int, default=128, help="of each task's test (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=DATA / "results" / "calibration.csv", help="the table")
    parser.add_argument("--gate", type=Path, default=GATE_CSV, help="what follows from it")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        run(options)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace) -> None:
    parts, names = options.parts.split(","), options.names.split(",")
    for given, able, flag in ((parts, PARTS, "--parts"), (names, tuple(VARIANTS), "--names")):
        if odd := [word for word in given if word not in able]:
            raise UsageError(f"{flag} {odd[0]}", ", ".join(able))
    kept = [row for row in read_rows(options.results) if row.part not in parts or row.name not in names]
    made: list[Row] = []
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "table": lambda: table(names),
        "rewrite": lambda: chain(rewritten_nets(names), rewritten_model(names)),
        "tasks": lambda: tasks(names, options.known_depth, options.sequences),
        "control": lambda: controls(names),
        "beyond": lambda: beyond(names),
    }
    for part in parts:
        started = time.perf_counter()
        for row in makers[part]():
            made.append(row)
            print(sentence(row), flush=True)
        print(f"{part}: {time.perf_counter() - started:.0f} s\n", flush=True)
    rows = sorted([*kept, *made], key=lambda row: (PARTS.index(row.part), list(VARIANTS).index(row.name)))
    write_table(options.results, [field.name for field in fields(Row)], map(astuple, rows))
    gate = gate_rows(read_rows(options.results))  # from the numbers as they are rounded there
    write_table(options.gate, GATE, gate)
    for name, variant, *states, reason in gate:
        print(f"{f'{name} {variant}':<24} {' '.join(f'{state:<10}' for state in states)} {reason}")
    print(f"\n{gate_table(read_rows(options.results))}")
    print(f"\nWrote {options.results} and {options.gate}.")


def sentence(row: Row) -> str:
    state = {True: "passed", False: "FAILED", None: "      "}[row.passed]
    return f"{state} {row.network}: {row.name} {row.variant}{' ' * bool(row.variant)}{said(row)} {row.note}"


# --- checks ----------------------------------------------------------------------------------------------------------


def of_net(net: nn.Module, names: Sequence[str]) -> Values:
    """Of an analytic network, in double precision."""
    _, corpus, anatomy = prepare(net.double(), exact.inputs(), device="cpu")
    return measure(anatomy, corpus, names, MANY)


def table(names: Sequence[str], part: str = "table", cases: Sequence[Known] | None = None) -> Iterator[Row]:
    """Networks whose depth is known on paper."""
    for case in known() if cases is None else cases:
        wanted = [name for name in names if any(case.answer(name, variant) for variant in VARIANTS[name])]
        for (name, variant), row in of_net(case.net, wanted).items():
            answer = case.answer(name, variant)
            if answer is None:
                continue
            tolerance = ESTIMATED.get(name, EXACT)
            if name == "stages":
                # Between two counts D(κ) is on the line, up to one below the count that is needed: at κ → 0 by κ over
                # the cost of the first stage that is missed.
                tolerance = 1e-2 if variant == NEAR_ZERO else 1
            yield checked(part, case.network, row, answer.value, tolerance, answer.note, tolerance == 1)


def beyond(names: Sequence[str]) -> Iterator[Row]:
    """What the gate does not ask for."""
    yield from table(names, "beyond", known_beyond())
    for normed in (False, True):
        net = exact.wired(normed)
        what = f"5 hidden branches, {'through norms' if normed else 'without norms'}: the stream times 4 behind block 1"
        before, after = (of_net(exact.hidden(some), names) for some in (net, exact.gained(net, 1, 4.0)))
        yield from compared(what, before, after, "beyond")


# --- rewrites --------------------------------------------------------------------------------------------------------


def rewritten_nets(names: Sequence[str]) -> Iterator[Row]:
    """What keeps the function must keep the depth: of analytic networks."""
    for label, net, changes in nets():
        before = of_net(net, names)
        for what, changed in changes.items():
            same(net, changed, exact.inputs())
            yield from compared(f"{label}: {what}", before, of_net(changed, names))


def rewritten_model(names: Sequence[str]) -> Iterator[Row]:
    """The same of a trained model."""
    model, corpus, changes = trained()
    before = measure(prepare(model, corpus)[2], corpus, names, DepthSettings())
    for what, changed in changes.items():
        same(model, changed, corpus.inputs)
        after = measure(prepare(changed, corpus)[2], corpus, names, DepthSettings())
        yield from compared(f"data/checkpoints/pre: {what}", before, after)


def nets() -> Iterator[tuple[str, nn.Module, dict[str, nn.Module]]]:
    """Analytic networks of random wiring, and the same rewritten."""
    for normed in (False, True):
        net = exact.wired(normed)
        changes: dict[str, nn.Module] = {
            "the stream times 4 behind block 1": exact.gained(net, 1, 4.0),
            "a branch in two halves": exact.halved(net, 1),
            "2 zero blocks at the end": exact.lengthened(net, len(net.blocks), 2),
            "2 zero blocks in the middle": exact.lengthened(net, 2, 2),
        }
        if normed:
            changes["x_0 and all branches times 5"] = exact.in_another_unit(net, 5.0)
        yield f"5 branches at random, {'through norms' if normed else 'without norms'}", net, changes


def trained() -> tuple[nn.Module, Corpus, dict[str, nn.Module]]:
    """A trained pre-LN model, a corpus, and the model rewritten. To split a branch of it would change it: the second
    half would read what the first wrote."""
    checkpoint, corpus, _ = prepare(DATA / "checkpoints" / "pre", tokens=8 * 64, device="cpu")
    model = checkpoint.model
    half = len(model.model.blocks) // 2
    return model, corpus, {
        "the stream times 4 behind block 5": rewrites.with_gain(model, half - 1, 4.0),
        "2 zero blocks at the end": rewrites.with_zero_blocks(model, 2 * half, 2),
        "2 zero blocks in the middle": rewrites.with_zero_blocks(model, half, 2),
        "x_0 and all branches times 5": rewrites.in_another_unit(model, 5.0),
    }  # fmt: skip


def same(before: nn.Module, after: nn.Module, ids: torch.Tensor) -> None:
    """Refuse a rewrite that changes the function."""
    with torch.no_grad():
        a, b = (getattr(out, "logits", out) for out in (before(ids), after(ids)))
    error = float((a - b).norm() / a.norm())
    if error > 1e-5:
        raise UsageError(f"a rewrite changes the logits by {error:.0e}", "at most 1e-5")


def compared(network: str, before: Values, after: Values, part: str = "rewrite") -> Iterator[Row]:
    for key, old in before.items():
        tolerance = ESTIMATED.get(old.name, EXACT)
        if key[0] == "stages" and key[1] != NEAR_ZERO and np.isfinite(old.ci_low):
            # At κ > 0 a rewrite can offer the search what was not there, such as half of a branch to drop, and one half
            # of the sequences chooses for the other: the curve may move within its sampling error.
            tolerance = max(tolerance, (old.ci_high - old.ci_low) / 2)
        yield checked(part, network, after[key], old.value, tolerance)


# --- trained models --------------------------------------------------------------------------------------------------


def tasks(names: Sequence[str], folder: Path, sequences: int) -> Iterator[Row]:
    """Does the estimate rank models as the number of blocks that their tasks need does?"""
    single: list[Row] = []
    for place in sorted(folder.glob("*-*/p*")):
        smallest = place.with_name(place.name.removesuffix(DEEP))
        if not ((place / "config.json").exists() and (smallest / "config.json").exists()):
            continue
        ids = np.load(place.parent / "ids.npy")[:sequences].astype(np.int64)
        _, corpus, anatomy = prepare(place, ids, tokens=ids.size, device="cpu")
        needed = LabConfig.from_pretrained(smallest).num_hidden_layers
        network = f"{place.parent.name}/{place.name}"
        for d in measure(anatomy, corpus, names, DepthSettings()).values():
            note = f"{d.of} blocks, {needed} needed"
            values = (float(needed), d.value, d.ci_low, d.ci_high)
            single.append(Row("tasks", network, d.name, d.unit, d.variant, *values, None, None, note))
            yield single[-1]
    yield from ranks(single)


def ranks(single: Sequence[Row]) -> Iterator[Row]:
    """Rank correlations, from a row a model and estimator.

    Judged by two. The models with no block more than needed must be ranked by need; but there the number of blocks
    alone gives the right order, and with it whatever grows with that number. So of the models that all have the same,
    larger number of blocks, those of one task and placement must be in order too, more than by chance: (right − wrong)
    / all pairs of models that need differently, and how many of all orders are as good. Their correlation over all
    tasks is shown and judges nothing: how much a model makes use of blocks that its task does not need depends on the
    task and the placement, and is not known.
    """
    for kind in ("minimal", "deep"):
        models = [row for row in single if row.network.endswith(DEEP) is (kind == "deep")]
        for which in ("pre", "post", "together", "within"):
            for name, variant in dict.fromkeys((row.name, row.variant) for row in models):
                some = [row for row in models if (row.name, row.variant) == (name, variant)]
                some = [row for row in some if which in ("together", "within", row.network.split("/")[1].split("-")[0])]
                need, values = (np.array([getattr(row, key) for row in some]) for key in ("expected", "measured"))
                if np.ptp(need) == 0:
                    continue
                if which == "within":
                    lines = [re.sub(r"-\d+/", "/", row.network) for row in some]
                    value, pairs, chance = ordered(need, values, lines)
                    interval, fine = (value, np.nan, np.nan), chance <= CHANCE
                    note = f"{pairs} pairs of models; by chance as good in {chance:.3g} of all orders"
                else:
                    interval, pairs = ranked(need, values), len(some)
                    fine, note = interval[1] > 0, f"rank correlation over {len(some)} models"
                passed = bool(fine) if (kind, which) in JUDGING and pairs else None
                label = "within a task and placement" if which == "within" else which
                yield Row("tasks", f"{kind}, {label}", name, "block", variant, 1.0, *interval, None, passed, note)


def controls(names: Sequence[str]) -> Iterator[Row]:
    """Trained models on the text that they know, their random twins on it, and the models on random tokens."""
    for place in sorted(path.parent for path in (DATA / "checkpoints").glob("*/config.json")):
        checkpoint, corpus, anatomy = prepare(place, tokens=16 * 64, device="cpu")
        model = measure(anatomy, corpus, names, DepthSettings())
        draws = (random_init(anatomy, corpus, seed) for seed in range(TWINS))
        twin = of_draws([measure(draw, corpus, names, DepthSettings()) for draw in draws])
        other = measure(anatomy, random_tokens(checkpoint, corpus, 0), names, DepthSettings())
        for key, d in model.items():
            beside = {"random init": twin[key], "random tokens": other[key]}
            passed = all(d.ci_low > c.ci_high for c in beside.values())
            note = ", ".join(f"{n}: {c.value:.3f} ({c.ci_low:.3f} to {c.ci_high:.3f})" for n, c in beside.items())
            yield Row("control", place.name, d.name, d.unit, d.variant, None, d.value, d.ci_low, d.ci_high, None, passed, note)  # fmt: skip # noqa: E501


if __name__ == "__main__":
    sys.exit(main())
