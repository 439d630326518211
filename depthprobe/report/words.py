"""What sentences are made of: a finding, an interval's ends, a plural."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["FEW", "Finding", "capital", "ends", "plural"]

FEW = 32  # sequences below which a bootstrap's interval is said to be too narrow


@dataclass(frozen=True)
class Finding:
    """One thing that was measured.

    Attributes:
        topic: one or two words.
        text: the sentence that matters.
        more: what qualifies it; empty if nothing does.
        short: one line for the terminal; None for the text itself, empty for nothing.
    """

    topic: str
    text: str
    more: str = ""
    short: str | None = None


def ends(row: Any) -> tuple[float, float]:
    """The interval's ends; everything where there is no interval, so that nothing is told apart."""
    low, high = row["ci_low"], row["ci_high"]
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return -math.inf, math.inf
    return float(low), float(high)


def capital(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[0].upper() + text[1:]


def plural(count: int) -> str:
    """The `s` of more than one, and of none."""
    return "" if count == 1 else "s"
