"""Evaluate many schedules with the loop over blocks outside: for weights that have to be fetched.

The walk of `sweep` goes to the end of one schedule before it turns to the next, and comes back to each block as often
as there are schedules. Here all schedules of all batches wait at a block, which is fetched once for all of them. A
block that was just run stays while the next one does, so that two neighbours can be swapped or run beside each other.
What a schedule runs later than that is fetched again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from depthprobe.ablations.effects import Reference, state_distance
from depthprobe.ablations.kinds import NOISE
from depthprobe.ablations.later import Later
from depthprobe.ablations.schedule import Schedule, Stage, Unit, unmodified
from depthprobe.ablations.sweep import Effects, Trie, random_vector
from depthprobe.ablations.units import Units
from depthprobe.stream import Entry

__all__ = ["Plan", "Visit", "Walk", "Work"]

WINDOW = 2  # blocks whose weights are there at once


@dataclass(frozen=True)
class Edge:
    """A stage that leads from one state to another.

    Attributes:
        stage, combine: as in the trie.
        child: the node that it leads to.
        whole: whether it is run as one, not made of what its units give.
        without: the block whose skip alone the state before it went through, for `Later`; None elsewhere.
    """

    stage: Stage
    combine: str
    child: int
    whole: bool
    without: int | None

    @property
    def layers(self) -> frozenset[int]:
        """The blocks whose weights it needs."""
        return frozenset(unit.layer for unit in self.stage)


@dataclass
class Node:
    """A state: what is run on it, the schedules that end there, l where it is the unmodified x_l, whether it stays."""

    edges: list[Edge] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    spine: int | None = None
    stays: bool = False


@dataclass(frozen=True)
class Work:
    """One evaluation.

    Attributes:
        node: on which state.
        what: a unit, or the index of an edge that is run as a whole.
        makes: the edges that are complete with it.
        last: whether nothing else is run on the state.
    """

    node: int
    what: Unit | int
    makes: tuple[int, ...]
    last: bool


@dataclass(frozen=True)
class Visit:
    """A block is fetched, and all is run that can be with what is there."""

    block: int
    works: tuple[Work, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """The order in which blocks are fetched for a set of schedules, told from their trie alone.

    Attributes:
        nodes: the states; the unmodified x_0 … x_L come first.
        visits: what is done, in order.
        window: how many blocks are there at once; more than `WINDOW` where weights of more are averaged.
        waiting: the most states of a batch that there are at once.
    """

    nodes: list[Node]
    visits: list[Visit]
    window: int
    waiting: int

    @classmethod
    def of(cls, schedules: Sequence[Schedule], blocks: int) -> Plan:
        """The plan for these schedules and the unmodified model."""
        nodes = _flat(Trie.of([unmodified(blocks), *schedules]), blocks)
        together = (len(edge.layers) for node in nodes for edge in node.edges if edge.whole)
        window = max([WINDOW, *together])
        visits, waiting = _visits(nodes, window)
        return cls(nodes, visits, window, waiting)

    def fetched(self, sizes: Sequence[int]) -> int:
        """Bytes that it fetches, from those of each block."""
        return sum(sizes[visit.block] for visit in self.visits)


class Walk:
    """One batch on its way through a plan.

    Args:
        units: the model.
        entry: the batch.
        plan: what to run.
        direction: a random unit vector a token for a layer, shaped like the state that it is given.
        later: as in `run_batch`; this batch's own.
    """

    def __init__(
        self,
        units: Units,
        entry: Entry,
        plan: Plan,
        direction: Callable[[int, Tensor], Tensor],
        later: Later | None = None,
    ) -> None:
        self.units, self.entry, self.plan, self.direction, self.later = units, entry, plan, direction, later
        self.states: dict[int, Tensor] = {0: entry.x}
        self.outputs: dict[tuple[int, Unit], Tensor] = {}
        self.spine: dict[int, Tensor] = {0: entry.x}
        if later is not None:
            later.spine(self.spine)

    def visit(self, visit: Visit) -> None:
        """Run all that waits for a block."""
        for work in visit.works:
            self._do(work)
        for layer in [layer for layer in self.spine if layer < visit.block - 1]:
            del self.spine[layer]  # blocks behind it look back no further

    def effects(self, reference: Callable[[Tensor], Reference | None]) -> tuple[dict[int, Effects], Reference | None]:
        """As `run_batch` gives them, once the last block was visited."""
        last = self.states[len(self.units.stream)]
        score = reference(last)
        found: dict[int, Effects] = {}
        for index, node in enumerate(self.plan.nodes):
            if node.ends:
                x = self.states[index]
                effects = {"state_distance": state_distance(x, last)}
                if score is not None:
                    effects |= score.compare(x)
                found.update((end, effects) for end in node.ends)
        return found, score

    def _do(self, work: Work) -> None:
        node, x = self.plan.nodes[work.node], self.states[work.node]
        if isinstance(work.what, Unit):
            self.outputs[work.node, work.what] = self._run(work.what, x)
        for place in work.makes:
            edge = node.edges[place]
            z = self.units.stage(self.entry, edge.stage, edge.combine, x, lambda unit: self.outputs[work.node, unit])
            self.states[edge.child] = z
            layer = self.plan.nodes[edge.child].spine
            if layer is not None:
                self.spine[layer] = z
            if edge.without is not None and self.later is not None:
                self.later.see(edge.without, edge.stage[0].layer, x, z)
        if work.last:
            for key in [key for key in self.outputs if key[0] == work.node]:
                del self.outputs[key]
            if not node.stays:
                del self.states[work.node]

    def _run(self, unit: Unit, x: Tensor) -> Tensor:
        if unit.part != NOISE:
            return self.units.unit(self.entry, unit, x)
        vector = random_vector(self.units, self.entry, self.spine, unit.layer, self.direction)
        return self.units.stream.inherit(x + vector, x)


def _flat(trie: Trie, blocks: int) -> list[Node]:
    """The nodes of a trie of the unmodified model, which is number 0, and others; the unmodified states first."""
    nodes = [Node(spine=layer, stays=layer == blocks) for layer in range(blocks + 1)]
    todo: list[tuple[int, Trie, int | None, int]] = [(0, trie, None, 0)]
    while todo:
        index, branch, skipped, after = todo.pop()
        node = nodes[index]
        node.ends = [end - 1 for end in branch.ends if end > 0]
        node.stays |= bool(node.ends)
        for (stage, combine), child in branch.children.items():
            without = node.spine if node.spine is not None and stage == (Unit(node.spine + 1),) else None
            if skipped is not None and stage == (Unit(after),):
                without = skipped
            if node.spine is not None and stage == (Unit(node.spine),):
                place = node.spine + 1
            else:
                place = len(nodes)
                nodes.append(Node())
            node.edges.append(Edge(stage, combine, place, combine in ("weights", "branch-sum"), without))
            todo.append((place, child, without, stage[0].layer + 1))
    return nodes


def _works(index: int, node: Node) -> Iterator[tuple[frozenset[int], Work]]:
    """What is run on a state, lowest blocks first, and the blocks that each needs; what it makes is told later."""
    plain = [edge for edge in node.edges if not edge.whole]
    units = sorted({unit for edge in plain for unit in edge.stage})
    wholes = [place for place, edge in enumerate(node.edges) if edge.whole]
    found: list[tuple[frozenset[int], Unit | int]] = [(frozenset({unit.layer}), unit) for unit in units]
    found += [(node.edges[place].layers, place) for place in wholes]
    for needs, what in found:
        yield needs, Work(index, what, (what,) if isinstance(what, int) else (), False)


def _visits(nodes: list[Node], window: int) -> tuple[list[Visit], int]:
    """Go up the blocks, again and again until nothing waits; and the most states that there are at once."""
    visits: list[Visit] = []
    waiting = {0: list(_works(0, nodes[0]))}  # node → what has still to be run on it
    done: dict[int, set[Unit]] = {0: set()}
    kept, most = 1, 1
    there: list[int] = []
    while waiting:
        block = _next(waiting, there)
        there = [*there, block][-window:]
        works: list[Work] = []
        todo = sorted(waiting, key=lambda index: (nodes[index].spine != block, index))  # all others look at this one
        while todo:
            index = todo.pop(0)
            node, left = nodes[index], []
            for needs, work in waiting[index]:
                if not needs <= set(there):
                    left.append((needs, work))
                    continue
                makes = work.makes
                if isinstance(work.what, Unit):
                    done[index].add(work.what)
                    makes = tuple(
                        place
                        for place, edge in enumerate(node.edges)
                        if not edge.whole and work.what in edge.stage and done[index].issuperset(edge.stage)
                    )
                works.append(Work(index, work.what, makes, False))
                for child in (node.edges[place].child for place in makes):
                    waiting[child], done[child] = list(_works(child, nodes[child])), set()
                    kept += 1
                    todo.append(child)
                most = max(most, kept + sum(map(len, done.values())))
            waiting[index] = left
            if not left:
                del waiting[index], done[index]
                if works and works[-1].node == index:
                    works[-1] = Work(index, works[-1].what, works[-1].makes, True)
                kept -= not node.stays
        visits.append(Visit(block, tuple(works)))
    return visits, most


def _next(waiting: dict[int, list[tuple[frozenset[int], Work]]], there: Sequence[int]) -> int:
    """The lowest block above the last one that is waited for, or the lowest of all."""
    missing = {block for works in waiting.values() for needs, _ in works for block in needs - set(there)}
    above = [block for block in missing if there and block > there[-1]]
    return min(above or missing)
