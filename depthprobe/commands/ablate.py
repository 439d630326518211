"""`depthprobe ablate`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthprobe.commands.existing import existing_report, folder_of
from depthprobe.commands.options import (
    BatchSize,
    Bos,
    Data,
    Debug,
    Device,
    DeviceMap,
    Dtype,
    Figures,
    InterruptedRunError,
    MaxMemory,
    OffloadFolder,
    Out,
    Revision,
    Seed,
    SeqLen,
    Spec,
    TextField,
    Threads,
    Tokenizer,
    Tokens,
    Trust,
    batch_number,
    check_figures,
    command_line,
    memory_bytes,
    preparation,
)

if TYPE_CHECKING:
    from depthprobe.ablation import Ablations
    from depthprobe.report import Report

_WHAT = "What is changed"


def ablate(
    checkpoint: Spec,
    kinds: Annotated[
        str,
        typer.Option(
            help="Comma-separated: skip, merge, swap, repeat, reverse, shuffle, attention-first, parallel.",
            rich_help_panel=_WHAT,
        ),
    ] = "skip,merge,swap",
    unit: Annotated[str, typer.Option(help="block, attention or mlp.", rich_help_panel=_WHAT)] = "block",
    span: Annotated[
        int, typer.Option(help="How many neighbours a merge or reversal takes.", rich_help_panel=_WHAT)
    ] = 2,
    combine: Annotated[
        str,
        typer.Option(
            help="What merged units make of their input: sum, mean, branch-sum (post-LN sublayers), weights.",
            rich_help_panel=_WHAT,
        ),
    ] = "sum",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="A schedule instead of kinds, such as '0-3 (4+5) 6-11'; may be given several times.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(
            help="Beside merges: skip one, skip both, swap, merge blocks that are no neighbours, add a random vector.",
            rich_help_panel=_WHAT,
        ),
    ] = True,
    score_positions: Annotated[float, typer.Option(help="Share of the positions that is scored.")] = 1.0,
    memory: Annotated[float, typer.Option(help="GiB that states and logits of one batch may take.")] = 2.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was killed.")] = False,
    out: Out = None,
    figures: Figures = "png",
    data: Data = None,
    tokens: Tokens = 4096,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    batch_size: BatchSize = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Change the order or the inputs of a model's blocks, and measure what it costs.

    Every change is a schedule: `0-3 (4+5) 6-11` runs blocks 4 and 5 on the same input, `0-3 5-11` skips block 4,
    `0-3 5 4 6-11` swaps two, `0-3 (4a+5a) (4m+5m) 6-11` runs both attentions and then both MLPs. What schedules share
    is run once. The results join the model's report, which is made first where there is none.

    Example: `depthprobe ablate gpt2 --kinds merge --span 3 --score-positions 0.25`

    Several processes divide the sequences: `torchrun --nproc-per-node 4 -m depthprobe ablate …`
    """
    given = preparation(locals())
    from depthprobe.processes import told
    from depthprobe.report.files import check_writable

    check_figures(figures)
    size = batch_number(batch_size)
    if out is not None:
        told(partial(check_writable, out))

    from depthprobe.ablation import default_schedules, place_of, run_ablations, sweep_cost
    from depthprobe.ablations.run import SweepSettings
    from depthprobe.ablations.schedule import parse
    from depthprobe.ablations.units import Units
    from depthprobe.prepare import prepare
    from depthprobe.progress import Bar, say
    from depthprobe.report.screen import show, show_schedules

    settings = SweepSettings(score_positions, seed, size, memory_bytes(memory))
    settings.check()
    wanted = [parse(text, combine) for text in schedule or []]  # type: ignore[arg-type]
    say(f"Loading {checkpoint}")
    model, corpus, anatomy = prepare(checkpoint, data, **given)
    chosen = wanted or default_schedules(
        len(anatomy.stream),
        tuple(kind.strip() for kind in kinds.split(",")),
        unit=unit,
        span=span,
        combine=combine,  # type: ignore[arg-type]
        controls=controls,
        post_ln=anatomy.post_ln,
        seed=seed,
    )
    for changed in chosen:  # before anything is measured
        Units(anatomy).check(changed)
    target = folder_of(model, out)
    told(lambda: check_writable(target))
    report = existing_report(model, corpus, anatomy, target, seed)
    beside = _joins(report, place_of(corpus, settings, anatomy.objective == "masked"))  # before the work, not after
    total, cost = sweep_cost(anatomy, corpus, chosen)
    say(f"Ablations: {cost}")
    kept = target / ".chunks"
    if not resume:
        _forget(kept)
    try:
        with Bar("Ablating", total, "block evaluations") as progress:
            found = run_ablations(anatomy, corpus, chosen, settings, progress, kept, report.layers, report.pairs)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted", fix="finished chunks are kept, --resume goes on") from None
    report = _joined(report, found, beside)
    path = told(lambda: report.save(target, figures))  # type: ignore[arg-type]
    _forget(kept)
    show(report, saved=path)
    if wanted:
        show_schedules(found.table)


def _forget(kept: Path) -> None:
    """Remove finished chunks: each process its own, which may be on another machine; none goes on before all have."""
    from depthprobe.processes import collected

    shutil.rmtree(kept, ignore_errors=True)
    collected(None)


def _joins(report: Report, place: dict[str, Any]) -> bool:
    """Whether ablations made there can stand beside the report's own; says so if they take their place."""
    from depthprobe.progress import say

    before = report.merging
    if not before:
        return False
    odd = [name for name, value in place.items() if name != "corpus" and before.get(name) != value]
    if odd:
        count = report.ablations[["schedule", "combine"]].drop_duplicates().shape[0]
        words = ", ".join(f"{_WORDS.get(name, name)} {before.get(name, 'not said')}, here {place[name]}" for name in odd
                          if name not in ("sha256", "ids")) or "another text"  # fmt: skip
        say(f"The report's ablations ({count} schedules) are of other tokens or positions ({words}): these replace "
            "them. --out elsewhere keeps them.")  # fmt: skip
    return not odd


def _joined(report: Report, found: Ablations, beside: bool) -> Report:
    """The report with these ablations beside its own, or instead of them."""
    import pandas as pd

    table, merging, before = found.table, found.merging, report.merging
    if merging["corpus"] != report.corpus["name"]:
        other = f"The changed models ran on {merging['corpus']}, the unmodified one on {report.corpus['name']}."
        merging = {**merging, "proxies": [], "notes": [*merging["notes"], other]}
    if beside:
        key = ["kind", "schedule", "combine", "metric"]
        again = report.ablations.set_index(key).index.isin(table.set_index(key).index)
        table = pd.concat([report.ablations[~again], table], ignore_index=True)
        spent = {name: before[name] + merging[name] for name in ("evaluations", "plain_evaluations", "seconds")}
        if before.get("fetched") or merging.get("fetched"):
            parts = [part.get("fetched") or {} for part in (before, merging)]
            spent["fetched"] = {name: sum(part.get(name, 0) for part in parts) for name in {**parts[0], **parts[1]}}
        merging = {name: before[name] for name in ("later",) if name in before} | {
            **merging,
            **spent,
            "rho": merging["rho"] or before["rho"],
            "proxies": merging["proxies"] or before["proxies"],
        }
    run = {**report.run, "ablation_command": command_line()}
    return replace(report, ablations=table, merging=merging, run=run)


_WORDS = {"score_positions": "share of positions", "tokens": "tokens a sequence"}
