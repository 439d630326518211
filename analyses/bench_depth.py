"""What the estimators of effective depth cost, in backward passes (the gradient ones) and in forward passes.

    python analyses/bench_depth.py [CHECKPOINT] [--tokens 1024] [--repeats 1] [--threads 1] [--only NAME ...]

A backward pass is autograd's own, of the mean loss by every weight, over the same sequences one at a time; the forward
pass before it is not counted. Both sides alternate in one process. The ratio is that of CPU times, which other jobs on
the machine disturb less; the clock's stands beside it. Peak memory is that of a process that runs one estimator alone.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from bench_probes import peak_mib
from torch import nn

from depthprobe.corpus import Corpus
from depthprobe.depth.path_elasticity import path_elasticity
from depthprobe.depth.path_elasticity_raw import path_elasticity_raw
from depthprobe.depth.path_spectrum import path_spectrum
from depthprobe.depth.stages import stages
from depthprobe.prepare import prepare
from depthprobe.verify import Anatomy

DEFAULT = ".weights/SmolLM2-135M-Instruct.Q4_1.gguf"
GIB = 8  # that a run may take
Time = tuple[float, float]  # by the clock, of the CPU; seconds
# What each is measured in, and how many of those it may take on the default checkpoint with 1,024 tokens, block level.
BOUNDS: dict[str, tuple[Callable, str, float]] = {
    "path_elasticity_raw": (path_elasticity_raw, "backward", 6),
    "path_elasticity": (path_elasticity, "backward", 12),
    "path_spectrum": (path_spectrum, "backward", 20),
    "stages": (stages, "forward", 260),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=DEFAULT)
    parser.add_argument("--tokens", type=int, default=1024, help="of the corpus")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--unit", default="block", help="block or sublayer; the bounds are for blocks")
    parser.add_argument("--repeats", type=int, default=1, help="medians are printed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(BOUNDS), default=list(BOUNDS), help="which estimators")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--peak", choices=list(BOUNDS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    _, corpus, anatomy = prepare(
        options.checkpoint, tokens=options.tokens, seq_len=options.seq_len, device="cpu", dtype="float32"
    )
    if options.peak:
        BOUNDS[options.peak][0](anatomy, corpus, options.unit)
        print(peak_mib() / 1024)
        return
    print(
        f"{options.checkpoint}, {corpus.sequences} × {corpus.tokens} tokens, {options.threads} threads, {options.unit}"
    )
    for name in options.only:
        ratio, clock, seconds = cost(name, anatomy, corpus, options.unit, options.repeats)
        _, unit, bound = BOUNDS[name]
        print(
            f"  {name:<20} {ratio:7.2f} {unit} passes (by the clock {clock:.2f}, {seconds:.0f} s); at most {bound}: "
            f"{'held' if ratio <= bound else 'NOT HELD'}",
            flush=True,
        )
    for name in () if options.no_memory else options.only:
        command = [sys.executable, __file__, options.checkpoint, "--tokens", str(options.tokens), "--peak", name]
        command += ["--seq-len", str(options.seq_len), "--unit", options.unit, "--threads", str(options.threads)]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"  {name:<20} {peak:7.2f} GiB at most, of {GIB}: {'held' if peak <= GIB else 'NOT HELD'}", flush=True)


def cost(name: str, anatomy: Anatomy, corpus: Corpus, unit: str, repeats: int) -> tuple[float, float, float]:
    """An estimator's time over that of a pass: of the CPU, by the clock; and its seconds by the clock."""
    estimator, kind, _ = BOUNDS[name]
    model = anatomy.stream.checkpoint.model
    plain = passes(model, corpus, kind)  # the first pass finds colder caches and fresh memory
    mine: list[Time] = []
    theirs: list[Time] = []
    for _ in range(repeats):
        mine.append(timed(lambda: estimator(anatomy, corpus, unit)))
        theirs.append(passes(model, corpus, kind))
    ratios = [[a[k] / b[k] for a, b in zip(mine, theirs, strict=True)] for k in (1, 0)]
    assert min(plain) > 0
    return statistics.median(ratios[0]), statistics.median(ratios[1]), statistics.median(a[0] for a in mine)


def passes(model: nn.Module, corpus: Corpus, kind: str) -> Time:
    """A forward pass, or the backward pass behind one, over the corpus."""
    flags = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(True)
    times = list(_backward(model, corpus) if kind == "backward" else _forward(model, corpus))
    for parameter, flag in zip(model.parameters(), flags, strict=True):
        parameter.grad = None
        parameter.requires_grad_(flag)
    clock, cpu = (sum(t[k] for t in times) for k in (0, 1))
    return clock, cpu


def _forward(model: nn.Module, corpus: Corpus) -> Iterator[Time]:
    with torch.no_grad():
        for ids in corpus.inputs:
            yield timed(lambda ids=ids: model(input_ids=ids[None], use_cache=False))


def _backward(model: nn.Module, corpus: Corpus) -> Iterator[Time]:
    for ids in corpus.inputs:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits.float(), ids[1:])
        yield timed(loss.backward)


def timed(run: Callable[[], object]) -> Time:
    """What a run takes by the clock and of the CPU, in seconds."""
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


if __name__ == "__main__":
    main()
