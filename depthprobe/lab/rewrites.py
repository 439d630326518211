"""Rewrites of a pre-LN lab model that keep what it computes: its depth must not change either."""

from __future__ import annotations

import copy

import torch
from torch import nn

from depthprobe.errors import UsageError
from depthprobe.lab.blocks import Block
from depthprobe.lab.model import LabForCausalLM

__all__ = ["in_another_unit", "with_gain", "with_zero_blocks"]


def with_gain(model: LabForCausalLM, place: int, factor: float) -> LabForCausalLM:
    """The stream times a factor behind block `place`, and all that is written later with it.

    Raises:
        UsageError: not a pre-LN model of plain blocks.
    """
    found, blocks = _copied(model)
    blocks[place].mlp_skip.alpha *= factor
    _scale(blocks[place].mlp.outer, factor)
    for block in blocks[place + 1 :]:
        _scale(block.attention.output, factor)
        _scale(block.mlp.outer, factor)
    _read_larger(found, blocks[place + 1 :], factor)
    return found


def in_another_unit(model: LabForCausalLM, factor: float) -> LabForCausalLM:
    """The embedding and all branches times a factor.

    Raises:
        UsageError: not a pre-LN model of plain blocks.
    """
    found, blocks = _copied(model)
    _scale(found.model.token_embedding, factor)
    _scale(found.model.position_embedding, factor)
    for block in blocks:
        _scale(block.attention.output, factor)
        _scale(block.mlp.outer, factor)
    _read_larger(found, blocks, factor)
    return found


def with_zero_blocks(model: LabForCausalLM, place: int, count: int) -> LabForCausalLM:
    """Blocks that write nothing in front of block `place`, or at the end.

    Raises:
        UsageError: not a pre-LN model of plain blocks.
    """
    found, blocks = _copied(model)
    for _ in range(count):
        block = copy.deepcopy(blocks[0])
        _scale(block.attention.output, 0.0)
        _scale(block.mlp.outer, 0.0)
        found.model.blocks.insert(place, block)
    found.config.num_hidden_layers += count
    return found


def _copied(model: LabForCausalLM) -> tuple[LabForCausalLM, list[Block]]:
    config = model.config
    if config.placement != "pre" or config.parallel_pairs or config.tie_word_embeddings:
        raise UsageError(
            f"a lab model with placement={config.placement!r}", "a pre-LN model of plain blocks, its head not tied"
        )
    found = copy.deepcopy(model)
    return found, list(found.model.blocks)  # type: ignore[arg-type]


def _scale(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def _read_larger(model: LabForCausalLM, blocks: list[Block], factor: float) -> None:
    """What is added to the variance in a norm grows with the stream, or its result would change a little."""
    norms = [skip.norm_before for block in blocks for skip in (block.attention_skip, block.mlp_skip)]
    for norm in (*norms, model.model.final_norm):
        norm.eps *= factor**2  # type: ignore[union-attr,operator]
