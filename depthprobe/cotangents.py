"""What is carried back through a model: the loss's gradient, and a random vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from depthprobe.ablations.effects import Scored
from depthprobe.errors import UsageError
from depthprobe.probes.base import key_rng
from depthprobe.probes.gradients import Cotangent
from depthprobe.verify import Anatomy

__all__ = ["Choice", "Cotangents"]

Choice = Literal["both", "loss", "random"]
_KEY = 1 << 24


@dataclass(frozen=True)
class Cotangents:
    """What can be carried back in a model, of what was asked for.

    Attributes:
        names: `loss` and `random`, or one of them.
        notes: why not the other one, and what the loss is of a masked model.
        seed: of the random vectors, and of the positions that are masked.
    """

    names: tuple[Cotangent, ...]
    notes: tuple[str, ...]
    seed: int

    @classmethod
    def of(cls, anatomy: Anatomy, wanted: Choice, seed: int) -> Cotangents:
        """Choose for one model.

        Raises:
            UsageError: the loss alone was asked for, and the model has none.
        """
        names: tuple[Cotangent, ...] = ("loss", "random") if wanted == "both" else (wanted,)
        why = _no_loss(anatomy)
        if why is None:
            masked = anatomy.objective == "masked" and "loss" in names
            text = (
                "Gradients were taken with a seeded 15 % of positions masked; the loss reads these alone, so that at "
                "x_L all others have a gradient of 0."
            )
            return cls(names, (text,) if masked else (), seed)
        if "random" not in names:
            raise UsageError(f"there is no loss to differentiate: {why}", fix="--cotangent random needs none")
        return cls(("random",), (f"The loss's gradients were left out: {why}.",) if "loss" in names else (), seed)

    def loss(self, anatomy: Anatomy, inputs: Tensor, sequence: int) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """What to run for one sequence `[1, tokens]`, and ℓ from its logits; None where no loss is carried back.

        ℓ is the mean cross-entropy at every position but the last, or at a masked model's 15 %.
        """
        inputs, each = self.losses(anatomy, inputs, sequence)
        return inputs, None if each is None else lambda logits: each(logits).mean()

    def losses(
        self, anatomy: Anatomy, inputs: Tensor, sequence: int
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """The same with the cross-entropy of every target, `[targets]`."""
        if "loss" not in self.names:
            return inputs, None

        def cross_entropy(logits: Tensor, truth: Tensor) -> Tensor:
            return nn.functional.cross_entropy(_float(logits), truth, reduction="none")

        if anatomy.objective == "causal":
            return inputs, lambda logits: cross_entropy(logits[0, :-1], inputs[0, 1:])
        tokenizer: Any = anatomy.stream.checkpoint.tokenizer
        special = tuple(tokenizer.all_special_ids)
        scored, hidden = Scored.masked(inputs, np.array([sequence]), special, tokenizer.mask_token_id, self.seed)
        places, truth = scored.positions[0], scored.targets[0]
        return hidden, lambda logits: cross_entropy(logits[0, places], truth)

    def random(self, tokens: int, width: int, sequence: int) -> Tensor | None:
        """A unit vector for every token, `[1, tokens, width]`, uniform on the sphere, by (seed, sequence)."""
        if "random" not in self.names:
            return None
        drawn = torch.from_numpy(key_rng(self.seed, sequence, _KEY).standard_normal((1, tokens, width)))
        return drawn / torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)


def _no_loss(anatomy: Anatomy) -> str | None:
    """Why a model has no loss, None where it has one."""
    if anatomy.objective is None:
        return "the model has no language-model head"
    tokenizer = anatomy.stream.checkpoint.tokenizer
    if anatomy.objective == "masked" and getattr(tokenizer, "mask_token_id", None) is None:
        return "which id masks a token is not known without a tokenizer"
    return None


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
