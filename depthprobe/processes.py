"""One process, or several that torchrun started: who has which sequences, what all of them found, and who writes.

Every process runs the same program on the whole model. Where it comes to the sequences of a corpus, each takes its
share (`dealt`), and afterwards all have the numbers of every sequence: what follows from them is the same everywhere,
and the first process writes it. Nothing is dealt unless a command says so (`joined`): a program of the user's may call
depthprobe from one of its processes alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from depthprobe.errors import DepthprobeError, UsageError

if TYPE_CHECKING:  # whoever asks only whether there are several need not wait for torch
    import torch
    from torch import Tensor, nn

__all__ = [
    "LostProcessError",
    "Processes",
    "announced",
    "batches_in_all",
    "collected",
    "count",
    "dealt",
    "dealt_to_this",
    "exchange",
    "first",
    "joined",
    "paced",
    "started",
    "summed",
    "together",
    "told",
]

T = TypeVar("T")
Progress = Callable[[int, int], None]
_MEETING = timedelta(minutes=5)  # for the others to come
# For others that have more to do. A process that has died is noticed at once; a machine that is gone without closing
# its connections is not.
_PATIENCE = timedelta(days=7)
_rank, _count = 0, 1
_group: Any = None


class LostProcessError(BaseException):
    """Another process of the run has ended. Not an Exception: what goes on after an error must not after this."""


@dataclass(frozen=True)
class Processes:
    """The processes of a training run.

    Attributes:
        rank: of this one, from 0; 0 writes.
        count: how many there are.
        device: of this one.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes, the same in all of them."""
        import torch.distributed as dist

        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
            values /= self.count
        return values

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the first one's, in place."""
        import torch.distributed as dist

        for tensor in tensors if self.count > 1 else ():
            dist.broadcast(tensor, 0)

    def generators_kept(self) -> AbstractContextManager[None]:
        """What is drawn inside leaves torch's random numbers for what comes after as they were."""
        import torch

        devices = [self.device] if self.device.type == "cuda" else []
        kept: AbstractContextManager[None] = torch.random.fork_rng(devices)
        return kept

    def wait(self) -> None:
        """Until all are here."""
        import torch.distributed as dist

        if self.count > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, with gradients that are averaged over the processes."""
        from torch.nn.parallel import DistributedDataParallel

        if self.count == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


def announced() -> tuple[int, int]:
    """Rank of this process and how many there are, as torchrun puts them into the environment; (0, 1) without it."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


@contextmanager
def started(device: torch.device) -> Iterator[Processes]:
    """The processes of a training run that torchrun announced, joined; or this one alone.

    Args:
        device: of this process.
    """
    import torch
    import torch.distributed as dist

    place, many = announced()
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    ours = many > 1 and not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(place, many, device)
    finally:
        if ours:
            dist.destroy_process_group()


@contextmanager
def joined() -> Iterator[None]:
    """Sequences are dealt among the processes that torchrun announced, for as long as this lasts.

    Raises:
        UsageError: the environment announces processes, and they cannot be found.
        LostProcessError: from within: another process has ended, or this one is told to.
    """
    global _rank, _count, _group
    place, many = announced()
    if many == 1:
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=_MEETING)  # numbers are exchanged, wherever the model is
        _group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"WORLD_SIZE is {many}, and the other processes were not found ({_line(error)})",
            "torchrun --nproc-per-node N -m depthprobe …, or no WORLD_SIZE in the environment",
            "unset WORLD_SIZE to run alone",
        ) from error
    before = signal.signal(signal.SIGTERM, _told_to_end)
    _rank, _count = place, many
    try:
        yield
    finally:
        _rank, _count, _group = 0, 1, None
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()


def count() -> int:
    """Among how many processes sequences are dealt; 1 outside of `joined`."""
    return _count


def first() -> bool:
    """Whether this is the one that prints and writes."""
    return _rank == 0


@contextmanager
def dealt(sequences: int, *arrays: np.ndarray) -> Iterator[range]:
    """The sequences of this process; at the end all processes have what each has put into the arrays.

    An error in one process is raised in all of them.

    Args:
        sequences: how many there are, dealt in order and as evenly as may be: the first process has one if any has.
        arrays: a row a sequence, `[sequences, …]`.
    """
    mine = _share(sequences, _rank)
    if _count == 1:
        yield mine
        return
    found: list[np.ndarray] | Exception
    try:
        yield mine
        found = [array[mine.start : mine.stop] for array in arrays]
    except Exception as error:
        found = error
    for other, theirs in enumerate(_raised(_gather(_sent(found)), found)):
        rows = _share(sequences, other)
        for array, part in zip(arrays, theirs, strict=True):
            array[rows.start : rows.stop] = part


def exchange(columns: MutableMapping[Any, np.ndarray], sequences: int) -> None:
    """Put every process's rows into the columns, `[sequences, …]` each; those that only others have are added.

    Rows of a process that does not have a column are NaN.
    """
    if _count == 1:
        return
    mine = _share(sequences, _rank)
    every = _gather({name: column[mine.start : mine.stop] for name, column in columns.items()})
    for other, theirs in enumerate(every):
        rows = _share(sequences, other)
        for name, part in theirs.items():
            if name not in columns:
                columns[name] = np.full((sequences, *part.shape[1:]), np.nan)
            columns[name][rows.start : rows.stop] = part


def dealt_to_this(sequences: int) -> range:
    """Those of so many sequences that `dealt` gives to this process."""
    return _share(sequences, _rank)


def batches_in_all(sequences: int, step: int) -> int:
    """How many batches of at most so many sequences all processes make of theirs."""
    return sum(-(-len(_share(sequences, place)) // step) for place in range(_count))


def collected(value: T) -> list[T]:
    """The value that each process has, in order of rank."""
    return [value] if _count == 1 else _gather(value)


def summed(values: Tensor) -> Tensor:
    """The sum over all processes, the same in all of them, on the device of what is given."""
    if _count == 1:
        return values
    import torch.distributed as dist

    total = values.detach().to("cpu", copy=True)
    with _noticed():
        dist.all_reduce(total, group=_group)
    return total.to(values.device)


def told(work: Callable[[], T]) -> T:
    """What the first process finds, or its error; the others do not look for themselves."""
    if _count == 1:
        return work()
    import torch.distributed as dist

    mine: T | Exception | None = None
    if _rank == 0:
        try:
            mine = work()
        except Exception as error:
            mine = error
    found: list[Any] = [_sent(mine)]
    with _noticed():
        dist.broadcast_object_list(found, src=0, group=_group)
    return _raised(found, mine)[0]


def together(work: Callable[[], T]) -> T:
    """What this process finds; an error in one process is raised in all of them."""
    if _count == 1:
        return work()
    error: Exception | None = None
    try:
        found = work()
    except Exception as caught:
        error = caught
    _raised(_gather(_sent(error)), error)
    return found


def paced(progress: Progress | None) -> Progress | None:
    """The same, told by one process how far all of them are, if they are as far as this one."""
    if progress is None or _count == 1:
        return progress
    return lambda done, total: progress(min(total, _count * done), total)


def _share(sequences: int, place: int) -> range:
    each, over = divmod(sequences, _count)
    start = place * each + min(place, over)
    return range(start, start + each + (place < over))


def _gather(value: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * _count
    with _noticed():
        dist.all_gather_object(found, value, group=_group)
    return found


def _sent(value: Any) -> Any:
    """What the others are given: the value itself, or an error that is known to them and can be sent."""
    if not isinstance(value, Exception) or isinstance(value, DepthprobeError):
        return value
    return DepthprobeError(f"another process of this run failed with {type(value).__name__}: {_line(value)}")


def _raised(found: list[Any], mine: Any) -> list[Any]:
    """The same, unless one of them is an error: this process's own, with where it comes from, or the first one."""
    errors = [value for value in (mine, *found) if isinstance(value, Exception)]
    if errors:
        errors[0].everywhere = True  # type: ignore[attr-defined]
        raise errors[0]
    return found


@contextmanager
def _noticed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(f"another process of this run has ended ({_line(error)})") from error


def _line(error: Exception) -> str:
    """The first line of a message."""
    return str(error).strip().partition("\n")[0][:200]


def _told_to_end(number: int, frame: Any) -> None:
    raise LostProcessError("this process was told to end, as happens when another one of the run has ended")
