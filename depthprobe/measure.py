"""The measuring loop: every batch goes through the blocks once, and all probes ride on that pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from depthprobe.branches import Reader
from depthprobe.corpus import Corpus
from depthprobe.errors import UsageError
from depthprobe.estimate import PerSequence
from depthprobe.probes.base import Batch, Probe, Step
from depthprobe.probes.growth import Growth, Sink
from depthprobe.probes.interaction import Interaction
from depthprobe.probes.kept import Pooled, analyze_kept, rounding_floors
from depthprobe.probes.lens import Lens
from depthprobe.probes.similarity import KeptStates, Similarity
from depthprobe.verify import Anatomy

__all__ = ["Measured", "Progress", "Settings", "measure"]

TOKENS_AT_ONCE = 2048
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings:
    """What to measure, and how.

    Attributes:
        skip_first: leading positions that the stream's metrics leave out.
        batch_size: sequences at once; None for about 2,048 tokens.
        seed: of every random draw.
        interaction: run the next block on the state from before this one, at the cost of two further passes.
        lens_positions: how many positions the logit lens reads out; 0 for no lens.
        keep_positions: how many positions' states are kept for centred cosines, CKA and linearity; None for 3,072,
            or six a dimension where that is more.
    """

    skip_first: int = 1
    batch_size: int | None = None
    seed: int = 0
    interaction: bool = True
    lens_positions: int = 1024
    keep_positions: int | None = None

    def check(self) -> None:
        """Refuse what makes no sense before anything is loaded.

        Raises:
            UsageError: a number that is too small.
        """
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"the batch size is {self.batch_size}", "at least 1, or auto")
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", "0 or more")
        if self.skip_first < 0:
            raise UsageError(f"--skip-first {self.skip_first}", "0 or more")
        if self.lens_positions < 0:
            raise UsageError(f"--lens-positions {self.lens_positions}", "0 or more")

    def passes(self, blocks: int) -> float:
        """How many forward passes' worth of blocks a run takes."""
        return 1.0 + (2 * (blocks - 1) / blocks if self.interaction else 0.0)

    def cost(self, anatomy: Anatomy, corpus: Corpus) -> str:
        """What a run will cost, in a sentence."""
        blocks = len(anatomy.stream)
        text = f"This takes {self.passes(blocks):.1f} forward passes over {corpus.sequences} × {corpus.tokens} tokens"
        if self.lens_positions and anatomy.objective is not None:
            read = min(self.lens_positions, corpus.sequences * corpus.tokens)
            text += f" and {blocks + 1} readouts at {read:,} positions"
        return text + "."


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything that one run saw, reduced to numbers a sequence and pooled values."""

    means: PerSequence
    pairs: dict[str, np.ndarray]
    pooled: list[Pooled]
    sinks: list[Sink]
    floors: dict[str, float]
    block_evaluations: int
    forward_passes: float
    seconds: float
    notes: list[str] = field(default_factory=list)


def measure(anatomy: Anatomy, corpus: Corpus, settings: Settings, progress: Progress | None = None) -> Measured:
    """Run the corpus through the model and watch it.

    Args:
        anatomy: the verified model.
        corpus: ids `[sequences, tokens]` or states `[sequences, tokens, width]`.
        settings: what to measure.
        progress: called with (sequences done, sequences in all) after every batch.

    Raises:
        NonFiniteError: an activation is not finite.
        UsageError: nothing is left once the first positions are skipped.
    """
    if corpus.tokens <= settings.skip_first:
        raise UsageError(
            f"--skip-first {settings.skip_first} leaves nothing of sequences of {corpus.tokens} tokens",
            fix="skip fewer positions, or use longer sequences",
        )
    stream, count = anatomy.stream, corpus.sequences
    width = stream.blocks.width
    means = PerSequence(count)
    growth, similarity = Growth(means, width), Similarity(means)
    budget = settings.keep_positions or max(3072, 6 * width)
    kept = KeptStates(count, corpus.tokens, settings.skip_first, budget, settings.seed)
    probes: list[Probe] = [growth, similarity, kept]
    notes: list[str] = []
    if settings.interaction and len(stream) > 1:
        probes.append(Interaction(means))
    if settings.lens_positions and anatomy.objective is None:
        notes.append("The logit lens was left out: the model has no language-model head.")
    elif settings.lens_positions and not anatomy.reads_positions_apart:
        notes.append("The logit lens was left out: the readout of a position depends on other positions.")
    elif settings.lens_positions:
        targets = anatomy.objective == "causal"
        probes.append(Lens(means, count, settings.lens_positions, targets))
        if not targets:
            notes.append("lens_loss was left out: a masked model is run unmasked, where its target is its own input.")

    started, evaluations = time.perf_counter(), 0
    step = settings.batch_size or max(1, TOKENS_AT_ONCE // corpus.tokens)
    device = stream.checkpoint.device
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        reader = stack.enter_context(Reader(stream, anatomy.blocks))
        for start in range(0, count, step):
            indices = np.arange(start, min(start + step, count))
            inputs = corpus.inputs[start : start + step]
            entry = stream.enter(inputs.to(device, stream.checkpoint.dtype if corpus.is_states else inputs.dtype))
            batch = Batch(reader, entry, indices, settings.skip_first, settings.seed)
            for probe in probes:
                probe.begin(batch)
            x = entry.x
            for layer in range(len(stream)):
                visit = reader.visit(entry, layer, x)
                seen = Step(layer, x, visit.z, visit.update, visit.branches)
                for probe in probes:
                    probe.see(batch, seen)
                x = visit.z
            for probe in probes:
                probe.end(batch)
            evaluations += len(stream) + (2 * (len(stream) - 1) if settings.interaction else 0)
            if progress is not None:
                progress(min(start + step, count), count)
        pooled, left_out = analyze_kept(kept, means)
        floors = rounding_floors(kept, settings.seed)
    return Measured(
        means,
        similarity.pairs,
        pooled,
        sorted(growth.sinks.values(), key=lambda sink: sink.position),
        floors,
        evaluations,
        settings.passes(len(stream)),
        time.perf_counter() - started,
        notes + left_out,
    )
