"""The public verb `effective_depth`: several estimates of how deep a model really is, beside their controls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from torch import nn

from depthprobe.checkpoint import Checkpoint
from depthprobe.controls import TWINS, Held, draws_of, run_controls
from depthprobe.corpus import Corpus
from depthprobe.depth.base import COLUMNS, SEQ_LEN, SPREAD, DepthSettings, resampler, shortened, units_of
from depthprobe.depth.finished import Finished
from depthprobe.depth.gate import CONTROLS, judge, static_gate
from depthprobe.depth.phases import phases
from depthprobe.depth.suite import ESTIMATORS, Ran, chosen, run_estimators, weight
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.estimate import Interval, plain_table
from depthprobe.offload import allowed, refuse_offloaded
from depthprobe.prepare import prepare
from depthprobe.report import Report
from depthprobe.report.words import FEW
from depthprobe.verify import Anatomy

__all__ = [
    "Effective",
    "Plan",
    "effective_cost",
    "effective_depth",
    "joined",
    "quick",
    "run_effective",
    "with_effective",
    "with_phases",
]

Progress = Callable[[int, int], None]
PARTS = 1000  # of a run, for the progress


@dataclass(frozen=True)
class Plan:
    """What to estimate, in what units, and beside which controls.

    Attributes:
        estimators: names of `depth.suite.ESTIMATORS`, None for all.
        unit: `block` or `sublayer`: what is counted.
        controls: of `random-init` (the same configuration with random weights) and `random-tokens`; without both, no
            estimate passes the gate.
        twins: how many draws of random weights an estimate must lie above, each.
    """

    estimators: tuple[str, ...] | None = None
    unit: str = "block"
    controls: tuple[str, ...] = CONTROLS
    twins: int = TWINS

    @property
    def draws(self) -> int:
        """How many further runs the controls take."""
        return sum(draws_of(control, self.twins) for control in self.controls)

    def check(self) -> None:
        """Refuse what makes no sense before anything is loaded.

        Raises:
            UsageError: an unknown estimator, unit or control.
        """
        chosen(self.estimators)
        if self.unit not in ("block", "sublayer"):
            raise UsageError(f"--unit {self.unit}", "block or sublayer")
        if odd := [name for name in self.controls if name not in CONTROLS]:
            raise UsageError(f"--control {odd[0]}", f"some of {', '.join(CONTROLS)}, or none")
        if self.twins < 1:
            raise UsageError(f"--twins {self.twins}", "at least 1, or leave random-init out of --control")


@dataclass(frozen=True, eq=False)
class Effective:
    """What was estimated.

    Attributes:
        table: the rows of depth.csv: name, unit, variant, value, ci_low, ci_high, of, passes_gate, note.
        details: what stands beside them in a report, see `Report.deep`.
        pairs: rows of pairs.csv, `update_dependence`; none where it was not measured.
    """

    table: pd.DataFrame
    details: dict[str, Any]
    pairs: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """A copy of the table."""
        return self.table.copy()

    def __repr__(self) -> str:
        passed = int(self.table["passes_gate"].sum())
        return f"Effective({len(self.table)} estimates, of which {passed} pass the gate)"

    def curve(self, name: str) -> pd.DataFrame:
        """A table beside the values, such as `stages/stages` or `dependence/profile`.

        Raises:
            KeyError: there is none of that name.
        """
        found = self.details["curves"][name]
        return pd.DataFrame(found["rows"], columns=found["columns"])


def effective_depth(
    model: str | Path | nn.Module | Checkpoint,
    data: Any = None,
    *,
    unit: Literal["block", "sublayer"] = "block",
    estimators: Sequence[str] | None = None,
    controls: Sequence[str] = CONTROLS,
    twins: int = TWINS,
    tokens: int = 2048,
    seq_len: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    skip_first: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    text_field: str = "text",
    progress: Progress | None = None,
    **loading: Any,
) -> Effective:
    """Estimate how many of a model's units are depth, in several ways, and which of them can be believed.

    An estimate passes the gate if its kind gave the known answers of networks and tasks (`analyses/calibration.py`),
    and if on this model it is above each of its randomly initialised twins and above itself on random tokens.

    Args:
        model, data: as in `analyze`.
        unit: what is counted, whole blocks or their attention and MLP.
        estimators: some of `depth.suite.ESTIMATORS`; all of them by default.
        controls: `random-init`, `random-tokens`, both or none.
        twins: how many draws of random weights.
        tokens: how many tokens to estimate on, in sequences that are spread over four times as much text; more where
            ids or states were given as long sequences, see `shortened`.
        seq_len: tokens of a sequence; of text 128 unless the model takes fewer.
        batch_size: sequences at once, None for what fits.
        seed: of every random draw, and of the first twin.
        skip_first: leading positions that averages over the stream's tokens leave out.
        bos, text_field: as in `analyze`.
        progress: called with (thousandths of a run done, in all).
        loading: further arguments of `load`.

    Raises:
        UsageError: a request that makes no sense, or units that were not found.
    """
    plan = Plan(None if estimators is None else tuple(estimators), unit, tuple(controls), twins)
    plan.check()
    settings = DepthSettings(seed=seed, skip_first=skip_first, batch_size=batch_size)
    settings.check()
    checkpoint, corpus, anatomy = prepare(
        model, data, tokens=SPREAD * tokens, seq_len=seq_len, seed=seed, bos=bos, text_field=text_field,
        usual_len=SEQ_LEN, **loading,
    )  # fmt: skip
    settings = replace(settings, memory=allowed(settings.memory, checkpoint.offload))
    return run_effective(anatomy, shortened(corpus, tokens, seq_len or SEQ_LEN), plan, settings, progress)


def run_effective(
    anatomy: Anatomy,
    corpus: Corpus,
    plan: Plan,
    settings: DepthSettings,
    progress: Progress | None = None,
    resume: Path | None = None,
) -> Effective:
    """Estimate the depth of a verified model, then of its controls; see `effective_depth`.

    The folder `resume` keeps finished estimates; a run that finds its own there goes on, and refuses those of others.
    """
    refuse_offloaded(anatomy.stream.checkpoint.offload, "effective depth was asked")
    started, names = time.perf_counter(), chosen(plan.estimators)
    counted = [name for name in names if ESTIMATORS[name].metrics]  # the others have no row to compare
    units = len(units_of(anatomy, plan.unit))
    more = PARTS * plan.draws * weight(counted, units) / weight(names, units)

    def step(share: float, before: float = 0.0, mine: float = PARTS) -> None:
        if progress is not None:
            progress(round(before + mine * share), round(PARTS + more))

    finished = None if resume is None else Finished.of(resume, anatomy, corpus, plan.unit, settings)
    ran = run_estimators(anatomy, corpus, names, plan.unit, settings, step, finished)
    rest = partial(step, before=PARTS, mine=more)
    beside = run_controls(anatomy, corpus, counted, plan.controls, plan.unit, settings, plan.twins, rest, finished)
    step(1.0, PARTS, more)
    return _effective(corpus, plan, settings, ran, beside, time.perf_counter() - started)


def joined(report: Report, found: Effective) -> Report:
    """The report with these estimates, instead of those that it had."""
    pairs = report.pairs[report.pairs["metric"] != "update_dependence"].reset_index(drop=True)
    if not found.pairs.empty:
        pairs = pd.concat([pairs, found.pairs], ignore_index=True)
    details = found.details
    if details["sha256"] != report.corpus["sha256"]:
        other = f"Effective depth was estimated on {_place(report, details['corpus'])}."
        details = {**details, "notes": [*details["notes"], other]}
    return replace(report, depth=found.table, deep=details, pairs=pairs)


def _place(report: Report, name: str) -> str:
    """Where something was measured that was not measured where the rest of the report was."""
    rest = report.corpus["name"]
    return f"{name if name != rest else 'another part of the text'}, all else on {rest}"


def with_effective(
    report: Report, anatomy: Anatomy, corpus: Corpus, settings: DepthSettings, progress: Progress | None = None
) -> Report:
    """What `analyze` does: the report with the estimates of `quick`, or with a note on why this model has none."""
    try:
        found = run_effective(anatomy, corpus, quick(len(anatomy.stream)), settings, progress)
        if (whole := report.corpus["tokens"]) > corpus.tokens:
            found.details["notes"].append(f"Depth was estimated on the first {corpus.tokens:,} of {whole:,} tokens.")
        return joined(report, found)
    except DepthprobeError as error:
        return replace(report, notes=[*report.notes, f"Effective depth was left out: {error}."])


def with_phases(
    report: Report, anatomy: Anatomy, corpus: Corpus, settings: DepthSettings, progress: Progress | None = None
) -> Report:
    """The report with phases of computation, or with a note on why this model has none; one more forward pass."""
    said = "Phases of computation were left out: "
    notes = [note for note in report.notes if not note.startswith(said)]  # of an earlier run into the same report
    try:
        found = phases(anatomy, corpus, settings, progress).plain()
        if corpus.sha256 != report.corpus["sha256"]:
            found["notes"] = [*found.get("notes", []), f"Looked for on {_place(report, corpus.name)}."]
        return replace(report, phases=found, notes=notes)
    except DepthprobeError as error:
        return replace(report, phases={}, notes=[*notes, f"{said}{error}."])


def quick(blocks: int) -> Plan:
    """What `analyze` estimates: what passed its calibration and what is published, if it costs little.

    Args:
        blocks: L; what takes more than 3 L forward passes, and more than 100, is left to `depthprobe depth`.
    """
    able = {name for (name, _), row in static_gate().items() if row.passed}
    names = [
        key
        for key, made in ESTIMATORS.items()
        if (able & set(made.metrics) or key in ("crossing", "lens")) and made.weight(blocks) <= max(3 * blocks, 100)
    ]
    return Plan(tuple(names))


def effective_cost(corpus: Corpus, plan: Plan, units: int) -> str:
    """What the estimates will cost, in a sentence."""
    names = chosen(plan.estimators)
    passes = weight(names, units) * (1 + plan.draws)
    beside = f", {' and '.join(plan.controls)} included" if plan.controls else ""
    return (
        f"Effective depth by {', '.join(names)}: about {passes:,.0f} forward passes over {corpus.sequences} × "
        f"{corpus.tokens} tokens{beside}."
    )


def _effective(
    corpus: Corpus,
    plan: Plan,
    settings: DepthSettings,
    ran: list[Ran],
    controls: dict[str, Held | str],
    seconds: float,
) -> Effective:
    """Put what ran into a table, with the gate's word on every row."""
    rows, gate, curves, notes, pairs = [], [], {}, [], pd.DataFrame()
    clusters = resampler(corpus, settings).clusters
    for one in ran:
        if one.estimate is None:
            notes.append(f"{one.name} was left out: {one.reason}.")
            continue
        for d in one.estimate.rows:
            held = {
                name: found if isinstance(found, str) else _interval(found.get((d.name, d.variant)))
                for name, found in controls.items()
            }
            verdict = judge(d.name, d.variant, Interval(d.value, d.ci_low, d.ci_high), held, d.clusters or clusters)
            gate.append({"name": d.name, "variant": d.variant, "passed": verdict.passed, "reason": verdict.reason})
            note = "; ".join(filter(None, (d.note, "" if verdict.passed else f"gate: {verdict.reason}")))
            rows.append((d.name, d.unit, d.variant, d.value, d.ci_low, d.ci_high, d.of, verdict.passed, note))
        for name, curve in one.estimate.curves.items():
            if name == "pairs":
                pairs = curve
            else:
                curves[f"{one.name}/{name}"] = plain_table(curve)
        notes += [note for note in one.estimate.notes if note not in notes]
    notes += [f"The control {name} could not be made: {why}." for name, why in controls.items() if isinstance(why, str)]
    if plan.unit == "sublayer":
        notes.append("The gate's calibration counted whole blocks, and no attention and MLP apart.")
    notes += _rest(clusters, corpus.sequences)
    details = {
        "unit": plan.unit,
        "estimators": [_described(one) for one in ran],
        "gate": gate,
        "controls": [
            {"control": name, **{key: getattr(d, key) for key in COLUMNS if hasattr(d, key) and key != "note"}}
            for name, found in controls.items()
            if not isinstance(found, str)
            for d in found.values()
        ],
        "curves": curves,
        "sequences": corpus.sequences, "clusters": clusters, "tokens": corpus.tokens, "corpus": corpus.name,
        "sha256": corpus.sha256, "skip_first": settings.skip_first, "seconds": seconds, "notes": notes,
    }  # fmt: skip
    return Effective(pd.DataFrame(rows, columns=list(COLUMNS)), details, pairs)


def _rest(count: int, sequences: int) -> list[str]:
    """On how few the intervals rest, if on few."""
    if count < 2:
        return ["There is one sequence, so that no estimate of effective depth has an interval."]
    what = f"{count} documents" if count < sequences else f"{count} sequences"
    return [f"The intervals rest on {what}; below {FEW} they tend to be too narrow."] if count < FEW else []


def _interval(found: Any) -> Interval | str:
    return "it has no such estimate" if found is None else Interval(found.value, found.ci_low, found.ci_high)


def _described(one: Ran) -> dict[str, Any]:
    """An estimator as it stands in the report."""
    made, estimate = ESTIMATORS[one.name], one.estimate
    metrics = [{"name": name, "does": does, "misses": misses} for name, (does, misses) in made.metrics.items()]
    return {
        "name": one.name,
        "metrics": metrics,
        "forward": None if estimate is None else estimate.cost_forward,
        "backward": None if estimate is None else estimate.cost_backward,
        "seconds": one.seconds,
        "reason": one.reason,
    }
