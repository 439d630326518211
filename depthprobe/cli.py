"""The command line: its commands, and what becomes of their failures."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from depthprobe.commands.ablate import ablate
from depthprobe.commands.analyze import analyze
from depthprobe.commands.compare import compare
from depthprobe.commands.depth import depth
from depthprobe.commands.gradients import gradients
from depthprobe.commands.inspect import inspect
from depthprobe.commands.metrics import metrics
from depthprobe.commands.options import remember
from depthprobe.commands.prune import prune
from depthprobe.commands.stages import stages
from depthprobe.commands.train import train
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.processes import LostProcessError, announced, joined

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

_INTERRUPTED = "interrupted; nothing was written"
_DEALT = ("analyze", "ablate", "depth")  # their sequences, among the processes that torchrun starts
_ALONE = ("stages", "prune", "gradients")  # what takes long and would be done by each of them


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


for command in (analyze, inspect, ablate, stages, prune, depth, gradients, compare, train, metrics):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every failure is one line and an exit status: 2 wrong usage, 130 interrupted, 1 failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    remember(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Δ and – still gets its numbers
    warnings.filterwarnings("ignore")  # of libraries; depthprobe says what it has to say itself
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments[:1] and arguments[0] in (*_DEALT, *_ALONE) and announced()[1] > 1:
        sys.exit(_one_of_several(arguments))
    sys.exit(_run(lambda: app(arguments, standalone_mode=False), debug="--debug" in arguments))


def _one_of_several(arguments: list[str]) -> int:
    """The same as one of the processes that torchrun started, of which the first one prints what all have to say."""
    place, many = announced()

    def command() -> Any:
        if arguments[0] in _ALONE:
            raise UsageError(
                f"{many} processes for depthprobe {arguments[0]}",
                f"one; several share the work of {', '.join(_DEALT)} and train",
            )
        with joined():
            return app(arguments, standalone_mode=False)

    debug = "--debug" in arguments
    try:
        if place == 0:
            return _run(command, debug)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            return _run(command, debug, alone=False)
    except LostProcessError as error:
        return _fail(f"process {place} of 0 to {many - 1}: {error}; what is finished is kept, --resume goes on", 1)


def _run(command: Callable[[], Any], debug: bool, alone: bool = True) -> int:
    """The exit status; a failure is said, unless another process says the same."""
    try:
        status = command()
        return _fail(_INTERRUPTED, 130) if status == 130 and alone else int(status or 0)
    except DepthprobeError as error:
        if debug:
            raise
        said = not alone and (error.everywhere or error.exit_code != 1)  # the first one says it too
        return error.exit_code if said else _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_INTERRUPTED, 130) if alone else 130
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining about that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        show = getattr(error, "show", None)
        if show is not None:  # the parser's own complaint, with its hint
            if alone:
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
