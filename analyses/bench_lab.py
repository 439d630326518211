"""What the lab costs: the trainer beside a bare loop of the same model and optimiser.

    python analyses/bench_lab.py [--steps 200] [--threads 1]

Times are noisy, so what is compared alternates in one process, and the median of the ratios is what counts.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn

from depthprobe.lab import LabConfig, LabForCausalLM, TrainSettings, read_text, train
from depthprobe.lab.byte_tokens import byte_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of the trainer and of the bare loop, each")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for width in (64, 128):
        trainer(width, options.steps)


def trainer(width: int, steps: int) -> None:
    """Ten steps of `train`, then ten of a bare loop, and so on; validation, states and the log are the trainer's."""
    settings = TrainSettings(steps=steps, device="cpu", warmup=0)
    config = LabConfig(vocab_size=257, max_position_embeddings=settings.seq_len, hidden_size=width)
    text = read_text(None, byte_tokenizer(), seq_len=settings.seq_len)
    batches = [text.batch(1, step, settings.batch_size)[0] for step in range(10)]
    model = LabForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=settings.betas, weight_decay=0.1, fused=True)

    def bare() -> None:
        for ids in batches:
            optimizer.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()

    bare()  # warm up
    ours: list[float] = []
    theirs: list[float] = []
    resumed = 0.0

    def alternate(done: int, total: int) -> None:
        nonlocal resumed
        now = time.perf_counter()
        if resumed:  # the first ten steps bring the setting up with them
            ours.append(now - resumed)
            bare()
            theirs.append(time.perf_counter() - now)
        resumed = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        train(config, settings, f"{folder}/run", text, progress=alternate)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(f"trainer, 12 blocks of width {width}, {torch.get_num_threads()} threads: a bare step takes "
          f"{100 * statistics.median(theirs):.1f} ms")  # fmt: skip
    print(f"  train / bare, ten steps each: median {statistics.median(ratios):.3f}, "
          f"{min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip
    print(f"  with validation every {settings.eval_every} steps: {sum(ours) / sum(theirs):.3f} in all")


if __name__ == "__main__":
    main()
