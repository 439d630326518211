"""What a change does to the model's predictions: loss, KL, agreement; or to its last state where there is no head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.probes.base import key_rng
from depthprobe.stream import Stream

__all__ = ["EFFECTS", "Reference", "Scored", "state_distance"]

EFFECTS = ("delta_loss", "kl", "top1_agreement")
MASKED = 0.15  # share of the positions at which a masked language model is scored (Devlin et al. 2019)
NEAR = 1e-3  # nats of KL below which it is taken from e^c − 1 instead of e^c
TINY = -80.0  # log of about the smallest probability whose product with e^c float32 still resolves
# Logits of one readout. glibc hands blocks above 32 MiB back to the system at once, and touching their pages anew costs
# about a third of SmolLM2's readout (two cores).
CHUNK_BYTES = 30 << 20

Part = tuple[slice, slice]  # of the sequences, and of their scored positions


@dataclass(frozen=True, eq=False)
class Scored:
    """The positions of a batch that are scored, the same number in every sequence.

    Attributes:
        positions: `[batch, scored]`.
        targets: the id that each should predict, `[batch, scored]`.
        ids: the ids at these positions; the readout looks at their shape only.
    """

    positions: Tensor
    targets: Tensor
    ids: Tensor

    @classmethod
    def next_token(cls, inputs: Tensor, sequences: NDArray[np.int64], share: float, seed: int) -> Scored:
        """Every position that has a next token, or a seeded random share of them, drawn by (seed, sequence)."""
        eligible = inputs.shape[1] - 1
        count = max(1, round(share * eligible))
        if count == eligible:
            positions = torch.arange(eligible).expand(len(inputs), -1)
        else:
            drawn = [np.sort(key_rng(seed, int(s), 1 << 21).permutation(eligible)[:count]) for s in sequences]
            positions = torch.from_numpy(np.stack(drawn))
        positions = positions.to(inputs.device)
        return cls(positions, inputs.gather(1, positions + 1), inputs.gather(1, positions))

    @classmethod
    def masked(
        cls, inputs: Tensor, sequences: NDArray[np.int64], special: tuple[int, ...], mask: int, seed: int
    ) -> tuple[Scored, Tensor]:
        """A seeded 15 % of every sequence's positions, and the inputs with the mask token there.

        Args:
            inputs: ids `[batch, tokens]`.
            sequences: their indices in the corpus; a draw is keyed by (seed, sequence).
            special: ids that are never masked, such as CLS and SEP.
            mask: the id of the mask token.
            seed: of the draw.
        """
        count = max(1, round(MASKED * inputs.shape[1]))
        drawn = []
        for row, sequence in enumerate(sequences):
            plain = np.flatnonzero(~np.isin(inputs[row].cpu().numpy(), special))
            # Too few plain ids to draw from: then any position will do, so that every sequence scores as many.
            eligible = plain if len(plain) >= count else np.arange(inputs.shape[1])
            drawn.append(np.sort(key_rng(seed, int(sequence), 1 << 23).permutation(eligible)[:count]))
        positions = torch.from_numpy(np.stack(drawn)).to(inputs.device)
        hidden = inputs.scatter(1, positions, mask)
        return cls(positions, inputs.gather(1, positions), hidden.gather(1, positions)), hidden


class Reference:
    """The unmodified model's predictions at the scored positions, to compare changed ones with.

    Keeps one copy of the unmodified probabilities and logits, `[scored positions, vocabulary]`; changed logits are
    made in chunks of positions and overwritten.

    Args:
        stream: the model.
        last: the unmodified x_L, `[batch, tokens, width]`.
        scored: which positions.
        unigram: log-probabilities of a unigram model, `[vocabulary]`, for `unigram_kl`.
        chunk: the most positions that are read out at once; None for as many as `CHUNK_BYTES` of logits hold.
    """

    def __init__(
        self, stream: Stream, last: Tensor, scored: Scored, unigram: Tensor | None = None, chunk: int | None = None
    ) -> None:
        self.stream, self.scored = stream, scored
        chunk = chunk or CHUNK_BYTES // (4 * (stream.checkpoint.vocab_size or 1))
        sequences, count = scored.positions.shape
        self.parts = _parts(sequences, count, max(1, chunk))
        self._room: Tensor | None = None
        self.unmodified: list[_Unmodified] = []
        self.to_unigram: list[Tensor] = []
        for part in self.parts:
            kept = _Unmodified.of(self.readout(last, part), scored.targets[part])
            self.unmodified.append(kept)
            if unigram is not None:
                entropy = kept.lse - (kept.chance * kept.logits).sum(dim=-1)
                self.to_unigram.append(-entropy - kept.chance @ unigram)

    def base_loss(self) -> NDArray[np.float64]:
        """Mean cross-entropy of the unmodified model, `[batch]`, nats."""
        return self._means([kept.loss for kept in self.unmodified])

    def unigram_kl(self) -> NDArray[np.float64] | None:
        """KL(unmodified ‖ unigram), `[batch]`, nats; None where no unigram was given."""
        return self._means(self.to_unigram) if self.to_unigram else None

    def compare(self, last: Tensor) -> dict[str, NDArray[np.float64]]:
        """The effects of a changed x_L `[batch, tokens, width]`, each a mean over scored positions, `[batch]`."""
        return self.effects(self.readout(last, part) for part in self.parts)

    def effects(self, logits: Iterable[Tensor]) -> dict[str, NDArray[np.float64]]:
        """The same from changed logits `[sequences, positions, vocabulary]`, one of each of `parts`; overwritten."""
        found = [
            kept.effects(changed, self._scratch(changed)) for kept, changed in zip(self.unmodified, logits, strict=True)
        ]
        return {name: self._means([effect[name] for effect in found]) for name in EFFECTS}

    def _means(self, values: list[Tensor]) -> NDArray[np.float64]:
        """Over the scored positions of each sequence, from a value a position of each of `parts`."""
        whole = torch.empty(self.scored.positions.shape, dtype=torch.float64)
        for part, value in zip(self.parts, values, strict=True):
            whole[part] = value.cpu().double()
        return whole.mean(dim=1).numpy()

    def _scratch(self, like: Tensor) -> Tensor:
        """Room for a pass over the vocabulary, the same at every call: new memory is slow to touch."""
        if self._room is None or self._room.numel() < like.numel():
            self._room = torch.empty_like(like).flatten()
        return self._room[: like.numel()].view(like.shape)

    def readout(self, last: Tensor, part: Part) -> Tensor:
        """Logits of an x_L `[batch, tokens, width]` at the scored positions of one of `parts`, in float32."""
        positions = self.scored.positions[part]
        rows = torch.arange(len(last), device=last.device)[part[0], None]
        return self.stream.readout(last[rows, positions], self.scored.ids[part]).float()


@dataclass(frozen=True, eq=False)
class _Unmodified:
    """The unmodified predictions of one part; `[sequences, positions]`, with the vocabulary behind where it says so.

    Attributes:
        logits: `[sequences, positions, vocabulary]`.
        chance: their softmax, the same shape.
        mass: its sum over the vocabulary, 1 but for rounding.
        lse: log Σ exp of the logits.
        best: the most likely id.
        targets: the id that follows.
        spread: whether some token's probability is too small for float32.
    """

    logits: Tensor
    chance: Tensor
    mass: Tensor
    lse: Tensor
    best: Tensor
    targets: Tensor
    spread: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> _Unmodified:
        lse = logits.logsumexp(dim=-1)
        chance = (logits - lse[..., None]).exp_()
        spread = logits.amin(dim=-1) - lse < TINY
        return cls(logits, chance, chance.sum(dim=-1), lse, logits.argmax(dim=-1), targets, spread)

    @property
    def loss(self) -> Tensor:
        """Cross-entropy, nats."""
        return self.lse - _at(self.logits, self.targets)

    def effects(self, logits: Tensor, scratch: Tensor) -> dict[str, Tensor]:
        """Of changed logits, which are overwritten, as is `scratch` of the same shape.

        With c = the gain of each logit less its mean under p, the unmodified distribution, KL(p ‖ changed) is
        log Σ p e^c, and the loss grows by that less c of the target.

        Few passes over the vocabulary are what makes this cheap beside the readout: no second softmax, no argmax.
        """
        same = _at(logits, self.best) >= logits.amax(dim=-1)
        gain = logits.sub_(self.logits)
        mean = torch.mul(self.chance, gain, out=scratch).sum(dim=-1) / self.mass
        c = gain.sub_(mean[..., None])
        kl = (torch.exp(c, out=scratch).mul_(self.chance).sum(dim=-1) / self.mass).log()
        # Nearly equal distributions leave only rounding, that of e^c (about 1) and of the mean: log Σ p e^c − Σ p c.
        near = kl.abs() < NEAR
        if bool(near.any()):
            chance, small, mass = self.chance[near], c[near], self.mass[near]
            kl[near] = ((chance * torch.expm1(small)).sum(dim=-1) / mass).log1p() - (chance * small).sum(dim=-1) / mass
        # Where p has no room in float32 for a token that gains much, its part of the sum is lost, or 0 · ∞.
        far = self.spread | ~kl.isfinite()
        if bool(far.any()):
            changed = c[far] + (mean[far][:, None] + self.logits[far])
            kl[far] = changed.logsumexp(dim=-1) - self.lse[far] - mean[far]
        return {"delta_loss": kl - _at(c, self.targets), "kl": kl.clamp_min(0), "top1_agreement": same.float()}


def _parts(sequences: int, scored: int, chunk: int) -> list[Part]:
    """Whole sequences, as many as a chunk of positions holds, or else equal shares of one sequence's positions."""
    if scored <= chunk:
        rows = chunk // scored
        return [(slice(i, min(i + rows, sequences)), slice(0, scored)) for i in range(0, sequences, rows)]
    edges = np.linspace(0, scored, -(-scored // chunk) + 1).round().astype(int).tolist()
    return [(slice(i, i + 1), slice(a, b)) for i in range(sequences) for a, b in pairwise(edges)]


def state_distance(changed: Tensor, last: Tensor) -> NDArray[np.float64]:
    """1 − cos of x_L and the changed x_L `[batch, tokens, width]`, mean over every position, `[batch]`."""
    a, b = changed.float(), last.float()
    a = a / torch.linalg.vector_norm(a, dim=-1, keepdim=True).clamp_min(1e-30)
    b = b / torch.linalg.vector_norm(b, dim=-1, keepdim=True).clamp_min(1e-30)
    return _means((a - b).square().sum(dim=-1) / 2)  # for unit vectors ‖a − b‖² / 2 is 1 − cos, without cancellation


def _at(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(-1, index[..., None])[..., 0]


def _means(values: Tensor) -> NDArray[np.float64]:
    return values.cpu().double().mean(dim=1).numpy()
