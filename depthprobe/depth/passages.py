"""A unit as steps on the stream, and what each makes of a cotangent: one part by its skip, one through its branches.

A unit is made of steps z = N(S x + Σ u(x)): S is the skip, N the norm after the sum (post-LN), each of them nothing
where there is none. A block is one step with u = f(x) − x, unless norms or factors stand on its skip: then it is the
steps of its sublayers, and its identity path is theirs, one after the other. Parallel sublayers are one step with two
branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthprobe.depth.base import units_of
from depthprobe.taps import Block, Branch
from depthprobe.verify import Anatomy

__all__ = ["Counted", "Pulled", "RanStep", "RanUnit", "Step", "combine", "counted_units", "leaf_of"]


@dataclass(frozen=True)
class Step:
    """One sum on the stream: of a whole block (no branches), of a sublayer, or of two that are parallel.

    Attributes:
        layer: index of the block.
        branches: what is added; empty for the block as a whole.
        later: it reads what an earlier branch of its block wrote.
        skip: the state is part of the sum.
    """

    layer: int
    branches: tuple[Branch, ...]
    later: bool = False
    skip: bool = True


@dataclass(frozen=True)
class Counted:
    """What counts as one passage: a block or a sublayer; two parallel sublayers, of which a path passes but one.

    Attributes:
        layer: index of the block.
        names: of the units in it: `block`, or `attention` and `mlp`.
        steps: in the order in which they run.
    """

    layer: int
    names: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Pulled:
    """A cotangent carried down through one unit, `[1, tokens, width]` each.

    Attributes:
        identity: what came by the identity path alone.
        through: what came through the unit: one for every name of a `Counted` (one for a block of several steps).
    """

    identity: Tensor
    through: tuple[Tensor, ...]

    @property
    def gone(self) -> Tensor:
        """All that came through the unit's branches."""
        return torch.stack(self.through).sum(dim=0) if len(self.through) > 1 else self.through[0]

    @property
    def total(self) -> Tensor:
        """Jᵀ of the cotangent."""
        return self.identity + self.gone


def counted_units(anatomy: Anatomy, unit: str, skips: Mapping[int, int]) -> tuple[Counted, ...]:
    """The units of a model in the order in which they write.

    Args:
        anatomy: the verified model.
        unit: `block` or `sublayer`.
        skips: block → 1 or 0, whether a block without known branches has a skip; see `paths.block_skips`.

    Raises:
        UsageError: an unknown kind of unit, or sublayers that were not found.
    """
    units_of(anatomy, unit)
    found: list[Counted] = []
    for block in anatomy.blocks:
        steps = _steps(block)
        if unit == "sublayer":
            found += [Counted(block.index, tuple(b.unit for b in step.branches), (step,)) for step in steps]
        elif all(b.norm is None and b.gain is None and b.skip_scale == 1.0 for b in block.branches):
            found.append(
                Counted(block.index, ("block",), (Step(block.index, (), skip=bool(skips.get(block.index, 1))),))
            )
        else:
            found.append(Counted(block.index, ("block",), steps))
    return tuple(found)


def _steps(block: Block) -> tuple[Step, ...]:
    """A block's sublayers: parallel ones together."""
    if any(branch.parallel for branch in block.branches):
        return (Step(block.index, block.branches),)
    return tuple(Step(block.index, (branch,), place > 0) for place, branch in enumerate(block.branches))


class RanUnit:
    """A unit with the graphs of its steps, in the order in which they run."""

    def __init__(self, steps: tuple[RanStep, ...]) -> None:
        self.steps = steps

    def pull(self, cotangent: Tensor, gauge: list[tuple[Tensor, ...]] | None = None) -> Pulled:
        """Carry a cotangent down.

        Args:
            cotangent: at what the unit writes, `[1, tokens, width]`.
            gauge: α of every branch of every step: that much of a branch counts as identity path.
        """
        if len(self.steps) == 1:
            return self.steps[0].pull(cotangent, None if gauge is None else gauge[0])
        total = cotangent
        for step in reversed(self.steps):
            total = step.pull(total).total
        identity = self.identity(cotangent, gauge)
        return Pulled(identity, (total - identity,))

    def identity(self, cotangent: Tensor, gauge: list[tuple[Tensor, ...]] | None = None) -> Tensor:
        """What comes down by the identity path alone."""
        for place, step in reversed(list(enumerate(self.steps))):
            cotangent = step.identity(cotangent, None if gauge is None else gauge[place])
        return cotangent


class RanStep:
    """A step z = N(S x + Σ u) run on a leaf x, and its graphs: of every u, of S where it is no factor, and of N."""

    def __init__(self, x: Tensor, updates: tuple[Tensor, ...], step: Step, module: nn.Module) -> None:
        self.x, self.updates = x, updates
        last = step.branches[-1] if step.branches else None
        self.scale = (1.0 if last is None else last.skip_scale) if step.skip else 0.0
        self.gain: tuple[Tensor, Tensor] | None = None
        if last is not None and last.gain is not None:
            state = leaf_of(x)
            self.gain = state, last.skip(module, state)
        frozen = tuple(update.detach() for update in updates)
        self.norm: tuple[Tensor, Tensor] | None = None
        if last is None or last.norm is None:
            self.z = combine(step, module, x.detach(), frozen)
        else:
            y = leaf_of(_total(step, module, x.detach(), frozen))
            self.norm = y, last.normed(module, y)
            self.z = self.norm[1].detach()

    def pull(self, cotangent: Tensor, alphas: tuple[Tensor, ...] | None = None) -> Pulled:
        """As a unit's; `alphas` is one for every u."""
        inside = self._inside(cotangent)
        identity, through = self._skip(inside), [_vjp(update, self.x, inside) for update in self.updates]
        if alphas is not None:
            identity = identity + sum(alphas) * inside
            through = [part - alpha * inside for part, alpha in zip(through, alphas, strict=True)]
        return Pulled(identity, tuple(through))

    def identity(self, cotangent: Tensor, alphas: tuple[Tensor, ...] | None = None) -> Tensor:
        """As a unit's."""
        inside = self._inside(cotangent)
        return self._skip(inside) if alphas is None else self._skip(inside) + sum(alphas) * inside

    def traces(self, signs: Tensor) -> tuple[Tensor, ...]:
        """tr(∂u/∂x) / width of every u, `[1, tokens, 1]`, from random signs `[probes, 1, tokens, width]`."""
        return tuple(
            torch.stack([(v * _vjp(update, self.x, v)).mean(dim=-1, keepdim=True) for v in signs]).mean(dim=0)
            for update in self.updates
        )

    def _inside(self, cotangent: Tensor) -> Tensor:
        return cotangent if self.norm is None else _vjp(self.norm[1], self.norm[0], cotangent)

    def _skip(self, cotangent: Tensor) -> Tensor:
        if self.gain is not None:
            return _vjp(self.gain[1], self.gain[0], cotangent)
        return cotangent if self.scale == 1.0 else cotangent * self.scale


def _total(step: Step, module: nn.Module, x: Tensor, updates: tuple[Tensor, ...]) -> Tensor:
    """S x + Σ u."""
    if not step.branches:
        return x + updates[0] if step.skip else updates[0]
    total = step.branches[-1].skip(module, x)
    for update in updates:
        total = total + update
    return total


def combine(step: Step, module: nn.Module, x: Tensor, updates: tuple[Tensor, ...]) -> Tensor:
    """N(S x + Σ u), `[1, tokens, width]` as x and every u."""
    total = _total(step, module, x, updates)
    return step.branches[-1].normed(module, total) if step.branches else total


def leaf_of(x: Tensor) -> Tensor:
    """The same values at the end of a graph."""
    return x.detach().requires_grad_()


def _vjp(output: Tensor, leaf: Tensor, cotangent: Tensor) -> Tensor:
    """The cotangent carried from an output to a leaf, 0 where the one does not depend on the other."""
    if not output.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(output, leaf, cotangent, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found
