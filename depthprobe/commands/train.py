"""`depthprobe train`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from depthprobe.commands.options import TEXT_PANEL, Debug, Device, InterruptedRunError, TextField, command_line
from depthprobe.errors import UsageError

MODEL_PANEL = "The model"
RATE_PANEL = "The optimiser"


def train(
    out: Annotated[Path, typer.Option(help="For checkpoint, log, figure and record; it must hold no other run.")],
    placement: Annotated[
        str | None,
        typer.Option(
            help="Where the norms sit: pre (the default), post, branch, sandwich, deepnorm, none.",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Blocks; 12 by default.", rich_help_panel=MODEL_PANEL, show_default=False)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Of the stream; 64 by default.", rich_help_panel=MODEL_PANEL, show_default=False)
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Of attention; 4 by default.", rich_help_panel=MODEL_PANEL, show_default=False)
    ] = None,
    mlp_ratio: Annotated[
        float | None,
        typer.Option(
            help="Width of the MLP over that of the stream; 4 by default.",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
    norm: Annotated[
        str | None,
        typer.Option(
            help="layernorm (the default), rmsnorm, and with --bidirectional batchnorm or instancenorm.",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Initialisation: xavier (the default), gpt2, or admin for post.",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
    layernorm_scaling: Annotated[
        bool,
        typer.Option("--layernorm-scaling", help="Norms before a branch times 1/√(l+1).", rich_help_panel=MODEL_PANEL),
    ] = False,
    residual_attention: Annotated[
        bool,
        typer.Option(
            "--residual-attention", help="Add the scores of the block before (RealFormer).", rich_help_panel=MODEL_PANEL
        ),
    ] = False,
    qk_norm: Annotated[
        bool, typer.Option("--qk-norm", help="A norm on queries and keys.", rich_help_panel=MODEL_PANEL)
    ] = False,
    parallel_pairs: Annotated[
        str | None,
        typer.Option(
            help="Let each two neighbours read the same state: blocks, or sublayers.",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
    bidirectional: Annotated[
        bool,
        typer.Option(
            "--bidirectional",
            help="Every position sees all, and predicts 15 % masked tokens.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Go on from a checkpoint's weights with a new schedule, instead of a new model.",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Sequences of an update, over all devices.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Parts that a batch is divided into, to save memory.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adamw, radam or sgd.", rich_help_panel=RATE_PANEL)] = "adamw",
    lr: Annotated[float, typer.Option(help="Learning rate after warm-up.", rich_help_panel=RATE_PANEL)] = 1e-3,
    betas: Annotated[str, typer.Option(help="Of adamw and radam.", rich_help_panel=RATE_PANEL)] = "0.9,0.98",
    momentum: Annotated[float, typer.Option(help="Of sgd.", rich_help_panel=RATE_PANEL)] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.", rich_help_panel=RATE_PANEL)] = 0.1,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Steps over which the learning rate grows, 0 for none. By default 100, in a run of less than 1,000 "
            "steps a tenth of them.",
            rich_help_panel=RATE_PANEL,
            show_default=False,
        ),
    ] = None,
    floor: Annotated[
        float,
        typer.Option(help="Share of the learning rate that a cosine falls to.", rich_help_panel=RATE_PANEL),
    ] = 0.1,
    clip: Annotated[
        float, typer.Option(help="Cut the gradient's norm to this; 0 leaves it.", rich_help_panel=RATE_PANEL)
    ] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32, or bf16 for autocast.")] = "float32",
    eval_every: Annotated[int, typer.Option(help="Steps between two looks at the validation loss.")] = 100,
    eval_tokens: Annotated[int, typer.Option(help="Validation tokens to look at.")] = 16384,
    margin: Annotated[
        float,
        typer.Option(help="The run failed if it ends less than so many nats below the tokens' own frequencies."),
    ] = 0.2,
    save_at: Annotated[
        str | None,
        typer.Option(help="Steps to keep a checkpoint at, as OUT/step-N: 0,100,500.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initialisation and the order of the data.")] = 0,
    data_seed: Annotated[
        int | None, typer.Option(help="Of the order of the data, if it is another.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text or token ids, as for analyze. By default the standard library's text and source, without what "
            "analyze reads by default.",
            show_default=False,
            rich_help_panel=TEXT_PANEL,
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", rich_help_panel=TEXT_PANEL)] = 64,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes (the default: one token a character of ASCII), or a folder with a tokenizer.",
            show_default=False,
            rich_help_panel=TEXT_PANEL,
        ),
    ] = None,
    text_field: TextField = "text",
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT where it was killed.")] = False,
    debug: Debug = False,
) -> None:
    """Train a small transformer whose norms sit where you say, everything else held equal.

    The result is a checkpoint that `depthprobe analyze` opens, with `log.jsonl`, `loss.png` and `run.json` beside it.
    The order of the data depends on the seed alone, so that models of different placements see the same batches. A
    run that diverges, or learns no more than the frequencies of the tokens, is recorded as failed; the exit status is
    0 all the same, since that is a result.

    Several devices: `torchrun --nproc-per-node 2 -m depthprobe train …`; the batch is divided among them.

    Example: `depthprobe train --placement post --layers 12 --lr 3e-4 --warmup 500 --out lab/post`
    """
    options = {
        "placement": placement,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "mlp_ratio": mlp_ratio,
        "norm": norm,
        "initialisation": init,
        "parallel_pairs": parallel_pairs,
        "layernorm_scaling": layernorm_scaling or None,
        "residual_attention": residual_attention or None,
        "qk_norm": qk_norm or None,
        "causal": False if bidirectional else None,
    }
    architecture = {name: value for name, value in options.items() if value is not None}
    if start is not None and architecture:
        raise UsageError("--from with options of the architecture", "one of the two", "a checkpoint has its own")
    beta, save = _numbers("--betas", betas, float), _numbers("--save-at", save_at, int)
    if len(beta) != 2:
        raise UsageError(f"--betas {betas}", "two numbers, as 0.9,0.98")

    from depthprobe.lab.config import LabConfig
    from depthprobe.lab.settings import TrainSettings
    from depthprobe.lab.training import train as run
    from depthprobe.processes import announced
    from depthprobe.progress import Bar

    warmup = min(100, steps // 10) if warmup is None else warmup
    settings = TrainSettings(
        steps, batch_size, seq_len, accumulate, optimizer, lr, (beta[0], beta[1]), momentum, weight_decay, warmup,
        floor, clip, dtype, eval_every, eval_tokens, margin, save, seed, data_seed, device,
    )  # fmt: skip
    settings.check()
    model = start if start is not None else LabConfig(**architecture)
    try:
        with Bar("Training", steps, "steps") if announced()[0] == 0 else nullcontext() as progress:
            result = run(
                model, settings, out, data, tokenizer=tokenizer, text_field=text_field, resume=resume,
                progress=progress, command=command_line(),
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = (out / "state.pt").exists()
        last = f"the state of the last validation is kept in {out}, --resume goes on" if kept else (
            "it was before the first validation, so that nothing is kept; --resume begins anew"
        )  # fmt: skip
        raise InterruptedRunError("interrupted", fix=last) from None
    if announced()[0] > 0:
        return
    loss = "not finite" if result.val_loss is None else f"{result.val_loss:.3f} nats per token"
    unigram = "" if result.unigram is None else f" (unigram {result.unigram:.3f})"
    if result.reason:
        print(f"failed: {result.reason}")
    print(f"validation loss {loss}{unigram} after {result.steps:,} of {steps:,} steps,")
    print(f"{result.tokens:,} tokens in {result.seconds:,.0f} s; {result.parameters:,} parameters")
    print(out / "run.json")


def _numbers(option: str, text: str | None, kind: Any) -> tuple[Any, ...]:
    """The numbers of a list with commas.

    Raises:
        UsageError: something else stands there.
    """
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"{option} {text}", "numbers with commas between them") from None
