"""What a block adds to the stream, and where: branches and norm placements, concluded from captured tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthprobe.stream import Entry, Stream
from depthprobe.taps import Block, Branch, Placement, Tap, Unit, first_tensor

__all__ = ["Block", "Branch", "find_branches"]

_ATTENTION = re.compile(r"attn|attention|(^|[._])(sa|mixer|mamba|ssm)([._]|$)", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|(^|[._])(ff|fc\d?|moe|experts?|lin\d|linear\d|dropout2|output)([._]|$)", re.IGNORECASE
)
_NORM = re.compile(r"norm", re.IGNORECASE)


@dataclass
class _Value:
    """One distinct tensor seen inside a block, with every tap that shows it."""

    sample: Tensor
    full: Tensor
    taps: list[Tap] = field(default_factory=list)
    from_norms: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """target = skip_scale · state + scale · update, the state through a gain or a norm after the sum where named."""

    update: int
    scale: float
    state: int
    skip_scale: float
    parallel: bool = False
    norm: str | None = None
    gain: str | None = None


def _norms(block: nn.Module) -> dict[str, nn.Module]:
    """The norms of a block by name: modules whose class is called so, innermost only."""
    named = {name: module for name, module in block.named_modules() if name and _NORM.search(type(module).__name__)}
    return {name: m for name, m in named.items() if not any(other.startswith(f"{name}.") for other in named)}


def _gains(block: nn.Module, width: int) -> set[str]:
    """The modules of a block whose only parameter is one factor for each of the stream's dimensions."""
    shapes = {name: [p.shape for p in module.parameters()] for name, module in block.named_modules() if name}
    return {name for name, found in shapes.items() if found == [(width,)]} - _norms(block).keys()


def find_branches(stream: Stream, entry: Entry, xs: Sequence[Tensor], tolerance: float) -> tuple[Block, ...]:
    """Conclude the branches of every block from one run on a small batch.

    A block is explained where its output can be written as the block's input plus one or two tensors seen inside
    it, each times a scalar, through a norm or not. What explains one block is tried first on the next.

    Args:
        stream: the model.
        entry: a small batch, already entered.
        xs: its states x_0 … x_L.
        tolerance: largest relative error of an explanation; the rounding of the model's dtype.

    Returns:
        One `Block` each; its `branches` are empty where no explanation was found.
    """
    with torch.no_grad():

        def look(index: int) -> _Seen:
            return _Seen(stream, entry, index, xs[index], xs[index + 1], tolerance)

        found: list[tuple[Branch, ...]] = []
        known: list[tuple[Branch, ...]] = []
        for index in range(len(stream)):
            with stream.resident(index):
                seen = look(index)
                branches = _first(seen, known) or seen.search()
            if branches and branches not in known:
                known.append(branches)
                known.sort(key=len, reverse=True)
            found.append(branches)
        # A block with a silent branch explains itself with fewer; the fuller explanation of its siblings is right.
        for index, branches in enumerate(found):
            fuller = [other for other in known if len(other) > len(branches)]
            if fuller:
                with stream.resident(index):
                    found[index] = _first(look(index), fuller) or branches
    kinds = [type(module).__name__ for module in stream.blocks.modules]
    return tuple(Block(i, kind, branches) for i, (kind, branches) in enumerate(zip(kinds, found, strict=True)))


def _first(seen: _Seen, known: list[tuple[Branch, ...]]) -> tuple[Branch, ...]:
    """The first of the known explanations that fits, () if none does."""
    return next((branches for old in known if (branches := seen.retry(old))), ())


class _Seen:
    """Everything of the stream's shape that was seen inside one block during one call."""

    def __init__(self, stream: Stream, entry: Entry, index: int, x: Tensor, z: Tensor, tolerance: float) -> None:
        self.index, self.tolerance = index, tolerance
        self.block = stream.blocks.modules[index]
        self.norms = _norms(self.block)
        self.norm_calls: list[tuple[str, int, int]] = []  # name, index of its input, index of its output
        self.gains = _gains(self.block, x.shape[-1])
        self.gain_calls: dict[int, tuple[str, int]] = {}  # index of its output → name, index of its input
        self.values: list[_Value] = []
        self.device = x.device
        state = x
        x, z = x.cpu(), z.cpu()
        weight = 1 / x.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)
        # Every token counts the same, however large its norm; a fixed sample of the entries is enough to search.
        generator = torch.Generator().manual_seed(0)
        pick = torch.randperm(x.numel(), generator=generator)[: 1 << 15]
        self._sample = lambda t: (t.reshape(x.shape).double() * weight).reshape(-1)[pick]
        self.x = self._add(x, None)
        self._run(stream, entry, state)
        self.z = self._add(z, None)
        table = torch.stack([value.sample for value in self.values])
        self.gram = table @ table.T

    def _run(self, stream: Stream, entry: Entry, x: Tensor) -> None:
        like, size = x.shape[-1], x.numel()
        live: list[tuple[Tap, Tensor, Tensor]] = []
        inputs_of: dict[str, int] = {}
        counts: dict[str, int] = {}

        def outside(t: Tensor) -> Tensor:
            if t.ndim == 3 and t.shape[:2] != x.shape[:2]:
                t = t.transpose(0, 1)  # the stream's own axes in a model that puts tokens first
            return t.reshape(x.shape)

        def keep(name: str, side: Literal["in", "out"], tensors: Any) -> int | None:
            tensor = first_tensor(tensors)
            if tensor is None or tensor.numel() != size or tensor.shape[-1] != like:
                return None
            copy = tensor.detach().clone()
            live.append((Tap(name, side), tensor, copy))
            return self._add(outside(copy).cpu(), Tap(name, side))

        handles = []
        for name, module in self.block.named_modules():
            if not name:
                continue

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1
                place = keep(name, "in", (args, kwargs))
                if place is not None:
                    inputs_of[name] = place

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                place = keep(name, "out", output)
                if place is not None and name in self.norms and name in inputs_of:
                    self.values[place].from_norms.append(name)
                    self.norm_calls.append((name, inputs_of[name], place))
                elif place is not None and name in self.gains and name in inputs_of:
                    self.gain_calls[place] = (name, inputs_of[name])

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        try:
            stream.run(entry, self.index, x)
        finally:
            for handle in handles:
                handle.remove()
        changed = {tap for tap, tensor, copy in live if not torch.equal(tensor, copy)}
        for value in self.values:
            value.taps = [
                Tap(tap.module, tap.side, tap in changed) for tap in value.taps if counts.get(tap.module, 1) == 1
            ]

    def _add(self, tensor: Tensor, tap: Tap | None) -> int:
        """Index of the tensor among the distinct values, with the tap noted."""
        sample = self._sample(tensor)
        index = next((i for i, value in enumerate(self.values) if torch.equal(value.sample, sample)), len(self.values))
        if index == len(self.values):
            self.values.append(_Value(sample, tensor.detach()))
        if tap is not None:
            self.values[index].taps.append(tap)
        return index

    def search(self) -> tuple[Branch, ...]:
        """The explanation of the block with the smallest error, () if there is none."""
        steps = self._explain(self.z, depth=3)
        return self._name(steps) if steps else ()

    def retry(self, branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
        """The same taps with placements of this block's own, () if they do not explain it."""
        where = {(tap.module, tap.side): i for i, value in enumerate(self.values) for tap in value.taps}
        steps = []
        for branch in branches:
            update = where.get((branch.update.module, branch.update.side))
            state = self.x if branch.state is None else where.get((branch.state.module, branch.state.side))
            if update is None or state is None:
                return ()
            steps.append(
                _Step(update, branch.scale, state, branch.skip_scale, branch.parallel, branch.norm, branch.gain)
            )
        return self._name(steps) if all(error <= self.tolerance for error in self._errors(steps)) else ()

    def _errors(self, steps: list[_Step]) -> Iterator[float]:
        """Relative error of each step against the state that follows it."""
        for place, step in enumerate(steps):
            if step.parallel:
                parts = sum(s.scale * self.values[s.update].full.double() for s in steps)
            else:
                parts = step.scale * self.values[step.update].full.double()
            state = self.values[step.state].full
            if step.gain is not None:
                state = self.block.get_submodule(step.gain)(state.to(self.device)).cpu()
            total = step.skip_scale * state.double() + parts
            following = self.z if step.parallel or place == len(steps) - 1 else steps[place + 1].state
            if step.norm is not None:
                like = self.values[step.update].full
                total = self.norms[step.norm](total.to(like.dtype).to(self.device)).cpu().double()
            goal = self.values[following].full.double()
            yield float(((total - goal).norm(dim=-1) / goal.norm(dim=-1).clamp_min(1e-30)).max())

    def _explain(self, target: int, depth: int) -> list[_Step] | None:
        """Steps that lead from the block's input to `target`, through the norm that wrote it if one did."""
        if target == self.x or depth == 0:
            return None
        for name, source, result in self.norm_calls:
            if result == target and (steps := self._sum(source, depth)):
                return [*steps[:-1], _Step(**{**vars(steps[-1]), "norm": name})]
        return self._sum(target, depth)

    def _sum(self, target: int, depth: int) -> list[_Step] | None:
        """Steps whose last one sums to `target`: from the block's input, from a later state, or in parallel."""
        updates = [i for i, value in enumerate(self.values) if any(tap.side == "out" for tap in value.taps)]
        updates = [i for i in updates if i not in {target, self.x}]
        found: list[tuple[float, list[_Step]]] = []
        for error, (state, update), (skip, scale) in self._fits(target, [(self.x, u) for u in updates])[:1]:
            found.append((error, [_Step(update, scale, state, skip)]))
        states = [i for i, value in enumerate(self.values) if value.taps and i not in {target, self.x}]
        for error, (state, update), (skip, scale) in self._fits(
            target, [(s, u) for s in states for u in updates if s != u]
        )[:8]:
            gain, source = self.gain_calls.get(state, (None, state))
            before = [] if source == self.x else self._explain(source, depth - 1)
            if before is not None:
                found.append((error, [*before, _Step(update, scale, source, skip, gain=gain)]))
                break
        pairs = [(self.x, a, b) for a in updates for b in updates if a < b]
        for error, (state, a, b), (skip, first, second) in self._fits(target, pairs)[:1]:
            found.append((error, [_Step(a, first, state, skip, True), _Step(b, second, state, skip, True)]))
        found.sort(key=lambda item: item[1][-1].gain is None)  # a learned factor may happen to be the same everywhere
        # A branch that is small beside the stream can be left out within the tolerance, but not as exactly. Between
        # explanations that are equally exact, the one found first is the simplest.
        exact = min((error for error, _ in found), default=0.0)
        return next((steps for error, steps in found if error <= 2 * exact + 1e-7), None)

    def _fits(
        self, target: int, terms: Sequence[tuple[int, ...]]
    ) -> list[tuple[float, tuple[int, ...], tuple[float, ...]]]:
        """Least-squares fits of the target by each set of terms that are good enough, best first."""
        good = []
        for term in terms:
            rows = torch.tensor(term)
            inner = self.gram[rows][:, rows]
            scale = inner.diagonal().sqrt()
            if bool((scale == 0).any()):
                continue
            normal = inner / scale.outer(scale)
            if float(torch.linalg.cond(normal)) > 1e10:
                continue
            weights = torch.linalg.solve(normal, self.gram[rows, target] / scale) / scale
            exact = self.values[target].sample - sum(
                float(w) * self.values[i].sample for w, i in zip(weights, term, strict=True)
            )
            size = self.gram[target, target].sqrt()
            error = float(exact.norm() / size)
            updates = min(float(weights[k].abs() * scale[k] / size) for k in range(1, len(term)))
            # An update no larger than the error explains nothing; a skip of weight 0 is no skip.
            if (
                error <= min(self.tolerance, (0.05 if self.tolerance < 1e-3 else 0.2) * updates)
                and abs(float(weights[0])) > 1e-3
            ):
                good.append((error, term, self._snapped(target, term, tuple(weights.tolist()), error)))
        return sorted(good, key=lambda fit: fit[0])

    def _snapped(
        self, target: int, term: tuple[int, ...], weights: tuple[float, ...], error: float
    ) -> tuple[float, ...]:
        """Weights near 1 as 1, where that explains the target about as well: rounding moves those of small updates."""
        plain = tuple(1.0 if abs(w - 1) <= 10 * self.tolerance else w for w in weights)
        rest = self.values[target].sample - sum(w * self.values[i].sample for w, i in zip(plain, term, strict=True))
        reached = float(rest.norm() / self.gram[target, target].sqrt())
        return plain if reached <= max(2 * error + 1e-7, 0.5 * self.tolerance) else weights

    def _name(self, steps: list[_Step]) -> tuple[Branch, ...]:
        """Branches with unit and placement, () where it cannot be told which is attention and which is the MLP."""
        units = self._units(steps)
        if units is None:
            return ()
        branches = []
        for step, unit in zip(steps, units, strict=True):
            update = self.values[step.update]
            # The last output is closest to the sum: a dropout's rather than its projection's.
            tap = [tap for tap in update.taps if tap.side == "out"][-1]
            state = None
            if step.state != self.x:
                # An output outlives the call; an input may be a view that a fused kernel never sees.
                state = sorted(self.values[step.state].taps, key=lambda tap: tap.side != "out")[0]
            reads = any(source == step.state for _, source, _ in self.norm_calls)
            writes = bool(update.from_norms)
            placement: Placement = "none"
            if step.norm is not None:
                placement = "post"
            elif reads and writes:
                placement = "sandwich"
            elif reads or writes:
                placement = "pre" if reads else "branch"
            branches.append(
                Branch(unit, placement, step.parallel, tap, step.scale, state, step.skip_scale, step.norm, step.gain)
            )
        return tuple(branches)

    def _called(self, name: str) -> str:
        """A module's name, `mlp` in place of a `mixer` that is one: what mixes tokens bears this name as well."""
        parts = name.split(".")
        for place, part in enumerate(parts):
            kind = type(self.block.get_submodule(".".join(parts[: place + 1]))).__name__ if part == "mixer" else ""
            if re.search("mlp|moe", kind, re.IGNORECASE):
                parts[place] = "mlp"
        return ".".join(parts)

    def _units(self, steps: list[_Step]) -> list[Unit] | None:
        names = []
        for step in steps:
            taps = list(self.values[step.update].taps)
            for name, source, result in self.norm_calls:
                if result == step.update:  # what a norm on the branch was given tells whose branch it is
                    taps = [tap for tap in taps if tap.module != name] + self.values[source].taps
            names.append(" ".join(self._called(tap.module) for tap in taps if tap.side == "out"))
        attention = [bool(_ATTENTION.search(name)) for name in names]
        if len(steps) == 2 and sum(attention) == 1:
            return ["attention" if flag else "mlp" for flag in attention]
        if len(steps) == 1:
            return ["attention"] if attention[0] else ["mlp"] if _MLP.search(names[0]) else None
        return None
