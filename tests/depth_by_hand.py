"""Lab models whose units are written out as their papers say, for the estimators of depth to be compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthprobe.lab import LabConfig, LabForCausalLM

__all__ = ["PLACEMENTS", "Hand", "changes", "frozen", "lab", "readout", "start", "units"]

Map = Callable[[Tensor], Tensor]

PLACEMENTS = {
    "pre": {"placement": "pre"},
    "scaled": {"placement": "pre", "layernorm_scaling": True},
    "post": {"placement": "post"},
    "post-rms": {"placement": "post", "norm": "rmsnorm"},
    "deepnorm": {"placement": "deepnorm"},
    "admin": {"placement": "post", "initialisation": "admin"},
    "branch": {"placement": "branch"},
    "sandwich": {"placement": "sandwich"},
    "none": {"placement": "none"},
}


@dataclass(frozen=True)
class Hand:
    """A unit: what it reads, w(x), P v with the norms frozen at the unmodified run, and the state after it."""

    reads: Tensor
    write: Map
    carry: Map
    step: Map


def lab(seed: int = 0, blocks: int = 3, bias: bool = True, **config: object) -> LabForCausalLM:
    """A small lab model whose gains and biases are not those of its initialisation."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": blocks, "num_attention_heads": 2}
    model = LabForCausalLM(LabConfig(**sizes, max_position_embeddings=32, **config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter)).mul_(bias or not name.endswith("bias"))
    return model


def frozen(norm: nn.Module | None, y: Tensor) -> Map:
    """v → γ ⊙ (v − mean v) / σ, σ that of y."""
    if norm is None:
        return lambda v: v
    if isinstance(norm, nn.RMSNorm):
        rms = (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return lambda v: norm.weight * v / rms
    sigma = (y.var(-1, keepdim=True, unbiased=False) + norm.eps).sqrt()
    return lambda v: norm.weight * (v - v.mean(-1, keepdim=True)) / sigma


def start(model: LabForCausalLM, inputs: Tensor) -> Tensor:
    """x_0."""
    return model.model.token_embedding(inputs) + model.model.position_embedding.weight[: inputs.shape[1]]


def readout(model: LabForCausalLM, x: Tensor) -> Tensor:
    """Logits."""
    return model.lm_head(x if model.model.final_norm is None else model.model.final_norm(x))


def units(model: LabForCausalLM, unit: str, inputs: Tensor) -> tuple[list[Hand], Tensor]:
    """Blocks or sublayers in order, and x_L."""
    x, found = start(model, inputs), []
    for block in model.model.blocks:
        attention, mlp = _sublayers(block, x)
        if unit == "block":

            def write(v: Tensor, block: nn.Module = block, a: Hand = attention, m: Hand = mlp) -> Tensor:
                return m.carry(a.write(v)) + m.write(a.step(v))

            def carry(v: Tensor, a: Hand = attention, m: Hand = mlp) -> Tensor:
                return m.carry(a.carry(v))

            found.append(Hand(x, write, carry, block))
        else:
            found += [attention, mlp]
        x = mlp.step(mlp.reads)
    return found, x


def _sublayers(block: nn.Module, x: Tensor) -> tuple[Hand, Hand]:
    made, read = [], x
    for skip, branch in (
        (block.attention_skip, lambda v: block.attend(v, None, None)[0]),
        (block.mlp_skip, block.think),
    ):

        def scale(v: Tensor, skip: nn.Module = skip) -> Tensor:
            return (v if skip.gain is None else skip.gain.weight * v) * skip.alpha

        norm = frozen(skip.norm_after, scale(read) + branch(read))
        made.append(
            Hand(
                read,
                lambda v, norm=norm, branch=branch: norm(branch(v)),
                lambda v, norm=norm, scale=scale: norm(scale(v)),
                lambda v, skip=skip, branch=branch: skip.add(v, branch(v)),
            )
        )
        read = made[-1].step(read)
    return made[0], made[1]


def changes(model: LabForCausalLM, unit: str, inputs: Tensor) -> dict[tuple[int, int], Tensor]:
    """(writer, reader) → ‖F_t(x_t) − F_t(x_t − c)‖ per token; 0 is the embedding, N + 1 the readout."""
    with torch.no_grad():
        found: dict[tuple[int, int], Tensor] = {}
        made, last = units(model, unit, inputs)
        left = [start(model, inputs)]
        for reader, hand in enumerate(made, start=1):
            base = hand.write(hand.reads)
            for writer, c in enumerate(left):
                found[writer, reader] = (base - hand.write(hand.reads - c)).norm(dim=-1)
            left = [*(hand.carry(c) for c in left), base]
        for writer, c in enumerate(left):
            change = readout(model, last) - readout(model, last - c)
            found[writer, len(left)] = (change - change.mean(-1, keepdim=True)).norm(dim=-1)
        return found
