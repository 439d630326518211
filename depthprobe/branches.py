"""Run a block and read what it adds to the stream, where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from depthprobe.stream import Entry, Stream
from depthprobe.taps import Block, Branch, Tap, first_tensor

__all__ = ["Reader", "Visit"]


@dataclass(frozen=True, eq=False)
class Visit:
    """One block applied to one state.

    Attributes:
        z: what the block wrote, `[batch, tokens, width]`.
        branches: (s, u) of each unit that was found, the same shape.
        update: F_l(x) in float32: f_l(x) − x, or in half precision the sum of the branches where they were found.
    """

    z: Tensor
    branches: dict[str, tuple[Tensor, Tensor]]
    update: Tensor


class Reader:
    """A stream whose branches are read as it runs. Use as a context: its hooks are on the model for that long.

    Args:
        stream: the model.
        blocks: its anatomy; blocks without branches are run all the same.
    """

    def __init__(self, stream: Stream, blocks: tuple[Block, ...]) -> None:
        self.stream, self.blocks = stream, blocks
        self._seen: dict[Tap, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for module, block in zip(self.stream.blocks.modules, self.blocks, strict=True):
            taps = {tap for branch in block.branches for tap in (branch.update, branch.state) if tap is not None}
            for tap in taps:
                target = module.get_submodule(tap.module)
                if tap.side == "in":
                    self._handles.append(target.register_forward_pre_hook(self._before(tap), with_kwargs=True))
                else:
                    self._handles.append(target.register_forward_hook(self._after(tap)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def visit(self, entry: Entry, index: int, x: Tensor) -> Visit:
        """Apply block `index` to any state `[batch, tokens, width]`."""
        self._seen.clear()
        with self.stream.resident(index):
            z = self.stream.run(entry, index, x)
            branches: dict[str, tuple[Tensor, Tensor]] = {
                b.unit: (self._state(b, index, x), self._update(b, x)) for b in self.blocks[index].branches
            }
        self._seen.clear()
        sums = bool(branches) and all(
            b.norm is None and b.gain is None and b.skip_scale == 1.0 for b in self.blocks[index].branches
        )
        if sums and z.dtype in {torch.bfloat16, torch.float16}:
            # The difference of two rounded states would be mostly rounding where the update is small.
            update = torch.stack([u.float() for _, u in branches.values()]).sum(dim=0)
        else:
            update = z.float() - x.float()
        return Visit(z, branches, update)

    def _update(self, branch: Branch, x: Tensor) -> Tensor:
        update = self._outside(self._seen[branch.update], x)
        return update if branch.scale == 1.0 else update * branch.scale

    def _state(self, branch: Branch, index: int, x: Tensor) -> Tensor:
        state = x if branch.state is None else self._outside(self._seen[branch.state], x)
        return branch.skip(self.stream.blocks.modules[index], state)

    def _outside(self, tensor: Tensor, x: Tensor) -> Tensor:
        if tensor.ndim == 3 and not self.stream.blocks.batch_first:
            return tensor.transpose(0, 1).to(x.device)
        return tensor.reshape(x.shape).to(x.device)  # some MLPs flatten batch and tokens

    def _before(self, tap: Tap) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._keep(tap, (args, kwargs))

        return hook

    def _after(self, tap: Tap) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._keep(tap, output)

        return hook

    def _keep(self, tap: Tap, value: Any) -> None:
        tensor = first_tensor(value)
        if tensor is not None:
            self._seen[tap] = tensor.clone() if tap.overwritten else tensor
