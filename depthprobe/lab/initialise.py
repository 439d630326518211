"""How a lab model starts: Xavier's, GPT-2's and Admin's initialisation, and DeepNorm's constants."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from depthprobe.lab.config import LabConfig

__all__ = ["Matrix", "deepnorm_alpha", "deepnorm_beta", "embedding_std", "fill"]

GPT2_STD = 0.02


def deepnorm_alpha(blocks: int) -> float:
    """The factor of the skip, α = (2L)^(1/4) for a single stack of L blocks (Wang et al. 2022, DeepNet)."""
    return (2 * blocks) ** 0.25


def deepnorm_beta(blocks: int) -> float:
    """The gain of the value, output and MLP matrices at initialisation, β = (8L)^(-1/4) (Wang et al. 2022)."""
    return (8 * blocks) ** -0.25


def embedding_std(config: LabConfig) -> float:
    """The standard deviation of both embedding tables.

    1/√2, so that x_0, the sum of a token's row and a position's, has unit variance, as a norm's output has: the first
    branch then finds a stream of its own size. A table that is also the head takes 1/√d, for logits of unit
    variance. GPT-2's initialisation takes 0.02, as for everything.
    """
    if config.initialisation == "gpt2":
        return GPT2_STD
    return config.hidden_size**-0.5 if config.tie_word_embeddings else 0.5**0.5


class Matrix(nn.Linear):
    """A linear layer that says what its rows are, in equal shares, since initialisations differ by it.

    Args:
        inputs, outputs: its sizes.
        parts: query, key, value, output, inner, outer or head.
    """

    def __init__(self, inputs: int, outputs: int, *parts: str, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.parts = parts


@torch.no_grad()
def fill(matrix: Matrix, config: LabConfig) -> None:
    """Draw a weight from the configuration's initialisation and set the bias to 0.

    Xavier's is uniform with variance 2 / (inputs + outputs) (Glorot & Bengio 2010), each of the matrices that stand in
    one weight by itself; Admin starts from it. GPT-2's is normal with standard deviation 0.02, divided by √(2L) where
    a branch writes. DeepNorm multiplies value, output and MLP matrices by β, whatever they were drawn from.
    """
    for part, weight in zip(matrix.parts, matrix.weight.chunk(len(matrix.parts)), strict=True):
        gain = 1.0
        if config.placement == "deepnorm" and part in ("value", "output", "inner", "outer"):
            gain = deepnorm_beta(config.num_hidden_layers)
        _draw(weight, config, gain, writes=part in ("output", "outer"))
    if matrix.bias is not None:
        matrix.bias.zero_()


def _draw(weight: Tensor, config: LabConfig, gain: float, writes: bool) -> None:
    if config.initialisation == "gpt2":
        weight.normal_(std=gain * GPT2_STD / (math.sqrt(2 * config.num_hidden_layers) if writes else 1.0))
    else:
        bound = gain * math.sqrt(6 / sum(weight.shape))
        weight.uniform_(-bound, bound)
