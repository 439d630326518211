"""The weights of a model that accelerate has dispatched: which stay while a block runs, and what was fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.errors import UsageError

__all__ = ["MEMORY", "Fetched", "Offload", "OnDisk", "Window", "allowed", "refuse_offloaded"]

MEMORY = 2 << 30  # bytes for states and activations where nobody says how many there are


@dataclass(frozen=True)
class Fetched:
    """Bytes of weights that a run fetched.

    Attributes:
        bytes: that were fetched.
        planned: that had to be, by the order in which blocks run.
        batch_outer: what a loop over batches outside would have fetched, a block whenever it runs.
        chunks: into how many parts the text was divided; each fetches the weights anew.
    """

    bytes: int
    planned: int
    batch_outer: int
    chunks: int


class _Counted(Mapping[str, Any]):
    """The weights of one module as accelerate's hook finds them, and a word on each that is taken."""

    def __init__(self, weights: Mapping[str, Any], took: Callable[[int], None]) -> None:
        self.weights, self.took = weights, took

    def __getitem__(self, name: str) -> Any:
        value = self.weights[name]
        self.took(value.nbytes)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __deepcopy__(self, memo: Any) -> _Counted:
        return self  # a copy of a block fetches from the same place


class Offload:
    """The weights of a model that accelerate has dispatched.

    Args:
        model: with accelerate's hooks.
        room: bytes for states and activations, None for `MEMORY`.

    Attributes:
        room: the same.
        fetched: bytes of weights that were fetched so far, whoever asked for them.
        parameters: how many the model has, tied ones counted once.
        places: bytes by where they are: `on` a device, or `offloaded`.
    """

    def __init__(self, model: nn.Module, room: int | None = None) -> None:
        self.model = model
        self.room = MEMORY if room is None else room
        self.fetched = 0
        # As they are now: accelerate makes new parameters whenever it fetches, and tied ones would be counted twice.
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.names = tuple(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
        self.places: dict[str, int] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            place = "offloaded" if tensor.device.type == "meta" else f"on {tensor.device}"
            self.places[place] = self.places.get(place, 0) + tensor.nbytes
        self._hooks: dict[nn.Module, Any] = {}
        outside: list[nn.Module] = []
        lists: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                lists.append(f"{name}.")
            for hook in _hooks(module):
                if hook.offload:
                    hook.weights_map = _Counted(hook.weights_map, self._took)
                    self._hooks[module] = hook
                    if not name.startswith(tuple(lists)):
                        outside.append(module)
        self._outside = tuple(outside)

    @classmethod
    def of(cls, model: nn.Module, room: int | None = None) -> Offload | None:
        """Of a model that was dispatched or has a limit; None where all of it is simply in memory."""
        known = getattr(model, "_depthprobe_offload", None)
        if known is not None:  # a module that is opened again, whose tied parameters may have come apart
            return known
        if room is None and not any(hook.offload for module in model.modules() for hook in _hooks(module)):
            return None
        found = cls(model, room)
        model.__dict__["_depthprobe_offload"] = found
        return found

    @property
    def any(self) -> bool:
        """Whether any weight has to be fetched."""
        return bool(self._hooks)

    @contextmanager
    def resident(self, *modules: nn.Module) -> Iterator[None]:
        """Fetch the weights inside these modules now and keep them for the length of the context.

        What is there already is not fetched again.
        """
        kept: list[nn.Module] = []
        try:
            for part in (part for module in modules for part in module.modules()):
                hook = self._hooks.get(part)
                if hook is not None and hook.offload:
                    hook.pre_forward(part)
                    hook.offload = False  # so that calls of the part neither fetch nor let go
                    kept.append(part)
            yield
        finally:
            for part in kept:
                self._hooks[part].offload = True
                self._hooks[part].post_forward(part, None)

    def outside(self) -> AbstractContextManager[None]:
        """The same for all weights that are in no list of blocks: embeddings, final norm, head."""
        return self.resident(*self._outside)

    def size(self, module: nn.Module) -> int:
        """Bytes that are fetched to run a module."""
        return sum(self._size(part) for part in module.modules() if part in self._hooks)

    @property
    def outside_size(self) -> int:
        """Bytes that `outside` fetches."""
        return sum(map(self._size, self._outside))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer by name, tied ones once, one in memory at a time."""
        for name in self.names:
            path, _, last = name.rpartition(".")
            owner: Any = self.model.get_submodule(path)
            tensor = getattr(owner, last)
            if tensor.device.type == "meta":
                while owner not in self._hooks:  # a hook may hold what is inside its module
                    path, _, inner = path.rpartition(".")
                    owner, last = self.model.get_submodule(path), f"{inner}.{last}"
                tensor = self._hooks[owner].weights_map[last].to(tensor.dtype)
            yield name, tensor

    def _took(self, size: int) -> None:
        self.fetched += size

    def _size(self, part: nn.Module) -> int:
        from accelerate.utils import named_module_tensors

        hook = self._hooks[part]
        tensors = named_module_tensors(
            part, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
        )
        return sum(tensor.nbytes for _, tensor in tensors)


class Window:
    """Blocks whose weights stay while others come: the last `size` that were asked for. Use as a context.

    Args:
        resident: gives the context in which a block's weights are there.
        size: how many.
    """

    def __init__(self, resident: Callable[[int], AbstractContextManager[None]], size: int) -> None:
        self.resident, self.size = resident, size
        self._held: list[AbstractContextManager[None]] = []

    def fetch(self, block: int) -> None:
        """A block's weights; those of the block that was fetched first go, if there are too many."""
        while len(self._held) >= self.size:
            self._held.pop(0).__exit__(None, None, None)
        context = self.resident(block)
        context.__enter__()
        self._held.append(context)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        while self._held:
            self._held.pop(0).__exit__(None, None, None)


class OnDisk:
    """A list of tensors that are files, mapped into memory for as long as somebody holds one that was asked for.

    Args:
        folder: an empty folder for them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    def append(self, like: Tensor) -> None:
        """A tensor of zeros of this shape and dtype."""
        self._kinds.append((like.shape, like.dtype))

    def __getitem__(self, index: int) -> Tensor:
        """The tensor itself: what is written into it stays."""
        shape, dtype = self._kinds[index]
        name = str(self.folder / f"{range(len(self))[index]}.bin")
        return torch.from_file(name, shared=True, size=shape.numel(), dtype=dtype).view(shape)

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


def allowed(memory: int, offload: Offload | None) -> int:
    """Bytes that states and graphs may take: what was asked for, or a quarter of what a limit of the process leaves."""
    return memory if offload is None else min(memory, offload.room // 4)


def refuse_offloaded(offload: Offload | None, what: str) -> None:
    """Raises UsageError where weights would have to be fetched for what cannot do so."""
    if offload is not None and offload.any:
        raise UsageError(f"{what} of a model whose weights are offloaded", "all weights in memory")


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on a module that know of offloading."""
    hook = getattr(module, "_hf_hook", None)
    return [one for one in getattr(hook, "hooks", (hook,)) if hasattr(one, "weights_map")]
