"""One checkpoint from its name to the report in its folder: what `analyze` does, with one checkpoint or with many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthprobe.commands.existing import finished_report
from depthprobe.commands.options import command_line

if TYPE_CHECKING:
    from depthprobe.checkpoint import Checkpoint
    from depthprobe.corpus import Corpus
    from depthprobe.measure import Settings
    from depthprobe.report import Report
    from depthprobe.verify import Anatomy

__all__ = ["Outcome", "Request", "analyze_one"]


@dataclass(frozen=True, eq=False)
class Request:
    """What `analyze` was asked for, but for the checkpoint and the folder.

    Attributes:
        data: the text, as on the command line.
        preparing: what `prepare` takes besides, of which tokens, seq_len, bos and text_field stand in the report.
        settings: of the unmodified run.
        ablations: whether blocks are skipped, merged and swapped.
        ablation_tokens: on how many tokens.
        gradient_tokens: on how many tokens gradients are taken.
        depth_tokens: on how many tokens effective depth is estimated.
        figures: png or svg.
    """

    data: str | None
    preparing: dict[str, Any]
    settings: Settings
    ablations: bool
    ablation_tokens: int
    gradient_tokens: int
    depth_tokens: int
    figures: str

    @property
    def options(self) -> dict[str, Any]:
        """As they stand in the report."""
        text = {name: self.preparing[name] for name in ("tokens", "seq_len", "bos", "text_field")}
        names = ("ablations", "ablation_tokens", "gradient_tokens", "depth_tokens")
        return text | vars(self.settings) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Outcome:
    """A report, the path of its page, and whether it was there already."""

    report: Report
    page: Path
    kept: bool = False


def analyze_one(spec: str, asked: Request, target: Path | None, keep: bool = False) -> Outcome:
    """Open a checkpoint, measure it, and write its report.

    Args:
        spec: the checkpoint.
        asked: what to measure, and on what.
        target: the folder of the report; None for reports/<model>.
        keep: take the report that is in `target`, if it is of the same weights, text and options, and overwrite none.

    Raises:
        OutputError: the report cannot be written, or there is another one that is to be kept.
        DepthprobeError: the checkpoint or the text cannot be used.
    """
    from depthprobe.prepare import prepare
    from depthprobe.progress import say
    from depthprobe.report.files import check_writable

    if keep and target is not None:
        finished_report(target, asked.options)  # other options are refused before anything is loaded
    say(f"Loading {spec}")
    model, corpus, anatomy = prepare(spec, asked.data, **asked.preparing)
    target = target or Path("reports") / model.name
    if keep and (report := finished_report(target, asked.options, (model, corpus))) is not None:
        return Outcome(report, target / "report.html", kept=True)
    check_writable(target)
    report = _measured(model, corpus, anatomy, asked)
    return Outcome(report, report.save(target, asked.figures))  # type: ignore[arg-type]


def _measured(model: Checkpoint, corpus: Corpus, anatomy: Anatomy, asked: Request) -> Report:
    """The report, with a bar for every stage."""
    from depthprobe.ablation import default_schedules, default_sweep, sweep_cost
    from depthprobe.analysis import build_report
    from depthprobe.depth.base import DepthSettings
    from depthprobe.effective import PARTS, QUICK_LEN, effective_cost, quick, shortened, with_effective, with_phases
    from depthprobe.gradient import GradientSettings, gradients_cost, with_gradients
    from depthprobe.measure import measure
    from depthprobe.progress import Bar, say

    settings = asked.settings
    seed, skip_first, blocks = settings.seed, settings.skip_first, len(anatomy.stream)
    say(f"Verified {blocks} blocks of {anatomy.stream.blocks.path}. {settings.cost(anatomy, corpus)}")
    with Bar("Measuring", corpus.sequences) as progress:
        measured = measure(anatomy, corpus, settings, progress)
    report = build_report(model, corpus, anatomy, measured, settings, asked.options, command_line())
    if asked.gradient_tokens:
        part, slopes = corpus.spread(asked.gradient_tokens), GradientSettings(skip_first=skip_first, seed=seed)
        if model.in_memory:
            say(gradients_cost(part, slopes))
        with Bar("Differentiating", part.sequences) as progress:
            report = with_gradients(report, anatomy, part, slopes, progress)
    if asked.depth_tokens:
        part, deep = (
            shortened(corpus, asked.depth_tokens, QUICK_LEN),
            DepthSettings(seed, skip_first, settings.batch_size),
        )
        if model.in_memory:
            say(effective_cost(part, quick(blocks), blocks))
        with Bar("Estimating depth", PARTS, "parts") as progress:
            report = with_effective(report, anatomy, part, deep, progress)
        with Bar("Reading", corpus.sequences) as progress:
            report = with_phases(report, anatomy, corpus, deep, progress)
    if not asked.ablations:
        return report
    part = corpus.spread(asked.ablation_tokens)
    total, cost = sweep_cost(anatomy, part, default_schedules(blocks, controls=False, post_ln=anatomy.post_ln))
    say(f"Ablations: {cost}")
    with Bar("Ablating", total, "block evaluations") as progress:
        swept = default_sweep(anatomy, part, seed, report.layers, report.pairs, progress, skip_first)
    return replace(report, ablations=swept.table, merging=swept.merging)
