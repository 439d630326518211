"""What a report is of, in a line, and what it does not say."""

from __future__ import annotations

from depthprobe.report.schema import Report
from depthprobe.report.tables import placements
from depthprobe.report.words import plural

__all__ = ["caveat", "headline"]


def caveat(report: Report) -> str:
    """What the measurements do not say."""
    if report.ablations.empty and report.depth.empty:
        return (
            "All of this was measured on unmodified runs over this corpus. It does not say how the loss would change "
            "if blocks were removed or merged."
        )
    if report.ablations.empty:
        return (
            "Estimates of depth that skip or merge units say what that costs over this corpus without any further "
            "training. All else was measured on unmodified runs."
        )
    return (
        "Costs are those of one change at a time, over this corpus and without any further training: they do not say "
        "what several changes would cost together, or how much of the cost training would win back. All else was "
        "measured on unmodified runs."
    )


def headline(report: Report) -> str:
    """One line on what was measured: depth, build, size, corpus."""
    model, corpus = report.model, report.corpus
    blocks, tokens = model["blocks"], corpus["sequences"] * corpus["tokens"]
    build = report.anatomy.get("summary")
    parts = [
        f"{blocks} block{plural(blocks)}",
        f"width {model['width']:,}",
        f"{_millions(model['parameters'])} parameters",
    ]
    if build and placements(report):
        parallel = ", parallel" if report.anatomy.get("parallel") else ""
        parts.insert(1, f"{build.replace(', parallel', '', 1)} norm{parallel}")
    what = "positions" if model.get("inputs") == "states" else "tokens"
    over = f"{tokens:,} {what} in {corpus['sequences']:,} sequence{plural(corpus['sequences'])}"
    return f"{', '.join(parts)}; measured on {over}, {model['dtype']}"


def _millions(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= 0.9995 * size:  # what is rounded to it, and would be 1e+03 of the smaller
            return f"{parameters / size:.3g} {letter}"
    return str(parameters)
