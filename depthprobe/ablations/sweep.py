"""Evaluate many schedules together: a prefix that several share is run once, and so is a unit that several run on
the same state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.ablations.effects import Reference, state_distance
from depthprobe.ablations.kinds import NOISE
from depthprobe.ablations.later import Later
from depthprobe.ablations.schedule import Schedule, Stage, Unit, unmodified
from depthprobe.ablations.units import Units
from depthprobe.stream import Entry

__all__ = ["Effects", "Trie", "planned_evaluations", "random_vector", "run_batch"]

Step = tuple[Stage, str]  # units and, for several, how they are combined
Effects = dict[str, NDArray[np.float64]]
_WHOLE = ("weights", "branch-sum")  # how stages are combined that are not made of what their units give


@dataclass
class Trie:
    """Schedules by their common prefixes: a node is a state, an edge a stage."""

    children: dict[Step, Trie] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, schedules: Iterable[Schedule]) -> Trie:
        """The trie of some schedules; `ends` hold their indices."""
        root = cls()
        for index, schedule in enumerate(schedules):
            node = root
            for stage in schedule.stages:
                step = (stage, schedule.combine if len(stage) > 1 else "")
                node = node.children.setdefault(step, cls())
            node.ends.append(index)
        return root

    def evaluations(self) -> int:
        """How many unit evaluations a walk takes, from the shape alone."""
        units: set[Unit] = set()
        extra = 0
        for stage, combine in self.children:
            if combine == "weights":
                extra += 1
            elif combine == "branch-sum":
                extra += len(stage)
            else:
                units |= set(stage)
        return len(units) + extra + sum(child.evaluations() for child in self.children.values())

    def fetches(self) -> Counter[int]:
        """Block → how often a walk needs its weights, from the shape alone."""
        units = {unit for stage, combine in self.children if combine not in _WHOLE for unit in stage}
        found = Counter(unit.layer for unit in units)
        for stage, combine in self.children:
            if combine in _WHOLE:
                found.update({unit.layer for unit in stage})
        for child in self.children.values():
            found.update(child.fetches())
        return found


def run_batch(
    units: Units,
    entry: Entry,
    trie: Trie,
    reference: Callable[[Tensor], Reference | None],
    direction: Callable[[int, Tensor], Tensor],
    later: Later | None = None,
) -> tuple[dict[int, Effects], Reference | None]:
    """The effects of every schedule in the trie on one batch.

    The unmodified run comes first: its states are kept, `[L + 1]` of them, and every schedule branches off from them.
    Beside these, memory holds the states along one path of the walk, however many schedules there are.

    Args:
        units: the model.
        entry: the batch.
        trie: the schedules.
        reference: makes the unmodified predictions from the unmodified x_L; returns None without a head.
        direction: a random unit vector a token for a layer, shaped like the state that it is given.
        later: is shown every block that runs where one block before it was skipped and nothing else was changed.

    Returns:
        Schedule index → metric → `[batch]`, and the unmodified predictions, None without a head.
    """
    spine = [entry.x]
    for layer in range(len(units.stream)):
        spine.append(units.unit(entry, Unit(layer), spine[-1]))
    score = reference(spine[-1])
    if later is not None:
        later.spine(spine)
    effects: dict[int, Effects] = {}

    def walk(node: Trie, x: Tensor, on_spine: int | None, skipped: int | None = None, after: int = 0) -> None:
        if node.ends:
            found = {"state_distance": state_distance(x, spine[-1])}
            if score is not None:
                found |= score.compare(x)
            effects.update((index, found) for index in node.ends)
        outputs: dict[Unit, Tensor] = {}
        if on_spine is not None and on_spine + 1 < len(spine):
            outputs[Unit(on_spine)] = spine[on_spine + 1]

        def run(unit: Unit) -> Tensor:
            if unit.part == NOISE:
                return units.stream.inherit(x + random_vector(units, entry, spine, unit.layer, direction), x)
            if unit not in outputs:
                outputs[unit] = units.unit(entry, unit, x)
            return outputs[unit]

        # The longest branch last: by then nothing of this node is needed any more.
        steps = sorted(node.children.items(), key=lambda item: item[1].evaluations())
        for place, ((stage, combine), child) in enumerate(steps):
            z = units.stage(entry, stage, combine, x, run)
            follows = on_spine is not None and stage == (Unit(on_spine),)
            if place == len(steps) - 1:
                outputs.clear()
            # A block that is run next but one was skipped; from there on each block must follow the one before.
            without = on_spine if on_spine is not None and stage == (Unit(on_spine + 1),) else None
            if skipped is not None and stage == (Unit(after),):
                without = skipped
            if without is not None and later is not None:
                later.see(without, stage[0].layer, x, z)
            walk(child, z, on_spine + 1 if follows and on_spine is not None else None, without, stage[0].layer + 1)

    walk(trie, entry.x, 0)
    return effects, score


def random_vector(
    units: Units,
    entry: Entry,
    spine: Sequence[Tensor] | Mapping[int, Tensor],
    layer: int,
    direction: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """A random vector a token of the norm of what merging layer − 1 and layer drops, `[batch, tokens, width]`.

    Args:
        units, entry: the model and the batch.
        spine: l → the unmodified x_l; those of layer − 1 to layer + 1 are read.
        layer: of the merge's second block.
        direction: as in `run_batch`.
    """
    before, here, after = (spine[i].float() for i in (layer - 1, layer, layer + 1))
    blind = units.unit(entry, Unit(layer), spine[layer - 1]).float() - before
    dropped = (after - here) - blind
    vector = direction(layer, dropped) * torch.linalg.vector_norm(dropped, dim=-1, keepdim=True)
    return vector.to(spine[layer].dtype)


def planned_evaluations(schedules: list[Schedule], blocks: int) -> tuple[int, int]:
    """Unit evaluations a batch: what a sweep takes, and what one forward pass a schedule would."""
    shared = Trie.of([unmodified(blocks), *schedules]).evaluations()
    return shared, sum(len(stage) for schedule in schedules for stage in schedule.stages)
