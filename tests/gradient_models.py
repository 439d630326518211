"""Models and sums that the tests of gradients share."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from families import DEPTH
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from depthprobe.ablations.effects import Scored
from depthprobe.lab.config import LabConfig
from depthprobe.lab.model import LabForCausalLM

__all__ = ["BLOCKS", "Chain", "Steps", "Times", "column", "losses", "realformer", "small"]

BLOCKS = {
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "opt-post": "model.decoder.layers",
    "neox": "gpt_neox.layers",
    "mixtral": "model.layers",
    "gemma3": "model.layers",
    "bert": "bert.encoder.layer",
    "realformer": "model.blocks",
}


def column(table: pd.DataFrame, metric: str, unit: str = "block") -> np.ndarray:
    rows = table[(table["metric"] == metric) & (table["unit"] == unit)].sort_values("layer")
    return rows["value"].to_numpy()


def realformer() -> nn.Module:
    """Each block hands its attention scores on to the next, beside the stream."""
    torch.manual_seed(0)
    config = LabConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=DEPTH, num_attention_heads=4, residual_attention=True
    )
    return LabForCausalLM(config).eval()


def losses(model: nn.Module, inputs: torch.Tensor, scored: Scored | None) -> torch.Tensor:
    """ℓ of each sequence of a batch, `[batch]`, from the model's own logits."""
    log_p = model(input_ids=inputs).logits.log_softmax(-1)
    if scored is None:
        return -log_p[:, :-1].gather(-1, inputs[:, 1:, None])[..., 0].mean(dim=1)
    rows = torch.arange(len(inputs))[:, None]
    return -log_p[rows, scored.positions].gather(-1, scored.targets[..., None])[..., 0].mean(dim=1)


def small(**sizes: int) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 20, **sizes}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.4)).eval()


class Times(nn.Module):
    """A block that multiplies, x → g x; its gradient by g is ⟨x, ∂ℓ/∂(g x)⟩."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x


class Chain(nn.Module):
    """Embedding, blocks that multiply, and a head, all of one's own."""

    def __init__(self, gains: list[float], tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6)
        self.blocks = nn.ModuleList([Times(gain) for gain in gains])
        self.head = nn.Linear(6, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Steps(Times):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * x).detach()
