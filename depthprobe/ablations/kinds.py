"""Which schedules a sweep is made of: by kind, and the controls that a merge is judged against."""

from __future__ import annotations

from depthprobe.ablations.schedule import (
    Combine,
    Part,
    Schedule,
    Unit,
    attention_first,
    merge,
    parallel_sublayers,
    repeat,
    reverse,
    shuffle,
    skip,
    swap,
)
from depthprobe.errors import UsageError

__all__ = ["DEFAULT_KINDS", "KINDS", "NOISE", "controls", "schedules"]

KINDS = ("skip", "merge", "swap", "repeat", "reverse", "shuffle", "attention-first", "parallel")
DEFAULT_KINDS = ("skip", "merge", "swap")
NOISE: Part = "~"
_PARTS: dict[str, Part] = {"block": "", "attention": "a", "mlp": "m"}


def schedules(
    blocks: int,
    kinds: tuple[str, ...] = DEFAULT_KINDS,
    unit: str = "block",
    span: int = 2,
    combine: Combine = "sum",
    seed: int = 0,
) -> list[Schedule]:
    """All schedules of some kinds, one for every place that they can stand in.

    Args:
        blocks: L.
        kinds: of `KINDS`. Spans of `span` blocks are merged, reversed and shuffled; one is skipped, repeated or run in
            parallel; two neighbours are swapped.
        unit: `block`, `attention` or `mlp`; sublayers can be skipped and merged.
        span: how many neighbouring units a merge joins.
        combine: how a merge combines them.
        seed: of the shuffles.

    Raises:
        UsageError: an unknown kind or unit, a span that is too short or too long, a kind that needs whole blocks.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"kind {unknown[0]!r}", ", ".join(KINDS))
    if unit not in _PARTS:
        raise UsageError(f"--unit {unit}", ", ".join(_PARTS))
    if not 2 <= span <= max(2, blocks):
        raise UsageError(f"--span {span}", f"2 to {blocks}, the number of blocks")
    part = _PARTS[unit]
    if part and (whole := [kind for kind in kinds if kind not in ("skip", "merge")]):
        raise UsageError(f"{whole[0]} was asked for --unit {unit}", "skip or merge", "use --unit block")
    places = range(blocks - span + 1)
    made: list[Schedule] = []
    for kind in kinds:
        if kind == "skip":
            made += [skip(blocks, [i], part) for i in range(blocks)]
        elif kind == "merge":
            made += [merge(blocks, range(i, i + span), combine, part) for i in places]
        elif kind == "swap":
            made += [swap(blocks, i, i + 1) for i in range(blocks - 1)]
        elif kind == "repeat":
            made += [repeat(blocks, i) for i in range(blocks)]
        elif kind == "reverse":
            made += [reverse(blocks, i, i + span) for i in places]
        elif kind == "shuffle":
            made += [shuffle(blocks, i, i + span, seed + i) for i in places]
        elif kind == "attention-first":
            made += [attention_first(blocks, range(i, i + span), combine) for i in places]
        else:
            made += [parallel_sublayers(blocks, [i]) for i in range(blocks)]
    return made


def controls(blocks: int, noise: bool = True) -> list[Schedule]:
    """What an adjacent merge is judged against: skip one, skip both, swap, a merge of blocks that are no neighbours,
    and a random vector of the norm of what the merge drops."""
    made = [skip(blocks, [i]) for i in range(blocks)]
    made += [skip(blocks, [i, i + 1]) for i in range(blocks - 1)]
    made += [swap(blocks, i, i + 1) for i in range(blocks - 1)]
    made += [_apart(blocks, i) for i in range(blocks - 2)]
    if noise:
        made += [_noise(blocks, i) for i in range(blocks - 1)]
    return made


def _apart(blocks: int, i: int) -> Schedule:
    """Blocks i and i + 2 as one stage, with i + 1 after them."""
    found = merge(blocks, [i, i + 2])
    return Schedule(found.stages, found.combine, "control", found.changed)


def _noise(blocks: int, i: int) -> Schedule:
    """The unmodified model with a random vector added to x_{i+2}, of the norm of F_{i+1}(x_{i+1}) − F_{i+1}(x_i)."""
    stages = [(Unit(layer),) for layer in range(blocks)]
    stages.insert(i + 2, (Unit(i + 1, NOISE),))
    words = f"random vector after {i},{i + 1}"
    return Schedule(tuple(stages), kind="control", changed=(i, i + 1), words=words)
