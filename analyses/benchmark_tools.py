"""The tools that `benchmark.py` sets side by side, each as its users would write it, and the process that one lives in.

Every tool has a process of its own: what one of them changes in torch or in the model does not slow the others down.
All are given the same weights, token ids, schedules and scored positions, and none keeps a cache of keys and values.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_plain import EFFECTS, LAYERS, PAIRS, Numbers, Unmodified, at, statistics
from numpy.typing import NDArray
from torch import Tensor, nn

from depthprobe import load
from depthprobe.ablation import ANALYZE_SHARE, default_schedules, run_ablations
from depthprobe.ablations.effects import Scored
from depthprobe.ablations.run import SweepSettings
from depthprobe.estimate import Resampler
from depthprobe.measure import TOKENS_AT_ONCE, Settings, measure
from depthprobe.prepare import prepare
from depthprobe.summary import layers_table, pairs_table

SKIP = 1  # leading positions that statistics leave out
QUARTER, EVERY, THRIFTY = (
    "quarter",
    "every",
    "thrifty",
)  # of the positions; read out where they are scored and only there
FORWARD = "forward"
SWEPT, SWEPT_LARGE, SMALL = 2048, 160, 10_000_000  # tokens: as `analyze` sweeps, and what half an hour allows
Change = tuple[str, int]  # kind, and the first block that it is about


@dataclass(frozen=True, eq=False)
class Task:
    """What every tool is given; arrays, which any process can hand to another.

    Attributes:
        ids: `[sequences, tokens]`, of the captures.
        step: sequences of a batch.
        swept_ids: `[sequences, tokens]` of the sweep, one batch.
        scored: a quarter of the positions that have a next token, `[sequences, scored]`.
        changes: the schedules, by kind.
    """

    ids: NDArray[np.int64]
    step: int
    swept_ids: NDArray[np.int64]
    scored: NDArray[np.int64]
    changes: tuple[Change, ...]

    @property
    def batches(self) -> tuple[Tensor, ...]:
        return torch.from_numpy(self.ids).split(self.step)

    @property
    def swept(self) -> Tensor:
        return torch.from_numpy(self.swept_ids)

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self.scored)


@dataclass
class Watch:
    """Seconds by the clock and of CPU time, by part of a run."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began, used = time.perf_counter(), time.process_time()
        yield
        taken = self.parts.setdefault(part, [0.0, 0.0])
        taken[0] += time.perf_counter() - began
        taken[1] += time.process_time() - used


def joined(parts: list[Numbers]) -> Numbers:
    """Batches after one another, along the last axis."""
    return {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}


class Bare:
    """The model itself, as transformers runs it."""

    package = "transformers"
    wrapped = 0.0  # seconds that it took to make a model that was loaded its own

    def __init__(self, checkpoint: str) -> None:
        opened = load(checkpoint, device="cpu")
        self.model, self.tokenizer = opened.model, opened.tokenizer
        self.blocks: Any = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))

    def forward(self, task: Task, watch: Watch) -> None:
        with watch(FORWARD):
            for ids in task.batches:
                self.logits(ids)

    def logits(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits

    def warm(self, task: Task, watch: Watch) -> None:
        """One batch, so that the first run that counts finds all in place."""
        with watch(FORWARD):
            self.logits(task.batches[0])


class Hooked(Bare):
    """What a library of hooks is asked for: states, and logits of a changed model."""

    def states(self, ids: Tensor) -> list[Tensor]:
        """x_0 and what every block wrote."""
        raise NotImplementedError

    def changed(self, ids: Tensor, change: Change | None, positions: Tensor | None = None) -> Tensor:
        """Logits with one change or none; with positions `[batch, scored]` the head is given those alone."""
        raise NotImplementedError

    def warm(self, task: Task, watch: Watch) -> None:
        """A sequence for everything that is timed later."""
        self.states(task.batches[0][:1])
        for kind in ("skip", "merge", "swap"):
            self.changed(task.swept[:1], (kind, 0), task.positions[:1])

    def capture(self, task: Task, watch: Watch) -> None:
        with watch("states"):
            for ids in task.batches:
                self.states(ids)

    def statistics(self, task: Task, watch: Watch) -> Numbers:
        return self._statistics(task, watch, self.states)

    def _statistics(self, task: Task, watch: Watch, states: Callable[[Tensor], list[Tensor]]) -> Numbers:
        found = []
        for ids in task.batches:
            with watch("states"):
                seen = states(ids)
            with watch("statistics"):
                found.append(statistics(seen, SKIP))
        return joined(found)

    def sweep(self, task: Task, watch: Watch) -> Numbers:
        """One forward pass a schedule; its logits are scored twice, at a quarter of the positions and at all."""
        scored: dict[str, Tensor | None] = {QUARTER: task.positions, EVERY: None}
        with watch(FORWARD):
            logits = self.changed(task.swept, None)
        base = {}
        for name, positions in scored.items():
            with watch(name):
                base[name] = Unmodified(at(logits, positions), at(task.swept.roll(-1, 1), positions))
        found: dict[str, list[Numbers]] = {name: [] for name in scored}
        for change in task.changes:
            with watch(FORWARD):
                logits = self.changed(task.swept, change)
            for name, positions in scored.items():
                with watch(name):
                    found[name].append(base[name].effects(at(logits, positions)))
        return {f"{name} {effect}": _stacked(found[name], effect) for name in found for effect in EFFECTS}

    def thrifty(self, task: Task, watch: Watch) -> Numbers:
        """The same at a quarter of the positions, where the head reads nothing else."""
        with watch(THRIFTY):
            targets = at(task.swept.roll(-1, 1), task.positions)
            base = Unmodified(self.changed(task.swept, None, task.positions), targets)
            found = [base.effects(self.changed(task.swept, change, task.positions)) for change in task.changes]
        return {f"{QUARTER} {effect}": _stacked(found, effect) for effect in EFFECTS}


def _stacked(found: list[Numbers], effect: str) -> np.ndarray:
    """`[schedules, sequences]`."""
    return np.stack([each[effect] for each in found])


class Nnsight(Hooked):
    package = "nnsight"

    def __init__(self, checkpoint: str) -> None:
        import nnsight

        super().__init__(checkpoint)
        began = time.perf_counter()
        self.traced: Any
        with warnings.catch_warnings(action="ignore"):  # on submodules named like what it serves; none is used here
            if self.model.can_generate():
                self.traced = nnsight.TransformersModel(self.model, tokenizer=self.tokenizer)
            else:  # there is no pipeline for it, as `TransformersModel` wants
                self.traced = nnsight.NNsight(self.model)
        self.wrapped = time.perf_counter() - began
        path = next(name for name, module in self.model.named_modules() if module is self.blocks)
        self.layers = self.traced.get(path)
        self.save = nnsight.save

    def states(self, ids: Tensor) -> list[Tensor]:
        with self.traced.trace(ids, use_cache=False):
            states = self.save([])
            states.append(self.layers[0].input)
            for layer in self.layers:
                states.append(layer.output)
        return states

    def stopped(self, task: Task, watch: Watch) -> Numbers:
        """The same statistics from a pass that ends with the last block: they do not need the head."""
        return self._statistics(task, watch, self.states_alone)

    def states_alone(self, ids: Tensor) -> list[Tensor]:
        with self.traced.trace(ids, use_cache=False) as tracer:
            states = self.save([])
            states.append(self.layers[0].input)
            for layer in self.layers:
                states.append(layer.output)
            tracer.stop()
        return states

    def changed(self, ids: Tensor, change: Change | None, positions: Tensor | None = None) -> Tensor:
        kind, index = change or ("", 0)
        first, second = self.layers[index], self.layers[min(index + 1, len(self.blocks) - 1)]
        model = self.traced
        with model.trace(ids, use_cache=False):
            if kind == "skip":
                first.skip(first.input)
            elif kind == "merge":
                x, written = first.input, first.output
                first.output = x
                second.output = written + (second.output - x)
            elif kind == "swap":
                args, kwargs = first.inputs
                first.skip(second(*args, **kwargs))
                args, kwargs = second.inputs
                second.skip(first(*args, **kwargs))
            if positions is not None:
                model.lm_head.input = at(model.lm_head.input, positions)
            logits = model.output.logits.save()
        return logits


class TransformerLens(Hooked):
    package = "transformer-lens"

    def __init__(self, checkpoint: str) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        super().__init__(checkpoint)
        began = time.perf_counter()
        self.bridge: Any = TransformerBridge.boot_transformers(
            checkpoint, hf_model=self.model, tokenizer=self.tokenizer, device="cpu"
        )
        self.wrapped = time.perf_counter() - began
        self.names = ["blocks.0.hook_in", *(f"blocks.{i}.hook_out" for i in range(len(self.blocks)))]

    def cache(self, task: Task, watch: Watch) -> None:
        """Everything, which is what `run_with_cache` keeps if nothing else is said."""
        with watch("states"):
            for ids in task.batches:
                self.bridge.run_with_cache(ids, use_cache=False)

    def states(self, ids: Tensor) -> list[Tensor]:
        _, cache = self.bridge.run_with_cache(ids, names_filter=self.names, use_cache=False)
        return [cache[name] for name in self.names]

    def changed(self, ids: Tensor, change: Change | None, positions: Tensor | None = None) -> Tensor:
        kind, index = change or ("", 0)
        first, second = f"blocks.{index}", f"blocks.{index + 1}"
        kept: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: Any) -> None:
            kept["x"] = x

        def give_back(written: Tensor, hook: Any) -> Tensor:
            kept["written"] = written
            return kept["x"]

        def add(written: Tensor, hook: Any) -> Tensor:
            return kept["written"] + (written - kept["x"])

        hooks: list[tuple[str, Any]] = []
        if kind in ("skip", "merge"):
            hooks += [(f"{first}.hook_in", keep), (f"{first}.hook_out", give_back)]
        if kind == "merge":
            hooks.append((f"{second}.hook_out", add))
        if positions is not None:
            hooks.append(("unembed.hook_in", lambda x, hook: at(x, positions)))
        with self.swapped(index) if kind == "swap" else nullcontext():
            return self.bridge.run_with_hooks(ids, fwd_hooks=hooks, use_cache=False)

    @contextmanager
    def swapped(self, index: int) -> Iterator[None]:
        """Two blocks in each other's place: hooks do not change the order in which blocks run."""
        blocks = self.bridge.blocks
        blocks[index], blocks[index + 1] = blocks[index + 1], blocks[index]
        try:
            yield
        finally:
            blocks[index], blocks[index + 1] = blocks[index + 1], blocks[index]


class Depthprobe:
    package = "depthprobe"
    wrapped = 0.0  # comes with the task: to verify its anatomy it needs a text

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = load(checkpoint, device="cpu")

    def task(self, tokens: int, sweep_tokens: int | None) -> tuple[Task, dict[str, Any]]:
        """What all tools are to do, and what it is done on."""
        sweep_tokens = sweep_tokens or (SWEPT if self.checkpoint.parameters < SMALL else SWEPT_LARGE)
        began = time.perf_counter()
        _, self.corpus, self.anatomy = prepare(self.checkpoint, tokens=tokens)
        wrapped = time.perf_counter() - began
        _, self.swept, _ = prepare(self.checkpoint, tokens=sweep_tokens)
        blocks = len(self.anatomy.stream)
        self.schedules = default_schedules(blocks, controls=False)
        if self.swept.inputs.numel() > TOKENS_AT_ONCE:
            raise ValueError(f"found {self.swept.inputs.numel()} tokens to sweep; expected at most {TOKENS_AT_ONCE}")
        measured = self._measure()
        resampler = Resampler(self.corpus.sequences, self.corpus.documents, 0)
        self.tables = layers_table(measured, resampler), pairs_table(measured, resampler)
        sequences = np.arange(self.swept.sequences)
        scored = Scored.next_token(self.swept.inputs, sequences, ANALYZE_SHARE, 0)
        task = Task(
            self.corpus.inputs.numpy(),
            max(1, TOKENS_AT_ONCE // self.corpus.tokens),
            self.swept.inputs.numpy(),
            scored.positions.numpy(),
            tuple((schedule.kind, schedule.changed[0]) for schedule in self.schedules),
        )
        about = {
            "architecture": self.checkpoint.architecture,
            "parameters": self.checkpoint.parameters,
            "blocks": blocks,
            "width": self.anatomy.stream.blocks.width,
            "captured": list(self.corpus.inputs.shape),
            "swept": list(self.swept.inputs.shape),
            "scored": list(scored.positions.shape),
            "schedules": len(self.schedules),
            "corpus": self.corpus.name,
            "sha256": self.corpus.sha256,
            "verified": wrapped,
        }
        return task, about

    def warm(self, task: Task, watch: Watch) -> None:
        """All is in place: making the task has measured the whole corpus."""

    def probes(self, task: Task, watch: Watch) -> Numbers:
        """All that ride on one pass; the plain ones leave out attention and MLP apart, CKA and linearity."""
        with watch("probes"):
            measured = self._measure()
        values, last = measured.means.values, len(self.anatomy.stream)
        found = {
            metric: np.stack([values[key] for i in range(last + 1) if (key := (metric, "block", i)) in values])
            for metric in LAYERS
            if (metric, "block", 0) in values
        }
        return found | {metric: measured.pairs[metric].T for metric in PAIRS}

    def quarter(self, task: Task, watch: Watch) -> Numbers:
        """As `analyze` sweeps, with tables, intervals, and what skips do to later blocks' updates."""
        layers, pairs = self.tables
        with watch(QUARTER):
            settings = SweepSettings(ANALYZE_SHARE)
            found = run_ablations(self.anatomy, self.swept, self.schedules, settings, None, None, layers, pairs, SKIP)
        return {f"{QUARTER} {effect}": found.swept.effects[effect].T for effect in EFFECTS}

    def every(self, task: Task, watch: Watch) -> Numbers:
        """As `ablate` sweeps."""
        with watch(EVERY):
            found = run_ablations(self.anatomy, self.swept, self.schedules, SweepSettings())
        return {f"{EVERY} {effect}": found.swept.effects[effect].T for effect in EFFECTS}

    def _measure(self) -> Any:
        return measure(self.anatomy, self.corpus, Settings(skip_first=SKIP, interaction=False, lens_positions=0))


TOOLS: dict[str, Any] = {
    "transformers": Bare,
    "depthprobe": Depthprobe,
    "nnsight": Nnsight,
    "transformer_lens": TransformerLens,
}


def serve(connection: Connection, name: str, checkpoint: str, threads: int) -> None:
    """Open a checkpoint with a tool, then run what is asked for until None is.

    Answers ("ready", what was found), ("refused", reason) or ("done", times, peak MiB, numbers).
    """
    torch.set_num_threads(threads)
    try:
        tool = TOOLS[name](checkpoint)
    except Exception as error:  # of another library: what it does not support is a result
        reason = str(error).strip().splitlines()[0].split(". ")[0]
        connection.send(("refused", f"{type(error).__name__}: {reason}"))
        return
    connection.send(("ready", {"version": metadata.version(tool.package), "wrapped": tool.wrapped}))
    task: Task | None = None
    with torch.no_grad(), suppress(EOFError):  # whoever asked has gone
        while (asked := connection.recv()) is not None:
            what, given = asked
            if what == "make task":
                task, about = tool.task(*given)
                connection.send(("done", task, about))
            elif what == "take task":
                task = given
                connection.send(("done",))
            else:
                connection.send(("done", *run(tool, what, task)))


def run(tool: Any, what: str, task: Task | None) -> tuple[dict[str, list[float]], int | None, Numbers | None]:
    """One run: seconds by part, peak memory in MiB, and what it found."""
    forget_peak()
    watch = Watch()
    found = getattr(tool, what)(task, watch)
    return watch.parts, peak(), found


def forget_peak() -> None:
    """Begin to look for the peak memory anew; only Linux can."""
    if os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int | None:
    """Peak resident memory of this process since then, in MiB; None where that is not known."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) // 1024
