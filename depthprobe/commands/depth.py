"""`depthprobe depth`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import Annotated

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
    SkipFirst,
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


def depth(
    checkpoint: Spec,
    unit: Annotated[str, typer.Option(help="What is counted: block, or sublayer (attention and MLP apart).")] = "block",
    estimators: Annotated[
        str,
        typer.Option(
            help="all, or some of: stages, dependence, crossing, lens, score, participation, effects, elasticity, raw, "
            "spectrum."
        ),
    ] = "all",
    control: Annotated[
        str,
        typer.Option(
            help="What to run the same way beside it: random-init (the configuration with random weights), "
            "random-tokens, or none. Without both, no estimate passes the gate."
        ),
    ] = "random-init,random-tokens",
    phases: Annotated[
        bool,
        typer.Option(help="Look for phases: clusters of layers, and what a straight line reads from their states."),
    ] = True,
    twins: Annotated[int, typer.Option(help="Draws of random weights, each of which an estimate must lie above.")] = 3,
    probes: Annotated[int, typer.Option(help="Random vectors from which path_elasticity takes each trace.")] = 2,
    memory: Annotated[float, typer.Option(help="GiB that the states and logits of one batch may take.")] = 2.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    out: Out = None,
    figures: Figures = "png",
    data: Data = None,
    tokens: Tokens = 2048,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    skip_first: SkipFirst = 1,
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
    """Estimate how many of a model's blocks are depth, in several ways, beside controls.

    No single number is right: they count different things, and most fail where the answer is known. An estimate passes
    the gate if it was right wherever the answer is known (data/results/calibration.csv), and if here it lies above the
    same model with random weights and on random tokens. The rest is shown as diagnostics, with the reason. All of them
    may take thousands of forward passes, most of them for stages: name some to wait less. The rows join the model's
    report as depth.csv. Sequences have 128 tokens unless --seq-len says otherwise: the intervals are over sequences, so
    more and shorter ones tell more. They are spread over four times as much text.

    Example: `depthprobe depth gpt2 --estimators dependence,elasticity`

    Several processes divide the sequences: `torchrun --nproc-per-node 4 -m depthprobe depth …`
    """
    given = preparation(locals())
    from depthprobe.processes import told
    from depthprobe.report.files import check_writable

    check_figures(figures)
    size = batch_number(batch_size)
    if out is not None:
        told(partial(check_writable, out))

    from depthprobe.depth.base import SEQ_LEN, SPREAD, DepthSettings, shortened, units_of
    from depthprobe.effective import (
        PARTS,
        Plan,
        effective_cost,
        joined,
        run_effective,
        with_phases,
    )
    from depthprobe.offload import allowed, refuse_offloaded
    from depthprobe.prepare import prepare
    from depthprobe.progress import Bar, say
    from depthprobe.report.screen import show, show_depth

    named = None if estimators == "all" else tuple(filter(None, estimators.split(",")))
    plan = Plan(named, unit, tuple(name for name in control.split(",") if name not in ("", "none")), twins)
    plan.check()
    settings = DepthSettings(seed, skip_first, size, memory_bytes(memory), probes)
    settings.check()
    say(f"Loading {checkpoint}")
    more = given | {"tokens": SPREAD * tokens, "usual_len": SEQ_LEN}
    model, corpus, anatomy = prepare(checkpoint, data, **more)
    refuse_offloaded(model.offload, "effective depth was asked")
    units = len(units_of(anatomy, unit))  # before anything is measured
    part = shortened(corpus, tokens, seq_len or SEQ_LEN)
    settings = replace(settings, memory=allowed(settings.memory, model.offload))
    settings.check(part)
    target = folder_of(model, out)
    told(lambda: check_writable(target))
    report = existing_report(model, corpus, anatomy, target, seed, skip_first)
    say(effective_cost(part, plan, units))
    kept = target / ".estimates"
    if not resume:
        told(lambda: shutil.rmtree(kept, ignore_errors=True))
    try:
        with Bar("Estimating", PARTS, "parts") as progress:
            found = run_effective(anatomy, part, plan, settings, progress, kept)
        report = joined(report, found)
        if phases:
            with Bar("Reading", corpus.sequences) as progress:
                report = with_phases(report, anatomy, corpus, settings, progress)
        report = replace(report, run={**report.run, "depth_command": command_line()})
        path = told(partial(report.save, target, figures))  # type: ignore[arg-type]
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted", fix="finished estimates are kept, --resume goes on") from None
    told(lambda: shutil.rmtree(kept, ignore_errors=True))
    show_depth(report)
    show(report, saved=path)
