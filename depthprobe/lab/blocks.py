"""Attention, MLP, and the blocks that are made of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthprobe.lab.config import LabConfig
from depthprobe.lab.initialise import Matrix
from depthprobe.lab.norms import RMSNorm
from depthprobe.lab.skip import Skip

__all__ = ["Attention", "Block", "Mlp", "Pair"]


class Attention(nn.Module):
    """Multi-head self-attention; with residual attention, on top of the scores of the block before."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.heads = config, config.num_attention_heads
        self.qkv = Matrix(width, 3 * width, "query", "key", "value")
        self.output = Matrix(width, width, "output")
        size = width // self.heads
        self.query_norm = RMSNorm(size, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(size, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, scores: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is added to the stream, and the scores for the next block where it wants them.

        Args:
            x: `[batch, tokens, width]`.
            scores: what the block before returned, `[batch, heads, tokens, tokens]`, before mask and softmax.
            mask: true where a position may look, `[batch, 1, tokens, tokens]`; None stands for every position, in a
                causal model every earlier one and itself.
        """
        batch, tokens, width = x.shape
        # One view for all three, since each costs as much as a small matrix product.
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.residual_attention or self.config._attn_implementation == "eager":
            mixed, scores = self._by_scores(query, key, value, scores, mask)
        else:
            causal = self.config.causal and mask is None
            mixed, scores = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal), None
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width)), scores

    def _by_scores(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same with the scores written out, and the sum of scores that goes on to the next block."""
        own = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if scores is not None:
            own = own + scores
        if mask is None and self.config.causal:
            mask = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).tril()
        seen = own if mask is None else own.masked_fill(~mask, -torch.inf)
        return seen.softmax(dim=-1) @ value, own if self.config.residual_attention else None


class Mlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.inner = Matrix(config.hidden_size, config.inner_size, "inner")
        self.outer = Matrix(config.inner_size, config.hidden_size, "outer")

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the stream, `[batch, tokens, width]` to the same."""
        return self.outer(F.gelu(self.inner(x)))


class Block(nn.Module):
    """Attention, then an MLP, each with its skip."""

    def __init__(self, config: LabConfig, index: int, closes: bool = True) -> None:
        super().__init__()
        self.carries_scores = config.residual_attention
        self.attention = Attention(config)
        self.attention_skip = Skip(config, index, closes)
        self.mlp = Mlp(config)
        self.mlp_skip = Skip(config, index, closes)

    def forward(self, x: Tensor, scores: Tensor | None = None, mask: Tensor | None = None) -> Any:
        """The stream `[batch, tokens, width]`, and with residual attention the scores beside it, in a tuple."""
        update, scores = self.attend(x, scores, mask)
        x = self.attention_skip.add(x, update)
        x = self.mlp_skip.add(x, self.think(x))
        return (x, scores) if self.carries_scores else x

    def attend(self, x: Tensor, scores: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the attention adds to x, and its scores."""
        written, scores = self.attention(self.attention_skip.read(x), scores, mask)
        return self.attention_skip.update(written), scores

    def think(self, x: Tensor) -> Tensor:
        """What the MLP adds to x."""
        return self.mlp_skip.update(self.mlp(self.mlp_skip.read(x)))


class Pair(nn.Module):
    """Two blocks side by side: x + F_a(x) + F_b(x), or both attentions side by side and then both MLPs.

    Both are given the scores of the pair before; those of the second go on.
    """

    def __init__(self, config: LabConfig, index: int) -> None:
        super().__init__()
        self.whole = config.parallel_pairs == "blocks"
        self.carries_scores = config.residual_attention
        self.first = Block(config, index, closes=self.whole)
        self.second = Block(config, index + 1)

    def forward(self, x: Tensor, scores: Tensor | None = None, mask: Tensor | None = None) -> Any:
        """As a block's."""
        if self.whole:
            a, b = self.first(x, scores, mask), self.second(x, scores, mask)
            if self.carries_scores:
                (a, _), (b, scores) = a, b
            x = a + b - x
        else:
            (a, _), (b, scores) = self.first.attend(x, scores, mask), self.second.attend(x, scores, mask)
            x = self.second.attention_skip.add(x, a + b)
            x = self.second.mlp_skip.add(x, self.first.think(x) + self.second.think(x))
        return (x, scores) if self.carries_scores else x
