"""The lab's trainer: what a run leaves, matched runs, the same numbers again, every option."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_runs import SMALL, TEXT, curve, record, rows, run, tiny, weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe.lab import LabForCausalLM, LabForMaskedLM, TrainSettings
from depthprobe.lab.settings import make_optimizer
from depthprobe.lab.text import Text, read_text


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps, with checkpoints on the way."""
    out = tmp_path_factory.mktemp("lab") / "first"
    run(out, save_at=(0, 20))
    return out


# --- what a run leaves ---------------------------------------------------------------------------------------------


def test_it_learns_and_leaves_a_record(first: Path) -> None:
    found = record(first)
    log = pd.read_json(first / "log.jsonl", lines=True, precise_float=True)
    assert list(log.columns) == ["step", "loss", "lr", "grad_norm", "tokens", "seconds", "val_loss"]
    assert log["step"].tolist() == list(range(31))
    assert log["tokens"].tolist() == [64 * step for step in range(31)]
    assert log.loc[log["val_loss"].notna(), "step"].tolist() == [0, 10, 20, 30]
    assert log["loss"].iloc[-5:].mean() < log["loss"].iloc[1:6].mean() - 1
    assert found["status"] == found["result"]["status"] == "done"
    assert found["result"]["val_loss"] == log["val_loss"].iloc[-1]
    assert found["text"]["sha256"] == read_text([TEXT], AutoTokenizer.from_pretrained(first)).sha256
    assert found["model"]["placement"] == "pre"
    assert found["settings"]["lr"] == 1e-2
    assert found["versions"]["torch"] == torch.__version__
    assert (first / "loss.png").read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in first.iterdir()}
    assert left == {
        "config.json", "log.jsonl", "loss.png", "model.safetensors", "run.json", "step-0", "step-20",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_the_checkpoint_opens(first: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(first)
    assert type(model) is LabForCausalLM
    assert sum(weight.numel() for weight in model.parameters()) == record(first)["parameters"]
    opened = depthprobe.load(first)
    assert (opened.vocab_size, opened.max_positions, opened.objective) == (257, 16, "causal")
    text = read_text([TEXT], opened.tokenizer, seq_len=16)
    ids, labels = text.validation
    with torch.no_grad():
        loss = float(opened.model(input_ids=ids[:32], labels=labels[:32]).loss)
    assert loss == pytest.approx(record(first)["result"]["val_loss"], rel=1e-6)


def test_step_checkpoints_are_those_of_the_step(first: Path, tmp_path: Path) -> None:
    """At 0 the initialisation; at 20 what a loop by hand has after 20 updates."""
    torch.manual_seed(0)
    settings = replace(SMALL, save_at=(0, 20))
    config = tiny(vocab_size=257, max_position_embeddings=16)
    model = LabForCausalLM(config)
    for name, weight in LabForCausalLM.from_pretrained(first / "step-0").state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    text = read_text([TEXT], AutoTokenizer.from_pretrained(first), seq_len=16)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    losses = []
    for step in range(20):
        warm = 1e-2 * (step + 1) / 5
        cosine = 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 5) / 25)))
        for group in optimizer.param_groups:
            group["lr"] = warm if step < 5 else cosine
        ids = text.batch(settings.seed, step, 4)[0]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose([row["loss"] for row in rows(first)[1:21]], losses, rtol=1e-4)
    for name, weight in LabForCausalLM.from_pretrained(first / "step-20").state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-3, atol=1e-4)
    assert record(first / "step-20")["step"] == 20
    assert record(first / "step-20")["text"] == record(first)["text"]


# --- matched, and the same again -----------------------------------------------------------------------------------


class Seen:
    """A text that writes down the batches that were drawn."""

    def __init__(self) -> None:
        from depthprobe.lab.byte_tokens import byte_tokenizer

        self.text: Text = read_text([TEXT], byte_tokenizer(), seq_len=16)
        self.batches: list[Tensor] = []
        for name in ("name", "sha256", "vocab_size", "frequencies", "validation"):
            setattr(self, name, getattr(self.text, name))

    def batch(self, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
        ids, labels = self.text.batch(seed, step, rows)
        self.batches.append(ids)
        return ids, labels


def test_placements_see_the_same_batches(tmp_path: Path) -> None:
    seen = {}
    for placement in ("pre", "post", "sandwich"):
        source = Seen()
        result = run(tmp_path / placement, tiny(placement=placement), source, steps=8)
        seen[placement] = torch.stack(source.batches)
        assert result.tokens == seen[placement].numel() == 8 * 4 * 16
    assert torch.equal(seen["pre"], seen["post"])
    assert torch.equal(seen["pre"], seen["sandwich"])
    tokens = [[row["tokens"] for row in rows(tmp_path / name)] for name in seen]
    assert tokens[0] == tokens[1] == tokens[2]
    rates = [[row["lr"] for row in rows(tmp_path / name)] for name in seen]
    assert rates[0] == rates[1] == rates[2]


def test_the_same_seed_gives_the_same_curve(first: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    run(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was used"
    assert curve(tmp_path / "again") == curve(first)
    assert weights(tmp_path / "again") == weights(first)


def test_seeds(first: Path, tmp_path: Path) -> None:
    for name, seeds in {"other": {"seed": 1}, "order": {"seed": 1, "data_seed": 0}}.items():
        source = Seen()
        run(tmp_path / name, data=source, steps=5, save_at=(0,), **seeds)
        drawn = Seen().text.batch(0, 0, 4)[0]
        assert torch.equal(source.batches[0], drawn) is (name == "order")
        assert weights(tmp_path / name / "step-0") != weights(first / "step-0")


def test_accumulation_changes_nothing_but_rounding(first: Path, tmp_path: Path) -> None:
    run(tmp_path / "parts", accumulate=4)
    for one, other in zip(curve(first), curve(tmp_path / "parts"), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == (value if value is None else pytest.approx(value, rel=1e-3)), (one["step"], name)
    assert curve(first) != curve(tmp_path / "parts"), "it was not divided"


# --- options -------------------------------------------------------------------------------------------------------


def test_the_learning_rate() -> None:
    settings = TrainSettings(steps=100, lr=1.0, warmup=10, floor=0.1)
    rates = [settings.rate(step) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert settings.rate(100) == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert replace(settings, warmup=0).rate(0) == 1.0


@pytest.mark.parametrize(
    ("optimizer", "lr", "kind"),
    [("adamw", 1e-2, torch.optim.AdamW), ("radam", 3e-2, torch.optim.RAdam), ("sgd", 0.3, torch.optim.SGD)],
)
def test_optimizers(optimizer: str, lr: float, kind: type, tmp_path: Path) -> None:
    settings = replace(SMALL, optimizer=optimizer, lr=lr, weight_decay=0.01, betas=(0.8, 0.9), momentum=0.7)
    made = make_optimizer(TINY_MODEL, settings)
    assert type(made) is kind
    decays = {weight.ndim: group["weight_decay"] for group in made.param_groups for weight in group["params"]}
    assert decays == {2: 0.01, 1: 0.0}
    assert sum(len(group["params"]) for group in made.param_groups) == len(list(TINY_MODEL.parameters()))
    assert made.param_groups[0].get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert made.param_groups[0].get("momentum", 0.7) == 0.7
    result = run(tmp_path / "run", optimizer=optimizer, lr=lr, weight_decay=0.01)
    log = rows(tmp_path / "run")
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 1
    assert result.loss is not None


TINY_MODEL = LabForCausalLM(tiny(vocab_size=257, max_position_embeddings=16))


def test_clipping(first: Path, tmp_path: Path) -> None:
    run(tmp_path / "free", clip=0.0, steps=3, warmup=0)
    run(tmp_path / "cut", clip=1e-9, steps=3, warmup=0, weight_decay=0.0, optimizer="sgd")
    assert rows(tmp_path / "free")[1]["grad_norm"] == rows(first)[1]["grad_norm"], "the norm is that before the cut"
    cut = rows(tmp_path / "cut")
    assert cut[0]["val_loss"] == pytest.approx(cut[-1]["val_loss"], abs=1e-5)


def test_half_precision(first: Path, tmp_path: Path) -> None:
    run(tmp_path / "half", dtype="bf16")
    one, other = rows(first)[1:6], rows(tmp_path / "half")[1:6]
    assert [row["loss"] for row in one] != [row["loss"] for row in other]
    np.testing.assert_allclose([row["loss"] for row in other], [row["loss"] for row in one], rtol=0.02)
    assert depthprobe.load(tmp_path / "half").dtype == torch.float32


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm", "instancenorm"])
def test_masked_prediction(norm: str, tmp_path: Path) -> None:
    result = run(tmp_path / "masked", tiny(causal=False, norm=norm), steps=40)
    opened = depthprobe.load(tmp_path / "masked")
    assert type(opened.model) is LabForMaskedLM
    assert opened.objective == "masked"
    assert opened.tokenizer.mask_token_id == 257
    log = rows(tmp_path / "masked")
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 1
    ids, labels = read_text([TEXT], opened.tokenizer, seq_len=16, objective="masked").validation
    with torch.no_grad():
        loss = float(opened.model(input_ids=ids[:32], labels=labels[:32]).loss)
    assert loss == pytest.approx(result.val_loss, rel=1e-5)


def test_admin_profiles_before_the_first_step(tmp_path: Path) -> None:
    run(tmp_path / "admin", tiny(placement="post", initialisation="admin"), steps=5, save_at=(0,))
    start = LabForCausalLM.from_pretrained(tmp_path / "admin" / "step-0").state_dict()
    gains = [float(weight.mean()) for name, weight in start.items() if "gain" in name]
    assert len(gains) == 4
    assert gains == sorted(gains)
    assert gains[-1] > 1.2


def test_fine_tuning_begins_where_the_checkpoint_ended(first: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "tuned", str(first), steps=10, lr=1e-3)
    log = rows(tmp_path / "tuned")
    assert log[0]["val_loss"] == record(first)["result"]["val_loss"]
    assert log[-1]["val_loss"] < log[0]["val_loss"]
    assert log[1]["lr"] == pytest.approx(1e-3 / 5), "a schedule of its own"
    assert result.status == "done"
    assert record(tmp_path / "tuned")["start"]["name"] == str(first)
    assert record(first)["start"] is None


def test_other_models_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    ids = np.random.default_rng(0).integers(0, 4, (100, 16))
    result = run(tmp_path / "gpt2", GPT2LMHeadModel(config), ids, steps=20)
    assert result.val_loss < rows(tmp_path / "gpt2")[0]["val_loss"] - 1
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")) is GPT2LMHeadModel


def test_ids_of_ones_own(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 300, (100, 16))
    run(tmp_path / "ids", data=ids, steps=5)
    opened = depthprobe.load(tmp_path / "ids")
    assert opened.tokenizer is None
    assert opened.vocab_size == int(ids.max()) + 1
