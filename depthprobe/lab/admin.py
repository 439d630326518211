"""Admin's initialisation of post-LN: how strongly each branch may depend on itself, from one batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.errors import UsageError
from depthprobe.lab.skip import Skip

__all__ = ["admin_profile"]


@torch.no_grad()
def admin_profile(model: nn.Module, input_ids: Tensor) -> tuple[float, ...]:
    """Set the ω of every sublayer i of N(ω_i ⊙ x_{i−1} + F_i(x_{i−1})), before the first step of training.

    ω_1 = 1 and ω_{i+1}² = Var[ω_i ⊙ x_{i−1}] + Var[F_i(x_{i−1})], variances over the whole batch (Liu et al. 2020,
    as in their code). Since a norm's output has unit variance, ω_{i+1}² = Var[x_0] + Σ_{j≤i} Var[F_j]: the skip weighs
    as much as everything before it would in pre-LN. Each ω is set before the batch goes on through its sublayer.

    Args:
        model: made with initialisation="admin"; its mode and its gradients are left as they are.
        input_ids: a batch of the training text, `[batch, tokens]`.

    Returns:
        ω of every sublayer in the order in which they ran, the same for all dimensions.

    Raises:
        UsageError: the model has no ω.
    """
    skips = [module for module in model.modules() if isinstance(module, Skip) and module.gain is not None]
    if not skips:
        raise UsageError("a profiling pass was asked for a model without Admin's factors", "initialisation='admin'")
    found = [1.0]
    parts: list[Tensor] = []

    def set_factor(gain: Any, args: Any) -> None:
        gain.weight.fill_(found[-1])

    def keep_skip(gain: Any, args: Any, output: Tensor) -> None:
        parts[:] = [output]

    def read_update(norm: Any, args: Any) -> None:
        (total,), (skip,) = args, parts
        found.append(math.sqrt(float(skip.var()) + float((total - skip).var())))

    handles: list[Any] = []
    for skip in skips:
        assert skip.gain is not None
        assert skip.norm_after is not None
        handles.append(skip.gain.register_forward_pre_hook(set_factor))
        handles.append(skip.gain.register_forward_hook(keep_skip))
        handles.append(skip.norm_after.register_forward_pre_hook(read_update))
    try:
        model(input_ids)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found[:-1])
