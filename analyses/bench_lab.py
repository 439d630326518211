"""What the lab costs: its model beside transformers' GPT-2, the trainer beside a bare loop of model and optimiser.

    python analyses/bench_lab.py [--steps 200] [--threads 1]

Times are noisy, so what is compared alternates in one process, and the median of the ratios is what counts.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from depthprobe.lab import LabConfig, LabForCausalLM, TrainSettings, read_text, train
from depthprobe.lab.byte_tokens import byte_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each of the two that are compared")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for width in (64, 128):
        model(width, options.steps)
    for width in (64, 128):
        trainer(width, options.steps)


def model(width: int, steps: int) -> None:
    """A training step of the lab's model, then one of GPT-2 of the same size without dropout, and so on."""
    blocks, heads, vocabulary, tokens, batch = 12, 4, 257, 64, 16
    lab = LabConfig(
        vocab_size=vocabulary, max_position_embeddings=tokens, hidden_size=width, num_hidden_layers=blocks,
        num_attention_heads=heads,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=vocabulary, n_positions=tokens, n_embd=width, n_layer=blocks, n_head=heads,
        activation_function="gelu", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=False,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    models = {"lab": LabForCausalLM(lab).train(), "gpt2": GPT2LMHeadModel(gpt2).train()}
    counts = {name: sum(p.numel() for p in one.parameters()) for name, one in models.items()}
    assert counts["lab"] == counts["gpt2"], counts
    optimizers = {name: torch.optim.AdamW(one.parameters(), lr=1e-3) for name, one in models.items()}
    ids = torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps):
        # whoever goes first may find colder caches
        for name in ("lab", "gpt2") if step % 2 else ("gpt2", "lab"):
            start = time.perf_counter()
            optimizers[name].zero_grad(set_to_none=True)
            models[name](input_ids=ids, labels=ids).loss.backward()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
    ours, theirs = (times[name][10:] for name in ("lab", "gpt2"))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"model, {blocks} blocks of width {width}, {torch.get_num_threads()} threads: a step of GPT-2's takes "
          f"{1000 * statistics.median(theirs):.1f} ms")  # fmt: skip
    print(f"  lab / GPT-2, one step each: median {statistics.median(ratios):.3f}, "
          f"middle half {low:.3f} to {high:.3f}", flush=True)  # fmt: skip


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
        if done:
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
