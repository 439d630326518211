"""What a long run shows on standard error: a bar with the time left, or plain lines where that is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Bar", "say"]


def say(text: str) -> None:
    """Print a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)


class Bar:
    """A bar with the time left on a terminal; elsewhere one line with the estimate after the first batch."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self.total, self.shown = total, console.is_terminal
        columns = (
            TextColumn("Measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("sequences ·"),
            TimeElapsedColumn(),
            TextColumn("· left"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not self.shown, transient=True)

    def __enter__(self) -> Callable[[int, int], None]:
        started = time.perf_counter()
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        first = True

        def step(done: int, total: int) -> None:
            nonlocal first
            self.bar.update(task, completed=done)
            if first and done < total:
                minutes = (time.perf_counter() - started) * total / done / 60
                say(f"About {minutes:.1f} minutes on this machine, from the first {done} of {total} sequences.")
            first = False

        return step

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
