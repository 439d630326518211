"""All estimators of effective depth by name, and how they are run one after another on one model and corpus."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from depthprobe.corpus import Corpus
from depthprobe.depth import (
    dependence,
    effects,
    participation,
    path_elasticity,
    path_elasticity_raw,
    path_spectrum,
    published,
    stages,
)
from depthprobe.depth.base import DepthSettings, Estimate, units_of
from depthprobe.depth.effects import Skips, run_skips
from depthprobe.depth.finished import Finished
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.verify import Anatomy

__all__ = ["ESTIMATORS", "Estimator", "Ran", "chosen", "run_estimators", "weight"]


@dataclass(frozen=True)
class Estimator:
    """One function that estimates, under the name that users choose it by.

    Attributes:
        name: of it.
        metrics: name of a row → what it counts and what it misses, a sentence each.
        run: the function.
        skips: it takes the runs without each unit, which it shares with the others that do.
        weight: about how many forward passes it takes of a model with N units, for the time left.
    """

    name: str
    metrics: dict[str, tuple[str, str]]
    run: Callable[..., Estimate]
    weight: Callable[[int], float]
    skips: bool = False


def _published(*names: str) -> dict[str, tuple[str, str]]:
    return {name: (published.DOES[name], published.MISSES[name]) for name in names}


ESTIMATORS: dict[str, Estimator] = {
    made.name: made
    for made in (
        Estimator(
            "stages",
            {"stages": (stages.DOES, stages.MISSES)},
            stages.stages,
            lambda n: 2.0 ** min(n, 11) / 4 if n <= 12 else 8.0 * n,
        ),
        Estimator(
            "dependence",
            {"dependence": (dependence.DOES, dependence.MISSES)},
            dependence.dependence,
            lambda n: 1.2 * n,
        ),
        Estimator("crossing", _published("cosine_crossing"), published.cosine_crossing, lambda _: 1.5),
        Estimator("lens", _published("lens_kl_depth", "lens_overlap_depth"), published.lens_depths, lambda _: 3.0),
        Estimator("score", _published("depth_score"), published.depth_score, lambda n: 1.3 * n, skips=True),
        Estimator(
            "participation",
            {"participation": (participation.DOES, participation.MISSES)},
            participation.participation,
            lambda n: 1.3 * n,
            skips=True,
        ),
        Estimator("effects", {}, effects.effects, lambda n: 1.3 * n, skips=True),
        Estimator(
            "elasticity",
            {"path_elasticity": (path_elasticity.DOES, path_elasticity.MISSES)},
            path_elasticity.path_elasticity,
            lambda _: 12.0,
        ),
        Estimator(
            "raw",
            {"path_elasticity_raw": (path_elasticity_raw.DOES, path_elasticity_raw.MISSES)},
            path_elasticity_raw.path_elasticity_raw,
            lambda _: 6.0,
        ),
        Estimator(
            "spectrum",
            {"path_spectrum": (path_spectrum.DOES, path_spectrum.MISSES)},
            path_spectrum.path_spectrum,
            lambda n: 4.0 + 0.6 * n,
        ),
    )
}


@dataclass(frozen=True, eq=False)
class Ran:
    """What became of one estimator.

    Attributes:
        name: of `ESTIMATORS`.
        estimate: what it found; None if it could not be made.
        reason: why not, empty if it was.
        seconds: that it took, the shared skip runs counted for whoever came first.
    """

    name: str
    estimate: Estimate | None
    reason: str
    seconds: float


def chosen(names: Sequence[str] | None) -> list[str]:
    """The estimators of those names in the order of `ESTIMATORS`; all of them for None.

    Raises:
        UsageError: an unknown name, or none at all.
    """
    if names is None:
        return list(ESTIMATORS)
    if odd := [name for name in names if name not in ESTIMATORS]:
        raise UsageError(f"an estimator {odd[0]!r}", f"some of {', '.join(ESTIMATORS)}")
    if not names:
        raise UsageError("no estimator", f"some of {', '.join(ESTIMATORS)}")
    return [name for name in ESTIMATORS if name in names]


def weight(names: Sequence[str], units: int) -> float:
    """About how many forward passes these take of a model with so many units."""
    total, shared = 0.0, 0.0
    for name in names:
        made = ESTIMATORS[name]
        if made.skips:
            shared = max(shared, made.weight(units))
        else:
            total += made.weight(units)
    return total + shared


def run_estimators(
    anatomy: Anatomy,
    corpus: Corpus,
    names: Sequence[str],
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Callable[[float], None] | None = None,
    finished: Finished | None = None,
    run: str = "model",
) -> list[Ran]:
    """Run these estimators; what one of them refuses is kept as its reason, and the others go on.

    Args:
        anatomy: a verified model.
        corpus: what to run it on.
        names: as `chosen` gives them.
        unit: `block` or `sublayer`.
        settings: seed, skipped positions, batch size, probes.
        progress: called with the share that is done, 0 to 1.
        finished: keeps what is found, and has what an earlier run found.
        run: what this one is called there.

    Raises:
        UsageError: a setting that makes no sense, or sublayers that were not found.
    """
    settings = settings or DepthSettings()
    settings.check(corpus)
    units = len(units_of(anatomy, unit))
    total, before = weight(names, units), 0.0
    shared: Skips | DepthprobeError | None = None
    counted = False  # the runs that several share
    found: list[Ran] = []
    for name in names:
        made, started = ESTIMATORS[name], time.perf_counter()
        mine = 0.0 if made.skips and counted else made.weight(units)
        counted |= made.skips

        def step(done: int, of: int, before: float = before, mine: float = mine) -> None:
            if progress is not None and of:
                progress((before + mine * done / of) / total)

        if finished is not None and (kept := finished.load(run, name)) is not None:
            found.append(Ran(name, kept[0], "", kept[1]))
            before += mine
            continue
        try:
            if made.skips and shared is None:
                try:
                    shared = run_skips(anatomy, corpus, unit, settings, step)
                except DepthprobeError as error:
                    shared = error
            if isinstance(shared, DepthprobeError) and made.skips:
                raise shared
            given = {"skips": shared} if made.skips else {"progress": step}
            estimate = made.run(anatomy, corpus, unit, settings, **given)
            found.append(Ran(name, estimate, "", time.perf_counter() - started))
        except DepthprobeError as error:
            found.append(Ran(name, None, str(error), time.perf_counter() - started))
        if finished is not None and found[-1].estimate is not None:  # what failed may go well another time
            finished.keep(run, name, found[-1].estimate, found[-1].seconds)
        before += mine
    return found
