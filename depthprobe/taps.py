"""How a block is described: which tensors inside it are its branches, and where they can be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

__all__ = ["Block", "Branch", "Placement", "Tap", "Unit", "first_tensor"]

Placement = Literal["pre", "post", "branch", "sandwich", "none"]
Unit = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Tap:
    """Where a tensor can be read: the input or the output of a module inside a block.

    `overwritten` marks a tensor that the block later changes in place, so that whoever keeps it must copy it.
    """

    module: str
    side: Literal["in", "out"]
    overwritten: bool = False


@dataclass(frozen=True)
class Branch:
    """One sublayer of one block: it turns s into s + u, or into N(s + u).

    Attributes:
        unit: `attention` or `mlp`.
        placement: where its norm sits, concluded from the tensors.
        parallel: it reads the block's input beside the other branch, not the other branch's result.
        update: where u is read; `scale` times that tensor is what is added.
        state: where s is read, None for the block's input; `skip_scale` times that tensor is s.
        norm: the module of a post-LN unit's norm N, None elsewhere.
        gain: the module that the state goes through before the sum, a learned factor for every dimension, None
            elsewhere; `skip_scale` times what it returns is then s.
    """

    unit: Unit
    placement: Placement
    parallel: bool
    update: Tap
    scale: float
    state: Tap | None
    skip_scale: float
    norm: str | None = None
    gain: str | None = None

    def skip(self, block: nn.Module, state: Tensor) -> Tensor:
        """s, what the branch is added to, from the state that was read."""
        if self.gain is not None:
            state = _called(block, self.gain, state)
        return state if self.skip_scale == 1.0 else state * self.skip_scale

    def normed(self, block: nn.Module, total: Tensor) -> Tensor:
        """What the branch writes, from the sum: through the norm after it, if there is one."""
        return total if self.norm is None else _called(block, self.norm, total)


def _called(block: nn.Module, name: str, state: Tensor) -> Tensor:
    """A module inside a block on a state, which stays where it is: accelerate may have put the block elsewhere."""
    found: Tensor = block.get_submodule(name)(state)
    return found.to(state.device)


@dataclass(frozen=True)
class Block:
    """One block: its branches in the order in which they write, empty where they were not found.

    `skip` says whether what it reads is added to what it computes. Without branches that cannot be told from outside,
    and is assumed; whoever builds a chain without skips says False.
    """

    index: int
    kind: str
    branches: tuple[Branch, ...]
    skip: bool = True

    @property
    def scales_stream(self) -> bool:
        """Whether the stream goes through a factor in the block, and no norm after the sum undoes that.

        Neither sublayer can then be run on its own: the factor would be applied by both.
        """
        return any(b.norm is None and (b.gain is not None or b.skip_scale != 1.0) for b in self.branches)

    def branch(self, unit: str) -> Branch | None:
        """The branch of that name, None where there is none."""
        return next((branch for branch in self.branches if branch.unit == unit), None)


def first_tensor(value: Any) -> Tensor | None:
    """The first floating tensor among a module's arguments or results, a keyword `hidden_states` before others."""
    return next((t for t in _flat(value) if t.is_floating_point()), None)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for name in sorted(value, key=lambda name: name != "hidden_states"):
            yield from _flat(value[name])
