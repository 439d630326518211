"""Run a sweep over a corpus, chunk by chunk: each finished chunk is kept, so that a killed run can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.ablations.effects import Reference, Scored
from depthprobe.ablations.later import Later, reason_against
from depthprobe.ablations.schedule import Schedule
from depthprobe.ablations.store import Store
from depthprobe.ablations.sweep import Trie, planned_evaluations, run_batch
from depthprobe.ablations.units import Units
from depthprobe.corpus import Corpus
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.fingerprint import digest, fingerprint
from depthprobe.probes.base import key_rng
from depthprobe.verify import Anatomy

__all__ = ["SweepSettings", "Swept", "scored_batch", "sweep"]

Progress = Callable[[int, int], None]
MEMORY = 2 << 30


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep is run.

    Attributes:
        score_positions: share of the predicted positions that are scored, drawn by (seed, sequence).
        seed: of that draw.
        batch_size: sequences at once; None for what `memory` allows, at most about 2,048 tokens.
        memory: bytes that states and logits of one batch may take.
    """

    score_positions: float = 1.0
    seed: int = 0
    batch_size: int | None = None
    memory: int = MEMORY

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: a share that is no share, a batch or a memory of nothing.
        """
        if not 0 < self.score_positions <= 1:
            raise UsageError(f"--score-positions {self.score_positions}", "a share above 0, at most 1")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"the batch size is {self.batch_size}", "at least 1, or auto")
        if self.memory < 1:
            raise UsageError(f"--memory is {self.memory} bytes", "more than 0")
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", "0 or more")

    def sequences_at_once(self, anatomy: Anatomy, corpus: Corpus) -> int:
        """The batch size: resolved once, since what is resumed must have the same."""
        if self.batch_size is not None:
            return self.batch_size
        fit = self.memory // self.bytes_of_sequence(anatomy, corpus)
        return int(max(1, min(fit, max(1, 2048 // corpus.tokens))))

    def bytes_of_sequence(self, anatomy: Anatomy, corpus: Corpus) -> int:
        """About what a sequence takes, however many schedules there are: the walk of the trie keeps one path."""
        states = (len(anatomy.stream) + 4) * corpus.tokens * anatomy.stream.blocks.width * 4
        scored = max(1, round(self.score_positions * (corpus.tokens - 1)))
        # Two copies of the unmodified predictions are kept, and a chunk of positions is in the air.
        logits = 2 * scored * (anatomy.stream.checkpoint.vocab_size or 0) * 4
        return states + logits


@dataclass(frozen=True, eq=False)
class Swept:
    """What a sweep found.

    Attributes:
        schedules: what was run.
        effects: metric → `[sequences, schedules]`, each a mean over the scored positions of a sequence.
        base_loss: the unmodified model's loss, `[sequences]`, nats; None without a head.
        unigram_kl: KL(unmodified ‖ unigram), `[sequences]`, nats; None where no unigram was given.
        evaluations: unit evaluations that were made.
        plain_evaluations: what one forward pass a schedule would have made.
        seconds: wall-clock time, of this process.
        notes: sentences on this run.
        later: what single skips did to later blocks' updates, where that was asked for and can be told.
    """

    schedules: list[Schedule]
    effects: dict[str, NDArray[np.float64]]
    base_loss: NDArray[np.float64] | None
    unigram_kl: NDArray[np.float64] | None
    evaluations: int
    plain_evaluations: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    later: Later | None = None


def sweep(
    anatomy: Anatomy,
    corpus: Corpus,
    schedules: list[Schedule],
    settings: SweepSettings | None = None,
    progress: Progress | None = None,
    resume: Path | None = None,
    unigram: Tensor | None = None,
    skip_first: int | None = None,
) -> Swept:
    """Run every schedule on every sequence, sharing what can be shared.

    Args:
        anatomy: the verified model.
        corpus: what to run it on.
        schedules: what to run.
        settings: how.
        progress: called with (unit evaluations done, in all); those of finished chunks that were kept count as done.
        unigram: log-probabilities `[vocabulary]` of a unigram model to state KL(unmodified ‖ unigram) of.
        skip_first: watch what single skips do to later blocks' updates, these leading positions left out; None for not.
        resume: folder that keeps finished chunks; a run that finds its own chunks there goes on after them.

    Raises:
        UsageError: a schedule that the model cannot run.
        OutputError: `resume` belongs to another model, corpus or set of schedules.
        NonFiniteError: an effect is not finite; the message names the schedule.
    """
    settings = settings or SweepSettings()
    settings.check()
    if not schedules:
        raise UsageError("there is no schedule to run", "at least one")
    step = settings.sequences_at_once(anatomy, corpus)
    shared, plain = planned_evaluations(schedules, len(anatomy.stream))
    chunks = -(-corpus.sequences // step)
    kept = 0

    def tick(made: int) -> None:
        if progress is not None:
            progress(kept * shared + made, chunks * shared)

    units = Units(anatomy, tick)
    for schedule in schedules:
        units.check(schedule)
    store = None if resume is None else Store(resume, _identity(anatomy, corpus, schedules, settings, step, unigram))
    trie = Trie.of(schedules)
    started, parts = time.perf_counter(), []
    stream, device = anatomy.stream, anatomy.stream.checkpoint.device
    watched = skip_first is not None and not reason_against(anatomy, corpus.tokens, skip_first)
    later = Later(len(stream), corpus.sequences, skip_first or 0) if watched else None
    for start in range(0, corpus.sequences, step):
        stop = min(start + step, corpus.sequences)
        part = None if store is None else store.load(start)
        if part is None:
            inputs = corpus.inputs[start:stop]
            inputs = inputs.to(device, stream.checkpoint.dtype if corpus.is_states else inputs.dtype)
            part = _chunk(units, trie, schedules, inputs, np.arange(start, stop), settings, unigram, later)
            if store is not None:
                store.save(start, part)
        else:
            kept += 1
        parts.append(part)
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    base, to_unigram = whole.pop("base_loss", None), whole.pop("unigram_kl", None)
    return Swept(
        schedules,
        whole,
        base,
        to_unigram,
        shared * chunks,
        plain * chunks,
        time.perf_counter() - started,
        _notes(anatomy) + _tight(anatomy, corpus, settings),
        later,
    )


def _chunk(
    units: Units,
    trie: Trie,
    schedules: list[Schedule],
    inputs: Tensor,
    sequences: NDArray[np.int64],
    settings: SweepSettings,
    unigram: Tensor | None,
    later: Later | None,
) -> dict[str, NDArray[np.float64]]:
    stream = units.stream
    if later is not None:
        later.begin(sequences)
    scored, inputs = scored_batch(units.anatomy, inputs, sequences, settings.score_positions, settings.seed)

    def reference(last: Tensor) -> Reference | None:
        return None if scored is None else Reference(stream, last, scored, unigram)

    def direction(layer: int, like: Tensor) -> Tensor:
        drawn = [key_rng(settings.seed, int(s), (1 << 22) + layer).standard_normal(like.shape[1:]) for s in sequences]
        vector = torch.from_numpy(np.stack(drawn)).to(like.device, like.dtype)
        return vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)

    with torch.no_grad():
        effects, score = run_batch(units, stream.enter(inputs), trie, reference, direction, later)
    part = {name: np.stack([effects[i][name] for i in range(len(schedules))], axis=1) for name in effects[0]}
    for name, values in part.items():
        if not np.isfinite(values).all():
            schedule = schedules[int(np.argwhere(~np.isfinite(values))[0, 1])]
            raise NonFiniteError(f"{name} of the schedule {schedule} is not finite", "finite effects", "try float32")
    if score is None:
        return part
    part["base_loss"] = score.base_loss()
    to_unigram = score.unigram_kl()
    return part if to_unigram is None else part | {"unigram_kl": to_unigram}


def scored_batch(
    anatomy: Anatomy, inputs: Tensor, sequences: NDArray[np.int64], share: float, seed: int
) -> tuple[Scored | None, Tensor]:
    """The positions of a batch that are scored, None without a head to score with, and the inputs, masked if need be.

    Args:
        anatomy: the model.
        inputs: ids `[batch, tokens]` or states `[batch, tokens, width]`.
        sequences: their indices in the corpus.
        share: of the positions with a next token; a masked model is scored at 15 % of all.
        seed: of the draw.
    """
    tokenizer, mask = anatomy.stream.checkpoint.tokenizer, _mask_token(anatomy)
    if not _scores(anatomy):
        return None, inputs
    if tokenizer is not None and mask is not None:
        return Scored.masked(inputs, sequences, tuple(tokenizer.all_special_ids), mask, seed)
    return Scored.next_token(inputs, sequences, share, seed), inputs


def _mask_token(anatomy: Anatomy) -> int | None:
    """The id that hides a token from a masked language model; None for other models, or where it is not known."""
    tokenizer = anatomy.stream.checkpoint.tokenizer
    return getattr(tokenizer, "mask_token_id", None) if anatomy.objective == "masked" else None


def _scores(anatomy: Anatomy) -> bool:
    """Whether predictions can be compared, and not the last state alone."""
    known = anatomy.objective == "causal" or _mask_token(anatomy) is not None
    return known and anatomy.reads_positions_apart


def _notes(anatomy: Anatomy) -> list[str]:
    if _scores(anatomy):
        return [] if anatomy.objective == "causal" else ["Effects are taken at a seeded 15 % of positions, masked."]
    if anatomy.objective is None:
        why = "the model has no language-model head"
    elif anatomy.objective == "masked" and _mask_token(anatomy) is None:
        why = "which id masks a token is not known without a tokenizer"
    else:
        why = "its readout of a position depends on other positions"
    return [f"Ablations are measured by state_distance alone: {why}."]


def _tight(anatomy: Anatomy, corpus: Corpus, settings: SweepSettings) -> list[str]:
    need = settings.bytes_of_sequence(anatomy, corpus)
    if need <= settings.memory or settings.batch_size is not None:
        return []
    return [
        f"One sequence takes about {need / 2**30:.2g} GiB of states and logits, more than --memory allows "
        f"({settings.memory / 2**30:.2g} GiB); sequences were run one at a time. Lower --seq-len or --score-positions."
    ]


def _identity(
    anatomy: Anatomy,
    corpus: Corpus,
    schedules: list[Schedule],
    settings: SweepSettings,
    step: int,
    unigram: Tensor | None,
) -> dict[str, Any]:
    """Everything that the numbers of a chunk depend on."""
    checkpoint = anatomy.stream.checkpoint
    config = getattr(checkpoint.model, "config", None)
    return {
        "model": checkpoint.name,
        "weights": fingerprint(checkpoint.model),
        "attention": getattr(config, "_attn_implementation", None),
        "dtype": str(checkpoint.dtype),
        "device": checkpoint.device.type,
        "corpus": digest(corpus.inputs),
        "unigram": None if unigram is None else digest(unigram),
        "schedules": [[str(schedule), schedule.combine] for schedule in schedules],
        "score_positions": settings.score_positions,
        "seed": settings.seed,
        "batch_size": step,
        "threads": torch.get_num_threads(),
        "masks": [_mask_token(anatomy), *getattr(checkpoint.tokenizer, "all_special_ids", [])],
        "depthprobe": metadata.version("depthprobe"),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
