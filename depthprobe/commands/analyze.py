"""`depthprobe analyze`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from depthprobe.commands.options import (
    BatchSize,
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
    Tokenizer,
    Tokens,
    Trust,
    batch_number,
    check_figures,
    command_line,
    preparation,
)
from depthprobe.errors import UsageError


def analyze(
    checkpoint: Spec,
    out: Out = None,
    figures: Figures = "png",
    data: Data = None,
    tokens: Tokens = 8192,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    skip_first: SkipFirst = 1,
    interaction: Annotated[
        bool,
        typer.Option(help="Run each block without its predecessor's update too: two further forward passes."),
    ] = True,
    lens_positions: Annotated[
        int, typer.Option(help="Positions that the logit lens reads out after every block; 0 for no lens.")
    ] = 1024,
    ablations: Annotated[
        bool, typer.Option(help="Skip each block, merge and swap each two neighbours, and measure what it costs.")
    ] = True,
    ablation_tokens: Annotated[
        int, typer.Option(help="How many of the tokens to run these on; a quarter of their positions is scored.")
    ] = 2048,
    gradient_tokens: Annotated[
        int, typer.Option(help="How many of the tokens to take gradients on, of states and weights; 0 for none.")
    ] = 1024,
    depth_tokens: Annotated[
        int, typer.Option(help="How many of the tokens to estimate effective depth on, beside controls; 0 for none.")
    ] = 512,
    batch_size: BatchSize = "auto",
    seed: Seed = 0,
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
    """Measure a checkpoint and write a report.

    The residual stream is found in the model and verified first. Then one pass over the text measures how the stream
    grows, how large and how aligned each update is, how alike neighbouring states are, whether a block needs its
    predecessor's update, and what the logit lens reads after every block. On fewer tokens, gradients are carried back
    from the loss and from a random vector, and effective depth is estimated in the ways that cost little; last, each
    block is skipped, and each two neighbours are merged and swapped.

    Example: `depthprobe analyze gpt2 --tokens 16384 --out reports/gpt2`
    """
    given = preparation(locals())
    from depthprobe.report.files import check_writable

    check_figures(figures)
    size = batch_number(batch_size)
    if out is not None:
        check_writable(out)

    from depthprobe.ablation import default_schedules, default_sweep, sweep_cost
    from depthprobe.analysis import build_report
    from depthprobe.depth.base import DepthSettings
    from depthprobe.effective import PARTS, QUICK_LEN, effective_cost, quick, shortened, with_effective, with_phases
    from depthprobe.gradient import GradientSettings, gradients_cost, with_gradients
    from depthprobe.measure import Settings, measure
    from depthprobe.prepare import prepare
    from depthprobe.progress import Bar, say
    from depthprobe.report.screen import show

    settings = Settings(skip_first, size, seed, interaction, lens_positions)
    settings.check()
    if gradient_tokens < 0:
        raise UsageError(f"--gradient-tokens {gradient_tokens}", "0 or more")
    if depth_tokens < 0:
        raise UsageError(f"--depth-tokens {depth_tokens}", "0 or more")
    say(f"Loading {checkpoint}")
    model, corpus, anatomy = prepare(checkpoint, data, **given)
    target = out or Path("reports") / model.name
    check_writable(target)
    say(f"Verified {len(anatomy.stream)} blocks of {anatomy.stream.blocks.path}. {settings.cost(anatomy, corpus)}")
    with Bar("Measuring", corpus.sequences) as progress:
        measured = measure(anatomy, corpus, settings, progress)
    options = {"tokens": tokens, "seq_len": seq_len, "bos": bos, "text_field": text_field} | vars(settings)
    options |= {"ablations": ablations, "ablation_tokens": ablation_tokens, "gradient_tokens": gradient_tokens}
    options |= {"depth_tokens": depth_tokens}
    report = build_report(model, corpus, anatomy, measured, settings, options, command_line())
    if gradient_tokens:
        part, slopes = corpus.spread(gradient_tokens), GradientSettings(skip_first=skip_first, seed=seed)
        if model.in_memory:
            say(gradients_cost(part, slopes))
        with Bar("Differentiating", part.sequences) as progress:
            report = with_gradients(report, anatomy, part, slopes, progress)
    if depth_tokens:
        part, deep = shortened(corpus, depth_tokens, QUICK_LEN), DepthSettings(seed, skip_first, size)
        if model.in_memory:
            say(effective_cost(part, quick(len(anatomy.stream)), len(anatomy.stream)))
        with Bar("Estimating depth", PARTS, "parts") as progress:
            report = with_effective(report, anatomy, part, deep, progress)
        with Bar("Reading", corpus.sequences) as progress:
            report = with_phases(report, anatomy, corpus, deep, progress)
    if ablations:
        part = corpus.spread(ablation_tokens)
        total, cost = sweep_cost(
            anatomy, part, default_schedules(len(anatomy.stream), controls=False, post_ln=anatomy.post_ln)
        )
        say(f"Ablations: {cost}")
        with Bar("Ablating", total, "block evaluations") as progress:
            swept = default_sweep(anatomy, part, seed, report.layers, report.pairs, progress, skip_first)
        report = replace(report, ablations=swept.table, merging=swept.merging)
    path = report.save(target, figures)  # type: ignore[arg-type]
    show(report, saved=path)
