"""What a long run shows on standard error: a bar with the time left, or plain lines where that is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from depthprobe.processes import first

__all__ = ["Bar", "say"]


def say(text: str) -> None:
    """Print a line to standard error at once; of several processes the first one does."""
    if first():
        print(text, file=sys.stderr, flush=True)


class Bar:
    """A bar with the time left on a terminal, and a line with the estimate after the first twentieth.

    Args:
        what: the work, such as `Measuring`.
        total: how much of it there is.
        unit: what is counted.
    """

    def __init__(self, what: str, total: int, unit: str = "sequences") -> None:
        console = Console(stderr=True)
        self.total, self.unit = total, unit
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"{unit} ·"),
            TimeElapsedColumn(),
            TextColumn("· left"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not (console.is_terminal and first()), transient=True)

    def __enter__(self) -> Callable[[int, int], None]:
        started, before = time.perf_counter(), -1
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        waiting = True

        def step(done: int, total: int) -> None:
            nonlocal waiting, before
            self.bar.update(task, completed=done, total=total)
            if before < 0:
                before = max(0, done - 1)  # what an earlier run had done took no time of this one
            if waiting and done > before and 20 * (done - before) >= total - before:
                waiting = False
                if done < total:
                    seconds = (time.perf_counter() - started) * (total - before) / (done - before)
                    long = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{max(1, round(seconds))} s"
                    say(f"About {long} on this machine, going by the first {done:,} of {total:,} {self.unit}.")

        return step

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
