"""Run a model's units one by one, backwards with their graphs and forwards with a tangent.

A sequence is run one at a time, so that no batch size can change a number. A unit's graph lives only while the unit is
looked at: what is kept is the states between units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Self

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthprobe.ablations.schedule import Part, Unit
from depthprobe.ablations.units import Units
from depthprobe.branches import Reader
from depthprobe.corpus import Corpus
from depthprobe.cotangents import Cotangents
from depthprobe.depth.base import DepthSettings, refuse_carried
from depthprobe.depth.passages import RanStep, RanUnit, Step, combine, counted_units, leaf_of
from depthprobe.depth.paths import block_skips
from depthprobe.errors import GradientError, NonFiniteError, UsageError, VerificationError
from depthprobe.probes.base import key_rng
from depthprobe.probes.gradients import differentiable, explained
from depthprobe.stream import Entry
from depthprobe.verify import Anatomy, worst

__all__ = ["Jacobians", "Tape", "dot"]

TOLERANCE = 1e-3  # between a step that is run alone and the block's own run, ‖a − b‖ / ‖b‖
_SIGNS, _PROBES = 1 << 25, 1 << 26  # keys of random draws


@dataclass(frozen=True, eq=False)
class Tape:
    """One sequence that was run forward.

    Attributes:
        row: its index in the corpus.
        entry: the batch of one sequence.
        states: what every step reads, and x_L at the end, each `[1, tokens, width]`.
        cotangent: the gradient at x_L, the same shape.
    """

    row: int
    entry: Entry
    states: tuple[Tensor, ...]
    cotangent: Tensor


def dot(a: Tensor, b: Tensor, skip: int) -> float:
    """⟨a, b⟩ over tokens and width, the first `skip` tokens left out, summed in float64."""
    a, b = (t[:, skip:].detach().cpu().double() for t in (a, b))
    return float((a * b).sum())


class Jacobians:
    """A model whose units can be run and differentiated one by one. Use as a context; weights are left as found.

    Args:
        name: of the estimator, for messages.
        anatomy: the verified model.
        corpus: its sequences.
        unit: `block` or `sublayer`.
        settings: seed, first positions that are left out, probes of a trace.

    Raises:
        UsageError: units that were not found, blocks that hand on more than the stream, or no position left.
        GradientError: from within the context: something in the model has no derivative.
    """

    def __init__(self, name: str, anatomy: Anatomy, corpus: Corpus, unit: str, settings: DepthSettings) -> None:
        settings.check(corpus)
        refuse_carried(anatomy, name)
        if anatomy.objective == "causal" and corpus.tokens - 1 <= settings.skip_first:
            raise UsageError(
                f"--skip-first {settings.skip_first} leaves no position with a gradient in sequences of "
                f"{corpus.tokens} tokens, the last of which predicts nothing",
                fix="skip fewer positions, or use longer sequences",
            )
        self.name, self.anatomy, self.corpus, self.settings = name, anatomy, corpus, settings
        self.stream, self.kind = anatomy.stream, unit
        skips, notes = block_skips(anatomy, corpus, settings.seed) if unit == "block" else ({}, [])
        self.units = counted_units(anatomy, unit, skips)
        self.steps = tuple(step for unit in self.units for step in unit.steps)
        places = [sum(len(u.steps) for u in self.units[:i]) for i in range(len(self.units))]
        self._places = [range(place, place + len(u.steps)) for place, u in zip(places, self.units, strict=True)]
        found = Cotangents.of(anatomy, "both", settings.seed)
        self.cotangents = replace(found, names=found.names[:1])
        self.notes = [*notes, *found.notes]
        if self.variant:
            self.notes.append("Random unit vectors at the last state take the place of the loss's gradient.")
        self._sublayers = Units(anatomy)

    @property
    def variant(self) -> str:
        """What a row's variant says of the cotangent: nothing where it is the loss's gradient."""
        return "" if self.cotangents.names == ("loss",) else "random"

    @property
    def of(self) -> int:
        """N, how many units there are."""
        return sum(len(unit.names) for unit in self.units)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(explained())
            stack.enter_context(_frozen(self.stream.checkpoint.model))
            stack.enter_context(torch.enable_grad())
            self._reader = stack.enter_context(Reader(self.stream, self.anatomy.blocks))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def forward(self, row: int, signed: bool = False) -> Tape:
        """Run one sequence, and take the gradient at x_L.

        Args:
            row: index of the sequence.
            signed: every target's loss gets an independent sign, by (seed, sequence).
        """
        checkpoint = self.stream.checkpoint
        inputs = self.corpus.inputs[row : row + 1]
        inputs = inputs.to(checkpoint.device, checkpoint.dtype if self.corpus.is_states else torch.int64)
        inputs, losses = self.cotangents.losses(self.anatomy, inputs, row)
        with torch.no_grad():
            entry = self.stream.enter(inputs)
            states = tuple(self._states(entry))
        if losses is None:
            drawn = self.cotangents.random(inputs.shape[1], states[-1].shape[-1], row)
            assert drawn is not None
            return Tape(row, entry, states, drawn.to(states[-1]))
        last = leaf_of(states[-1])
        each = losses(self.stream.readout(last, inputs))
        if signed:
            signs = key_rng(self.settings.seed, row, _SIGNS).integers(0, 2, len(each)) * 2 - 1
            each = each * torch.from_numpy(signs).to(each)
        (cotangent,) = torch.autograd.grad(each.mean(), last)
        if not bool(torch.isfinite(cotangent).all()):
            raise NonFiniteError(f"the gradient at x_{len(self.stream)} is not finite (sequence {row})", "finite ones")
        return Tape(row, entry, states, cotangent)

    def at(self, tape: Tape, index: int) -> RanUnit:
        """Unit `index`, run once more on what it read, with its graph.

        Raises:
            VerificationError: its steps, run one by one, do not give what the model's own block gave.
        """
        ran = []
        for place in self._places[index]:
            step, leaf = self.steps[place], leaf_of(tape.states[place])
            ran.append(RanStep(leaf, self._updates(tape.entry, step, leaf), step, self._module(step)))
            error = worst(ran[-1].z, tape.states[place + 1])
            if error > TOLERANCE:
                raise VerificationError(
                    f"block {step.layer}'s sublayers, run one by one, give a state that differs from its own by "
                    f"{error:.1e}",
                    f"at most {TOLERANCE:.0e}",
                    f"{self.name} cannot be taken of these units",
                )
        return RanUnit(tuple(ran))

    def traces(self, tape: Tape, index: int, ran: RanUnit) -> list[tuple[Tensor, ...]]:
        """α = tr(∂u/∂x) / width of every branch of every step, `[1, tokens, 1]`, from random signs (Hutchinson 1990).

        The trace is that of one token's output by the same token's input. Draws are keyed by (seed, sequence, step).
        """
        shape = (self.settings.probes, *tape.cotangent.shape)
        found = []
        for place, one in zip(self._places[index], ran.steps, strict=True):
            signs = key_rng(self.settings.seed, tape.row, _PROBES + place).integers(0, 2, shape, dtype="int8") * 2 - 1
            found.append(one.traces(torch.from_numpy(signs).to(tape.cotangent)))
        return found

    def push(self, tape: Tape, index: int, v: Tensor) -> Tensor:
        """J v of unit `index`, `[1, tokens, width]`, by forward-mode differentiation."""
        for place in self._places[index]:
            step, x = self.steps[place], tape.states[place]
            # The fused attention kernels have no forward-mode derivative, nor a second one.
            with sdpa_kernel(SDPBackend.MATH):
                v = _push(partial(self._sum, tape.entry, step), x, v)
        return v

    def _states(self, entry: Entry) -> Iterator[Tensor]:
        x = entry.x
        yield x
        for layer, steps in groupby(self.steps, key=lambda step: step.layer):
            visit = self._reader.visit(entry, layer, x)
            *between, _ = steps
            for step in between:
                updates = tuple(visit.branches[branch.unit][1] for branch in step.branches)
                x = combine(step, self._module(step), x, updates)
                yield x
            x = visit.z
            yield x

    def _updates(self, entry: Entry, step: Step, x: Tensor) -> tuple[Tensor, ...]:
        """What a step adds to a state, as functions of the state; f(x) − x for a whole block, f(x) without a skip."""
        if not step.branches:
            z = self.stream.run(entry, step.layer, x)
            if x.requires_grad and not z.requires_grad:
                raise GradientError(f"the model cannot be differentiated: block {step.layer} has no derivative")
            return (z - x if step.skip else z,)
        if step.later:
            part: Part = "a" if step.branches[0].unit == "attention" else "m"
            return (self._sublayers.sublayer(entry, Unit(step.layer, part), x)[1],)
        visit = self._reader.visit(entry, step.layer, x)
        return tuple(visit.branches[branch.unit][1] for branch in step.branches)

    def _sum(self, entry: Entry, step: Step, x: Tensor) -> Tensor:
        return combine(step, self._module(step), x, self._updates(entry, step, x))

    def _module(self, step: Step) -> nn.Module:
        return self.stream.blocks.modules[step.layer]


def _push(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """The function's derivative at x along v: in forward mode, or by differentiating twice where that is not known."""
    try:
        with torch.no_grad(), forward_mode.dual_level():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what it loads at the first call
                dual = forward_mode.make_dual(x, v)
            pushed = forward_mode.unpack_dual(function(dual)).tangent
            return torch.zeros_like(v) if pushed is None else pushed.clone()
    except NotImplementedError:
        leaf = leaf_of(x)
        z = function(leaf)
        weight = torch.zeros_like(z).requires_grad_()
        (back,) = torch.autograd.grad(z, leaf, weight, create_graph=True, allow_unused=True)
        return torch.zeros_like(v) if back is None else torch.autograd.grad(back, weight, v)[0]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Floating weights in float32 or better and without gradients, for the length of the context."""
    with differentiable(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        yield
