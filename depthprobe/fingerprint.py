"""Tell two models or two corpora apart."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.offload import Offload

__all__ = ["digest", "fingerprint", "sampled"]


# What a configuration says of where a model came from and how it is run, and not of which function it is.
_NO_MATTER = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_THEIRS = "transformers_modules"  # the package into which transformers puts such code
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module, offload: Offload | None = None) -> str:
    """A hash of a model: of its configuration, of code that came with it, and a sample and the sum of each tensor.

    The sum notices one changed weight, the sample changed places; hashing every byte would take as long as a sweep. The
    sum is of the bits as whole numbers, which comes out the same in any order: of floats, it would depend on how many
    threads, or which device, took it.

    Args:
        model: the module.
        offload: fetches its weights one by one, where they are not in memory.
    """
    found = hashlib.sha256(json.dumps(_configuration(model), sort_keys=True, default=str).encode())
    found.update(_code(model))
    named: Iterable[tuple[str, Tensor]] = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named if offload is None else offload.tensors():
        values = tensor.detach().flatten()
        bits = values.view(_BITS.get(values.element_size(), torch.uint8))
        sample = bits[:: max(1, bits.numel() // 64)].cpu().numpy()
        total = int(bits.sum(dtype=torch.int64))  # which may wrap around
        found.update(f"{name} {values.dtype} {total} ".encode() + sample.tobytes())
    return found.hexdigest()


def _configuration(model: nn.Module) -> Any:
    """What decides which function the weights are of: the same weights with another epsilon are another model."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):
        try:
            return _settled(config.to_diff_dict())
        except Exception:  # of code of its own, whose class cannot be made without arguments
            return _settled(config.to_dict())
    if is_dataclass(config) and not isinstance(config, type):
        return _settled(asdict(config))
    return _settled(config) if isinstance(config, dict) else None


def _settled(value: Any) -> Any:
    """The same, without what does not matter, at any depth."""
    if not isinstance(value, dict):
        return value
    kept = {str(name): part for name, part in value.items() if name not in _NO_MATTER}
    return {name: _settled(part) for name, part in kept.items() if not name.startswith("_")}


def _code(model: nn.Module) -> bytes:
    """A hash of the files that came with the checkpoint, where it runs code of its own."""
    named = {type(module).__module__ for module in model.modules()}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in named if name.startswith(_THEIRS)}
    there = sorted((Path(file).name, Path(file)) for file in files if file and Path(file).exists())
    return b"".join(hashlib.sha256(path.read_bytes()).digest() for _, path in there)


def sampled(model: nn.Module) -> str:
    """A hash of a sample of each weight, which does not depend on the machine that it is taken on."""
    found = hashlib.sha256()
    for name, tensor in model.named_parameters():
        values = tensor.detach().flatten()
        found.update(name.encode() + values[:: max(1, values.numel() // 64)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def digest(values: Tensor) -> str:
    """A hash of every value, with shape and dtype."""
    name = str(values.dtype).removeprefix("torch.")
    array = (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).cpu().numpy()  # which has none
    return hashlib.sha256(f"{name} {array.shape} ".encode() + array.tobytes()).hexdigest()
