"""One process, or several that torchrun started: who writes, and what is averaged over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthprobe.errors import UsageError

__all__ = ["Processes", "started", "writes"]


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

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
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
            values /= self.count
        return values

    def generators_kept(self) -> AbstractContextManager[None]:
        """What is drawn inside leaves torch's random numbers for what comes after as they were."""
        devices = [self.device] if self.device.type == "cuda" else []
        kept: AbstractContextManager[None] = torch.random.fork_rng(devices)
        return kept

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, with gradients that are averaged over the processes."""
        if self.count == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def writes() -> bool:
    """Whether this process is the one that writes and prints: the only one, or the first that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def started(device: str) -> Iterator[Processes]:
    """The processes that torchrun announced in the environment, joined; or this one alone.

    Args:
        device: cpu, cuda, mps, or auto.

    Raises:
        UsageError: the device is not there.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    place = _device(device, int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0)
    ours = count > 1 and not dist.is_initialized()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if ours:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(rank, count, place)
    finally:
        if ours:
            dist.destroy_process_group()


def _device(name: str, local: int) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}", "auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local)
    there = {"cpu": 1, "cuda": torch.cuda.device_count() if cuda else 0, "mps": int(mps)}
    if (device.index or 0) >= there.get(device.type, 0):
        raise UsageError(f"--device {device} is not on this machine", "auto or cpu")
    return device
