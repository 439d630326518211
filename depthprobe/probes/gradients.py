"""How a gradient changes on its way down the stream: one sequence, backwards, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from depthprobe.errors import GradientError, NonFiniteError
from depthprobe.estimate import PerSequence
from depthprobe.probes.base import mean_tokens, median_tokens, wide
from depthprobe.probes.weights import Weights
from depthprobe.stream import Entry, Stream

__all__ = ["Cotangent", "StateNorms", "backpropagate", "differentiable", "explained", "graph_bytes"]

Cotangent = Literal["loss", "random"]
SUFFIX: dict[Cotangent, str] = {"loss": "", "random": "_random"}
_HALF = (torch.float16, torch.bfloat16)


def backpropagate(
    stream: Stream,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor] | None,
    random: Tensor | None,
    see: Callable[[Cotangent, int, Tensor], None],
    weights: Weights | None = None,
    keep: bool = True,
) -> float | None:
    """Run one batch forward and every cotangent backward, block by block; nothing is left in any `.grad`.

    Each block reads a leaf, so that its own graph ends there. What blocks hand on beside the stream (RealFormer's
    attention scores) carries gradients down too; those at x_l hold it fixed, as autograd does.

    Args:
        stream: the model, under `differentiable`.
        inputs: ids `[batch, tokens]` or states `[batch, tokens, width]`.
        loss: logits `[batch, tokens, vocabulary]` to a number; None for no loss.
        random: what arrives at x_L instead, `[batch, tokens, width]`; None for none.
        see: called with the cotangent, l and the gradient at x_l, for l = L … 0.
        weights: takes the loss's gradients by weights.
        keep: hold the graph of every block; otherwise only the states are kept, and each block is run again on the way
            down.

    Returns:
        The loss.

    Raises:
        GradientError: something in the model has no derivative.
    """
    with torch.enable_grad(), explained(), _overwriting(stream):
        entry = stream.enter(inputs)
        leaves = [stream.inherit(_leaf(entry.x), entry.x)]
        outputs: list[Tensor | None] = []
        for index in range(len(stream)):
            with torch.set_grad_enabled(keep):
                z = stream.run(entry, index, leaves[-1])
            outputs.append(z if keep else None)
            leaves.append(stream.inherit(_leaf(z), z))
        arriving: dict[Cotangent, Tensor] = {}
        value, last = None, leaves[-1]
        outside = [] if weights is None else weights.outside
        if random is not None:
            arriving["random"] = random.to(last)
        if loss is not None:  # last, so that the graphs are free once it has passed
            value = loss(stream.readout(last, inputs))
            arriving["loss"], found = _pull([(value, None)], last, outside)
            if weights is not None:
                weights.take(outside, found)
        for name, gradient in arriving.items():
            see(name, len(stream), gradient)
        final = [*arriving][-1]
        beneath: dict[Cotangent, list[Tensor | None]] = {name: [] for name in arriving}
        beside: dict[int, tuple[Tensor, Tensor]] = {}
        for index in reversed(range(len(stream))):
            held, leaf = outputs.pop(), leaves.pop(index)
            below = _handed_on(stream, leaf)
            z = stream.run(entry, index, leaf) if held is None else held
            own = [] if weights is None else weights.blocks[index]
            sides = [] if weights is None else _sides(entry, index, stream.blocks.slot)
            for name in arriving:
                more = [*own, *sides] if name == "loss" else []
                handed = zip(_handed_on(stream, z), beneath[name], strict=False)  # the last block's goes nowhere
                written = [(z, arriving[name]), *((t, g) for t, g in handed if g is not None)]
                arriving[name], found = _pull(written, leaf, [*below, *more], retain=name != final)
                beneath[name], found = list(found[: len(below)]), found[len(below) :]
                see(name, index, arriving[name])
                if weights is not None and name == "loss":
                    weights.take(own, found[: len(own)])
                    _add(beside, sides, found[len(own) :])
        if weights is not None and "loss" in arriving:
            _add(beside, [entry.x], [arriving["loss"]])
            pairs = [pair for pair in beside.values() if pair[0].requires_grad]
            if pairs and outside:
                tensors, gradients = zip(*pairs, strict=True)
                found = torch.autograd.grad(tensors, outside, gradients, allow_unused=True)
                weights.take(outside, found, door=True)
    return None if value is None else value.item()


def graph_bytes(stream: Stream, inputs: Tensor) -> int:
    """About how many bytes the graphs of all blocks hold besides the weights, as measured on block 0."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in stream.checkpoint.model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself may be the node's own output: a circle that is never freed

    with torch.enable_grad(), explained():
        entry = stream.enter(inputs)
        leaf = stream.inherit(_leaf(entry.x), entry.x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stream.run(entry, 0, leaf)
    return sum(held.values()) * len(stream)


class StateNorms:
    """‖∂/∂x_l‖ a token, reduced to one number a sequence: mean, median, and the share of the energy at position 0.

    Args:
        means: where the results go.
        skip: how many leading positions the norms leave out; the share is of all.
        targetless: whether the last position has no target, so that no loss depends on it, and it is left out too.
        offset: added to the index of a sequence, for the several models of one table.
    """

    def __init__(self, means: PerSequence, skip: int, targetless: bool, offset: int = 0) -> None:
        self.means, self.skip, self.targetless, self.offset = means, skip, targetless, offset

    def see(self, sequence: int, cotangent: Cotangent, layer: int, gradient: Tensor) -> None:
        """Take the gradient `[1, tokens, width]` at x_l.

        Raises:
            NonFiniteError: it is not finite.
        """
        norms = torch.linalg.vector_norm(wide(gradient.detach()), dim=-1)  # squares of tiny ones vanish in float32
        if not bool(torch.isfinite(norms).all()):
            raise NonFiniteError(
                f"the gradient at x_{layer} is not finite ({cotangent}, sequence {sequence})", "finite gradients"
            )
        counted = norms[:, :-1] if self.targetless and cotangent == "loss" else norms
        energy = norms.square()
        total = float(energy.sum())
        share = np.array([float(energy[:, 0].sum()) / total if total > 0 else 0.0])
        suffix = SUFFIX[cotangent]
        for metric, values in (
            (f"gradient_norm{suffix}", mean_tokens(counted, self.skip)),
            (f"gradient_norm{suffix}_median", median_tokens(counted, self.skip)),
            (f"gradient_first_share{suffix}", share),
        ):
            self.means.add((metric, "block", layer), np.array([sequence + self.offset]), values)


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Every floating weight in float32 or better and with a gradient, for the length of the context.

    Half precision would lose a gradient that is divided by the number of tokens. Weights, flags and dtypes are then as
    they were, to the bit.
    """
    halves = [(t, t.data) for t in chain(model.parameters(), model.buffers()) if t.dtype in _HALF]
    flags = [(p, p.requires_grad) for p in model.parameters() if p.is_floating_point()]
    try:
        for tensor, data in halves:
            tensor.data = data.float()
        for parameter, _ in flags:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for tensor, data in halves:
            tensor.data = data


@contextmanager
def explained() -> Iterator[None]:
    """torch's complaint as one line."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise GradientError(f"the model cannot be differentiated: {reason}") from error


def _overwriting(stream: Stream) -> AbstractContextManager[Any]:
    """For blocks that write into what they were given: what autograd has saved is copied before it is overwritten."""
    return torch.autograd.graph.allow_mutation_on_saved_tensors() if stream.copies_input else nullcontext()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _pull(
    written: Sequence[tuple[Tensor, Tensor | None]], leaf: Tensor, more: Sequence[Tensor], retain: bool = False
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """From outputs with their cotangents the gradient at a leaf, 0 where none depends on it, and at further tensors."""
    outputs, cotangents = zip(*written, strict=True)
    found = torch.autograd.grad(outputs, [leaf, *more], cotangents, retain_graph=retain, allow_unused=True)
    return torch.zeros_like(leaf) if found[0] is None else found[0], found[1:]


def _handed_on(stream: Stream, state: Tensor) -> list[Tensor]:
    """The tensors that accompany a state, which the next block reads; with a gradient where they are leaves."""
    values = stream.handed_on(state) if stream.blocks.carried else ()
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return [tensor.requires_grad_() if tensor.is_leaf else tensor for tensor in tensors]


def _sides(entry: Entry, index: int, slot: int | str) -> list[Tensor]:
    """What a block is handed besides the stream and depends on weights, such as a learned table of positions."""
    args, kwargs = entry.calls[index]
    beside: list[Any] = [value for place, value in enumerate(args) if place != slot]
    beside += [value for name, value in kwargs.items() if name != slot]
    return [tensor for tensor in _tensors(beside) if tensor.requires_grad]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _add(totals: dict[int, tuple[Tensor, Tensor]], tensors: Sequence[Tensor], gradients: Sequence[Any]) -> None:
    """Sum gradients that reach the same tensor from several blocks."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            before = totals.get(id(tensor))
            totals[id(tensor)] = (tensor, gradient if before is None else before[1] + gradient)
