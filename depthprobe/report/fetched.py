"""What the report says of weights that had to be fetched while the model ran."""

from __future__ import annotations

from typing import Any

from depthprobe.report.schema import Report
from depthprobe.report.tables import number
from depthprobe.report.words import Finding, plural

__all__ = ["fetched_finding", "fetched_words"]


def fetched_words(fetched: dict[str, Any] | None) -> str:
    """`1.2 GiB in 2 chunks; 30 GiB with batches outside`; empty where all weights were in memory."""
    if not fetched:
        return ""
    chunks = fetched["chunks"]
    return (
        f"{_size(fetched['bytes'])} in {chunks} chunk{plural(chunks)} of the text; with batches in the outer loop "
        f"{_size(fetched['batch_outer'])}"
    )


def fetched_finding(report: Report) -> Finding | None:
    """How many bytes of weights were fetched, and how many a loop over batches outside would have."""
    parts = {"the measurements": report.cost.get("fetched"), "changed models": report.merging.get("fetched")}
    known = {what: fetched for what, fetched in parts.items() if fetched}
    if not known:
        return None
    said = "; ".join(f"for {what} {fetched_words(fetched)}" for what, fetched in known.items())
    odd = [what for what, fetched in known.items() if fetched["bytes"] != fetched["planned"]]
    more = f"That of {' and of '.join(odd)} is not what was planned." if odd else "As planned, to the byte."
    sizes, outer = (" and ".join(_size(one[key]) for one in known.values()) for key in ("bytes", "batch_outer"))
    short = f"{sizes} of weights; with batches in the outer loop {outer}"
    return Finding("Fetched", f"Weights were fetched when they were needed: {said}.", more, short)


def _size(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{number(count / (1 << power))} {unit}"
    return f"{number(count)} bytes"
