"""What a user of a hook library writes for states and logits in hand: depthprobe's statistics and effects, plain torch.

No line of it is depthprobe's, so that its agreement with depthprobe's numbers says something about both.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = dict[str, NDArray[np.float64]]

# By layer: of the states, of the updates, of both; the names are those of layers.csv
LAYERS = (
    "residual_norm", "residual_norm_median", "residual_rms",
    "update_norm", "update_ratio", "update_ratio_median", "update_share", "update_energy_share", "update_alignment",
    "cosine_adjacent", "block_influence", "update_cosine_next",
)  # fmt: skip
PAIRS = ("cosine", "angular_distance")  # of every two states; the names are those of pairs.csv
EFFECTS = ("delta_loss", "kl", "top1_agreement")


def statistics(states: list[Tensor], skip: int = 1) -> Numbers:
    """Of x_0 … x_L, each `[batch, tokens, width]`; per token, then the mean or the median over tokens.

    Args:
        states: before the first block, and what every block wrote.
        skip: leading positions that are left out.

    Returns:
        metric → `[layers, batch]`, or `[pairs, batch]`.
    """
    states = [x[:, skip:].float() for x in states]
    norms = [x.norm(dim=-1) for x in states]
    found: dict[str, list[Tensor]] = {name: [] for name in LAYERS}
    for norm in norms:
        found["residual_norm"].append(norm.mean(dim=1))
        found["residual_norm_median"].append(norm.quantile(0.5, dim=1))
        found["residual_rms"].append((norm / math.sqrt(states[0].shape[-1])).mean(dim=1))
    previous = None
    for s, z, before, after in zip(states, states[1:], norms, norms[1:], strict=False):
        u = z - s
        size = u.norm(dim=-1)
        ratio = size / before
        near = dot(s, z) / (before * after)
        found["update_norm"].append(size.mean(dim=1))
        found["update_ratio"].append(ratio.mean(dim=1))
        found["update_ratio_median"].append(ratio.quantile(0.5, dim=1))
        found["update_share"].append((dot(u, z) / after.square()).mean(dim=1))
        found["update_energy_share"].append((size / after).square().mean(dim=1))
        found["update_alignment"].append((dot(u, s) / (size * before)).mean(dim=1))
        found["cosine_adjacent"].append(near.mean(dim=1))
        found["block_influence"].append((1 - near).mean(dim=1))
        if previous is not None:
            found["update_cosine_next"].append((dot(u, previous[0]) / (size * previous[1])).mean(dim=1))
        previous = u, size
    directions = torch.stack([x / norm[..., None] for x, norm in zip(states, norms, strict=True)], dim=2)
    cosines = (directions @ directions.mT).clamp(-1, 1)  # [batch, tokens, layers + 1, layers + 1]
    rows, columns = torch.triu_indices(len(states), len(states), offset=1)
    both = {"cosine": cosines.mean(dim=1), "angular_distance": cosines.acos().mean(dim=1) / math.pi}
    layers = {name: torch.stack(values) for name, values in found.items() if values}
    pairs = {name: values[:, rows, columns].T for name, values in both.items()}
    return {name: values.double().numpy() for name, values in (layers | pairs).items()}


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each token."""
    return torch.linalg.vecdot(a, b)


class Unmodified:
    """The unmodified predictions at the scored positions, to compare changed ones with.

    Args:
        logits: `[batch, scored, vocabulary]`.
        targets: the ids that follow, `[batch, scored]`.
    """

    def __init__(self, logits: Tensor, targets: Tensor) -> None:
        self.log_p, self.targets = logits.log_softmax(dim=-1), targets
        self.p, self.best = self.log_p.exp(), self.log_p.argmax(dim=-1)

    def effects(self, logits: Tensor) -> Numbers:
        """Of changed logits of the same shape: metric → `[batch]`, the mean over the scored positions."""
        log_q = logits.log_softmax(dim=-1)
        gained = (self.log_p - log_q).gather(-1, self.targets[..., None])[..., 0]
        found = {
            "delta_loss": gained,
            "kl": (self.p * (self.log_p - log_q)).sum(dim=-1),
            "top1_agreement": (log_q.argmax(dim=-1) == self.best).float(),
        }
        return {name: values.double().mean(dim=1).numpy() for name, values in found.items()}


def at(values: Tensor, positions: Tensor | None) -> Tensor:
    """Of `[batch, tokens, …]` what stands at `[batch, scored]`; None for every position that has a next token."""
    return values[:, :-1] if positions is None else values[torch.arange(len(values))[:, None], positions]


def distance(theirs: Numbers, ours: Numbers) -> dict[str, float]:
    """Metric → the largest relative difference; near 0, relative to a hundredth of the metric's largest value.

    A token that two kernels rank differently by chance is a whole position's agreement, so there it is the mean
    difference over what was changed.
    """
    found = {}
    for name, values in ours.items():
        apart = np.abs(theirs[name] - values)
        if name == "top1_agreement":
            found[name] = float(apart.mean())
        else:
            found[name] = float((apart / np.maximum(np.abs(values), np.abs(values).max() / 100)).max())
    return found
