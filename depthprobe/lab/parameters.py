"""How many parameters a lab model has, by part: matched models differ in nothing but their norms and gains."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from depthprobe.lab.config import LabConfig
from depthprobe.lab.model import LabForCausalLM, LabForMaskedLM
from depthprobe.lab.norms import Norm
from depthprobe.lab.skip import Gain

__all__ = ["parameter_difference", "parameters_by_part"]


def parameters_by_part(config: LabConfig) -> dict[str, int]:
    """The number of parameters of a language model with this configuration.

    Returns:
        embeddings, matrices (with their biases), head (0 where it is the token table), norms, and gains: Admin's ω.
    """
    with torch.device("meta"):
        model = (LabForCausalLM if config.causal else LabForMaskedLM)(config)
    counts: Counter[str] = Counter(embeddings=0, matrices=0, head=0, norms=0, gains=0)
    for name, module in model.named_modules():
        if isinstance(module, Norm):
            part = "norms"
        elif isinstance(module, Gain):
            part = "gains"
        elif isinstance(module, nn.Embedding):
            part = "embeddings"
        else:
            part = "head" if name == "lm_head" else "matrices"
        tied = part == "head" and config.tie_word_embeddings
        counts[part] += 0 if tied else sum(weight.numel() for weight in module.parameters(recurse=False))
    return dict(counts)


def parameter_difference(a: LabConfig, b: LabConfig) -> dict[str, int]:
    """How many parameters more b has than a, by part; parts in which they agree are left out."""
    ours, theirs = parameters_by_part(a), parameters_by_part(b)
    return {part: theirs[part] - count for part, count in ours.items() if theirs[part] != count}
