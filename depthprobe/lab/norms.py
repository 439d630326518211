"""The four norms, each a module on `[batch, tokens, width]` with a learned scale, and a shift but for RMSNorm.

The two that take statistics over positions count padding as well.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthprobe.lab.config import LabConfig

__all__ = ["BatchNorm", "InstanceNorm", "Norm", "RMSNorm", "make_norm"]


class RMSNorm(nn.RMSNorm):
    """Each position by its root mean square, in the precision of the scale, as autocast does it for LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        """`[…, width]` to the same."""
        return super().forward(x.to(self.weight.dtype))


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


Norm = nn.LayerNorm | RMSNorm | BatchNorm | InstanceNorm


def make_norm(config: LabConfig) -> Norm:
    """The norm that a configuration names, over the width of the stream."""
    width, eps = config.hidden_size, config.norm_eps
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=eps)
    if config.norm == "rmsnorm":
        return RMSNorm(width, eps=eps)
    if config.norm == "batchnorm":
        return BatchNorm(width, eps=eps)
    return InstanceNorm(width, eps=eps, affine=True)
