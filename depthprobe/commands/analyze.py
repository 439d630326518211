"""`depthprobe analyze`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from depthprobe.commands.one import Request, analyze_one
from depthprobe.commands.options import (
    CHECKPOINT_HELP,
    MODEL_PANEL,
    OUT_PANEL,
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
    TextField,
    Threads,
    Tokenizer,
    Tokens,
    Trust,
    batch_number,
    check_figures,
    preparation,
)
from depthprobe.commands.several import analyze_several, is_pattern, with_revisions
from depthprobe.errors import UsageError


def analyze(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT",
            show_default=False,
            help=f"{CHECKPOINT_HELP} Several, or a quoted pattern such as 'run/step-*', get a report each.",
        ),
    ],
    out: Out = None,
    compare: Annotated[
        bool,
        typer.Option(help="Of several checkpoints, compare the reports, in OUT/compare.", rich_help_panel=OUT_PANEL),
    ] = True,
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
        int,
        typer.Option(
            help="How many of the tokens to run these on; scored at a quarter of the positions, 15 % if masked."
        ),
    ] = 2048,
    gradient_tokens: Annotated[
        int, typer.Option(help="How many of the tokens to take gradients on, of states and weights; 0 for none.")
    ] = 1024,
    depth_tokens: Annotated[
        int,
        typer.Option(help="How many of the tokens to estimate depth on, beside controls; 0 for none, and no phases."),
    ] = 512,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the parts that a run which was stopped has finished.")
    ] = False,
    batch_size: BatchSize = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    revisions: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Several of one hub checkpoint, such as step0,step1000; a report each.",
            show_default=False,
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Measure checkpoints and write a report of each.

    The residual stream is found in the model and verified first. Then one pass over the text measures how the stream
    grows, how large and how aligned each update is, how alike neighbouring states are, whether a block needs its
    predecessor's update, and what the logit lens reads after every block. On fewer tokens, gradients are carried back
    from the loss and from a random vector, and effective depth is estimated in the ways that cost little; last, each
    block is skipped, and each two neighbours are merged and swapped.

    With several checkpoints --out is the folder for a report each (reports/ by default) and for their comparison. A
    report that is there already, of the same weights, text and options, is kept as it is, and none is overwritten. A
    checkpoint that fails does not stop the others: the table at the end says why.

    Example: `depthprobe analyze gpt2 --tokens 16384 --out reports/gpt2`

    Example: `depthprobe analyze EleutherAI/pythia-70m --revisions step0,step1000,step143000 --out reports/pythia`

    Several processes divide the sequences: `torchrun --nproc-per-node 4 -m depthprobe analyze …`
    """
    given = preparation(locals())
    from depthprobe.processes import told
    from depthprobe.report.files import check_writable

    several = len(checkpoints) > 1 or revisions is not None or is_pattern(checkpoints[0])
    specs = with_revisions(checkpoints, revisions, revision)
    check_figures(figures)
    size = batch_number(batch_size)
    if out is not None:
        told(partial(check_writable, out))

    from depthprobe.measure import Settings
    from depthprobe.report.screen import show

    settings = Settings(skip_first, size, seed, interaction, lens_positions)
    settings.check()
    if ablation_tokens < 2:
        raise UsageError(f"--ablation-tokens {ablation_tokens}", "2 or more", "use --no-ablations for none")
    if gradient_tokens < 0:
        raise UsageError(f"--gradient-tokens {gradient_tokens}", "0 or more")
    if depth_tokens < 0:
        raise UsageError(f"--depth-tokens {depth_tokens}", "0 or more")
    asked = Request(data, given, settings, ablations, ablation_tokens, gradient_tokens, depth_tokens, figures, resume)
    if several:
        analyze_several(specs, asked, out or Path("reports"), compare=compare, debug=debug)
        return
    outcome = analyze_one(specs[0], asked, out)
    show(outcome.report, saved=outcome.page)
