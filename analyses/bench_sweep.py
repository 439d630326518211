"""What a shared sweep costs against the plain loop: all single skips and adjacent merges, with the same effects.

    python analyses/bench_sweep.py [CHECKPOINT] [--tokens 512] [--repeats 3] [--threads 2]

The plain loop is what one would write without sharing: for every schedule a full forward pass, from the embedding
through the blocks to the logits of every position, whose scored ones are then compared with the unmodified predictions
by the same function as the sweep's. With --thrifty the plain loop, too, reads out no more than the scored positions and
those in the same chunks. Times are noisy, so both sides alternate in one process, and the ratio of each pair is what
counts: by the clock, and by the CPU time of the process, which other jobs on the machine disturb less.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from depthprobe.ablation import default_schedules
from depthprobe.ablations.effects import Reference, Scored, state_distance
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import Schedule
from depthprobe.ablations.sweep import Trie, planned_evaluations, run_batch
from depthprobe.ablations.units import Units
from depthprobe.corpus import Corpus
from depthprobe.prepare import prepare
from depthprobe.stream import Entry
from depthprobe.verify import Anatomy

DEFAULT = ".weights/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGETS = {0.25: 0.55, 1.0: 0.65}  # of the default checkpoint, on two threads
COUNTS = (10, 59, 174)  # 174: a default sweep of 30 blocks with all of its controls


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=DEFAULT)
    parser.add_argument("--tokens", type=int, default=512, help="of the corpus; 512 take about half an hour")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs; medians are printed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--score-positions", default="0.25,1", help="shares of the positions to score (default: both)")
    parser.add_argument("--thrifty", action="store_true", help="a plain loop that reads out scored positions alone")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory, which takes a minute")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_memory(options.checkpoint, options.peak))
        return
    times(options)
    if not options.no_memory:
        memory(options)


def times(options: argparse.Namespace) -> None:
    """Shared and plain, alternating."""
    checkpoint, corpus, anatomy = prepare(options.checkpoint, tokens=options.tokens)
    schedules = default_schedules(len(anatomy.stream), ("skip", "merge"), controls=False)
    units = Units(anatomy)
    print(f"{checkpoint.name}: {corpus.sequences} × {corpus.tokens} tokens, {torch.get_num_threads()} threads")
    planned, plain = planned_evaluations(schedules, len(anatomy.stream))
    print(f"  {len(schedules)} schedules; planned block evaluations a batch: shared {planned}, plain {plain}")
    plain_loop(units, corpus, schedules[:1], 1.0)  # warm up
    for share in map(float, options.score_positions.split(",")):
        target = f", target {TARGETS[share]} or less" if share in TARGETS else ""
        settings = SweepSettings(share)
        step = settings.sequences_at_once(anatomy, corpus)
        alternate(
            f"--score-positions {share:g}{target}",
            units,
            lambda s=settings: sweep(anatomy, corpus, schedules, s, progress=_count(units)),  # type: ignore[misc]
            lambda s=share, b=step: plain_loop(units, corpus, schedules, s, b, options.thrifty),  # type: ignore[misc]
            options.repeats,
        )
    alternate(
        "layers alone, no head",
        units,
        lambda: shared_layers(units, corpus, schedules),
        lambda: plain_loop(units, corpus, schedules, None),
        options.repeats,
    )


def plain_loop(
    units: Units,
    corpus: Corpus,
    schedules: list[Schedule],
    share: float | None,
    step: int | None = None,
    thrifty: bool = False,
) -> None:
    """Every schedule from the embedding to the effects, one after another; only the last states without a share."""
    stream = units.stream
    step = step or corpus.sequences
    with torch.no_grad():
        for start in range(0, corpus.sequences, step):
            inputs = corpus.inputs[start : start + step]
            last = list(stream.states(stream.enter(inputs)))[-1]
            units.evaluations += len(stream)
            reference = None
            if share is not None:
                scored = Scored.next_token(inputs, np.arange(start, start + len(inputs)), share, 0)
                reference = Reference(stream, last, scored)
            for schedule in schedules:
                x = full_pass(units, stream.enter(inputs), schedule)
                if reference is None:
                    state_distance(x, last)
                elif thrifty:
                    reference.compare(x)
                else:
                    compare_all(reference, x, inputs)


def compare_all(reference: Reference, x: torch.Tensor, inputs: torch.Tensor) -> dict[str, np.ndarray]:
    """The effects from the logits of every position, as a forward pass of the model gives them."""
    logits = reference.stream.readout(x, inputs).float()
    positions = reference.scored.positions
    rows = torch.arange(len(inputs))[:, None]
    every = positions.shape[1] == inputs.shape[1] - 1
    # Nothing is copied where all positions are scored
    at = [logits[part] if every else logits[rows[part[0]], positions[part]] for part in reference.parts]
    return reference.effects(at)


def full_pass(units: Units, entry: Entry, schedule: Schedule) -> torch.Tensor:
    """x_L `[batch, tokens, width]` of one schedule, with nothing shared."""
    x = entry.x
    for stage in schedule.stages:
        x = units.stage(entry, stage, schedule.combine, x, partial(units.unit, entry, x=x))
    return x


def shared_layers(units: Units, corpus: Corpus, schedules: list[Schedule]) -> None:
    """The sweep's walk without a readout."""
    with torch.no_grad():
        entry = units.stream.enter(corpus.inputs)
        run_batch(units, entry, Trie.of(schedules), lambda last: None, lambda layer, like: like)


def alternate(what: str, units: Units, shared: Callable[[], object], plain: Callable[[], object], repeats: int) -> None:
    """Run both sides in turn, and print their times, evaluations and ratios."""
    print(f"  {what}")
    clock: dict[str, list[float]] = {"shared": [], "plain": []}
    cpu: dict[str, list[float]] = {"shared": [], "plain": []}
    made: dict[str, int] = {}
    for _ in range(repeats):
        for name, run in (("shared", shared), ("plain", plain)):
            units.evaluations = 0
            began, used = time.perf_counter(), time.process_time()
            run()
            clock[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)
            made[name] = units.evaluations
            print(f"    {name:<6} {clock[name][-1]:6.1f} s, CPU {cpu[name][-1]:6.1f} s", flush=True)
    print(f"    block evaluations made: shared {made['shared']}, plain {made['plain']}")
    for name, taken in (("time", clock), ("CPU time", cpu)):
        ratios = [s / p for s, p in zip(taken["shared"], taken["plain"], strict=True)]
        sides = ", ".join(f"{side} {statistics.median(taken[side]):.1f} s" for side in taken)
        print(f"    shared / plain, {name}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to "
              f"{max(ratios):.3f} (medians {sides})", flush=True)  # fmt: skip


def _count(units: Units) -> Callable[[int, int], None]:
    """The sweep counts for itself; its last report is what it made."""

    def step(done: int, total: int) -> None:
        units.evaluations = done

    return step


def peak_memory(checkpoint: str, count: int) -> str:
    """Peak resident memory of this process while it sweeps so many schedules; loading is not counted."""
    _, corpus, anatomy = prepare(checkpoint, tokens=128, seq_len=128)
    schedules = chosen(anatomy, count)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, which is that of loading
    sweep(anatomy, corpus, schedules, SweepSettings(0.25))
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return f"{len(schedules):>4} schedules: {int(line.split()[1]) // 1024} MiB"


def chosen(anatomy: Anatomy, count: int) -> list[Schedule]:
    """An even choice among the default schedules and their controls."""
    every = default_schedules(len(anatomy.stream))
    return [every[i] for i in np.linspace(0, len(every) - 1, min(count, len(every))).astype(int)]


def memory(options: argparse.Namespace) -> None:
    """Peak memory for a growing number of schedules, a process each."""
    if not Path("/proc/self/clear_refs").exists():
        print("  peak memory: only measured on Linux")
        return
    print("  peak resident memory of the sweep by number of schedules (1 × 128 tokens)")
    for count in COUNTS:
        command = [
            sys.executable,
            __file__,
            options.checkpoint,
            "--peak",
            str(count),
            "--threads",
            str(options.threads),
        ]
        peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        print(f"    {peak}", flush=True)


if __name__ == "__main__":
    main()
