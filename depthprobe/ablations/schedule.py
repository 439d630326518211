"""Schedules: in which order, and on which input, the units of a model run. Pure data, with a notation.

`0-3 (4+5) 6-11` runs blocks 0 to 3, then 4 and 5 on the same input, then 6 to 11. `4a` and `4m` are the attention and
the MLP of block 4. Units in parentheses form one stage: they read the same state. Stages run one after another.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from depthprobe.errors import UsageError

__all__ = [
    "Combine",
    "Part",
    "Schedule",
    "Unit",
    "attention_first",
    "merge",
    "parallel_sublayers",
    "parse",
    "partition",
    "repeat",
    "reverse",
    "shuffle",
    "skip",
    "swap",
    "unmodified",
]

Combine = Literal["sum", "mean", "branch-sum", "weights"]
Part = Literal["", "a", "m", "~"]  # ~ adds a random vector, a control; it has no notation


@dataclass(frozen=True, order=True)
class Unit:
    """A block, or its attention (`a`) or MLP (`m`)."""

    layer: int
    part: Part = ""

    def __str__(self) -> str:
        return f"{self.layer}{self.part}"


Stage = tuple[Unit, ...]


@dataclass(frozen=True)
class Schedule:
    """Stages that run one after another; the units of a stage read the same state.

    Attributes:
        stages: each a tuple of one or more units.
        combine: what a stage of several units makes of them: `sum` x + Σ F_i(x), `mean` of the outputs,
            `branch-sum` N_last(x + Σ branch_i(x)) for post-LN sublayers, `weights` one block with the mean weights.
        kind: `skip`, `merge`, `swap`, `repeat`, `reverse`, `shuffle`, `control` or `custom`; how the tables call it.
        changed: the layers that the change is about.
        words: what tables call it where it is no schedule (a control).
    """

    stages: tuple[Stage, ...]
    combine: Combine = "sum"
    kind: str = "custom"
    changed: tuple[int, ...] = ()
    words: str = ""

    def __str__(self) -> str:
        """The notation; `parse` reads it back."""
        parts: list[str] = []
        run: list[int] = []
        highest = -1

        def flush() -> None:
            if run:
                parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
                run.clear()

        for stage in self.stages:
            plain = len(stage) == 1 and stage[0].part == ""
            layer = stage[0].layer
            if not plain or (run and layer != run[-1] + 1):
                flush()
            if plain and not run and layer <= highest:
                parts.append(str(layer))  # out of order: shown on its own
            elif plain:
                run.append(layer)
            else:
                text = "+".join(map(str, stage))
                parts.append(text if len(stage) == 1 else f"({text})")
            highest = max(highest, layer)
        flush()
        return " ".join(parts)

    @property
    def label(self) -> str:
        """What stands in tables: the notation, or the words of what is no schedule or has no block left."""
        if self.combine == "weights" and self.merges:
            return f"averaged weights {self}"
        return self.words or str(self) or "no block"

    @property
    def unit(self) -> str:
        """`block`, `attention`, `mlp`, or `sublayer` where both kinds are run on their own."""
        parts = {unit.part for stage in self.stages for unit in stage} & {"a", "m"}
        if not parts:
            return "block"
        if self.kind == "skip" and len(parts) == 1:  # what is left of the block says what is gone
            return "attention" if parts == {"m"} else "mlp"
        merged = {unit.part for stage in self.stages if len(stage) > 1 for unit in stage}
        return {"a": "attention", "m": "mlp"}.get("".join(merged), "sublayer")

    @property
    def merges(self) -> bool:
        """Whether any stage has more than one unit."""
        return any(len(stage) > 1 for stage in self.stages)

    @property
    def needs_branches(self) -> bool:
        """Whether it cannot run without the attention and MLP branches."""
        return (self.combine == "branch-sum" and self.merges) or any(
            u.part in ("a", "m") for stage in self.stages for u in stage
        )

    def check(self, blocks: int) -> Schedule:
        """The schedule itself, if it fits a model of so many blocks.

        Raises:
            UsageError: a layer out of range, or a combination that the stages do not allow.
        """
        for unit in (unit for stage in self.stages for unit in stage):
            if not 0 <= unit.layer < blocks:
                raise UsageError(f"the schedule names block {unit.layer}", f"0 to {blocks - 1}")
        if self.combine not in get_args(Combine):
            raise UsageError(f"combine is {self.combine!r}", ", ".join(get_args(Combine)))
        for stage in self.stages:
            if not stage:
                raise UsageError("a stage of the schedule is empty", "at least one unit in each")
            if len(set(stage)) < len(stage):
                raise UsageError(f"stage ({'+'.join(map(str, stage))}) has a unit twice", "different units in a stage")
            if len({unit.part == "" for unit in stage}) > 1:
                raise UsageError(f"stage ({'+'.join(map(str, stage))}) mixes a block with a sublayer", "one of the two")
            if self.combine == "weights" and len(stage) > 1 and stage[0].part:
                raise UsageError("averaged weights were asked for sublayers", "whole blocks")
        return self


_TOKEN = re.compile(r"(?P<space>\s+)|(?P<number>[0-9]+)|(?P<part>[am])|(?P<sign>[-()+])")


def parse(text: str, combine: Combine = "sum") -> Schedule:
    """Read the notation.

    Args:
        text: such as `0-3 (4+5) 6-11` or `0-3 (4a+5a) (4m+5m) 6-11`; `0-3a` is not allowed, a range has whole blocks.
        combine: how stages of several units are combined.

    Raises:
        UsageError: the message quotes the text and points at the character that was not expected.
    """
    tokens: list[tuple[str, str, int]] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _pointed(text, place, "a block number, a, m, -, +, ( or )")
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match.group(), place))
        place = match.end()
    if not tokens:
        raise UsageError("the schedule is empty", "stages such as 0-3 (4+5) 6-11")
    return Schedule(tuple(_Parser(text, tokens).stages()), combine)


class _Parser:
    def __init__(self, text: str, tokens: list[tuple[str, str, int]]) -> None:
        self.text, self.tokens, self.next = text, [*tokens, ("end", "", len(text))], 0

    def stages(self) -> Iterable[Stage]:
        while self._kind() != "end":
            if self._take("("):
                units = [self._unit()]
                while self._take("+"):
                    start = self._place()
                    if (unit := self._unit()) in units:
                        raise _pointed(self.text, start, "different units in a stage")
                    units.append(unit)
                if not self._take(")"):
                    raise _pointed(self.text, self._place(), "+ or )")
                yield tuple(units)
            else:
                start = self._place()
                first = self._unit()
                if self._take("-"):
                    last = self._unit()
                    if first.part or last.part:
                        raise _pointed(self.text, start, "whole blocks at both ends of a range")
                    if last.layer < first.layer:
                        raise _pointed(self.text, start, "a range that goes up; write falling blocks one by one")
                    yield from ((Unit(layer),) for layer in range(first.layer, last.layer + 1))
                else:
                    yield (first,)

    def _unit(self) -> Unit:
        kind, word, place = self.tokens[self.next]
        if kind != "number" or len(word) > 5:  # a range of billions would fill the memory before it is refused
            raise _pointed(self.text, place, "a block number" + (" below 100000" if kind == "number" else ""))
        self.next += 1
        touching = self._place() == place + len(word)
        part: Part = ""
        if self._kind() == "part" and touching:
            part = "a" if self.tokens[self.next][1] == "a" else "m"
            self.next += 1
        return Unit(int(word), part)

    def _take(self, sign: str) -> bool:
        found = self.tokens[self.next][1] == sign
        self.next += found
        return found

    def _kind(self) -> str:
        return self.tokens[self.next][0]

    def _place(self) -> int:
        return self.tokens[self.next][2]


def _pointed(text: str, place: int, expected: str) -> UsageError:
    found = repr(text[place]) if place < len(text) else "the end"
    near = f"{text[:place][-12:]}▸{text[place:][:12]}"
    return UsageError(f"schedule {text!r}: {found} at character {place + 1}, {near}", expected)


def unmodified(blocks: int) -> Schedule:
    """Every block once, in order."""
    return Schedule(_chain(range(blocks)))


def skip(blocks: int, layers: Iterable[int], part: Part = "") -> Schedule:
    """Without some blocks, or without the attention or MLP of some."""
    gone = _layers(blocks, layers)
    stages: list[Stage] = []
    for layer in range(blocks):
        if layer not in gone:
            stages.append((Unit(layer),))
        elif part:
            stages.append((Unit(layer, "m" if part == "a" else "a"),))
    return Schedule(tuple(stages), kind="skip", changed=tuple(gone))


def merge(blocks: int, layers: Iterable[int], combine: Combine = "sum", part: Part = "") -> Schedule:
    """Some blocks as one stage, at the place of the first; for sublayers, attention and MLP of others stay in order.

    With a `part`, the attentions (or MLPs) of the blocks are merged at the place of the first one, and what is left of
    each block runs where it was.
    """
    chosen = _layers(blocks, layers)
    if not part:
        stages: list[Stage] = [(Unit(layer),) for layer in range(blocks) if layer not in chosen]
        stages.insert(chosen[0], tuple(Unit(layer) for layer in chosen))
        return Schedule(tuple(stages), combine, "merge", tuple(chosen))
    units = [(Unit(layer, p),) for layer in range(blocks) for p in _parts(layer in chosen)]
    stage = tuple(Unit(layer, part) for layer in chosen)
    place = units.index((stage[0],))
    kept = [unit for unit in units if unit[0] not in stage]
    return Schedule((*kept[:place], stage, *kept[place:]), combine, "merge", tuple(chosen))


def _parts(split: bool) -> tuple[Part, ...]:
    return ("a", "m") if split else ("",)


def attention_first(blocks: int, layers: Iterable[int], combine: Combine = "sum") -> Schedule:
    """The attentions of some contiguous blocks on one state, then their MLPs on the next: `(4a+5a) (4m+5m)`."""
    chosen = _layers(blocks, layers)
    if len(chosen) <= chosen[-1] - chosen[0]:
        raise UsageError(f"attention first was asked for blocks {', '.join(map(str, chosen))}", "neighbouring blocks")
    before = [(Unit(layer),) for layer in range(chosen[0])]
    after = [(Unit(layer),) for layer in range(chosen[0], blocks) if layer not in chosen]
    pair = [tuple(Unit(layer, "a") for layer in chosen), tuple(Unit(layer, "m") for layer in chosen)]
    return Schedule((*before, *pair, *after), combine, "merge", tuple(chosen))


def parallel_sublayers(blocks: int, layers: Iterable[int]) -> Schedule:
    """Attention and MLP of some blocks on the same state, as in PaLM: `(4a+4m)`."""
    chosen = _layers(blocks, layers)
    stages = [(Unit(i, "a"), Unit(i, "m")) if i in chosen else (Unit(i),) for i in range(blocks)]
    return Schedule(tuple(stages), kind="custom", changed=tuple(chosen))


def swap(blocks: int, first: int, second: int) -> Schedule:
    """Two blocks in each other's place."""
    _layers(blocks, [first, second])
    order = list(range(blocks))
    order[first], order[second] = order[second], order[first]
    return Schedule(_chain(order), kind="swap", changed=(first, second))


def repeat(blocks: int, layer: int, times: int = 2) -> Schedule:
    """One block several times in a row."""
    _layers(blocks, [layer])
    order = [i for i in range(blocks) for _ in range(times if i == layer else 1)]
    return Schedule(_chain(order), kind="repeat", changed=(layer,))


def reverse(blocks: int, start: int, stop: int) -> Schedule:
    """Blocks `start` to `stop − 1` in falling order."""
    middle = _layers(blocks, range(start, stop))
    order = [*range(start), *reversed(middle), *range(stop, blocks)]
    return Schedule(_chain(order), kind="reverse", changed=tuple(middle))


def shuffle(blocks: int, start: int, stop: int, seed: int) -> Schedule:
    """Blocks `start` to `stop − 1` in a random order, which is never the one that they are in."""
    middle = _layers(blocks, range(start, stop))
    rng, before = random.Random(seed), list(middle)
    while len(middle) > 1 and middle == before:
        rng.shuffle(middle)
    order = [*range(start), *middle, *range(stop, blocks)]
    return Schedule(_chain(order), kind="shuffle", changed=tuple(range(start, stop)))


def partition(stages: Sequence[Sequence[int]], combine: Combine = "sum") -> Schedule:
    """Groups of blocks as stages, in the order given; a block in none of them is dropped."""
    made = tuple(tuple(Unit(layer) for layer in stage) for stage in stages if stage)
    changed = tuple(layer for stage in stages if len(stage) > 1 for layer in stage)
    return Schedule(made, combine, "merge", changed)


def _layers(blocks: int, layers: Iterable[int]) -> list[int]:
    """The layers in rising order, each once.

    Raises:
        UsageError: there is none, or one is out of range.
    """
    chosen = sorted(set(layers))
    if not chosen:
        raise UsageError("a change of no block was asked for", "at least one")
    if odd := [layer for layer in chosen if not 0 <= layer < blocks]:
        raise UsageError(f"block {odd[0]} was asked for", f"0 to {blocks - 1}")
    return chosen


def _chain(order: Iterable[int]) -> tuple[Stage, ...]:
    return tuple((Unit(layer),) for layer in order)
