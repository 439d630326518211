"""Run a model one block at a time, from any state. The model's own modules do all the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import Cache

from depthprobe.blocks import BlockList, call_model, model_output
from depthprobe.checkpoint import Checkpoint

__all__ = ["Entry", "Stream"]


class _StopForwardError(Exception):
    """Leaves the model's forward pass once every block has been reached."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A batch at the door of the first block.

    Attributes:
        inputs: ids `[batch, tokens]` or states `[batch, tokens, width]`.
        x: the stream x_0 that block 0 reads, `[batch, tokens, width]`.
        calls: the other arguments that the model hands to each block (its own mask, rotary embedding, …), so
            that a block keeps them wherever it runs.
    """

    inputs: Tensor
    x: Tensor
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]


class Stream:
    """A model as a sequence of functions on its residual stream.

    `enter` takes a batch to x_0, `run` applies one block, `readout` is the model's own tail (final norm and head).
    Nothing in the model is edited: for `enter` and `readout` its blocks are bypassed for the length of one call.

    Where blocks hand on something beside the stream (`BlockList.carried`), it goes with the state that was written
    with it, so that a block gets what the block before it in a schedule handed on. A state that is made outside of
    `run` has to be given it by `inherit`.
    """

    def __init__(self, checkpoint: Checkpoint, blocks: BlockList, copies_input: bool = False) -> None:
        self.checkpoint = checkpoint
        self.blocks = blocks
        self.copies_input = copies_input  # for blocks that write in place into the state that they are given
        self._beside = WeakTensorKeyDictionary()  # state → what was handed on with it, for as long as the state lives

    def __len__(self) -> int:
        return len(self.blocks)

    def resident(self, *indices: int) -> AbstractContextManager[None]:
        """A context in which the weights of these blocks are there; each is fetched once, if it has to be fetched."""
        offload = self.checkpoint.offload
        return nullcontext() if offload is None else offload.resident(*(self.blocks.modules[i] for i in indices))

    def enter(self, inputs: Tensor) -> Entry:
        """Embed a batch and collect the arguments of every block, at the cost of the embedding alone."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        start: list[Tensor] = []

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            x = args[self.blocks.slot] if isinstance(self.blocks.slot, int) else kwargs[self.blocks.slot]
            if index == 0:
                start.append(x)
            calls.append((tuple(map(_uncached, args)), {name: _uncached(value) for name, value in kwargs.items()}))
            if index == len(self) - 1:
                raise _StopForwardError
            return x

        with self._bypassed(record), suppress(_StopForwardError):
            call_model(self.checkpoint, inputs)
        x = self._outside(start[0])
        if self.blocks.carried:
            # What the model gives its first block: None, as a rule, or no such argument at all.
            given = dict(enumerate(calls[0][0])) | calls[0][1]
            self._beside[x] = tuple(given.get(slot) for _, slot in self.blocks.carried)
        return Entry(inputs, x, tuple(calls))

    def run(self, entry: Entry, index: int, x: Tensor, module: nn.Module | None = None) -> Tensor:
        """Block `index`, or a module in its place, on any state: f_l(x), `[batch, tokens, width]` to the same."""
        args, kwargs = entry.calls[index]
        inner = self._outside(x.clone() if self.copies_input else x)
        slot = self.blocks.slot
        if isinstance(slot, int):
            args = (*args[:slot], inner, *args[slot + 1 :])
        else:
            kwargs = {**kwargs, slot: inner}
        if self.blocks.carried:
            args, kwargs = self._with_beside(args, kwargs, x)
        with self.resident(index):
            output = (module or self.blocks.modules[index])(*args, **kwargs)
        container, _, place = self.blocks.returns
        z = self._outside(output if container is None else output[place]).to(x.device)
        if self.blocks.carried:
            self._beside[z] = tuple(output[other] for other, _ in self.blocks.carried)
        return z

    def inherit(self, state: Tensor, source: Tensor) -> Tensor:
        """The state, from now on accompanied by what was handed on with another one."""
        if self.blocks.carried:
            self._beside[state] = self.handed_on(source)
        return state

    def handed_on(self, x: Tensor) -> tuple[Any, ...]:
        """What blocks handed on with a state, in the order of `BlockList.carried`."""
        if x not in self._beside:
            raise RuntimeError("a state was made without a word on what blocks hand on beside it: see Stream.inherit")
        return self._beside[x]

    def _with_beside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A block's arguments with what was handed on with this state in its places."""
        changed, named = list(args), dict(kwargs)
        for (_, slot), value in zip(self.blocks.carried, self.handed_on(x), strict=True):
            if isinstance(slot, int):
                changed[slot] = value
            else:
                named[slot] = value
        return tuple(changed), named

    def readout(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The model's own tail on a last state `[batch, tokens, width]`: logits, or its last state without a head.

        Args:
            x: the state, as if the last block had written it.
            inputs: ids or states of the same batch and tokens; only their shape matters to most models.
        """

        def substitute(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            if index == len(self) - 1:
                return self._outside(x)
            return args[self.blocks.slot] if isinstance(self.blocks.slot, int) else kwargs[self.blocks.slot]

        with self._bypassed(substitute):
            return model_output(call_model(self.checkpoint, inputs), self.blocks.output_batch_first)

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's own, untouched forward pass: logits, or its last state without a head."""
        return model_output(call_model(self.checkpoint, inputs), self.blocks.output_batch_first)

    def states(self, entry: Entry) -> Iterator[Tensor]:
        """x_0, x_1, … x_L, one after another."""
        x = entry.x
        yield x
        for index in range(len(self)):
            x = self.run(entry, index, x)
            yield x

    def working_bytes(self, tokens: int) -> int:
        """About what one sequence of so many tokens takes while a block runs on it and its states are measured."""
        widest = max((max(p.shape, default=1) for p in self.blocks.modules[0].parameters()), default=1)
        config = getattr(self.checkpoint.model, "config", None)
        heads = getattr(config and config.get_text_config(), "num_attention_heads", 1)
        return 4 * tokens * (3 * widest + 24 * self.blocks.width + 2 * heads * tokens)

    def at(self, index: int, x: Tensor) -> Tensor:
        """The state on the device where block `index` runs, with what was handed on with it."""
        device = next((p.device for p in self.blocks.modules[index].parameters()), x.device)
        return x if device.type == "meta" or device == x.device else self.inherit(x.to(device), x)

    def _outside(self, x: Tensor) -> Tensor:
        """Between the model's axes and `[batch, tokens, width]`; its own inverse."""
        return x if self.blocks.batch_first else x.transpose(0, 1)

    @contextmanager
    def _bypassed(self, substitute: Callable[[int, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
        """Replace every block's forward for the length of the context by `substitute(index, args, kwargs)`."""

        def patched(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                x = substitute(index, args, kwargs)
                container, length, place = self.blocks.returns
                if container is None:
                    return x
                values = [x if i == place else None for i in range(length)]
                return tuple(values) if container == "tuple" else values

            return forward

        saved: list[tuple[nn.Module, Any]] = []
        try:
            for index, module in enumerate(self.blocks.modules):
                saved.append((module, module.__dict__.get("forward")))
                module.forward = patched(index)
            yield
        finally:
            for module, forward in saved:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.forward = forward


def _uncached(value: Any) -> Any:
    """An argument of a block, None for a cache: it would hand on the keys and values of the block's last run."""
    return None if isinstance(value, Cache) else value
