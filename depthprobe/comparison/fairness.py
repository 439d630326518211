"""What makes a comparison unfair, and what a report lacks: a sentence each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from depthprobe.comparison.runs import Run
from depthprobe.depth.gate import FEWEST
from depthprobe.evidence import clusters
from depthprobe.report import Report

__all__ = ["missing", "warnings"]

_SHOWN = 6


def warnings(runs: Sequence[Run]) -> list[str]:
    """Everything in which runs differ that a difference between them may be about, most serious first."""
    found = [f"{run.name} failed in training ({run.training.failed}): it is a failed run, not a worse model."
             for run in runs if run.training.failed]  # fmt: skip
    found += [
        f"The stream of {run.name} was not verified: {_failed(run.report)}." for run in runs if _failed(run.report)
    ]
    fresh = [run.name for run in runs if run.report.gradients.get("fresh")]
    if fresh and len(fresh) < len(runs):
        found.append(f"{_names(fresh)}: a random initialisation, beside trained models.")
    found += _apart(runs, "Different texts", _sha256, "A difference may be one of the texts.", _corpus)
    for what, value, consequence in _FACTS:
        found += _apart(runs, what, value, consequence)
    return found + _tokens(runs) + _twice(runs)


def missing(runs: Sequence[Run]) -> list[str]:
    """What could not be compared, or not of every run, because a report does not have it."""
    tests: list[tuple[str, Callable[[Report], bool]]] = [
        ("changed models (no cost of skips and merges, no ρ)", lambda r: r.ablations.empty),
        ("gradients", lambda r: not r.gradients),
        ("estimates of effective depth", lambda r: r.depth.empty),
        ("attention and MLP apart (their branches were not found)", lambda r: _sublayers(r) == "blocks alone"),
        ("a language-model head (no loss, no lens)", lambda r: r.model.get("objective") is None),
    ]
    found = []
    for what, lacks in tests:
        names = [run.name for run in runs if lacks(run.report)]
        if names:
            everyone = len(names) == len(runs) > 1
            found.append(f"No report with {what}." if everyone else f"{_names(names)} without {what}.")
    few = {run.name: clusters(run.report, "corpus") for run in runs if not run.report.gradients.get("fresh")}
    few = {name: (count, what) for name, (count, what) in few.items() if count < FEWEST}
    if few:
        each = ", ".join(dict.fromkeys(f"{count} {what}" for count, what in few.values()))
        found.append(f"{_names([*few])}: intervals rest on {each}, and a verdict needs {FEWEST}: --tokens reads more.")
    return found


def _apart(
    runs: Sequence[Run],
    what: str,
    value: Callable[[Run], Any],
    consequence: str,
    show: Callable[[Run], str] | None = None,
) -> list[str]:
    """A warning where the runs have several values of something; those that have none are passed over.

    `show` puts the value of a run into words, if it is none that a reader can use.
    """
    words: dict[Any, str] = {}
    by_value: dict[Any, list[str]] = {}
    for run in runs:
        found = value(run)
        if found is not None:
            by_value.setdefault(found, []).append(run.name)
            words.setdefault(found, show(run) if show else str(found))
    if len(by_value) < 2:
        return []
    each = "; ".join(f"{words[found]} ({_names(names)})" for found, names in by_value.items())
    return [f"{what}: {each}. {consequence}"]


def _twice(runs: Sequence[Run]) -> list[str]:
    prints: dict[Any, list[str]] = {}
    for run in runs:
        found = run.report.model.get("fingerprint")
        if found is not None:
            prints.setdefault(found, []).append(run.name)
    return [f"{_names(names)} are the same weights." for names in prints.values() if len(names) > 1]


def _failed(report: Report) -> str:
    return "; ".join(check["what"] + " fails" for check in report.verification
                     if not check["passed"] and check.get("level") != "sublayers")  # fmt: skip


def _sublayers(report: Report) -> str:
    found = any(block.get("attention") or block.get("mlp") for block in report.anatomy.get("blocks", []))
    return "attention and MLP" if found else "blocks alone"


def _vocabulary(run: Run) -> str | None:
    size = run.report.model.get("vocab_size")
    return None if size is None else f"{size:,} ids"


def _tokens(runs: Sequence[Run]) -> list[str]:
    """Two tokenizers of equal size: the same text begins with other tokens."""
    if len({run.report.corpus["sha256"] for run in runs}) > 1 or len({_vocabulary(run) for run in runs}) > 1:
        return []
    return _apart(runs, "Different tokenizers", _first, "Losses a token and KLs do not compare.")


def _first(run: Run) -> str | None:
    corpus = run.report.corpus
    tokens = corpus.get("first_tokens") or corpus.get("first_ids")
    return " ".join(f"⟨{token}⟩" for token in tokens[:4]) if tokens else None


def _changed(run: Run) -> str | None:
    merging = run.report.merging
    if run.report.ablations.empty or not merging:
        return None
    share = merging.get("score_positions")
    scored = f", {share:.0%} scored" if isinstance(share, float) and share < 1 else ""
    text = "" if merging.get("sha256") in (None, run.report.corpus["sha256"]) else f" of {merging.get('corpus')}"
    return f"{merging.get('sequences')} × {merging.get('tokens')}{text}{scored}"


def _cost(run: Run) -> str | None:
    """What a changed model costs, where ρ was measured: a masked model's cost is a KL only if a mask is known."""
    cost = (run.report.merging.get("rho") or {}).get("cost")
    return cost and {"kl": "KL", "state_distance": "distance of the last states"}.get(cost, str(cost))


def _estimated(run: Run) -> str | None:
    """On what effective depth was estimated, where that is not what all else was measured on by its name and size."""
    deep = run.report.deep
    if run.report.depth.empty or not deep.get("sequences"):
        return None
    text = "" if deep.get("sha256") == run.report.corpus["sha256"] else f" of {deep.get('corpus')}"
    return f"{deep['sequences']} × {deep.get('tokens')}{text}"


def _differentiated(run: Run) -> str | None:
    """On what gradients were taken, whose size at a token goes with one over the number of tokens of a sequence."""
    found = run.report.gradients
    text = "" if found.get("sha256") in (None, run.report.corpus["sha256"]) else f" of {found.get('corpus')}"
    return f"{found.get('sequences')} × {found.get('tokens')}{text}" if found.get("sequences") else None


def _counted(run: Run) -> str | None:
    return None if run.report.depth.empty else f"{run.report.deep.get('unit', 'block')}s"


def _sha256(run: Run) -> str:
    return str(run.report.corpus["sha256"])


def _corpus(run: Run) -> str:
    corpus = run.report.corpus
    size = f"{corpus['sequences']} × {corpus['tokens']}"
    return f"{corpus['name']}, {size}, sha256 {str(corpus['sha256'])[:8]}"


def _objective(run: Run) -> str:
    return {"causal": "the next token", "masked": "masked tokens"}.get(str(run.report.model.get("objective")), "none")


_FACTS: tuple[tuple[str, Callable[[Run], Any], str], ...] = (
    ("Different tokenizers", _vocabulary, "Losses a token and KLs do not compare."),
    ("Different lengths", lambda run: f"{run.report.corpus['tokens']} tokens a sequence", "Position matters."),
    ("Different objectives", _objective, "Losses and KLs do not compare."),
    ("Different dtypes", lambda run: run.report.model["dtype"], "Small differences may be rounding."),
    ("Different units", lambda run: _sublayers(run.report), "Only whole blocks compare."),
    (
        "Different numbers of blocks",
        lambda run: run.report.model["blocks"],
        "Compared at relative depth; a block is not the same share of each.",
    ),
    ("Different widths", lambda run: run.report.model["width"], "Norms grow with √width; ratios and angles compare."),
    (
        "Different positions left out",
        lambda run: f"the first {run.report.corpus['skip_first']}",
        "Position 0 may have a norm of 100 times the others'.",
    ),
    ("Models changed on different texts", _changed, "Their costs and ρ differ in precision, or in the text."),
    ("Costs of changes of different kinds", _cost, "ρ does not compare, and is left out."),
    ("Depth counted in different units", _counted, "Estimates of it do not compare."),
    ("Depth estimated on different texts", _estimated, "Estimates differ in precision, or in the text."),
    (
        "Gradients taken on different texts",
        _differentiated,
        "A token's share of the loss, and with it its gradient, goes with the number of tokens of a sequence.",
    ),
    (
        "Different tokens of training",
        lambda run: f"{run.training.tokens:,}" if run.training.tokens is not None else None,
        "As they are, the models are not equally trained.",
    ),
    (
        "Trained on different texts",
        lambda run: run.training.text and f"sha256 {run.training.text[:8]}",
        "A difference may be one of the texts.",
    ),
)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
