"""Tell two models or two corpora apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from depthprobe.offload import Offload

__all__ = ["digest", "fingerprint", "sampled"]


def fingerprint(model: nn.Module, offload: Offload | None = None) -> str:
    """A hash of a model's weights, from a sample and the sum of each tensor.

    The sum notices one changed weight, the sample changed places; hashing every byte would take as long as a sweep.

    Args:
        model: the module.
        offload: fetches its weights one by one, where they are not in memory.
    """
    found = hashlib.sha256()
    named: Iterable[tuple[str, Tensor]] = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named if offload is None else offload.tensors():
        values = tensor.detach().flatten()
        values = values.cpu() if values.device.type == "mps" else values  # which has no float64
        sample = values[:: max(1, values.numel() // 64)].double().cpu().numpy()
        found.update(name.encode() + sample.tobytes() + values.sum(dtype=torch.float64).cpu().numpy().tobytes())
    return found.hexdigest()


def sampled(model: nn.Module) -> str:
    """A hash of a sample of each weight, which does not depend on the machine that it is taken on."""
    found = hashlib.sha256()
    for name, tensor in model.named_parameters():
        values = tensor.detach().flatten()
        found.update(name.encode() + values[:: max(1, values.numel() // 64)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def digest(values: Tensor) -> str:
    """A hash of every value, with shape and dtype."""
    array = values.cpu().numpy()
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()
