"""One checkpoint from its name to the report in its folder: what `analyze` does, with one checkpoint or with many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthprobe.commands.existing import finished_report, folder_of
from depthprobe.commands.options import InterruptedRunError, command_line
from depthprobe.commands.unfinished import Unfinished

if TYPE_CHECKING:
    from depthprobe.checkpoint import Checkpoint
    from depthprobe.corpus import Corpus
    from depthprobe.depth.base import DepthSettings
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
        resume: go on after the stages that an unfinished run has kept.
    """

    data: str | None
    preparing: dict[str, Any]
    settings: Settings
    ablations: bool
    ablation_tokens: int
    gradient_tokens: int
    depth_tokens: int
    figures: str
    resume: bool = False

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
    from depthprobe.processes import told
    from depthprobe.progress import say
    from depthprobe.report.files import check_writable

    if keep and (place := target) is not None:
        told(lambda: finished_report(place, asked.options))  # other options are refused before anything is loaded
    say(f"Loading {spec}")
    model, corpus, anatomy = prepare(spec, asked.data, **asked.preparing)
    target = folder_of(model, target)
    if keep and (report := told(lambda: finished_report(target, asked.options, (model, corpus)))) is not None:
        return Outcome(report, target / "report.html", kept=True)
    told(lambda: check_writable(target))
    kept = Unfinished(target)
    if not asked.resume:
        kept.drop()
    begun = kept.load(asked.options, (model, corpus)) if asked.resume else None
    report, done = begun or (None, [])
    if done:
        say(f"Going on after {', '.join(done)}.")
    work = _Work(model, corpus, anatomy, asked)
    try:
        for name, stage in _stages(asked).items():
            if name not in done:
                report = stage(report, work)
                done.append(name)
                kept.keep(report, done, (model, corpus))
        assert report is not None
        page = told(partial(report.save, target, asked.figures))  # type: ignore[arg-type]
    except KeyboardInterrupt:
        if not done:
            raise
        raise InterruptedRunError("interrupted", fix=f"{', '.join(done)} is kept, --resume goes on") from None
    kept.drop()
    return Outcome(report, page)


@dataclass(frozen=True, eq=False)
class _Work:
    """What every stage of an analysis is given."""

    model: Checkpoint
    corpus: Corpus
    anatomy: Anatomy
    asked: Request

    @property
    def settings(self) -> Settings:
        return self.asked.settings

    @property
    def deep(self) -> DepthSettings:
        from depthprobe.depth.base import DepthSettings
        from depthprobe.offload import MEMORY, allowed

        memory = allowed(MEMORY, self.model.offload)
        return DepthSettings(self.settings.seed, self.settings.skip_first, self.settings.batch_size, memory)


def _measured(report: Report | None, work: _Work) -> Report:
    from depthprobe.analysis import build_report
    from depthprobe.measure import measure
    from depthprobe.progress import Bar, say

    settings, anatomy, corpus = work.settings, work.anatomy, work.corpus
    say(f"Verified {len(anatomy.stream)} blocks of {anatomy.stream.blocks.path}. {settings.cost(anatomy, corpus)}")
    with Bar("Measuring", corpus.sequences) as progress:
        measured = measure(anatomy, corpus, settings, progress)
    return build_report(work.model, corpus, anatomy, measured, settings, work.asked.options, command_line())


def _differentiated(report: Report, work: _Work) -> Report:
    from depthprobe.gradient import GradientSettings, gradients_cost, with_gradients
    from depthprobe.progress import Bar, say

    part = work.corpus.spread(work.asked.gradient_tokens)
    slopes = GradientSettings(skip_first=work.settings.skip_first, seed=work.settings.seed)
    if work.model.in_memory:
        say(gradients_cost(part, slopes))
    with Bar("Differentiating", part.sequences) as progress:
        return with_gradients(report, work.anatomy, part, slopes, progress)


def _estimated(report: Report, work: _Work) -> Report:
    from depthprobe.depth.base import QUICK_LEN, shortened
    from depthprobe.effective import PARTS, effective_cost, quick, with_effective
    from depthprobe.progress import Bar, say

    part, blocks = shortened(work.corpus, work.asked.depth_tokens, QUICK_LEN), len(work.anatomy.stream)
    if work.model.in_memory:
        say(effective_cost(part, quick(blocks), blocks))
    with Bar("Estimating depth", PARTS, "parts") as progress:
        return with_effective(report, work.anatomy, part, work.deep, progress)


def _read(report: Report, work: _Work) -> Report:
    from depthprobe.effective import with_phases
    from depthprobe.progress import Bar

    with Bar("Reading", work.corpus.sequences) as progress:
        return with_phases(report, work.anatomy, work.corpus, work.deep, progress)


def _ablated(report: Report, work: _Work) -> Report:
    from depthprobe.ablation import default_schedules, default_sweep, sweep_cost
    from depthprobe.progress import Bar, say

    part, anatomy = work.corpus.spread(work.asked.ablation_tokens), work.anatomy
    schedules = default_schedules(len(anatomy.stream), controls=False, post_ln=anatomy.post_ln)
    total, cost = sweep_cost(anatomy, part, schedules)
    say(f"Ablations: {cost}")
    seed, skip_first = work.settings.seed, work.settings.skip_first
    with Bar("Ablating", total, "block evaluations") as progress:
        swept = default_sweep(anatomy, part, seed, report.layers, report.pairs, progress, skip_first)
    return replace(report, ablations=swept.table, merging=swept.merging)


def _stages(asked: Request) -> dict[str, Callable[[Any, _Work], Report]]:
    """What an analysis is made of, in order."""
    found: dict[str, Callable[[Any, _Work], Report]] = {"the unmodified run": _measured}
    if asked.gradient_tokens:
        found["gradients"] = _differentiated
    if asked.depth_tokens:
        found |= {"effective depth": _estimated, "phases": _read}
    if asked.ablations:
        found["ablations"] = _ablated
    return found
