"""Whether a run failed, and the sentence that says why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["ABOVE_START", "WINDOW", "diverged", "stuck"]

Row = dict[str, Any]

WINDOW = 50  # steps whose median loss counts, so that a short spike is none of it
ABOVE_START = 1.0  # nats


def diverged(rows: Sequence[Row]) -> str | None:
    """Why a run cannot come to anything any more, from the rows of its log so far; None while it can.

    A loss or a gradient that is not finite, or a median loss of the last 50 steps of more than 1 nat above the first.
    Rows keep what is not finite as None; the row of step 0 has no loss, and the next one is the first.
    """
    steps = rows[1:]
    for row in steps[-WINDOW:]:
        for name, what in (("loss", "loss"), ("grad_norm", "gradient's norm")):
            if row[name] is None or not math.isfinite(row[name]):
                return f"diverged: the {what} is not finite at step {row['step']:,}"
    if len(steps) < WINDOW:
        return None
    first, last = steps[0]["loss"], statistics.median(row["loss"] for row in steps[-WINDOW:])
    if last <= first + ABOVE_START:
        return None
    return (
        f"diverged: the median loss of the {WINDOW} steps before step {steps[-1]['step']:,} is {last:.2f}, "
        f"more than {ABOVE_START:g} nat above the first step's {first:.2f}"
    )


def stuck(validation: float | None, unigram: float | None, margin: float) -> str | None:
    """Why a finished run learned next to nothing; None if it did learn.

    Args:
        validation: the last validation loss, nats a token; None where it is not finite.
        unigram: the loss of the training text's frequencies on the same tokens; None where that says nothing.
        margin: how far below that a loss must be, nats.
    """
    if validation is None:
        return "diverged: the validation loss is not finite"
    if unigram is None or validation < unigram - margin:
        return None
    where = "stuck at" if validation <= unigram + margin else "it ended above"
    return (
        f"{where} the unigram entropy: the validation loss is {validation:.3f}, the frequencies of the training tokens "
        f"alone give {unigram:.3f}, and below {unigram - margin:.3f} it would not count as failed"
    )
