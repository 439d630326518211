"""`depthprobe gradients`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from depthprobe.commands.existing import existing_report, folder_of
from depthprobe.commands.options import (
    Bos,
    Data,
    Debug,
    Device,
    DeviceMap,
    Dtype,
    Figures,
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
    check_figures,
    command_line,
    memory_bytes,
    preparation,
)
from depthprobe.errors import UsageError


def gradients(
    checkpoint: Spec,
    cotangent: Annotated[
        str,
        typer.Option(
            help="What is carried back: the loss's gradient, a random unit vector at every token of the last state, "
            "or both."
        ),
    ] = "both",
    weights: Annotated[bool, typer.Option(help="The loss's gradients by every weight too.")] = True,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure a random initialisation of the checkpoint's configuration instead."),
    ] = False,
    seeds: Annotated[
        int, typer.Option(help="With --fresh: how many initialisations; from two on, intervals are over them.")
    ] = 1,
    memory: Annotated[
        float,
        typer.Option(
            help="GiB that the graph of one sequence may take, and again that sums of weights' gradients may. Beyond "
            "it blocks are run a second time, and the sums are made for fewer groups or left out."
        ),
    ] = 2.0,
    out: Out = None,
    figures: Figures = "png",
    data: Data = None,
    tokens: Tokens = 4096,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    skip_first: SkipFirst = 1,
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
    """Measure how the gradient changes on its way down, and how large it is at every weight.

    The loss is each sequence's mean over its predicted positions; sequences run one at a time, so that no batch size
    changes a number. A random gradient shows what the blocks alone do, whatever the head and the targets. The rows join
    layers.csv of the model's report, which is made first where there is none; a fresh model has a report of its own.

    Example: `depthprobe gradients gpt2 --fresh --seeds 10`
    """
    given = preparation(locals())
    from depthprobe.report.files import check_writable

    check_figures(figures)
    if out is not None:
        check_writable(out)
    if seeds < 1 or (seeds > 1 and not fresh):
        raise UsageError(f"--seeds {seeds}", "1 or more, with --fresh")

    from depthprobe.fresh import fresh_twin
    from depthprobe.gradient import GradientSettings, gradients_cost, joined, run_gradients
    from depthprobe.offload import refuse_offloaded
    from depthprobe.prepare import prepare
    from depthprobe.progress import Bar, say
    from depthprobe.report.screen import show

    number = seeds if fresh else 0
    settings = GradientSettings(cotangent, weights, skip_first, seed, number, memory_bytes(memory))  # type: ignore[arg-type]
    settings.check()
    say(f"Loading {checkpoint}")
    model, corpus, anatomy = prepare(checkpoint, data, **given)
    if fresh:
        model, corpus, anatomy = prepare(fresh_twin(model, seed), corpus)
    refuse_offloaded(model.offload, "gradients were asked for")
    settings.cotangents(anatomy, corpus)  # before anything is measured
    target = folder_of(model, out)
    check_writable(target)
    report = existing_report(model, corpus, anatomy, target, seed, skip_first)
    say(gradients_cost(corpus, settings))
    with Bar("Differentiating", corpus.sequences * seeds) as progress:
        found = run_gradients(anatomy, corpus, settings, progress)
    report = joined(report, found)
    path = replace(report, run={**report.run, "gradient_command": command_line()}).save(target, figures)  # type: ignore[arg-type]
    show(report, saved=path)
