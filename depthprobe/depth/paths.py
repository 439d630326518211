"""What each unit reads, what it writes, and what its skip lets through: the identity path, at the actual states.

A unit turns the stream x into P x + w: w is what it writes, P its identity path. P is the identity where the branch is
added to the stream (pre, branch, sandwich, none), times the factor that stands on the skip if there is one; in post-LN
it is the norm with its statistics frozen at the actual state, v → γ ⊙ (v − mean v) / σ, and w = P u. A whole post-LN
block has both its norms on the way. Where no branch was found it is told from the block's Jacobian whether there is a
skip at all. The constants β of norms are nobody's contribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from depthprobe.ablations.units import Units
from depthprobe.branches import Reader, Visit
from depthprobe.corpus import Corpus
from depthprobe.depth.base import units_of
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.probes.base import key_rng
from depthprobe.stream import Entry
from depthprobe.taps import Branch
from depthprobe.verify import Anatomy

__all__ = ["Frozen", "Path", "Taken", "Walk", "block_skips"]

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Frozen:
    """A norm as the linear map that it is with its statistics held fixed: v → factor ⊙ (v − mean v).

    Attributes:
        factor: γ / σ, broadcast against `[batch, tokens, width]`.
        centre: the axis of the mean: -1 (LayerNorm), 1 (a norm over positions), None for no mean (RMSNorm).
    """

    factor: Tensor
    centre: int | None

    def __call__(self, v: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same, in float32."""
        return self.factor * _centred(v, self.centre)

    @classmethod
    def of(cls, norm: nn.Module, y: Tensor) -> Frozen:
        """The norm at the state y `[batch, tokens, width]`, found by applying it; its class does not matter.

        Raises:
            UsageError: the norm is not of the form γ ⊙ (y − mean y) / σ + β.
        """
        width, dtype = y.shape[-1], y.dtype

        def apply(v: Tensor) -> Tensor:
            found: Tensor = norm(v.to(dtype))
            return found.float().to(v.device)

        like = y.new_ones((1, 2, width)).float()  # two positions: a norm over positions refuses a single one
        shift = apply(0 * like)[:, :1]
        sign = like.clone()
        sign[..., ::2] = -1
        sign = sign - sign.mean()
        gain = (apply(sign)[:, :1] - shift) / sign[:, :1]  # γ up to a factor, which is taken up below
        flat = apply(like)[:, :1] - shift  # 0 where the mean over the width is taken out
        y32, given = y.float(), apply(y) - shift
        centre = -1 if float(flat.norm()) < 0.5 * float(gain.norm()) else None
        for axis, scale, over in ((centre, gain, -1), (1, torch.ones_like(gain), 1)):
            plain = scale * _centred(y32, axis)
            factor = (given * plain).sum(over, keepdim=True) / plain.square().sum(over, keepdim=True).clamp_min(1e-30)
            error = float((given - factor * plain).norm() / given.norm().clamp_min(1e-30))
            if error <= (3e-2 if dtype in _HALF else 1e-3):
                return cls(factor * scale, axis)
        raise UsageError(
            f"a norm after the sum, {type(norm).__name__}, is not γ ⊙ (y − mean y) / σ + β (error {error:.0e})",
            "LayerNorm, RMSNorm or a norm over positions",
        )


def _centred(v: Tensor, axis: int | None) -> Tensor:
    return v if axis is None else v - v.mean(dim=axis, keepdim=True)


@dataclass(frozen=True, eq=False)
class Path:
    """One unit's way through: one branch of a block, or all of them.

    Attributes:
        module: the block.
        branches: those of the unit in order, each with its frozen norm after the sum, None where there is none.
        skip: 1 or 0, whether a block without known branches has a skip.
        joins: the unit is the second of two that read the same state, so the skip's factor is applied already.
    """

    module: nn.Module
    branches: tuple[tuple[Branch, Frozen | None], ...]
    skip: int = 1
    joins: bool = False

    def carry(self, v: Tensor) -> Tensor:
        """P v: what is left behind the unit of a part v of the stream, float32."""
        if not self.branches:
            return v if self.skip else torch.zeros_like(v)
        return self._through(v, [None] * len(self.branches))

    def written(self, updates: list[Tensor]) -> Tensor:
        """What the unit's branches u `[batch, tokens, width]` leave behind it: w."""
        return self._through(torch.zeros_like(updates[0], dtype=torch.float32), list(updates))

    def _through(self, v: Tensor, updates: list[Tensor] | list[None]) -> Tensor:
        for place, ((branch, norm), u) in enumerate(zip(self.branches, updates, strict=True)):
            if not (branch.parallel and (place > 0 or self.joins)):
                v = branch.skip(self.module, v).float()
            if u is not None:
                v = v + u.float()
            if norm is not None:
                v = norm(v)
        return v


@dataclass(frozen=True, eq=False)
class Taken:
    """An unmodified run on one batch.

    Attributes:
        entry: the batch.
        reads: the state that each unit reads, `[N]` of `[batch, tokens, width]` in the model's dtype.
        writes: what each unit writes, float32.
        paths: each unit's identity path at these states.
        last: x_L.
    """

    entry: Entry
    reads: list[Tensor]
    writes: list[Tensor]
    paths: list[Path]
    last: Tensor


class Walk:
    """The units of one model and what they write on any state. Use as a context: hooks are on the model for that long.

    Args:
        anatomy: a verified model.
        unit: `block` or `sublayer`.
        skips: block → 1 or 0 for blocks without known branches, as `block_skips` gives.
        tick: called after every evaluation of a unit with how many there were.

    Raises:
        UsageError: sublayers were asked for and not found, or stand where they cannot be run alone.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        unit: str,
        skips: dict[int, int] | None = None,
        tick: Callable[[int], None] | None = None,
    ) -> None:
        self.anatomy, self.stream, self.skips = anatomy, anatomy.stream, skips or {}
        self.units = units_of(anatomy, unit)
        self.evaluations, self._tick = 0, tick
        self._runner = Units(anatomy)
        self._reader = Reader(anatomy.stream, anatomy.blocks)
        if unit == "sublayer":
            for block in anatomy.blocks:
                if len(block.branches) > 1 and block.scales_stream:
                    raise UsageError(
                        f"in block {block.index} a skip has a factor, so that no sublayer can be run on its own",
                        "--unit block",
                    )
                if len(block.branches) > 1 and block.branches[1].parallel and block.branches[1].norm:
                    raise UsageError(
                        f"in block {block.index} one norm follows the sum of attention and MLP, which are no units of "
                        "their own then",
                        "--unit block",
                    )

    def __len__(self) -> int:
        return len(self.units)

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def visit(self, entry: Entry, block: int, x: Tensor) -> Visit:
        """A whole block on a state, its branches read; counts as one evaluation."""
        self._count()
        return self._reader.visit(entry, block, x)

    def joins(self, index: int) -> bool:
        """Whether a unit reads the same state as the unit before it, and not that unit's result."""
        unit = self.units[index]
        branches = self.anatomy.blocks[unit.layer].branches
        return (
            unit.part != ""
            and len(branches) > 1
            and index > 0
            and self.units[index - 1].layer == unit.layer
            and (branches[1].parallel)
        )

    def take(self, inputs: Tensor, alone: bool = True) -> Taken:
        """The unmodified run on ids `[batch, tokens]` or states `[batch, tokens, width]`.

        Args:
            inputs: the batch.
            alone: run each sublayer once more on its own for what it writes, so that rounding is that of `write`.

        Raises:
            NonFiniteError: a unit writes values that are not finite.
        """
        entry = self.stream.enter(inputs)
        found = Taken(entry, [], [], [], entry.x)
        x, paths = entry.x, found.paths
        for block, module in zip(self.anatomy.blocks, self.stream.blocks.modules, strict=True):
            visit = self.visit(entry, block.index, x)
            total, pairs, states = x, [], []
            for branch in block.branches:
                states.append(x if branch.parallel else total)
                s, u = visit.branches[branch.unit]
                total = (total if branch.parallel and len(states) > 1 else s) + u
                frozen = None
                if branch.norm is not None:
                    norm = module.get_submodule(branch.norm)
                    frozen, total = Frozen.of(norm, total), branch.normed(module, total)
                pairs.append((branch, frozen))
            if self.units[len(paths)].part:
                found.reads.extend(self.stream.inherit(state, visit.z) if state is not x else x for state in states)
                paths.extend(Path(module, (pair,), joins=place > 0) for place, pair in enumerate(pairs))
            else:
                found.reads.append(x)
                paths.append(Path(module, tuple(pairs), self.skips.get(block.index, 1)))
            found.writes.extend(self.writes(found, block.index, visit))
            x = visit.z
        if alone and self.units[0].part:
            found.writes[:] = [self.write(found, index, read) for index, read in enumerate(found.reads)]
        return Taken(entry, found.reads, found.writes, paths, x)

    def writes(self, taken: Taken, block: int, visit: Visit) -> list[Tensor]:
        """What each unit of a block writes in one visit of it, through the units' frozen identity paths, float32."""
        places = self.places(block)
        paths = [taken.paths[place] for place in places]
        if len(paths) > 1:
            updates = [[visit.branches[path.branches[0][0].unit][1]] for path in paths]
            found = [path.written(some) for path, some in zip(paths, updates, strict=True)]
        elif paths[0].branches:
            found = [paths[0].written([visit.branches[branch.unit][1] for branch, _ in paths[0].branches])]
        else:
            found = [visit.update if paths[0].skip else visit.z.float()]
        for place, w in zip(places, found, strict=True):
            self._check(place, w, visit.z.dtype)
        return found

    def write(self, taken: Taken, index: int, x: Tensor) -> Tensor:
        """What a unit writes when it reads x `[batch, tokens, width]`, through its frozen identity path, float32.

        Raises:
            NonFiniteError: it is not finite; the message names the block.
        """
        unit = self.units[index]
        if not unit.part:
            return self.writes(taken, unit.layer, self.visit(taken.entry, unit.layer, x))[0]
        w = taken.paths[index].written([self.alone(taken, index, x)])
        self._check(index, w, x.dtype)
        return w

    def alone(self, taken: Taken, index: int, x: Tensor) -> Tensor:
        """The branch u of a sublayer that reads x; takes an evaluation of its whole block."""
        self._count()
        return self._runner.sublayer(taken.entry, self.units[index], x)[1]

    def step(self, taken: Taken, index: int, x: Tensor, u: Tensor) -> Tensor:
        """The state after a sublayer that read x and whose branch is u: N(x + u), the norm that of this state."""
        path = taken.paths[index]
        branch = path.branches[0][0]
        total = branch.skip(path.module, x) + u
        return branch.normed(path.module, total)

    def places(self, block: int) -> list[int]:
        """The indices of a block's units."""
        return [place for place, unit in enumerate(self.units) if unit.layer == block]

    def _check(self, index: int, w: Tensor, dtype: torch.dtype) -> None:
        if not bool(torch.isfinite(w).all()):
            wrong = (~torch.isfinite(w).all(dim=-1)).nonzero()[0].tolist()
            unit = self.units[index]
            name = {"": "block", "a": "attention", "m": "mlp"}.get(unit.part, unit.part)
            raise NonFiniteError.in_block(unit.layer, name, str(dtype).removeprefix("torch."), *wrong)

    def _count(self) -> None:
        self.evaluations += 1
        if self._tick is not None:
            self._tick(self.evaluations)


def block_skips(anatomy: Anatomy, corpus: Corpus, seed: int = 0) -> tuple[dict[int, int], list[str]]:
    """Of blocks without known branches: 1 where the block keeps the stream and adds to it, 0 where it replaces it.

    Told by the mean of the Jacobian's diagonal, tr(∂f/∂x) / d: near 1 with a skip, near 0 without. The trace is
    Hutchinson's estimate from one random direction at every token of up to two sequences, by central differences.

    Returns:
        Block → 0 or 1, and a sentence on each of the two.
    """
    unknown = [block.index for block in anatomy.blocks if not block.branches and block.skip]
    found = {block.index: 0 for block in anatomy.blocks if not block.branches and not block.skip}
    if not (unknown or found):
        return {}, []
    stream = anatomy.stream
    inputs = corpus.inputs[:2, :64].to(stream.checkpoint.device)
    dtype = stream.checkpoint.dtype
    with torch.no_grad():
        entry = stream.enter(inputs.to(dtype) if corpus.is_states else inputs)
        for index, x in enumerate(stream.states(entry)):
            if index not in unknown:
                continue  # and so for x_L
            signs = key_rng(seed, 0, (1 << 24) + index).integers(0, 2, x.shape) * 2 - 1
            v = torch.from_numpy(signs.astype(np.float32)).to(x.device)
            reach = (5e-2 if dtype in _HALF else 1e-3) * float(x.float().square().mean().sqrt()) or 1e-3
            ends = [
                stream.run(entry, index, stream.inherit((x.float() + sign * reach * v).to(x.dtype), x)).float()
                for sign in (1, -1)
            ]
            found[index] = int(float(((ends[0] - ends[1]) * v).mean()) / (2 * reach) > 0.5)
    notes = []
    for skip, words in ((1, "taken to add to the stream"), (0, "taken to replace the stream, without a skip")):
        blocks = [index for index, value in found.items() if value == skip]
        if blocks:
            which = "all blocks" if len(blocks) == len(stream) else f"block {', '.join(map(str, blocks))}"
            notes.append(f"No branches were found in {which}: {words}, by the diagonal of the Jacobian.")
    return found, notes
