"""Small transformers of every norm placement, to train and to compare with everything else held equal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthprobe.lab.config import LabConfig
    from depthprobe.lab.model import LabForCausalLM, LabForMaskedLM, LabModel
    from depthprobe.lab.settings import TrainSettings
    from depthprobe.lab.text import Text, read_text
    from depthprobe.lab.training import TrainResult, train

__all__ = [
    "LabConfig",
    "LabForCausalLM",
    "LabForMaskedLM",
    "LabModel",
    "Text",
    "TrainResult",
    "TrainSettings",
    "read_text",
    "train",
]

_HOMES = {
    "LabConfig": "config",
    "LabForCausalLM": "model",
    "LabForMaskedLM": "model",
    "LabModel": "model",
    "Text": "text",
    "TrainResult": "training",
    "TrainSettings": "settings",
    "read_text": "text",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    # Whoever imports depthprobe imports this folder: it must not wait for torch.
    if name in _HOMES:
        return getattr(import_module(f"depthprobe.lab.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'depthprobe.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
