"""How a branch is joined to the residual stream: the one place where the placements differ."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from depthprobe.lab.config import LabConfig
from depthprobe.lab.initialise import deepnorm_alpha
from depthprobe.lab.norms import make_norm

__all__ = ["Gain", "Skip"]


class Gain(nn.Module):
    """A learned factor for every dimension: Admin's ω."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return self.weight * x


class Skip(nn.Module):
    """How one branch F is joined to the stream: what it reads, what becomes of what it writes, and the sum.

    Args:
        config: names the placement.
        index: of the block, from 0, for the LayerNorm scaling.
        closes: it makes the sum; of two branches that are added at once, only the second does.
    """

    def __init__(self, config: LabConfig, index: int, closes: bool = True) -> None:
        super().__init__()
        self.norm_before = make_norm(config) if config.norm_before else None
        self.norm_update = make_norm(config) if config.norm_on_update else None
        self.norm_after = make_norm(config) if config.norm_after and closes else None
        self.gain = Gain(config.hidden_size) if config.initialisation == "admin" and closes else None
        self.alpha = deepnorm_alpha(config.num_hidden_layers) if config.placement == "deepnorm" else 1.0
        self.scaling = 1 / math.sqrt(index + 1) if config.layernorm_scaling else 1.0

    def read(self, x: Tensor) -> Tensor:
        """What the branch is given: N(x) or x."""
        if self.norm_before is None:
            return x
        normed = self.norm_before(x)
        return normed if self.scaling == 1.0 else self.scaling * normed

    def update(self, written: Tensor) -> Tensor:
        """What is added for what the branch wrote: N(F) or F."""
        return written if self.norm_update is None else self.norm_update(written)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """The stream after the branch: x + u, N(x + u), N(αx + u) or N(ω ⊙ x + u)."""
        if self.gain is not None:
            x = self.gain(x)
        total = x + update if self.alpha == 1.0 else torch.add(update, x, alpha=self.alpha)
        return total if self.norm_after is None else self.norm_after(total)
