"""The measuring loop: every batch goes through the blocks once, and all probes ride on that pass.

Where weights have to be fetched, the loop over blocks is outside and that over batches inside.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from depthprobe.branches import Reader
from depthprobe.corpus import Corpus
from depthprobe.errors import UsageError
from depthprobe.estimate import PerSequence
from depthprobe.offload import Fetched, OnDisk
from depthprobe.placement import bfloat16_instructions
from depthprobe.probes.base import Batch, Probe, Step
from depthprobe.probes.growth import Growth, Sink
from depthprobe.probes.interaction import Interaction
from depthprobe.probes.kept import Pooled, analyze_kept, rounding_floors
from depthprobe.probes.lens import Lens
from depthprobe.probes.similarity import KeptStates, Similarity
from depthprobe.processes import batches_in_all, dealt, exchange, paced, together
from depthprobe.stream import Stream
from depthprobe.verify import Anatomy

__all__ = ["Measured", "Progress", "Settings", "measure"]

FASTER = 512  # width from which products of bfloat16 pay: analyses/bench_dtype.py, at 576 and at 64
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
        checkpoint, wide = anatomy.stream.checkpoint, anatomy.stream.blocks.width >= FASTER
        if wide and checkpoint.dtype is torch.float32 and checkpoint.device.type == "cpu" and bfloat16_instructions():
            text += ". On this CPU --dtype bfloat16 is faster; most metrics change by under 1 % of their largest value"
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
    fetched: Fetched | None = None


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
    together(lambda: _check_length(corpus, settings))
    stream, count = anatomy.stream, corpus.sequences
    width = stream.blocks.width
    means = PerSequence(count)
    growth, similarity = Growth(means, width), Similarity(means)
    budget = settings.keep_positions or max(3072, 6 * width)
    kept = KeptStates(count, corpus.tokens, settings.skip_first, budget, settings.seed)
    parts = _parts(anatomy, corpus, settings, kept)
    probes: list[Probe] = [growth, similarity, kept]
    notes: list[str] = []
    if parts.tight:
        notes.append("The states of one sequence take more than --max-memory leaves room for: lower --seq-len.")
    if settings.interaction and len(stream) > 1:
        probes.append(Interaction(means))
    if settings.lens_positions and anatomy.objective is None:
        notes.append("The logit lens was left out: the model has no language-model head.")
    elif settings.lens_positions and not anatomy.reads_positions_apart:
        notes.append("The logit lens was left out: the readout of a position depends on other positions.")
    elif settings.lens_positions:
        targets = anatomy.objective == "causal"
        probes.append(Lens(means, count, settings.lens_positions, targets, _positions_at_once(stream)))
        if not targets:
            notes.append("lens_loss was left out: a masked model is run unmasked, where its target is its own input.")

    started, offload = time.perf_counter(), stream.checkpoint.offload
    before = 0 if offload is None else offload.fetched
    reads = any(isinstance(probe, Lens) for probe in probes)
    progress = paced(progress)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if parts.on_disk:
            kept.states = OnDisk(Path(stack.enter_context(TemporaryDirectory())))
        reader = stack.enter_context(Reader(stream, anatomy.blocks))
        with dealt(count) as mine:
            batches = [slice(row, min(row + parts.batch, mine.stop)) for row in mine[:: parts.batch]]
            chunks = [batches[start : start + parts.batches] for start in range(0, len(batches), parts.batches)]
            for chunk in chunks:
                with stream.checkpoint.outside():
                    runs = [_Run(reader, corpus, rows, settings, probes) for rows in chunk]
                for layer in range(len(stream)):
                    # A block's weights are fetched once, if at all, for all batches that wait for it.
                    with stream.resident(layer):
                        for run in runs:
                            run.step(layer)
                    done = sum(rows.stop - rows.start for rows in chunk) * (layer + 1) // len(stream)
                    if progress is not None and len(chunk) > 1 and layer + 1 < len(stream):
                        progress(chunk[0].start + done, count)
                with stream.checkpoint.outside() if reads else nullcontext():
                    while runs:
                        runs.pop(0).end()
                if progress is not None:
                    progress(chunk[-1].stop, count)
        means.exchange()
        exchange(similarity.pairs, count)
        growth.exchange()
        kept.exchange()
        pooled, left_out = analyze_kept(kept, means)
        floors = rounding_floors(kept, settings.seed)
    further = 2 * (len(stream) - 1) if settings.interaction else 0
    return Measured(
        means,
        similarity.pairs,
        pooled,
        sorted(growth.sinks.values(), key=lambda sink: sink.position),
        floors,
        batches_in_all(count, parts.batch) * (len(stream) + further),
        settings.passes(len(stream)),
        time.perf_counter() - started,
        notes + left_out,
        _fetched(stream, before, len(chunks), len(batches), settings.interaction, 1 + reads),
    )


def _check_length(corpus: Corpus, settings: Settings) -> None:
    if corpus.tokens <= settings.skip_first:
        raise UsageError(
            f"--skip-first {settings.skip_first} leaves nothing of sequences of {corpus.tokens} tokens",
            fix="skip fewer positions, or use longer sequences",
        )


class _Run:
    """A batch on its way through the blocks, with probes of its own that share what they collect."""

    def __init__(
        self, reader: Reader, corpus: Corpus, rows: slice, settings: Settings, probes: Sequence[Probe]
    ) -> None:
        stream, inputs = reader.stream, corpus.inputs[rows]
        entry = stream.enter(
            inputs.to(stream.checkpoint.device, stream.checkpoint.dtype if corpus.is_states else inputs.dtype)
        )
        indices = np.arange(rows.start, rows.stop)
        self.batch = Batch(reader, entry, indices, settings.skip_first, settings.seed)
        self.probes = [copy.copy(probe) for probe in probes]
        self.x = entry.x
        for probe in self.probes:
            probe.begin(self.batch)

    def step(self, layer: int) -> None:
        """Run a block and show it to the probes."""
        x = self.batch.reader.stream.at(layer, self.x)
        visit = self.batch.reader.visit(self.batch.entry, layer, x)
        seen = Step(layer, x, visit.z, visit.update, visit.branches)
        for probe in self.probes:
            probe.see(self.batch, seen)
        self.x = visit.z

    def end(self) -> None:
        """The last block has run."""
        for probe in self.probes:
            probe.end(self.batch)


@dataclass(frozen=True)
class _Parts:
    """How the corpus is divided.

    Attributes:
        batch: sequences of a batch.
        batches: that wait together.
        on_disk: whether kept states go to disk.
        tight: whether there is too little memory for one sequence.
    """

    batch: int
    batches: int = 1
    on_disk: bool = False
    tight: bool = False


def _parts(anatomy: Anatomy, corpus: Corpus, settings: Settings, kept: KeptStates) -> _Parts:
    """As much at once as memory allows: all that wait are fetched for together."""
    stream, offload, most = anatomy.stream, anatomy.stream.checkpoint.offload, max(1, TOKENS_AT_ONCE // corpus.tokens)
    if offload is None:
        return _Parts(settings.batch_size or most)
    layers, width = len(stream) + 1, stream.blocks.width
    sample = kept.bytes(layers, width)
    on_disk, works = sample > offload.room // 4, stream.working_bytes(corpus.tokens)
    room = offload.room - (0 if on_disk else sample)
    batch = settings.batch_size or max(1, min(most, room // 4 // works))
    # The states of all layers wait for the angles between all, and those that the lens reads for the head.
    read = min(1.0, settings.lens_positions / (corpus.sequences * corpus.tokens))
    each = (8 + layers * (1 + read)) * corpus.tokens * width * 4
    together = max(1, int((room - batch * works) // (batch * each))) if offload.any else 1
    return _Parts(batch, together, on_disk, works + each > offload.room)


def _positions_at_once(stream: Stream) -> int:
    """How many positions the lens reads out together: 256, or what a quarter of a limited memory holds logits of."""
    offload = stream.checkpoint.offload
    return 256 if offload is None else min(256, offload.room // (4 * 24 * (stream.checkpoint.vocab_size or 1)))


def _fetched(stream: Stream, before: int, chunks: int, batches: int, interaction: bool, outside: int) -> Fetched | None:
    """What the run fetched; `outside` is how often a chunk, or a batch, needs the weights outside of the blocks."""
    offload = stream.checkpoint.offload
    if offload is None or not offload.any:
        return None
    sizes = [offload.size(block) for block in stream.blocks.modules]
    again = 2 * sum(sizes[1:]) if interaction else 0
    rest = outside * offload.outside_size
    return Fetched(
        offload.fetched - before, chunks * (sum(sizes) + rest), batches * (sum(sizes) + again + rest), chunks
    )
