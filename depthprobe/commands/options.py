"""The options that several commands share. A field's help is its documentation."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.processes import announced

MODEL_PANEL = "The model"
TEXT_PANEL = "The text"
OUT_PANEL = "Output"

CHECKPOINT_HELP = "A hub id or id@revision, a directory in transformers' format, a .gguf file, or nanoGPT's ckpt.pt."
Spec = Annotated[str, typer.Argument(metavar="CHECKPOINT", show_default=False, help=CHECKPOINT_HELP)]
Data = Annotated[
    str | None,
    typer.Option(
        help="A text file or - for standard input, .jsonl, token ids as .npy [sequences, tokens], nanoGPT's .bin, a "
        "folder saved by datasets, or hf:NAME[[:CONFIG]:SPLIT]. By default the English of Python's own manual.",
        show_default=False,
        rich_help_panel=TEXT_PANEL,
    ),
]
Tokens = Annotated[int, typer.Option(help="How many tokens to measure on.", rich_help_panel=TEXT_PANEL)]
SeqLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a sequence: by default 256 (depth: 128), or the model's positions if it has fewer.",
        show_default=False,
        rich_help_panel=TEXT_PANEL,
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        help="Begin each sequence with BOS: auto (where the tokenizer does), always, never.", rich_help_panel=TEXT_PANEL
    ),
]
TextField = Annotated[
    str, typer.Option(help="The field of .jsonl or a dataset that holds the text.", rich_help_panel=TEXT_PANEL)
]
Seed = Annotated[int, typer.Option(help="Of every random draw and of the bootstrap.")]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads of torch; by default as many as it chooses.", show_default=False),
]
Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16, float16; auto keeps the checkpoint's.", rich_help_panel=MODEL_PANEL),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps; auto takes the best there is.", rich_help_panel=MODEL_PANEL)]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Where weights go, as in transformers: auto, balanced, balanced_low_0, sequential, or module → device as "
        "JSON. Weights that do not fit are fetched while blocks run.",
        show_default=False,
        rich_help_panel=MODEL_PANEL,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        help="What this process may take in all, such as 0=20GiB,cpu=60GiB; a GPU that is not named is not used.",
        show_default=False,
        rich_help_panel=MODEL_PANEL,
    ),
]
OffloadFolder = Annotated[
    Path | None,
    typer.Option(
        help="For weights on disk that have to be written anew; safetensors are read where they are.",
        show_default=False,
        rich_help_panel=MODEL_PANEL,
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub checkpoint.", rich_help_panel=MODEL_PANEL)
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the checkpoint.", rich_help_panel=MODEL_PANEL
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Where to find a tokenizer, instead of beside the checkpoint.", rich_help_panel=MODEL_PANEL),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the report; reports/<model> by default.", rich_help_panel=OUT_PANEL, show_default=False
    ),
]
Figures = Annotated[str, typer.Option(help="Format of the figure files: png or svg.", rich_help_panel=OUT_PANEL)]
BatchSize = Annotated[str, typer.Option(help="Sequences at once, or auto. Results do not depend on it.")]
SkipFirst = Annotated[
    int,
    typer.Option(
        help="Leading positions that the stream's metrics leave out: position 0 is an attention sink, whose norm can "
        "be 100 times the others'."
    ),
]


def batch_number(text: str) -> int | None:
    """None for `auto`.

    Raises:
        UsageError: neither auto nor a positive number.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--batch-size {text}", "a positive number, or auto")
    return int(text)


def memory_bytes(gib: float) -> int:
    """The bytes of `--memory`.

    Raises:
        UsageError: less than one, or no number.
    """
    if not (math.isfinite(gib) and gib * 2**30 >= 1):
        raise UsageError(f"--memory {gib:g}", "a number of GiB, more than 0")
    return int(gib * 2**30)


def check_figures(figures: str) -> None:
    """Refuse a format before anything is loaded.

    Raises:
        UsageError: neither png nor svg.
    """
    if figures not in ("png", "svg"):
        raise UsageError(f"--figures {figures}", "png or svg")


class InterruptedRunError(DepthprobeError):
    """The user ended a command of which some part is finished and kept."""

    exit_code = 130


_typed: list[str] = []


def remember(arguments: list[str]) -> None:
    """Keep what the command line was given, for `command_line`."""
    _typed[:] = arguments


def command_line() -> str:
    """What the user typed, quoted so that it can be typed again."""
    many = announced()[1]
    if many == 1:
        return shlex.join(["depthprobe", *_typed])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", many))
    nodes = ["--nnodes", str(many // here)] if many > here else []
    return shlex.join(["torchrun", *nodes, "--nproc-per-node", str(here), "-m", "depthprobe", *_typed])


def set_threads(threads: int | None) -> None:
    """Have torch run on so many threads in this process; None leaves its own choice.

    Raises:
        UsageError: less than one.
    """
    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"--threads {threads}", "1 or more")
    import torch

    torch.set_num_threads(threads)


def preparation(values: dict[str, Any]) -> dict[str, Any]:
    """Of a command's arguments, those that `prepare` takes besides the checkpoint and the data; `threads` is set.

    Raises:
        UsageError: less than one thread.
    """
    set_threads(values["threads"])
    names = ("tokens", "seq_len", "seed", "bos", "text_field")
    placing = ("device", "device_map", "max_memory", "offload_folder")
    loading = ("dtype", "revision", "tokenizer", "trust_remote_code")
    return {name: values[name] for name in (*names, *placing, *loading)}
