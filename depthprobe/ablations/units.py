"""Run a unit or a stage on any state: whole blocks as they are, sublayers by silencing the rest of their block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.ablations.schedule import Schedule, Stage, Unit
from depthprobe.errors import UsageError
from depthprobe.stream import Entry
from depthprobe.taps import Branch, Tap, first_tensor
from depthprobe.verify import Anatomy

__all__ = ["Units"]

_NAMES = {"a": "attention", "m": "mlp"}


class Units:
    """Applies the units of one model, and counts how many it has run.

    Args:
        anatomy: the verified model.
        tick: called after every evaluation with how many there were.
    """

    def __init__(self, anatomy: Anatomy, tick: Callable[[int], None] | None = None) -> None:
        self.anatomy, self.stream, self.tick = anatomy, anatomy.stream, tick
        self.evaluations = 0

    def check(self, schedule: Schedule) -> None:
        """Whether this model can run the schedule.

        Raises:
            UsageError: a layer out of range, sublayers that were not found, a combination that its placement excludes.
        """
        schedule.check(len(self.stream))
        for stage in schedule.stages:
            for unit in stage:
                if unit.part in _NAMES:
                    self._branch(unit)
            if len(stage) > 1 and schedule.combine == "weights":
                shapes = [{n: p.shape for n, p in self._module(unit).named_parameters()} for unit in stage]
                if any(other != shapes[0] for other in shapes):
                    raise UsageError(f"averaged weights were asked for ({_text(stage)})", "blocks of the same shape")
            if len(stage) > 1 and schedule.combine == "branch-sum":
                if not stage[0].part:
                    raise UsageError(
                        f"branch-sum was asked for whole blocks, ({_text(stage)})", "sublayers, as (4a+5a)"
                    )
                if self._branch(stage[-1]).norm is None:
                    raise UsageError(f"branch-sum was asked for ({_text(stage)})", "post-LN sublayers", "use sum")
        parts = [unit.layer for stage in schedule.stages for unit in stage if unit.part in _NAMES]
        for layer in {layer for layer in parts if parts.count(layer) > 1}:
            if self.anatomy.blocks[layer].scales_stream:
                raise UsageError(
                    f"the schedule runs sublayers of block {layer} apart, but its skip has a factor",
                    "whole blocks, or one sublayer of it",
                    "each would apply it",
                )

    def unit(self, entry: Entry, unit: Unit, x: Tensor) -> Tensor:
        """What a unit makes of a state `[batch, tokens, width]`: f(x), the same shape."""
        self._count()
        if not unit.part:
            return self.stream.run(entry, unit.layer, x)
        return self.sublayer(entry, unit, x)[0]

    def stage(self, entry: Entry, stage: Stage, combine: str, x: Tensor, run: Callable[[Unit], Tensor]) -> Tensor:
        """What a stage makes of a state.

        What blocks hand on beside the stream, such as attention scores, is that of the stage's last unit with an
        attention; of the state where only MLPs ran.

        Args:
            entry: the batch.
            stage: its units.
            combine: see `Schedule`.
            x: the state, `[batch, tokens, width]`.
            run: gives f(x) of a unit on this state; the caller may have it already.
        """
        if len(stage) == 1:
            return run(stage[0])
        if combine == "weights":
            self._count()
            with self._resident(stage):
                return self.stream.run(entry, stage[0].layer, x, self._averaged(stage))
        if combine == "branch-sum":
            with self._resident(stage):
                return self._branch_sum(entry, stage, x)
        outputs = [run(unit) for unit in stage]
        source = next((z for unit, z in zip(reversed(stage), reversed(outputs), strict=True) if unit.part != "m"), x)
        if combine == "mean":
            return self.stream.inherit(torch.stack(outputs).mean(dim=0), source)
        total = x.float()
        for output in outputs:
            total = total + (output.float() - x.float())
        return self.stream.inherit(total.to(x.dtype), source)

    def _count(self) -> None:
        self.evaluations += 1
        if self.tick is not None:
            self.tick(self.evaluations)

    def _resident(self, stage: Stage) -> AbstractContextManager[None]:
        """A context in which the weights of all blocks of a stage are there."""
        return self.stream.resident(*sorted({unit.layer for unit in stage}))

    def _module(self, unit: Unit) -> nn.Module:
        return self.stream.blocks.modules[unit.layer]

    def _branch(self, unit: Unit) -> Branch:
        branch = self.anatomy.blocks[unit.layer].branch(_NAMES[unit.part])
        if branch is None:
            raise UsageError(
                f"the schedule names {unit}, but no {_NAMES[unit.part]} branch was found in block {unit.layer}",
                "whole blocks",
            )
        return branch

    def sublayer(self, entry: Entry, unit: Unit, x: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) of a sublayer and its branch u(x), by one run of its block with the other branch out of the way.

        What is substituted, or kept, is a function of x, so that both can be differentiated.
        """
        branch = self._branch(unit)
        others = [b for b in self.anatomy.blocks[unit.layer].branches if b.unit != branch.unit]
        block = self.stream.blocks.modules[unit.layer]
        seen: dict[str, Tensor] = {}
        handles = [_watch(block, branch.update, seen, "u")]
        first = branch.state is None and not branch.parallel
        try:
            if branch.norm is not None and first and others:
                # Post-LN attention: what the second unit reads is what this one writes.
                state = others[0].state
                assert state is not None
                handles.append(_watch(block, state, seen, "z"))
                last = self.stream.run(entry, unit.layer, x)
                z = self.stream.inherit(self._shaped(seen["z"], x), last)
            else:
                for other in others:
                    if branch.norm is not None:
                        assert branch.state is not None
                        handles.append(_substitute(block, branch.state, self._inner(x)))
                    else:
                        handles.append(_silence(block, other.update))
                z = self.stream.run(entry, unit.layer, x)
                if unit.part == "m":
                    self.stream.inherit(z, x)  # no attention ran, whatever its block computed on the side
        finally:
            for handle in handles:
                handle.remove()
        u = self._shaped(seen["u"], x) * branch.scale
        return z, u

    def _branch_sum(self, entry: Entry, stage: Stage, x: Tensor) -> Tensor:
        """N_last(x + Σ u_i(x))."""
        last = self._branch(stage[-1])
        block = self._module(stage[-1])
        total, source = last.skip(block, x), x
        for unit in stage:
            self._count()
            z, u = self.sublayer(entry, unit, x)
            total = total + u
            source = source if unit.part == "m" else z
        return self.stream.inherit(last.normed(block, total), source)

    def _averaged(self, stage: Stage) -> nn.Module:
        """A copy of the stage's first block with the mean of all its blocks' weights."""
        blocks = [self._module(unit) for unit in stage]
        merged = copy.deepcopy(blocks[0])
        with torch.no_grad():
            for name, parameter in merged.named_parameters():
                same = [block.get_parameter(name).to(parameter.device) for block in blocks]
                parameter.copy_(torch.stack(same).mean(dim=0))
        return merged

    def _shaped(self, tensor: Tensor, x: Tensor) -> Tensor:
        if tensor.ndim == 3 and not self.stream.blocks.batch_first:
            return tensor.transpose(0, 1).to(x.device)
        return tensor.reshape(x.shape).to(x.device)

    def _inner(self, x: Tensor) -> Tensor:
        return x if self.stream.blocks.batch_first else x.transpose(0, 1)


def _text(stage: Stage) -> str:
    return "+".join(map(str, stage))


def _watch(block: nn.Module, tap: Tap, seen: dict[str, Tensor], key: str) -> Any:
    def keep(value: Any) -> None:
        tensor = first_tensor(value)
        if tensor is not None:
            seen[key] = tensor.clone() if tap.overwritten else tensor

    module = block.get_submodule(tap.module)
    if tap.side == "out":
        return module.register_forward_hook(lambda module, args, output: keep(output))
    return module.register_forward_pre_hook(lambda module, args, kwargs: keep((args, kwargs)), with_kwargs=True)


def _substitute(block: nn.Module, tap: Tap, x: Tensor) -> Any:
    """Make the module at the tap return `x` in its own shape."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _replaced(output, lambda t: x.reshape(t.shape).to(t.device))

    return block.get_submodule(tap.module).register_forward_hook(hook)


def _silence(block: nn.Module, tap: Tap) -> Any:
    """Make the module at the tap add nothing."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _replaced(output, torch.zeros_like)

    return block.get_submodule(tap.module).register_forward_hook(hook)


def _replaced(output: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """The output with its first floating tensor replaced."""
    if isinstance(output, Tensor):
        return make(output)
    values = list(output)
    place = next(i for i, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point())
    values[place] = make(values[place])
    return type(output)(values) if isinstance(output, list) else tuple(values)
