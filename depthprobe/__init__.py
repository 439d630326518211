"""How much of a trained transformer's depth is really used?

`analyze` measures a checkpoint and returns a `Report`; `inspect` finds and verifies a model's anatomy and measures
nothing; `load` opens a checkpoint once for several of these.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthprobe.lab.registration import register as _register

if TYPE_CHECKING:
    from depthprobe.ablation import Ablations, ablate
    from depthprobe.analysis import analyze, inspect
    from depthprobe.checkpoint import Checkpoint, load
    from depthprobe.comparison import compare
    from depthprobe.effective import Effective, effective_depth
    from depthprobe.errors import DepthprobeError
    from depthprobe.gradient import Gradients, gradients
    from depthprobe.report import Report
    from depthprobe.report.compare_schema import Comparison

__all__ = [
    "Ablations",
    "Checkpoint",
    "Comparison",
    "DepthprobeError",
    "Effective",
    "Gradients",
    "Report",
    "ablate",
    "analyze",
    "compare",
    "effective_depth",
    "gradients",
    "inspect",
    "load",
]

_HOMES = {
    "Ablations": "ablation",
    "ablate": "ablation",
    "analyze": "analysis",
    "inspect": "analysis",
    "Checkpoint": "checkpoint",
    "load": "checkpoint",
    "DepthprobeError": "errors",
    "Effective": "effective",
    "effective_depth": "effective",
    "Gradients": "gradient",
    "gradients": "gradient",
    "Report": "report",
    "Comparison": "report.compare_schema",
    "compare": "comparison",
}

_register()  # so that transformers' AutoModelForCausalLM opens the lab's checkpoints; imports nothing by itself


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: `depthprobe --help` should not wait for them.
    if name in _HOMES:
        return getattr(import_module(f"depthprobe.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'depthprobe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
