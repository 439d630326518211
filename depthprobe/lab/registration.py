"""Make transformers' auto classes know the lab's models, whichever of the two packages is imported first.

The auto classes take seconds to import and `depthprobe --help` should not wait for them: where they are not there
yet, the registration waits for whoever imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["register"]


def _register_config(auto: ModuleType) -> None:
    from depthprobe.lab.config import LabConfig

    auto.AutoConfig.register(LabConfig.model_type, LabConfig)


def _register_models(auto: ModuleType) -> None:
    from depthprobe.lab.config import LabConfig
    from depthprobe.lab.model import LabForCausalLM, LabForMaskedLM, LabModel

    auto.AutoModel.register(LabConfig, LabModel)
    auto.AutoModelForCausalLM.register(LabConfig, LabForCausalLM)
    auto.AutoModelForMaskedLM.register(LabConfig, LabForMaskedLM)


_ON_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_models,
}


def register() -> None:
    """Register the lab's configuration and models: now with the modules that are loaded, else when they are."""
    waiting = {}
    for name, action in _ON_IMPORT.items():
        if name in sys.modules:
            action(sys.modules[name])
        else:
            waiting[name] = action
    if waiting:
        sys.meta_path.insert(0, _Watcher(waiting))


class _Watcher:
    """Finds the modules that it waits for as everybody else would, but calls an action when one has been loaded."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self.waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by the import system for every module that is not loaded yet."""
        action = self.waiting.pop(name, None)
        spec = find_spec(name) if action is not None else None
        if action is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        loader.exec_module = execute_and_act
        return spec
