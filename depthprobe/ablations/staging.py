"""How few stages does a model need? Merge neighbours or drop blocks, cheapest first, and see what each count costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.ablations.run import SweepSettings, Swept, sweep
from depthprobe.ablations.schedule import Combine, Schedule, Stage, Unit
from depthprobe.corpus import Corpus, halves
from depthprobe.errors import UsageError
from depthprobe.estimate import Interval, Resampler
from depthprobe.verify import Anatomy

__all__ = ["KAPPAS", "Point", "Staging", "find_stages", "stages_at"]

KAPPAS = (0.01, 0.03, 0.1)
EXHAUSTIVE = 12  # blocks up to which every contiguous partition is tried: 2^11 schedules
DROPPING = 7  # blocks up to which that is done for every choice of blocks to keep: (3^7 - 1) / 2 schedules
CANDIDATES = 6  # changes that a greedy step tries again, cheapest at the last count first
POST_LN = ("branch-sum", "attention-first")  # a sum of post-LN blocks keeps each one's norm as part of its update
Groups = tuple[tuple[int, ...], ...]
Best = dict[int, tuple[float, Groups]]  # stages → the cheapest grouping and its cost
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Point:
    """The best schedule found with so many stages, and what it costs on the half that did not choose it.

    Attributes:
        stages: sequential steps.
        schedule: the notation; empty for no stage at all.
        relative_kl: KL(unchanged ‖ changed) / KL(unchanged ‖ unigram).
        kl, delta_loss: nats per token.
        top1_agreement: share of positions.
    """

    stages: int
    schedule: str
    relative_kl: Interval
    kl: Interval
    delta_loss: Interval
    top1_agreement: Interval


@dataclass(frozen=True)
class Staging:
    """The curve of stages against cost.

    Attributes:
        units: N, the number of blocks, or of sublayers.
        points: from N stages down.
        combine: how stages of several blocks are combined.
        searched: how the schedules were chosen, in words.
        unigram_kl: KL(unchanged ‖ the corpus's unigram), nats per token: what relative KL is relative to.
        sequences: how many scored.
        depth: κ → D(κ), the fewest stages with relative KL ≤ κ, interpolated between counts; without an interval where
            it is a bound only (`at_most`). A low end at the last count of a search that stopped early is a bound too.
        evaluations: block evaluations of the whole search.
    """

    units: int
    points: tuple[Point, ...]
    combine: str
    searched: str
    unigram_kl: float
    sequences: int
    depth: dict[float, Interval]
    evaluations: int

    def at_most(self, kappa: float) -> bool:
        """Whether D(κ) is a bound only: the search stopped at two stages or more, and so few are within κ already."""
        return 0 < self.points[-1].stages == self.depth[kappa].value


def find_stages(
    anatomy: Anatomy,
    corpus: Corpus,
    *,
    combine: str = "auto",
    limit: int = 1,
    settings: SweepSettings | None = None,
    progress: Progress | None = None,
    units: tuple[Unit, ...] | None = None,
    kappas: tuple[float, ...] = KAPPAS,
) -> Staging:
    """Merge and drop down to `limit` stages; choose on one half of the sequences, score on the other (`corpus.halves`).

    Up to 12 blocks, every partition into contiguous stages is tried as well, up to 7 with any of the blocks dropped.
    The greedy search starts from the whole model; each step merges two neighbouring stages or drops a block, whichever
    costs least. Its first step tries all changes, a later one those that are new or were cheapest when last tried.

    A document is in one half alone. The curve ends with no block at all where the search went down to one stage. Where
    it stopped before that and so few stages are within κ already, D(κ) is only known to be `limit` at most.

    Args:
        anatomy: a verified model with a next-token head.
        corpus: at least two sequences.
        combine: what a stage of several blocks does: `sum`, `mean`; `attention-first`, all attentions and then all
            MLPs, each summed; `branch-sum`, the same with one norm over the sum of the branches, for post-LN; `auto` is
            `sum`, and for post-LN the better of the last two, told by the half that chooses.
        limit: fewest stages.
        settings: how sweeps are run.
        progress: called with (stages done with, stages in all).
        units: what is merged and dropped, in order: the blocks, or the attention and MLP of each. Of sublayers `auto`
            is `sum`, and for post-LN the better of that and `branch-sum`.
        kappas: where the curve is read.

    Raises:
        UsageError: no head to measure KL with, fewer than two sequences, a limit out of range.
    """
    units = units or tuple(Unit(block) for block in range(len(anatomy.stream)))
    whole = _unmerged(anatomy, units)
    parts, blocks = units[0].part != "", len(whole)
    if anatomy.objective != "causal" or not anatomy.reads_positions_apart:
        raise UsageError("stages are counted by KL, and this model has no next-token head", "a causal language model")
    if corpus.sequences < 2:
        raise UsageError("one half of the sequences chooses and the other scores; there is one", "at least 2 sequences")
    if not 0 <= limit <= blocks:
        raise UsageError(f"--limit {limit}", f"0 to {blocks}")
    if combine not in ("auto", "sum", "mean", *POST_LN):
        raise UsageError(f"--combine {combine}", f"auto, sum, mean, {', '.join(POST_LN)}")
    if parts and combine == "attention-first":
        raise UsageError("--combine attention-first was asked for stages of sublayers", "auto, sum, mean or branch-sum")
    settings = settings or SweepSettings()
    first = halves(corpus)
    choose, score = corpus.take(first), corpus.take(~first)
    named = "sublayer" if parts else "block"
    searched = f"greedy: merge two neighbouring stages or drop a {named}, whichever costs least"
    if len(units) <= EXHAUSTIVE:
        searched += ", and every partition into contiguous stages"
        searched += f" of every choice of {named}s" if len(units) <= DROPPING else ""
    best_of = (POST_LN[0], "sum") if parts else POST_LN
    ways = (combine,) if combine != "auto" else best_of if anatomy.post_ln else ("sum",)
    steps, evaluations = blocks - limit + 1, 0
    tried: dict[str, Best] = {}
    for place, way in enumerate(ways):
        search = _Search(anatomy, choose, way, settings, units, whole)

        def step(done: int, place: int = place) -> None:
            if progress is not None:
                progress(place * steps + done, len(ways) * steps)

        tried[way] = search.down_to(limit, step)
        evaluations += search.evaluations
    combine = min(tried, key=lambda way: float(np.mean([cost for cost, _ in tried[way].values()])))
    if len(ways) > 1:
        searched += f"; the better of {' and '.join(ways)} was {combine}"
    best = tried[combine]
    if limit <= 1:
        best[0] = (np.inf, ())  # no block at all: where the curve ends
    chosen = [best[count][1] for count in sorted(best, reverse=True)]
    unigram = _unigram(anatomy, corpus)
    schedules = [_schedule(groups, combine, units) for groups in chosen]
    swept = sweep(anatomy, score, schedules, settings, unigram=unigram)
    if progress is not None:
        progress(len(ways) * steps, len(ways) * steps)
    total = evaluations + swept.evaluations
    found, depth = _summary(score, chosen, swept, settings.seed, kappas)
    relative_to = float(np.mean(swept.unigram_kl))  # type: ignore[arg-type]
    return Staging(len(units), found, combine, searched, relative_to, score.sequences, depth, total)


def stages_at(kappa: float, counts: NDArray[np.float64], relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """D(κ) of each row: the fewest stages with a relative KL of at most κ, interpolated linearly between counts.

    Args:
        kappa: share of the unigram's KL.
        counts: stage counts in rising order, `[M]`.
        relative: relative KL at each, `[R, M]`; made non-increasing, since fewer stages that cost less serve as well.
    """
    fewest = np.minimum.accumulate(relative, axis=1)
    found = np.empty(len(relative))
    for row, values in enumerate(fewest):
        place = int(np.argmax(values <= kappa)) if bool((values <= kappa).any()) else len(values) - 1
        found[row] = counts[place]
        if place > 0 and values[place - 1] > kappa >= values[place]:
            part = (values[place - 1] - kappa) / (values[place - 1] - values[place])
            found[row] = counts[place - 1] + part * (counts[place] - counts[place - 1])
    return found


class _Search:
    """Costs of groupings on the half that chooses."""

    def __init__(
        self,
        anatomy: Anatomy,
        corpus: Corpus,
        combine: str,
        settings: SweepSettings,
        units: tuple[Unit, ...],
        whole: Groups,
    ) -> None:
        self.anatomy, self.corpus, self.combine, self.settings = anatomy, corpus, combine, settings
        self.units, self.whole = units, whole
        self.evaluations = 0

    def down_to(self, limit: int, step: Callable[[int], None]) -> Best:
        """The cheapest grouping found for every count from that of the whole model to `limit` stages."""
        blocks = len(self.whole)
        best: Best = {blocks: (0.0, self.whole)}

        def offer(groups: Groups, cost: float) -> None:
            if len(groups) not in best or cost < best[len(groups)][0]:
                best[len(groups)] = (cost, groups)

        for count, cost, groups in self.greedy(self.whole, limit):
            offer(groups, cost)
            step(blocks - count)
        if len(self.units) <= EXHAUSTIVE:
            every = [groups for groups in _partitions(len(self.units)) if limit <= len(groups) < blocks]
            for groups, cost in zip(every, self.costs(every), strict=True):
                offer(groups, cost)
        return best

    def costs(self, candidates: list[Groups]) -> list[float]:
        """Mean KL of each."""
        if not candidates:
            return []
        schedules = [_schedule(groups, self.combine, self.units) for groups in candidates]
        swept = sweep(self.anatomy, self.corpus, schedules, self.settings)
        self.evaluations += swept.evaluations
        return [float(value) for value in swept.effects["kl"].mean(axis=0)]

    def greedy(self, groups: Groups, limit: int) -> Iterator[tuple[int, float, Groups]]:
        """The cheapest way down found so far: (stages, cost, groups) after every step."""
        last: dict[tuple[str, tuple[int, ...]], float] = {}
        while len(groups) > limit:
            changes = _changes(groups)
            if not changes:  # one stage of several blocks
                return
            # A change's price moves little from step to step; one that was dear stays out of the next trial.
            known = sorted((key for key in changes if key in last), key=last.__getitem__)
            tried = [key for key in changes if key not in last] + known[:CANDIDATES]
            costs = self.costs([changes[key] for key in tried])
            last = {key: value for key, value in last.items() if key in changes}
            last.update(zip(tried, costs, strict=True))
            price, key = min(zip(costs, tried, strict=True))
            groups = changes[key]
            yield len(groups), price, groups


def _changes(groups: Groups) -> dict[tuple[str, tuple[int, ...]], Groups]:
    """Ways to have one stage less, by what they do: merge two, drop a lone block, drop one of several and merge on."""
    found: dict[tuple[str, tuple[int, ...]], Groups] = {}
    for place, stage in enumerate(groups):
        if place + 1 < len(groups):
            joined = stage + groups[place + 1]
            found["merge", joined] = (*groups[:place], joined, *groups[place + 2 :])
        if len(stage) == 1:
            found["drop", stage] = (*groups[:place], *groups[place + 1 :])
        else:
            # A block of a merged stage goes together with the join of its neighbours, or the count would not fall.
            for block in stage:
                rest = tuple(b for b in stage if b != block)
                if place + 1 < len(groups):
                    joined = rest + groups[place + 1]
                    found["drop and merge", (block, *joined)] = (*groups[:place], joined, *groups[place + 2 :])
    return found


def _partitions(blocks: int) -> Iterator[Groups]:
    """Every split of the blocks into contiguous stages; of few blocks, also with any of them dropped."""
    for size in range(1 if blocks <= DROPPING else blocks, blocks + 1):
        for kept in combinations(range(blocks), size):
            for cuts in range(1 << (size - 1)):
                groups = [[kept[0]]]
                for place, block in enumerate(kept[1:]):
                    if cuts >> place & 1:
                        groups.append([block])
                    else:
                        groups[-1].append(block)
                yield tuple(map(tuple, groups))


def _unmerged(anatomy: Anatomy, units: tuple[Unit, ...]) -> Groups:
    """The model as it is: a stage for every unit, one for two sublayers that read the same state."""
    groups: list[tuple[int, ...]] = []
    for place, unit in enumerate(units):
        branches = anatomy.blocks[unit.layer].branches
        if unit.part and place and units[place - 1].layer == unit.layer and branches[-1].parallel:
            groups[-1] = (*groups[-1], place)
        else:
            groups.append((place,))
    return tuple(groups)


def _schedule(groups: Groups, combine: str, units: tuple[Unit, ...]) -> Schedule:
    """The schedule of groups of units, told by their places."""
    changed = tuple(units[place].layer for stage in groups if len(stage) > 1 for place in stage)
    stages: list[Stage] = []
    for group in groups:
        stage = tuple(units[place] for place in group)
        if len(stage) > 1 and combine in POST_LN and not stage[0].part:
            stages += [tuple(Unit(unit.layer, "a") for unit in stage), tuple(Unit(unit.layer, "m") for unit in stage)]
        else:
            stages.append(stage)
    way: Combine = "branch-sum" if combine == "branch-sum" else "mean" if combine == "mean" else "sum"
    return Schedule(tuple(stages), way, "merge", changed)


def _unigram(anatomy: Anatomy, corpus: Corpus) -> Tensor:
    """Log-probabilities of the corpus's own unigram, each id of the head's vocabulary counted once more than it is."""
    stream = anatomy.stream
    with torch.no_grad():
        entry = stream.enter(corpus.inputs[:1, :2].to(stream.checkpoint.device))
        vocabulary = stream.readout(entry.x, entry.inputs).shape[-1]
    counts = torch.bincount(corpus.inputs.flatten(), minlength=vocabulary).double() + 1
    return (counts / counts.sum()).log().float().to(stream.checkpoint.device)


def _summary(
    corpus: Corpus, chosen: list[Groups], swept: Swept, seed: int, kappas: tuple[float, ...]
) -> tuple[tuple[Point, ...], dict[float, Interval]]:
    """The points of the curve, and D at each κ, with intervals over the sequences that scored."""
    assert swept.unigram_kl is not None
    resampler = Resampler(corpus.sequences, corpus.documents, seed)
    unigram = swept.unigram_kl[:, None]
    names = ("kl", "delta_loss", "top1_agreement")
    points = []
    for place, groups in enumerate(chosen):
        both = np.hstack([swept.effects["kl"][:, [place]], unigram])
        relative = resampler.function(both, lambda m: m[:, 0] / m[:, 1])
        rest = [resampler.function(swept.effects[name][:, [place]], lambda m: m[:, 0]) for name in names]
        points.append(Point(len(groups), str(swept.schedules[place]), relative, *rest))
    rising = np.argsort([point.stages for point in points])
    counts = np.array([points[i].stages for i in rising], dtype=np.float64)
    columns = np.hstack([swept.effects["kl"][:, rising], unigram])
    depth = {}
    for kappa in kappas:
        depth[kappa] = resampler.function(
            columns,
            lambda m, kappa=kappa: stages_at(kappa, counts, m[:, :-1] / m[:, -1:]),  # type: ignore[misc]
        )
        if 0 < counts[0] == depth[kappa].value:  # nothing below was tried: only a bound is known
            depth[kappa] = Interval(depth[kappa].value, np.nan, np.nan)
    return tuple(points), depth
