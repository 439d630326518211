"""A plain, separate count of paths: every unit's Jacobian as a matrix, every path written out.

Nothing of depthprobe's estimators is used. A unit is given by functions of its state, written out from the model's own
modules: what it writes, and what it would write if its branches stood still. Of these the Jacobians are taken whole,
and all products of the two parts are formed, one for every way through the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from by_hand import BY_HAND, ByHand
from torch import Tensor, nn

from depthprobe.lab import LabForCausalLM

__all__ = [
    "Paths",
    "Plain",
    "Sum",
    "block_units",
    "gauged",
    "gradient",
    "jacobian",
    "lab_start",
    "lab_sums",
    "lab_tail",
    "matrices",
    "parallel_units",
    "sublayer_units",
    "tokens_trace",
]

Function = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plain:
    """A unit: `whole` x → z, and `still` (v, x) → z with the branches held at what they wrote at x."""

    whole: Function
    still: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sum:
    """A sublayer's parts: what it adds, the skip, and the norm after the sum."""

    update: Function
    skip: Function
    norm: Function


class Paths:
    """The parts g_k of the gradient at the first state of some sequences, `[k, tokens, width]` each."""

    def __init__(self, skip: int) -> None:
        self.parts: list[Tensor] = []
        self.skip = skip

    def add(self, pairs: Sequence[Pair], cotangent: Tensor) -> None:
        """One sequence: of every unit the first matrix or the second, which counts; all ways, one by one."""
        parts = torch.zeros(len(pairs) + 1, cotangent.numel(), dtype=cotangent.dtype)
        for choice in product((0, 1), repeat=len(pairs)):
            g = cotangent.reshape(-1)
            for pair, chosen in zip(reversed(pairs), reversed(choice), strict=True):
                g = pair[chosen].T @ g
            parts[sum(choice)] += g
        self.parts.append(parts.reshape(len(parts), *cotangent.shape[1:])[:, self.skip :])

    @property
    def elasticity(self) -> float:
        """⟨Σ k g_k, g⟩ / ‖g‖²."""
        weighted = [torch.tensordot(torch.arange(len(one)).to(one), one, 1) for one in self.parts]
        return sum(float((h * one.sum(0)).sum()) for h, one in zip(weighted, self.parts, strict=True)) / self.square

    @property
    def direct_share(self) -> float:
        """⟨g_0, g⟩ / ‖g‖²."""
        return sum(float((one[0] * one.sum(0)).sum()) for one in self.parts) / self.square

    @property
    def square(self) -> float:
        """‖g‖²."""
        return sum(float(one.sum(0).square().sum()) for one in self.parts)

    @property
    def energies(self) -> np.ndarray:
        """‖g_k‖² for every k."""
        return np.sum([one.square().sum(dim=(1, 2)).numpy() for one in self.parts], axis=0)


def jacobian(function: Function, x: Tensor) -> Tensor:
    """`[size, size]`."""
    return torch.autograd.functional.jacobian(function, x).reshape(x.numel(), x.numel())


def matrices(units: Sequence[Plain], x: Tensor) -> tuple[list[Pair], Tensor]:
    """(P, J − P) of every unit, each `[size, size]`, and the last state, from a first state `[1, tokens, width]`."""
    found = []
    for unit in units:
        still = jacobian(lambda v, unit=unit, at=x: unit.still(v, at), x)
        found.append((still, jacobian(unit.whole, x) - still))
        x = unit.whole(x).detach()
    return found, x


def gauged(sums: Sequence[Sum], x: Tensor) -> tuple[list[Pair], Tensor]:
    """The same in the trace gauge, of sublayers."""
    found = []
    for one in sums:
        update, skip = jacobian(one.update, x), jacobian(one.skip, x)
        y = (one.skip(x) + one.update(x)).detach()
        norm, alpha = jacobian(one.norm, y), torch.diag(tokens_trace(update, x).repeat_interleave(x.shape[-1]))
        found.append((norm @ (skip + alpha), norm @ (update - alpha)))
        x = one.norm(y).detach()
    return found, x


def tokens_trace(matrix: Tensor, x: Tensor) -> Tensor:
    """tr / width of the part of a Jacobian `[size, size]` that leads from each token to itself, `[tokens]`."""
    return matrix.diagonal().reshape(x.shape[1:]).mean(dim=-1)


def gradient(tail: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a number by a state."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(tail(leaf), leaf)[0]


def sublayer_units(sums: Sequence[Sum]) -> list[Plain]:
    """Each sublayer a unit."""
    return [
        Plain(
            lambda x, s=s: s.norm(s.skip(x) + s.update(x)),
            lambda v, x, s=s: s.norm(s.skip(v) + s.update(x).detach()),
        )
        for s in sums
    ]


def block_units(sums: Sequence[Sum]) -> list[Plain]:
    """Each two sublayers a unit."""
    units = sublayer_units(sums)
    return [
        Plain(
            lambda x, a=a, m=m: m.whole(a.whole(x)),
            lambda v, x, a=a, m=m: m.still(a.still(v, x), a.whole(x)),
        )
        for a, m in zip(units[::2], units[1::2], strict=True)
    ]


def lab_sums(model: LabForCausalLM) -> list[Sum]:
    """Attention and MLP of every block of a lab model, whatever its placement."""
    found = []
    for block in model.model.blocks:
        for skip, update in (
            (block.attention_skip, lambda x, block=block: block.attend(x, None, None)[0]),
            (block.mlp_skip, lambda x, block=block: block.think(x)),
        ):
            found.append(Sum(update, _factor(skip), skip.norm_after or nn.Identity()))
    return found


def _factor(skip: Any) -> Function:
    return lambda x: skip.alpha * (x if skip.gain is None else skip.gain.weight * x)


def lab_start(model: LabForCausalLM, ids: Tensor) -> Tensor:
    """x_0 of one sequence."""
    with torch.no_grad():
        return model.model.token_embedding(ids[None]) + model.model.position_embedding.weight[: len(ids)]


def lab_tail(model: LabForCausalLM, ids: Tensor, signs: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The loss of one sequence from its last state."""

    def loss(x: Tensor) -> Tensor:
        logits = model.lm_head(x if model.model.final_norm is None else model.model.final_norm(x))
        each = -logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return (each if signs is None else each * signs).mean()

    return loss


def parallel_units(model: nn.Module, name: str, ids: Tensor) -> tuple[list[Plain], list[Tensor]]:
    """Blocks whose attention and MLP read the same state: a path passes the one, the other, or neither; x_0."""
    by_hand = ByHand(model, BY_HAND[name], ids[None])
    starts: list[Tensor] = []
    handle = by_hand.blocks[0].register_forward_pre_hook(lambda _, args: starts.append(args[0]))
    with torch.no_grad():
        by_hand._forward()
    handle.remove()
    units = []
    hand = by_hand.hand
    for block, call in zip(by_hand.blocks, by_hand.calls, strict=True):

        def whole(x: Tensor, block: nn.Module = block, call: Any = call) -> Tensor:
            return x + hand.attention(block, x, call) + hand.mlp(block, x, call)

        units.append(Plain(whole, lambda v, x, whole=whole: v + (whole(x) - x).detach()))
    return units, starts
