"""What skipping each unit does to all later ones and to the output: one set of runs for several estimators.

After Csordás, Manning & Potts 2025, "Do language models use their depth efficiently?": the relative change of every
later unit's update when a unit is skipped. They show maxima, over tokens and prompts, which grow with the corpus; here
it is the mean and the 95th percentile over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.ablations.batch import scored_batch, scores
from depthprobe.ablations.effects import Reference, Scored, state_distance
from depthprobe.ablations.later import over_tokens
from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings, Estimate, Floats, Progress, batches, bytes_of_sequence, resampler
from depthprobe.depth.paths import Taken, Walk, block_skips
from depthprobe.errors import UsageError
from depthprobe.fingerprint import digest
from depthprobe.probes.base import key_rng, wide
from depthprobe.processes import dealt
from depthprobe.verify import Anatomy

__all__ = ["DOES", "MISSES", "Skips", "effects", "run_skips"]

DOES = "Shows, for every two units, by how much the later one's update changes when the earlier one is skipped."
MISSES = (
    "A change passed on through units in between looks like a direct one, and a skipped unit leaves a stream that the "
    "model has never seen."
)

ALL, LATER = "all tokens", "later tokens"
Columns = dict[tuple[str, str], Floats]  # (all or later tokens, what) → [sequences, M]


@dataclass(frozen=True, eq=False)
class Skips:
    """Every unit skipped once, and once more at the first tokens only.

    Attributes:
        unit: `block` or `sublayer`.
        count: N.
        ids: a hash of the sequences, which parts of one text do not share.
        changes: (`all tokens` or `later tokens`, `mean` or `p95`) → relative change of a later unit's update,
            `[sequences, N (N − 1) / 2]`, by skipped unit, then by later unit.
        output: `all tokens` and `later tokens` → ‖p' − p‖₂ of the predicted probabilities, mean over tokens,
            `[sequences, N]`; of a model without a head 1 − cos of the last state.
        cost: (name, `[sequences, N]`): the skips' KL, or `state_distance` without a head.
        evaluations: forward passes' worth of block evaluations.
        readouts: how many readouts of the corpus.
        notes: sentences on this run.
    """

    unit: str
    count: int
    ids: str
    changes: Columns
    output: dict[str, Floats]
    cost: tuple[str, Floats]
    evaluations: float
    readouts: int
    notes: list[str] = field(default_factory=list)

    def of(self, unit: str, corpus: Corpus) -> Skips:
        """The same, where it is about this unit and corpus.

        Raises:
            UsageError: it is not.
        """
        if (self.unit, self.ids) != (unit, digest(corpus.inputs)):
            raise UsageError(f"the skip runs are of unit {self.unit}", f"unit {unit} and the same sequences")
        return self


def effects(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    skips: Skips | None = None,
) -> Estimate:
    """The matrix unit → later unit.

    The update of a later unit is what it writes, through its own identity path frozen at the unmodified run. The first
    `settings.skip_first` positions are left out.

    Args:
        anatomy, corpus, unit, settings, progress: as in `run_skips`.
        skips: runs of the same corpus and unit, if they were made before.

    Returns:
        No row; the curves `effects` (skipped, unit, tokens, statistic, value, ci_low, ci_high; units from 0) and
        `output` (skipped, tokens, value, ci_low, ci_high).
    """
    settings = settings or DepthSettings()
    skips = run_skips(anatomy, corpus, unit, settings, progress) if skips is None else skips.of(unit, corpus)
    draws = resampler(corpus, settings)
    first, second = np.triu_indices(skips.count, k=1)
    tables = []
    for (tokens, statistic), columns in skips.changes.items():
        value, low, high = draws.intervals(columns) if len(first) else (np.empty(0),) * 3  # a single unit has no pair
        table = pd.DataFrame({"skipped": first, "unit": second, "tokens": tokens, "statistic": statistic})
        tables.append(table.assign(value=value, ci_low=low, ci_high=high))
    outputs = []
    for tokens, columns in skips.output.items():
        value, low, high = draws.intervals(columns)
        table = pd.DataFrame({"skipped": range(skips.count), "tokens": tokens})
        outputs.append(table.assign(value=value, ci_low=low, ci_high=high))
    curves = {
        "effects": pd.concat(tables, ignore_index=True),
        "output": pd.concat(outputs, ignore_index=True),
    }
    return Estimate([], curves=curves, cost_forward=skips.evaluations, notes=list(skips.notes))


def run_skips(
    anatomy: Anatomy,
    corpus: Corpus,
    unit: str = "block",
    settings: DepthSettings | None = None,
    progress: Progress | None = None,
    later: bool = True,
) -> Skips:
    """Skip every unit, once at all tokens; in a causal model once more at the first tokens of each sequence only.

    Where that part ends is drawn by (seed, sequence) from the middle half of the positions; the effect on later tokens
    is that at and after the end. Every run starts from the unmodified state before the skipped unit.

    Args:
        anatomy: a verified model.
        corpus: what to run it on.
        unit: `block` or `sublayer`.
        settings: seed, skipped positions, batch size.
        progress: called with (runs done, in all).
        later: make the second set of runs.

    Raises:
        UsageError: sublayers were not found.
        NonFiniteError: an activation is not finite.
    """
    settings = settings or DepthSettings()
    settings.check(corpus)
    known, notes = block_skips(anatomy, corpus, settings.seed)
    walk = Walk(anatomy, unit, known)
    count, blocks = len(walk), len(anatomy.stream)
    kinds = [ALL]
    if later and anatomy.causal and not anatomy.stream.blocks.carried and corpus.tokens >= 4:
        kinds.append(LATER)
    elif later:
        notes.append("Effects on later tokens alone were left out: " + _why(anatomy))
    pairs = count * (count - 1) // 2
    changes = {(kind, name): np.full((corpus.sequences, pairs), np.nan) for kind in kinds for name in ("mean", "p95")}
    output = {kind: np.full((corpus.sequences, count), np.nan) for kind in kinds}
    cost = np.full((corpus.sequences, count), np.nan)
    each = bytes_of_sequence(anatomy, corpus, 3 * count + 8, 2)
    done = 0
    arrays = (*changes.values(), *output.values(), cost)
    with torch.no_grad(), walk, dealt(corpus.sequences, *arrays) as mine:
        rounds = -(-len(mine) // settings.sequences_at_once(corpus, each))
        for indices, inputs in batches(anatomy, corpus, settings, each, mine):
            scored, inputs = scored_batch(anatomy, inputs, indices, 1.0, settings.seed)
            taken = walk.take(inputs, alone=False)
            out = _Output(walk, taken, scored)
            cuts = _cuts(indices, corpus.tokens, settings.seed).to(taken.last.device)
            place = torch.arange(corpus.tokens, device=taken.last.device)
            late, kept = place >= cuts[:, None], (place >= settings.skip_first).expand(len(indices), -1)
            keep = {ALL: kept, LATER: late & kept}
            start = 0
            for skipped in range(count):
                stop = start + count - 1 - skipped
                for kind in kinds:
                    x, found = _without(walk, taken, skipped, None if kind == ALL else ~late)
                    for offset, change in enumerate(found):
                        mean, high = over_tokens(change, keep[kind])
                        changes[kind, "mean"][indices, start + offset] = mean
                        changes[kind, "p95"][indices, start + offset] = high
                    away, price = out.compare(x, None if kind == ALL else late)
                    output[kind][indices, skipped] = away
                    if kind == ALL:
                        cost[indices, skipped] = price
                start, done = stop, done + 1
                if progress is not None:
                    progress(done, rounds * count)
    evaluations = walk.evaluations / (max(1, rounds) * blocks)
    readouts = 1 + len(kinds) * count
    notes.append(f"Skip runs took {evaluations:.1f} forward passes of the blocks and {readouts} readouts.")
    named = "kl" if scores(anatomy) else "state_distance"
    return Skips(unit, count, digest(corpus.inputs), changes, output, (named, cost), evaluations, readouts, notes)


def _why(anatomy: Anatomy) -> str:
    if not anatomy.causal:
        return "no position of this model is later than another."
    if anatomy.stream.blocks.carried:
        return "this model's blocks hand on attention scores, which cannot be skipped at some tokens."
    return "sequences are shorter than 4 tokens."


def _cuts(sequences: NDArray[np.int64], tokens: int, seed: int) -> Tensor:
    """The first position that no skip touches, `[batch]`; at least one predicted position is left."""
    low, high = max(1, tokens // 4), max(2, min(tokens - 2, 3 * tokens // 4))
    return torch.tensor([int(key_rng(seed, int(s), 1 << 25).integers(low, high + 1)) for s in sequences])


def _without(walk: Walk, taken: Taken, skipped: int, where: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """x_L without a unit, at the positions `where` alone, and the relative change of each later update, per token."""
    found: list[Tensor] = []
    units, unit = walk.units, walk.units[skipped]

    def differ(index: int, w: Tensor) -> None:
        base = taken.writes[index]
        size = torch.linalg.vector_norm(base, dim=-1)
        away = torch.linalg.vector_norm(w - base, dim=-1)
        found.append(wide(torch.where(size > 0, away / size.clamp_min(1e-38), torch.nan)))

    def mixed(changed: Tensor, index: int) -> Tensor:
        """The changed state where the skip is, and elsewhere the unmodified one, which unit `index` reads."""
        if where is None:
            return changed
        return torch.where(where[..., None], changed, taken.reads[index] if index < len(units) else taken.last)

    after = next((i for i in range(skipped, len(units)) if units[i].layer > unit.layer), len(units))
    if any(walk.joins(i) for i in walk.places(unit.layer)):
        # Two that read the same state: the other one's update stays as it was.
        for index in range(skipped + 1, after):
            differ(index, taken.writes[index])
        whole = taken.reads[after] if after < len(units) else taken.last
        x = mixed((whole.float() - taken.writes[skipped]).to(whole.dtype), after)
    else:
        x = mixed(taken.reads[skipped], skipped + 1)
        for index in range(skipped + 1, after):
            u = walk.alone(taken, index, x)
            differ(index, taken.paths[index].written([u]))
            x = walk.step(taken, index, x, u)
    x = walk.stream.inherit(x, taken.reads[skipped])
    for block in range(unit.layer + 1, len(walk.stream)):
        visit = walk.visit(taken.entry, block, x)
        for index, w in zip(walk.places(block), walk.writes(taken, block, visit), strict=True):
            differ(index, w)
        x = visit.z
    return x, found


class _Output:
    """What a changed x_L does to what the model predicts."""

    def __init__(self, walk: Walk, taken: Taken, scored: Scored | None) -> None:
        self.last = taken.last
        self.reference = None if scored is None else Reference(walk.stream, taken.last, scored)

    def compare(self, x: Tensor, where: Tensor | None) -> tuple[Floats, Floats]:
        """The change of the probabilities at the positions `where` (None for all), and the cost at all; `[batch]`."""
        if self.reference is None:
            distance = _apart(x, self.last)
            return _mean(distance, where), state_distance(x, self.last)
        reference, away = self.reference, torch.zeros(self.reference.scored.positions.shape, dtype=torch.float64)

        def seen() -> Iterator[Tensor]:
            for part, kept in zip(reference.parts, reference.unmodified, strict=True):
                logits = reference.readout(x, part)
                chance = (logits - logits.logsumexp(dim=-1)[..., None]).exp_()  # as the unmodified, to the last bit
                away[part] = wide(torch.linalg.vector_norm(chance - kept.chance, dim=-1)).cpu()
                yield logits

        if where is None:
            kl = reference.effects(seen())["kl"]
            return _mean(away, None), kl
        for _ in seen():
            pass
        counted = where.cpu().gather(1, reference.scored.positions.cpu())
        return _mean(away, counted), np.full(len(away), np.nan)


def _apart(x: Tensor, last: Tensor) -> Tensor:
    return wide(1 - torch.cosine_similarity(x.float(), last.float(), dim=-1))


def _mean(values: Tensor, where: Tensor | None) -> Floats:
    """Mean over the positions of each sequence."""
    if where is None:
        return values.mean(dim=1).cpu().numpy()
    return torch.where(where, values, torch.nan).nanmean(dim=1).cpu().numpy()
