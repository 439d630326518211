"""The four norms, each a module on `[batch, tokens, width]` with a learned scale (and shift, but for RMSNorm)."""

from __future__ import annotations

from torch import Tensor, nn

from depthprobe.lab.config import LabConfig

__all__ = ["BatchNorm", "InstanceNorm", "Norm", "make_norm"]


class BatchNorm(nn.BatchNorm1d):
    """Each channel by its mean and variance over batch and positions, when evaluated by their running averages."""

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return super().forward(x.flatten(0, -2)).view(x.shape)


class InstanceNorm(nn.InstanceNorm1d):
    """Each channel of each sequence by its mean and variance over positions, in training and evaluation alike."""

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


Norm = nn.LayerNorm | nn.RMSNorm | BatchNorm | InstanceNorm


def make_norm(config: LabConfig) -> Norm:
    """The norm that a configuration names, over the width of the stream."""
    width, eps = config.hidden_size, config.norm_eps
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=eps)
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=eps)
    if config.norm == "batchnorm":
        return BatchNorm(width, eps=eps)
    return InstanceNorm(width, eps=eps, affine=True)
