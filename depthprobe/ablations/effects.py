"""What a change does to the model's predictions: loss, KL, agreement; or to its last state where there is no head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.probes.base import key_rng
from depthprobe.stream import Stream

__all__ = ["EFFECTS", "Reference", "Scored", "state_distance"]

EFFECTS = ("delta_loss", "kl", "top1_agreement")
MASKED = 0.15  # share of the positions at which a masked language model is scored (Devlin et al. 2019)
NEAR = 1e-2  # nats below which a difference of two logarithms is taken from their ratio instead


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
    made in chunks of positions and thrown away.

    Args:
        stream: the model.
        last: the unmodified x_L, `[batch, tokens, width]`.
        scored: which positions.
        unigram: log-probabilities of a unigram model, `[vocabulary]`, for `unigram_kl`.
        chunk: about how many positions are read out at once; at least those of one sequence.
    """

    def __init__(
        self, stream: Stream, last: Tensor, scored: Scored, unigram: Tensor | None = None, chunk: int = 256
    ) -> None:
        self.stream, self.scored = stream, scored
        self.rows = max(1, chunk // scored.positions.shape[1])
        self.logits: list[Tensor] = []
        self.chance: list[Tensor] = []
        self.best: list[Tensor] = []
        self.lse: list[Tensor] = []
        self.loss: list[Tensor] = []
        self.to_unigram: list[Tensor] = []
        for part in self._parts():
            logits = self._readout(last, part)
            lse = logits.logsumexp(dim=-1)
            chance = (logits - lse[..., None]).exp_()
            self.logits.append(logits)
            self.chance.append(chance)
            self.lse.append(lse)
            self.best.append(logits.argmax(dim=-1))
            self.loss.append(lse - _at(logits, scored.targets[part]))
            if unigram is not None:
                entropy = lse - (chance * logits).sum(dim=-1)
                self.to_unigram.append(-entropy - chance @ unigram)

    def base_loss(self) -> NDArray[np.float64]:
        """Mean cross-entropy of the unmodified model, `[batch]`, nats."""
        return _means(torch.cat(self.loss))

    def unigram_kl(self) -> NDArray[np.float64] | None:
        """KL(unmodified ‖ unigram), `[batch]`, nats; None where no unigram was given."""
        return _means(torch.cat(self.to_unigram)) if self.to_unigram else None

    def compare(self, last: Tensor) -> dict[str, NDArray[np.float64]]:
        """The effects of a changed x_L `[batch, tokens, width]`, each a mean over scored positions, `[batch]`."""
        kls, losses, agreements = [], [], []
        for index, part in enumerate(self._parts()):
            logits = self._readout(last, part)
            targets = self.scored.targets[part]
            gap = self.logits[index] - logits
            apart = (self.chance[index] * gap).sum(dim=-1)
            shift = logits.logsumexp(dim=-1) - self.lse[index]
            kl = apart + shift
            # Two nearly equal logarithms leave only rounding: there, log Σ p e^c − Σ p c with c = apart − gap is exact.
            near = kl.abs() < NEAR
            if bool(near.any()):
                chance, c = self.chance[index][near], apart[near][:, None] - gap[near]
                exact = (chance * torch.expm1(c)).sum(dim=-1).log1p() - (chance * c).sum(dim=-1)
                # A token of no probability that gains more nats than float32 has exponents leaves 0 · ∞.
                kl[near] = torch.where(exact.isfinite(), exact, kl[near])
                shift[near] = kl[near] - apart[near]
            kls.append(kl.clamp_min(0))
            losses.append(_at(gap, targets) + shift)
            agreements.append((logits.argmax(dim=-1) == self.best[index]).float())
        return {
            "delta_loss": _means(torch.cat(losses)),
            "kl": _means(torch.cat(kls)),
            "top1_agreement": _means(torch.cat(agreements)),
        }

    def _parts(self) -> list[slice]:
        count = len(self.scored.positions)
        return [slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows)]

    def _readout(self, last: Tensor, part: slice) -> Tensor:
        positions = self.scored.positions[part]
        rows = torch.arange(len(last), device=last.device)[part, None]
        return self.stream.readout(last[rows, positions], self.scored.ids[part]).float()


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
