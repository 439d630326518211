"""What the probes cost: their time against bare forward passes over the same tokens, and peak memory by corpus size.

    python analyses/bench_probes.py [CHECKPOINT] [--tokens 4096] [--repeats 5] [--threads 2]

Times are noisy, so bare and probed runs alternate in one process and the ratio of each pair is what counts.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from depthprobe.measure import Settings, measure
from depthprobe.prepare import prepare

DEFAULT = ".weights/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMORY_MODEL = "data/gpt2-manual"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=DEFAULT)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_memory(options.checkpoint, options.peak))
        return
    times(options)
    memory()


def times(options: argparse.Namespace) -> None:
    """Bare and probed runs, alternating."""
    checkpoint, corpus, anatomy = prepare(options.checkpoint, tokens=options.tokens)
    settings = Settings(interaction=False, lens_positions=0)
    batch = max(1, 2048 // corpus.tokens)
    print(f"{checkpoint.name}: {corpus.sequences} × {corpus.tokens} tokens, {torch.get_num_threads()} threads")

    def bare() -> None:
        with torch.no_grad():
            for start in range(0, corpus.sequences, batch):
                anatomy.stream.forward(corpus.inputs[start : start + batch])

    def body() -> None:
        """The blocks alone, without the head that probes do not need."""
        with torch.no_grad():
            for start in range(0, corpus.sequences, batch):
                for _ in anatomy.stream.states(anatomy.stream.enter(corpus.inputs[start : start + batch])):
                    pass

    runs = {"bare": bare, "body": body, "probed": lambda: measure(anatomy, corpus, settings)}
    bare()  # warm up
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - started)
    for name, values in taken.items():
        print(f"  {name:<7} median {statistics.median(values):6.2f} s   all {' '.join(f'{v:.2f}' for v in values)}")
    for other in ("bare", "body"):
        ratios = [p / b for p, b in zip(taken["probed"], taken[other], strict=True)]
        print(f"  probed / {other}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def peak_memory(checkpoint: str, tokens: int) -> int:
    """Peak resident memory in MiB of this process after one run."""
    _, corpus, anatomy = prepare(checkpoint, tokens=tokens)
    # Longer corpora repeat the sequences: only their number matters here.
    inputs = corpus.inputs.repeat(tokens // corpus.inputs.numel() + 1, 1)[: tokens // corpus.tokens]
    longer = type(corpus)(inputs, None, corpus.name, corpus.sha256, corpus.bos, corpus.notes)
    measure(anatomy, longer, Settings(interaction=False, lens_positions=0))
    return peak_mib()


def peak_mib() -> int:
    """Peak resident memory of this program in MiB; getrusage also counts what the process was before it became it."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def memory() -> None:
    """Peak memory for corpora of growing size, a process each."""
    print(f"{MEMORY_MODEL}: peak resident memory by --tokens")
    for tokens in (8192, 32768, 131072):
        command = [sys.executable, __file__, MEMORY_MODEL, "--peak", str(tokens)]
        peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        print(f"  {tokens:>7,} tokens: {peak} MiB")


if __name__ == "__main__":
    main()
