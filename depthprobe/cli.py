"""The command line: parse, call, print. Heavy imports wait until a command needs them, so that help is instant."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from depthprobe.errors import DepthprobeError, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    name="depthprobe",
    help="How much of a trained transformer's depth is really used?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL = "The model"
_TEXT = "The text"
_OUT = "Output"

Spec = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        show_default=False,
        help="A hub id or id@revision, a directory in transformers' format, a .gguf file, or nanoGPT's ckpt.pt.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="A text file or - for standard input, .jsonl, token ids as .npy [sequences, tokens], nanoGPT's .bin, a "
        "folder saved by datasets, or hf:NAME[:SPLIT]. By default the English of Python's own manual.",
        show_default=False,
        rich_help_panel=_TEXT,
    ),
]
Tokens = Annotated[int, typer.Option(help="How many tokens to measure on.", rich_help_panel=_TEXT)]
SeqLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a sequence: 256, or the model's positions if it has fewer.",
        show_default=False,
        rich_help_panel=_TEXT,
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        help="Begin each sequence with BOS: auto (where the tokenizer does), always, never.", rich_help_panel=_TEXT
    ),
]
TextField = Annotated[
    str, typer.Option(help="The field of .jsonl or a dataset that holds the text.", rich_help_panel=_TEXT)
]
Seed = Annotated[int, typer.Option(help="Of every random draw and of the bootstrap.")]
Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16, float16; auto keeps the checkpoint's.", rich_help_panel=_MODEL),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps; auto takes the best there is.", rich_help_panel=_MODEL)]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub checkpoint.", rich_help_panel=_MODEL)
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.", rich_help_panel=_MODEL),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Where to find a tokenizer, instead of beside the checkpoint.", rich_help_panel=_MODEL),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


_INTERRUPTED = "interrupted; nothing was written"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"depthprobe {version('depthprobe')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def analyze(
    checkpoint: Spec,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report; reports/<model> by default.", rich_help_panel=_OUT, show_default=False
        ),
    ] = None,
    figures: Annotated[str, typer.Option(help="Format of the figure files: png or svg.", rich_help_panel=_OUT)] = "png",
    data: Data = None,
    tokens: Tokens = 8192,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    skip_first: Annotated[
        int,
        typer.Option(
            help="Leading positions that the stream's metrics leave out: position 0 is an attention sink, whose "
            "norm can be 100 times the others'."
        ),
    ] = 1,
    interaction: Annotated[
        bool,
        typer.Option(help="Run each block without its predecessor's update too: two further forward passes."),
    ] = True,
    lens_positions: Annotated[
        int, typer.Option(help="Positions that the logit lens reads out after every block; 0 for no lens.")
    ] = 1024,
    batch_size: Annotated[
        str, typer.Option(help="Sequences at once; auto for about 2,048 tokens. Results do not depend on it.")
    ] = "auto",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Measure a checkpoint and write a report.

    The residual stream is found in the model and verified first. Then one pass over the text measures how the stream
    grows, how large and how aligned each update is, how alike neighbouring states are, whether a block needs its
    predecessor's update, and what the logit lens reads after every block.

    Example: `depthprobe analyze gpt2 --tokens 16384 --out reports/gpt2`
    """
    from depthprobe.report.files import check_writable

    if figures not in ("png", "svg"):
        raise UsageError(f"--figures {figures}", "png or svg")
    size = _batch_size(batch_size)
    if out is not None:
        check_writable(out)

    from depthprobe.analysis import build_report, prepare
    from depthprobe.measure import Settings, measure
    from depthprobe.progress import Bar, say
    from depthprobe.report.screen import show

    settings = Settings(skip_first, size, seed, interaction, lens_positions)
    settings.check()
    say(f"Loading {checkpoint}")
    model, corpus, anatomy = prepare(
        checkpoint,
        data,
        tokens=tokens,
        seq_len=seq_len,
        seed=seed,
        bos=bos,  # type: ignore[arg-type]
        text_field=text_field,
        dtype=dtype,
        device=device,
        revision=revision,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    target = out or Path("reports") / model.name
    check_writable(target)
    say(f"Verified {len(anatomy.stream)} blocks of {anatomy.stream.blocks.path}. {settings.cost(anatomy, corpus)}")
    with Bar(corpus.sequences) as progress:
        measured = measure(anatomy, corpus, settings, progress)
    options = {"tokens": tokens, "seq_len": seq_len, "bos": bos, "text_field": text_field} | vars(settings)
    report = build_report(model, corpus, anatomy, measured, settings, options, _command())
    path = report.save(target, figures)  # type: ignore[arg-type]
    show(report, saved=path)


@app.command()
def inspect(
    checkpoint: Spec,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Print what was found in a checkpoint: its blocks, where each norm sits, and how well that reproduces the model.

    Seconds, on a few random tokens; nothing is written. Exit status 1 if the blocks do not give the model's own output.
    """
    from depthprobe.analysis import inspect as look
    from depthprobe.report.screen import show_anatomy

    found = look(
        checkpoint,
        dtype=dtype,
        device=device,
        revision=revision,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    show_anatomy(found)


@app.command()
def metrics(
    name: Annotated[str | None, typer.Argument(help="One metric; all of them by default.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Print the glossary: every metric's name, formula, source, and how to read it."""
    from rich.console import Console
    from rich.text import Text

    from depthprobe.glossary import METRICS, NOTATION, lookup

    console = Console(highlight=False)
    if name is None:
        console.print(Text(NOTATION), "", sep="\n")
    for metric in METRICS.values() if name is None else [lookup(name)]:
        where = "report.json" if metric.table == "report" else f"{metric.table}.csv"
        console.print(Text.assemble((metric.name, "bold"), f"  {metric.title}", (f"  [{where}]", "dim")))
        console.print(Text(f"    {metric.formula}"))
        console.print(Text(f"    {metric.reading}"))
        if metric.source:
            console.print(Text(f"    {metric.source}", "dim"))
        console.print()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every failure is one line and an exit status: 2 wrong usage, 130 interrupted, 1 failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.filterwarnings("ignore")  # of libraries; depthprobe says what it has to say itself
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(_run(lambda: app(arguments, standalone_mode=False), debug="--debug" in arguments))


def _run(command: Callable[[], Any], debug: bool) -> int:
    try:
        status = command()
        return _fail(_INTERRUPTED, 130) if status == 130 else int(status or 0)
    except DepthprobeError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_INTERRUPTED, 130)
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining about that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        show = getattr(error, "show", None)
        if show is not None:  # the parser's own complaint, with its hint
            show()
            return int(getattr(error, "exit_code", 2))
        if debug:
            raise
        text = " ".join(str(error).split())[:300]
        kind = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
        return _fail(f"{kind}: {text}; --debug shows where", 1)


def _fail(text: str, status: int) -> int:
    print(f"depthprobe: {text}", file=sys.stderr)
    return status


def _command() -> str:
    return shlex.join(["depthprobe", *sys.argv[1:]])


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--batch-size {text}", "a positive number, or auto")
    return int(text)
