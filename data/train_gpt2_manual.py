"""Train the small GPT-2 in data/gpt2-manual on the English of Python's own standard library.

    python data/train_gpt2_manual.py                 # CPU, one thread, about 40 minutes; resumes from --state

Text: the training share of the manual topics (a hash of a topic's name decides, see depthprobe/documents.py) and the
docstrings of the standard library's sources, which are parsed, not imported. A part of it is held out for validation.
The analysis share is never trained on: its loss is only reported.
"""

import argparse
import ast
import csv
import hashlib
import inspect
import math
import platform
import sysconfig
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from depthprobe import corpus
from depthprobe.documents import manual_topics

VOCAB, BLOCKS, WIDTH, HEADS, POSITIONS = 1024, 8, 128, 4, 256
BATCH, PEAK, FLOOR, WARMUP, DECAY = 16, 2e-3, 2e-4, 100, 0.1
END = "<|endoftext|>"
HERE = Path(__file__).resolve().parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=HERE / "gpt2-manual", help="where the trained model goes")
parser.add_argument("--state", type=Path, default=Path("gpt2-manual.state.pt"), help="where an interrupted run resumes")
parser.add_argument("--steps", type=int, default=1100)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--threads", type=int, default=1)
args = parser.parse_args()
torch.set_num_threads(args.threads)
torch.manual_seed(args.seed)

# ---------------------------------------------------------------------------------------------------------- the text


def docstrings(root: Path) -> list[str]:
    """Every docstring below root, once, in the order of the paths; tests and installed packages left out."""
    found: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old sources
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[inspect.cleandoc(ast.get_docstring(node, clean=False) or "")] = None
    return [text for text in found if len(text) >= 40]


def words(paragraph: str) -> str:
    """The paragraph without its indentation and line breaks."""
    return " ".join(paragraph.split())


analysed = {words(part) for topic in manual_topics("analysis") for part in topic.split("\n\n")}
texts = manual_topics("training") + docstrings(Path(sysconfig.get_paths()["stdlib"]))
texts = ["\n\n".join(part for part in text.split("\n\n") if words(part) not in analysed) for text in texts]
texts = sorted((text for text in texts if text), key=lambda text: hashlib.sha256(text.encode()).digest())
train_texts, held_out = texts[len(texts) // 20 :], texts[: len(texts) // 20]  # by hash: as good as drawn by lot
raw = END.join(train_texts).encode()
seen = {words(part) for text in train_texts for part in text.split("\n\n")}
checked = [words(part) for text in held_out for part in text.split("\n\n")]
twice = [part for part in checked if part in seen]
share = sum(map(len, twice)) / sum(map(len, checked))

# ----------------------------------------------------------------------------------------------------- the tokenizer

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe.train_from_iterator(
    train_texts,
    trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False, special_tokens=[END], initial_alphabet=alphabet),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, model_max_length=POSITIONS)


def stream(documents: list[str]) -> np.ndarray:
    """Ids of all documents, each with an end-of-text token in front."""
    return np.array([i for text in documents for i in [bpe.token_to_id(END), *bpe.encode(text).ids]], dtype=np.int64)


def entropy(ids: torch.Tensor) -> float:
    """Of the ids' own frequencies, nats per token: the best that a unigram can do on them in hindsight."""
    share = ids.unique(return_counts=True)[1].double() / ids.numel()
    return float(-(share * share.log()).sum())


train_ids, held_ids = stream(train_texts), stream(held_out)
held = torch.from_numpy(held_ids[: len(held_ids) // POSITIONS * POSITIONS].reshape(-1, POSITIONS))
print(f"{len(train_texts):,} texts, {len(raw):,} bytes, {len(train_ids):,} tokens; held out {len(held_ids):,} tokens")

# --------------------------------------------------------------------------------------------------------- the model

model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=VOCAB,
        n_layer=BLOCKS,
        n_embd=WIDTH,
        n_head=HEADS,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
# GPT-2's 0.02 is meant for widths of a thousand: at 128 branches start about 50 (MLP) and 200 (attention) times
# smaller than with 1 / sqrt(fan in), which weights of blocks get here (Conv1D keeps [in, out]). Embeddings keep 0.02.
for name, weight in model.named_parameters():
    if ".h." in name and weight.ndim == 2:
        torch.nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
parameters = sum(weight.numel() for weight in model.parameters())

matrices = [weight for weight in model.parameters() if weight.ndim == 2]
vectors = [weight for weight in model.parameters() if weight.ndim != 2]
groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98))


def rate(step: int) -> float:
    """Warm-up, then half a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, args.steps - WARMUP)))


def loss_of(rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, nats; rows are ids [batch, tokens]."""
    logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(rows: torch.Tensor) -> float:
    """The same over many rows, a batch at a time."""
    return sum(loss_of(part).item() * len(part) for part in rows.split(BATCH)) / len(rows)


# ------------------------------------------------------------------------------------------------------------ the run

first, curve, spent = 0, [], 0.0
if args.state.exists():
    state = torch.load(args.state, weights_only=True)
    if state["text"] != hashlib.sha256(raw).hexdigest() or state["steps"] != args.steps or state["seed"] != args.seed:
        raise SystemExit(f"{args.state} belongs to another run: remove it, or name another with --state")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first, curve, spent = state["step"], state["curve"], state["seconds"]
    print(f"resumed at step {first}")

began = time.monotonic() - spent
for step in range(first, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    # drawn from (seed, step), so that a resumed run sees the same batches
    starts = np.random.default_rng((args.seed, step)).integers(0, len(train_ids) - POSITIONS, BATCH)
    loss = loss_of(torch.from_numpy(np.stack([train_ids[start : start + POSITIONS] for start in starts])))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    done = step + 1
    if done % 50 == 0 or done in (1, args.steps):
        model.eval()
        curve.append([done, loss.item(), mean_loss(held[:64])])
        model.train()
        spent = time.monotonic() - began
        print(
            f"step {done} train {curve[-1][1]:.4f} validation {curve[-1][2]:.4f} {spent / done:.2f} s a step",
            flush=True,
        )
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": done,
            "curve": curve,
            "seconds": spent,
            "text": hashlib.sha256(raw).hexdigest(),
            "steps": args.steps,
            "seed": args.seed,
        }
        torch.save(saved, args.state.with_suffix(".part"))
        args.state.with_suffix(".part").replace(args.state)

# -------------------------------------------------------------------------------------------------- what is left of it

model.eval()
analysis = corpus.read(None, tokenizer, tokens=10**7, seq_len=POSITIONS, vocab_size=VOCAB)
final, foreign = mean_loss(held), mean_loss(analysis.inputs)
args.out.mkdir(parents=True, exist_ok=True)
model.save_pretrained(args.out)
tokenizer.save_pretrained(args.out)
(args.out / "generation_config.json").unlink(missing_ok=True)
with open(args.out / "loss.csv", "w", newline="") as file:
    csv.writer(file).writerows([["step", "train", "validation"], *curve])
size = (args.out / "model.safetensors").stat().st_size
command = f"python data/train_gpt2_manual.py --steps {args.steps} --seed {args.seed} --threads {args.threads}"
seen = args.steps * BATCH * POSITIONS
(args.out / "README.md").write_text(f"""# gpt2-manual

A small trained GPT-2 to try depthprobe on: {BLOCKS} blocks, width {WIDTH}, {HEADS} heads, {POSITIONS} positions, tied
embeddings, {parameters:,} parameters, float32 ({size:,} bytes), with its own byte-level BPE of {VOCAB:,} tokens.

| | tokens | loss, nats per token | unigram entropy, nats per token |
|---|---|---|---|
| validation: a held-out part of the training material | {held.numel():,} | {final:.3f} | {entropy(held):.3f} |
| the analysis share of the manual | {analysis.inputs.numel():,} | {foreign:.3f} | {entropy(analysis.inputs):.3f} |

Neither was trained on, but for {len(twice)} of the {len(checked)} paragraphs of the validation text, \
{share:.1%} of its characters, which other docstrings repeat. The unigram entropy is that of the tokens' own \
frequencies: no unigram can do better on them.

- Command: `{command}`, {spent / 60:.0f} minutes.
- Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}.
- Text: the training share of `pydoc_data.topics`, and the docstrings of the standard library but for its tests, without
  the paragraphs that the analysis share has too. {len(train_texts):,} texts, {len(raw):,} bytes,
  {len(train_ids):,} tokens; sha256 of the texts joined by `{END}`:
  `{hashlib.sha256(raw).hexdigest()}`. The text itself is not kept here.
- Held out: {len(held_out):,} more texts of the same material, chosen by their hash.
- Analysis share: packed in sequences of {POSITIONS}, sha256 `{analysis.sha256}`.
- Tokens seen: {seen:,} ({args.steps:,} steps of {BATCH} x {POSITIONS}), {seen / len(train_ids):.1f} times the text.
- AdamW, betas 0.9 and 0.98, weight decay {DECAY} on matrices, gradients clipped to 1, no dropout; rate {PEAK} after
  {WARMUP} steps of warm-up, then a cosine down to {FLOOR}.
- Weights of blocks were drawn with standard deviation 1 / sqrt(fan in), not GPT-2's 0.02, with which branches start
  about 50 (MLP) and 200 (attention) times smaller at this width. The embeddings keep 0.02, so that the first block
  outweighs them from the start. Both shape what depthprobe sees in it.
- `loss.csv`: loss of a step's own batch, and of the first 64 held-out sequences.

The text is under Python's licence (PSF-2.0), the weights are under this repository's.
""")
args.state.unlink(missing_ok=True)
print(f"validation {final:.4f} (unigram {entropy(held):.4f}), analysis share {foreign:.4f}: {args.out}")
