"""Find the block list of a model by watching one forward pass."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthprobe.checkpoint import Checkpoint
from depthprobe.errors import AnatomyError, NonFiniteError

__all__ = ["BlockList", "call_model", "find_blocks", "model_output"]

# Such a list does carry the stream, only not as one tensor through blocks called once: nothing inside it is the stream.
_STREAM_REFUSED = ("is changed between", "times in one forward pass", "more than one residual stream")


@dataclass(frozen=True, eq=False)
class BlockList:
    """The modules that the residual stream runs through, and how each of them takes and gives it.

    Attributes:
        path: dotted name of the list inside the model.
        modules: the blocks, in the order in which the model calls them.
        slot: position or keyword of the stream among a block's arguments.
        returns: what a block returns, `(container, length, index of the stream in it)`; container None for a tensor.
        batch_first: False where the stream is `[tokens, batch, width]`.
        output_batch_first: the same for what the model returns.
        width: size of the stream's last dimension.
        carried: what each block hands to the next beside the stream, such as RealFormer's attention scores, as
            (index in what a block returns, position or keyword among the next block's arguments).
        carried_unchanged: it is one and the same tensor for all blocks, such as T5's table of positions.
    """

    path: str
    modules: tuple[nn.Module, ...]
    slot: int | str
    returns: tuple[Literal["tuple", "list"] | None, int, int]
    batch_first: bool
    output_batch_first: bool
    width: int
    carried: tuple[tuple[int, int | str], ...] = ()
    carried_unchanged: bool = False

    def __len__(self) -> int:
        return len(self.modules)


@dataclass
class _Call:
    """One call of a candidate block: the stream before and after, where it stood, and the tensors beside it."""

    slot: int | str
    before: Tensor
    given: dict[int | str, Tensor]
    after: Tensor | None = None
    returns: tuple[Any, int, int] = (None, 1, 0)
    beside: dict[int, Tensor] = field(default_factory=dict)


def find_blocks(checkpoint: Checkpoint, inputs: Tensor) -> BlockList:
    """Watch one forward pass and conclude which list of modules carries the residual stream.

    Args:
        checkpoint: the model.
        inputs: a small batch, ids `[batch, tokens]` or states `[batch, tokens, width]`; batch and tokens must differ,
            or the order of the stream's axes could not be told.

    Raises:
        NonFiniteError: a block writes what is not a number.
        AnatomyError: there is no such list, or more than one stream, or the stream is changed between blocks.
    """
    model = checkpoint.model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise AnatomyError(
            f"{type(model).__name__} is an encoder–decoder, with two residual streams",
            "one stack of blocks",
            "pass its encoder alone as a module from Python",
        )
    lists = {name: tuple(module) for name, module in model.named_modules() if _is_list(module)}
    calls, order, output = _watch(checkpoint, inputs, lists)
    output_batch_first = output.shape[:2] != inputs.shape[:2][::-1]
    problems: list[str] = []
    found: dict[str, BlockList] = {}
    refused: dict[str, str] = {}
    for name in sorted(lists, key=lambda name: name.count(".")):
        if any(name.startswith(f"{outer}.") for outer in (*found, *refused)):
            continue  # a list inside a block
        result = _check(name, lists[name], calls, order, inputs, output_batch_first)
        if isinstance(result, BlockList):
            found[name] = result
        elif result:
            problems.append(result)
            if any(reason in result for reason in _STREAM_REFUSED):
                refused[name] = result
    if not found:
        kind = type(model).__name__
        raise AnatomyError(
            f"no residual stream was found in {kind}" + (f": {'; '.join(problems)}" if problems else ""),
            "a list of blocks, each called once, that hands one tensor [batch, tokens, width] from block to block",
        )
    sizes = {name: _size(blocks) for name, blocks in found.items()}
    best = max(found, key=lambda name: sizes[name])
    rivals = [name for name in found if name != best and len(found[name]) > 1 and sizes[name][0] > sizes[best][0] / 4]
    larger = [problem for name, problem in refused.items() if _parameters(lists[name]) > sizes[best][0]]
    if rivals or larger:
        raise AnatomyError(
            f"{type(model).__name__} has no single stack of blocks: "
            + (f"{best} and {', '.join(rivals)}" if rivals else "; ".join(larger)),
            "one residual stream through one list of blocks",
        )
    return found[best]


def call_model(checkpoint: Checkpoint, inputs: Tensor) -> Any:
    """The model's own forward pass on ids or states, without a cache."""
    model = checkpoint.model
    with checkpoint.outside():
        if checkpoint.inputs == "states":
            return model(inputs if _takes_batch_first(model) else inputs.transpose(0, 1))
        if not checkpoint.is_hf:
            return model(inputs)
        keywords = {"use_cache": False} if _accepts(model, "use_cache") else {}
        return model(input_ids=inputs, **keywords)


def model_output(output: Any, batch_first: bool = True) -> Tensor:
    """The logits of a forward pass, or the last state where there is no head; `[batch, tokens, size]`."""
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    tensor = output if isinstance(output, Tensor) else next(iter(_tensors(output)), None)
    if tensor is None:
        raise AnatomyError(f"the model returns a {type(output).__name__} without a tensor", "logits or states")
    return tensor if batch_first else tensor.transpose(0, 1)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0


def _takes_batch_first(model: nn.Module) -> bool:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    return attention is None or attention.batch_first


def _accepts(model: nn.Module, keyword: str) -> bool:
    inner = getattr(model, "base_model", model)
    return any(keyword in inspect.signature(module.forward).parameters for module in (model, inner))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _stream_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor] | None:
    """The first floating tensor among positional arguments, then keywords, `hidden_states` first."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return index, value
    for name in sorted(kwargs, key=lambda name: name != "hidden_states"):
        value = kwargs[name]
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return name, value
    return None


def _stream_result(output: Any, like: Tensor) -> tuple[Tensor, tuple[Any, int, int]] | None:
    if isinstance(output, Tensor):
        return (output, (None, 1, 0)) if output.shape == like.shape else None
    if isinstance(output, tuple | list):
        for index, value in enumerate(output):
            if isinstance(value, Tensor) and value.shape == like.shape:
                return value, ("tuple" if isinstance(output, tuple) else "list", len(output), index)
    return None


def _watch(
    checkpoint: Checkpoint, inputs: Tensor, lists: dict[str, tuple[nn.Module, ...]]
) -> tuple[dict[int, list[_Call]], list[int], Tensor]:
    """Run the model once; return the calls of every candidate by `id`, the order of the calls, and the output."""
    calls: dict[int, list[_Call]] = defaultdict(list)
    order: list[int] = []
    handles = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        order.append(id(module))
        stream = _stream_argument(args, kwargs)
        if stream is not None:
            # A clone, since some blocks add in place onto what they were given.
            slots: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            given = {slot: value for slot, value in slots if isinstance(value, Tensor)}
            calls[id(module)].append(_Call(stream[0], stream[1].detach().clone(), given))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if calls[id(module)]:
            result = _stream_result(output, calls[id(module)][-1].before)
            if result is not None:
                call = calls[id(module)][-1]
                call.after, call.returns = result[0].detach().clone(), result[1]
                if not isinstance(output, Tensor):
                    call.beside = {
                        place: value
                        for place, value in enumerate(output)
                        if isinstance(value, Tensor) and value is not result[0]
                    }

    for module in {id(m): m for modules in lists.values() for m in modules}.values():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        with torch.no_grad():
            output = model_output(call_model(checkpoint, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls, order, output


def _check(
    name: str,
    modules: tuple[nn.Module, ...],
    calls: dict[int, list[_Call]],
    order: list[int],
    inputs: Tensor,
    output_batch_first: bool,
) -> BlockList | str | None:
    """The list as a `BlockList`, or why it is none; None where it has nothing to do with a stream."""
    runs = [calls.get(id(module), []) for module in modules]
    if not any(call.after is not None for run in runs for call in run):
        return None
    if any(len(run) > 1 for run in runs):
        return f"a block of {name} is called {max(map(len, runs))} times in one forward pass"
    if any(not run for run in runs):
        missing = sum(not run for run in runs)
        return f"{missing} of the {len(modules)} entries of {name} were not called with a state"
    flat = [run[0] for run in runs]
    places = [order.index(id(module)) for module in modules]
    if places != sorted(places):
        return f"the blocks of {name} are not called in their order"
    for index, call in enumerate(flat):
        if call.after is None:
            return f"{name}[{index}] returns no tensor of its input's shape {tuple(call.before.shape)}"
    first = flat[0].before
    if first.ndim > 3:
        return f"{name} carries states of shape {tuple(first.shape)}, more than one residual stream"
    if first.ndim < 3:
        return f"{name} carries states of shape {tuple(first.shape)}, without a batch dimension"
    batch, tokens = inputs.shape[:2]
    if first.shape[:2] not in {(batch, tokens), (tokens, batch)}:
        return f"{name} carries states of shape {tuple(first.shape)} for inputs of shape {tuple(inputs.shape)}"
    for index, (call, following) in enumerate(pairwise(flat)):
        assert call.after is not None
        if call.after.isnan().any() and torch.allclose(call.after, following.before, 0, 0, equal_nan=True):
            row, position = call.after.isnan().any(dim=-1).nonzero()[0].tolist()
            dtype = str(call.after.dtype).removeprefix("torch.")
            raise NonFiniteError.in_block(index, "block", dtype, row, position)
        if not torch.equal(call.after, following.before):
            return f"the stream of {name} is changed between blocks {index} and {index + 1}"
    if len({(call.slot, call.returns) for call in flat}) > 1:
        return f"the blocks of {name} take or return the stream in different ways"
    batch_first = first.shape[:2] == (batch, tokens)
    carried = _carried(flat)
    same = bool(carried) and all(_one(flat[1:], slot) for _, slot in carried)
    return BlockList(
        name, modules, flat[0].slot, flat[0].returns, batch_first, output_batch_first, first.shape[-1], carried, same
    )


def _carried(calls: list[_Call]) -> tuple[tuple[int, int | str], ...]:
    """What every block returns and the next is given, the very same tensor, beside the stream."""
    common: set[tuple[int, int | str]] | None = None
    for call, following in pairwise(calls):
        handed = {
            (place, slot)
            for place, value in call.beside.items()
            for slot, other in following.given.items()
            if value is other and slot != following.slot
        }
        common = handed if common is None else common & handed
    return tuple(sorted(common or (), key=str))


def _one(calls: list[_Call], slot: int | str) -> bool:
    """Whether all blocks are given the very same tensor there."""
    return all(call.given[slot] is calls[0].given[slot] for call in calls)


def _size(blocks: BlockList) -> tuple[int, int]:
    return _parameters(blocks.modules), len(blocks)


def _parameters(modules: tuple[nn.Module, ...]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
