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

from depthprobe.ablations.batch import Batch, Part, mask_token, scored_batch, scores
from depthprobe.ablations.later import Later, reason_against
from depthprobe.ablations.outer import Plan, Walk
from depthprobe.ablations.schedule import Schedule, unmodified
from depthprobe.ablations.store import Store, step_of
from depthprobe.ablations.sweep import Trie, planned_evaluations, run_batch
from depthprobe.ablations.units import Units
from depthprobe.corpus import Corpus
from depthprobe.errors import UsageError
from depthprobe.fingerprint import digest, fingerprint
from depthprobe.offload import MEMORY, Fetched, Window
from depthprobe.processes import batches_in_all, collected, count, dealt, told
from depthprobe.verify import Anatomy

__all__ = ["SweepSettings", "Swept", "scored_batch", "sweep"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep is run.

    Attributes:
        score_positions: share of the predicted positions that are scored, drawn by (seed, sequence).
        seed: of that draw.
        batch_size: sequences at once; None for what `memory` allows, at most about 2,048 tokens.
        memory: bytes that states and logits of one batch may take; a limit of the whole process goes before it.
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
        offload, each = anatomy.stream.checkpoint.offload, self.bytes_of_sequence(anatomy, corpus)
        if offload is not None:
            each += anatomy.stream.working_bytes(corpus.tokens)
        fit = self.memory // each if offload is None else offload.room // 2 // each
        return int(max(1, min(fit, max(1, 2048 // corpus.tokens))))

    def batches_at_once(self, anatomy: Anatomy, corpus: Corpus, plan: Plan, batch: int) -> int:
        """How many batches can wait for a block together, with all states that the plan keeps."""
        offload = anatomy.stream.checkpoint.offload
        assert offload is not None
        works, waits = self.bytes_by_plan(anatomy, corpus, plan)
        return int(max(1, (offload.room - batch * works) // (batch * waits)))

    def bytes_by_plan(self, anatomy: Anatomy, corpus: Corpus, plan: Plan) -> tuple[int, int]:
        """About what a sequence takes while something is run on it, and while it waits for a block."""
        works = self.bytes_of_sequence(anatomy, corpus, 4) + anatomy.stream.working_bytes(corpus.tokens)
        return works, (plan.waiting + 3) * corpus.tokens * anatomy.stream.blocks.width * 4

    def bytes_of_sequence(self, anatomy: Anatomy, corpus: Corpus, states: int | None = None) -> int:
        """About what a sequence takes, however many schedules there are: the walk of the trie keeps one path.

        Args:
            anatomy: the model.
            corpus: how long a sequence is.
            states: how many are kept; a path of the walk by default.
        """
        states = (states or len(anatomy.stream) + 4) * corpus.tokens * anatomy.stream.blocks.width * 4
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
        evaluations: unit evaluations that were made, by all processes.
        plain_evaluations: what one forward pass a schedule would have made.
        seconds: wall-clock time, of this process.
        notes: sentences on this run.
        later: what single skips did to later blocks' updates, where that was asked for and can be told.
        fetched: bytes of weights that were fetched, by this process; None where all are in memory.
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
    fetched: Fetched | None = None


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
    stream, offload = anatomy.stream, anatomy.stream.checkpoint.offload
    # What memory allows may differ a little when a run goes on: the folder says what was decided.
    decided = step_of(resume) if resume and offload and settings.batch_size is None else None
    step = decided or settings.sequences_at_once(anatomy, corpus)
    shared, plain = planned_evaluations(schedules, len(stream))
    rows: list[slice] = []  # of this process
    parts: dict[int, Part] = {}
    kept = 0

    def tick(made: int) -> None:
        if progress is not None:
            progress(kept * shared + made, len(rows) * shared)

    units = Units(anatomy, tick)
    for schedule in schedules:
        units.check(schedule)
    started = time.perf_counter()
    watched = skip_first is not None and not reason_against(anatomy, corpus.tokens, skip_first)
    later = Later(len(stream), corpus.sequences, skip_first or 0) if watched else None
    plan = Plan.of(schedules, len(stream)) if offload and offload.any else None
    together = 1 if plan is None else settings.batches_at_once(anatomy, corpus, plan, step)
    # Of several processes the first one says it: how many threads each has may differ from machine to machine.
    identity = told(lambda: resume and _identity(anatomy, corpus, schedules, settings, step, unigram))
    fetched = offload.fetched if offload else 0  # once the identity has looked at every weight
    with dealt(corpus.sequences) as mine:
        store = Store(resume, identity) if resume and identity else None
        rows += [slice(row, min(row + step, mine.stop)) for row in mine[::step]]
        if store is not None:
            parts = {batch.start: part for batch in rows if (part := store.load(batch.start)) is not None}
            kept = len(parts)
        todo = [batch for batch in rows if batch.start not in parts]
        chunks = [todo[start : start + together] for start in range(0, len(todo), together)]
        for chunk in chunks:
            found = _chunk(units, schedules, chunk, corpus, settings, unigram, later, plan)
            for batch, part in zip(chunk, found, strict=True):
                parts[batch.start] = part
                if store is not None:
                    store.save(batch.start, part)
    if later is not None:
        later.exchange()
    parts = {start: part for theirs in collected(parts) for start, part in theirs.items()}
    whole = {name: np.concatenate([parts[start][name] for start in sorted(parts)]) for name in parts[0]}
    base, to_unigram = whole.pop("base_loss", None), whole.pop("unigram_kl", None)
    return Swept(
        schedules,
        whole,
        base,
        to_unigram,
        sum(collected(kept * shared + units.evaluations)),
        plain * batches_in_all(corpus.sequences, step),
        time.perf_counter() - started,
        _notes(anatomy) + _tight(anatomy, corpus, settings, plan),
        later,
        None if plan is None else _fetched(anatomy, schedules, plan, fetched, len(chunks), len(todo)),
    )


def _chunk(
    units: Units,
    schedules: list[Schedule],
    rows: list[slice],
    corpus: Corpus,
    settings: SweepSettings,
    unigram: Tensor | None,
    later: Later | None,
    plan: Plan | None,
) -> list[Part]:
    """Every schedule on some batches: by the plan, if weights have to be fetched, or one batch after another."""
    stream, share, seed = units.stream, settings.score_positions, settings.seed
    batches = (Batch(units, corpus, part, share, seed, unigram, later) for part in rows)
    with torch.no_grad():
        if plan is None:
            trie = Trie.of(schedules)
            ran = ((one, run_batch(units, one.entry, trie, one.reference, one.direction, one.later)) for one in batches)
            return [one.part(*effects, schedules) for one, effects in ran]
        with stream.checkpoint.outside():
            waiting = [(one, Walk(units, one.entry, plan, one.direction, one.later)) for one in batches]
        with Window(stream.resident, plan.window) as window:
            for visit in plan.visits:
                window.fetch(visit.block)
                for _, walk in waiting:
                    walk.visit(visit)
        with stream.checkpoint.outside():
            return [one.part(*walk.effects(one.reference), schedules) for one, walk in waiting]


def _fetched(
    anatomy: Anatomy, schedules: list[Schedule], plan: Plan, before: int, chunks: int, batches: int
) -> Fetched:
    """What this process fetched, and what it had to: the weights outside of the blocks twice a chunk, or a batch."""
    stream, offload = anatomy.stream, anatomy.stream.checkpoint.offload
    assert offload is not None
    sizes, outside = [offload.size(block) for block in stream.blocks.modules], 2 * offload.outside_size
    runs = Trie.of([unmodified(len(stream)), *schedules]).fetches()
    each = sum(count * sizes[block] for block, count in runs.items())
    return Fetched(
        offload.fetched - before, chunks * (plan.fetched(sizes) + outside), batches * (each + outside), chunks
    )


def _notes(anatomy: Anatomy) -> list[str]:
    if scores(anatomy):
        return [] if anatomy.objective == "causal" else ["Effects are taken at a seeded 15 % of positions, masked."]
    if anatomy.objective is None:
        why = "the model has no language-model head"
    elif anatomy.objective == "masked" and mask_token(anatomy) is None:
        why = "which id masks a token is not known without a tokenizer"
    else:
        why = "its readout of a position depends on other positions"
    return [f"Ablations are measured by state_distance alone: {why}."]


def _tight(anatomy: Anatomy, corpus: Corpus, settings: SweepSettings, plan: Plan | None) -> list[str]:
    offload, need = anatomy.stream.checkpoint.offload, settings.bytes_of_sequence(anatomy, corpus)
    allowed, option = (settings.memory, "--memory") if offload is None else (offload.room, "--max-memory")
    if plan is not None:
        need = sum(settings.bytes_by_plan(anatomy, corpus, plan))
    if need <= allowed or settings.batch_size is not None:
        return []
    return [
        f"One sequence takes about {need / 2**30:.2g} GiB of states and logits, more than {option} allows "
        f"({allowed / 2**30:.2g} GiB); sequences were run one at a time. Lower --seq-len or --score-positions."
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
        "weights": fingerprint(checkpoint.model, checkpoint.offload),
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
        "processes": count(),
        "masks": [mask_token(anatomy), *getattr(checkpoint.tokenizer, "all_special_ids", [])],
        "depthprobe": metadata.version("depthprobe"),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
