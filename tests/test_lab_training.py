"""The lab's trainer: matched runs, the same numbers again, resumption after a kill, and failures by name."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe.errors import CorpusError, DepthprobeError, OutputError, UsageError
from depthprobe.lab import LabConfig, LabForCausalLM, LabForMaskedLM, TrainResult, TrainSettings, train
from depthprobe.lab.outcome import diverged, stuck
from depthprobe.lab.runlog import Log
from depthprobe.lab.settings import make_optimizer
from depthprobe.lab.text import Text, read_text

WORDS = ["stream", "block", "norm", "update", "depth", "layer", "grows", "falls", "is", "the", "a", "of"]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 12_000))
SMALL = TrainSettings(
    steps=30, batch_size=4, seq_len=16, lr=1e-2, warmup=5, eval_every=10, eval_tokens=512, device="cpu"
)
TINY = LabConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


def tiny(**changes: Any) -> LabConfig:
    return LabConfig(**{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **changes})


def run(out: Path, model: Any = TINY, data: Any = None, *, resume: bool = False, **changes: Any) -> TrainResult:
    return train(model, replace(SMALL, **changes), out, [TEXT] if data is None else data, resume=resume)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[dict[str, Any]]:
    """All of the log that does not depend on the clock."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows(out)]


def record(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "run.json").read_text()))


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


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


# --- killed and resumed --------------------------------------------------------------------------------------------

KILLED = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from test_lab_training import run
run(Path(sys.argv[1]), steps=100_000 if len(sys.argv) > 2 else 60, eval_every=20, save_at=(0, 50))
"""


def test_killed_and_resumed(tmp_path: Path) -> None:
    """A real SIGKILL between two saved states: the resumed run ends with the same weights and log, to the last bit."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    out, hold = tmp_path / "killed", tmp_path / "hold"
    script = KILLED.replace("run(Path", f"import depthprobe.lab.loop as loop\n{_SLOW.format(hold=str(hold))}\nrun(Path")
    process = subprocess.Popen([sys.executable, "-c", script, str(out)], env=environment)
    until = time.monotonic() + 400
    while not hold.exists():  # it waits at step 53 of 60, the last state being that of step 40
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert record(out)["status"] == "running"
    assert not (out / "model.safetensors").exists()
    assert rows(out)[-1]["step"] == 50, "the log is ahead of the state, and has to be cut"
    assert torch.load(out / "state.pt", weights_only=True)["step"] == 40

    with pytest.raises(OutputError, match=r"holds a run.*--resume"):
        run(out, steps=60, eval_every=20)
    with pytest.raises(OutputError, match="another lr"):
        run(out, resume=True, steps=60, eval_every=20, lr=1e-3)
    with pytest.raises(OutputError, match="another text"):
        run(out, data=[TEXT + "."], resume=True, steps=60, eval_every=20)
    with pytest.raises(OutputError, match="another model"):
        run(out, tiny(placement="post"), resume=True, steps=60, eval_every=20)
    resumed = run(out, resume=True, steps=60, eval_every=20, save_at=(0, 50))
    whole = run(tmp_path / "whole", steps=60, eval_every=20, save_at=(0, 50))
    assert curve(out) == curve(tmp_path / "whole")
    assert weights(out) == weights(tmp_path / "whole")
    assert weights(out / "step-50") == weights(tmp_path / "whole" / "step-50")
    assert (resumed.val_loss, resumed.steps, resumed.tokens) == (whole.val_loss, whole.steps, whole.tokens)
    assert not (out / "state.pt").exists()

    before = (out / "run.json").read_bytes()
    again = run(out, resume=True, steps=60, eval_every=20, save_at=(0, 50))
    assert again.val_loss == whole.val_loss
    assert (out / "run.json").read_bytes() == before, "a finished run was run again"


_SLOW = """
import time
update = loop.Loop._update
def held(self, step):
    if step == 52:
        Path({hold!r}).write_text("")
        time.sleep(600)
    update(self, step)
loop.Loop._update = held
"""


def test_a_log_is_cut_to_what_the_state_knows(tmp_path: Path) -> None:
    with closing(Log(tmp_path / "log.jsonl")) as log:
        log.write([{"step": 0, "val_loss": 5.5}, {"step": 1, "loss": 5.4}])
        log.sync()
        known = log.size
        log.write([{"step": 2, "loss": math.inf}])
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    assert rows(tmp_path)[2]["loss"] is None, "JSON has no infinity"
    with closing(Log(tmp_path / "log.jsonl", known, writes=False)) as log:
        assert [row["step"] for row in log.rows] == [0, 1]
        assert len(rows(tmp_path)) == 3
    with closing(Log(tmp_path / "log.jsonl", known)) as log:
        assert [row["step"] for row in rows(tmp_path)] == [0, 1]
        log.write([{"step": 2, "loss": 5.0}])
        assert [row["step"] for row in log.rows] == [0, 1, 2]
    assert rows(tmp_path)[2]["loss"] == 5.0


def test_a_run_killed_before_its_first_state_begins_anew(first: Path, tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "early"
    with pytest.raises(KeyboardInterrupt):
        train(TINY, replace(SMALL, eval_every=30), out, [TEXT], progress=fail)
    assert rows(out)[-1]["step"] == 10
    run(out, resume=True, eval_every=30)
    assert [row["loss"] for row in rows(out)] == [row["loss"] for row in rows(first)]


def test_a_damaged_state(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=10)
    kept = record(tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text(json.dumps({k: v for k, v in kept.items() if k != "result"}))
    (tmp_path / "a" / "state.pt").write_bytes(b"PK" * 50)
    with pytest.raises(OutputError, match=r"state.pt cannot be read"):
        run(tmp_path / "a", resume=True, steps=10)


# --- failures ------------------------------------------------------------------------------------------------------


def test_post_ln_fails_where_pre_ln_trains(tmp_path: Path) -> None:
    """12 blocks of width 64, 64 tokens, batch 16, 1e-3 without warm-up, on the default text; 100 steps are enough."""
    settings = TrainSettings(steps=100, lr=1e-3, warmup=0, eval_every=100, eval_tokens=4096, device="cpu")
    found = {name: train(LabConfig(placement=name), settings, tmp_path / name) for name in ("pre", "post")}
    assert found["pre"].status == "done", found["pre"].reason
    assert found["post"].status == "failed"
    assert "unigram entropy" in str(found["post"].reason)
    assert record(tmp_path / "post")["status"] == "failed"
    assert record(tmp_path / "post")["result"]["reason"] == found["post"].reason
    assert found["post"].tokens == found["pre"].tokens == 100 * 16 * 64
    assert abs(found["post"].parameters - found["pre"].parameters) == 2 * 64, "but for the final norm"


def test_a_run_that_diverges_stops(tmp_path: Path) -> None:
    result = run(tmp_path / "far", optimizer="sgd", lr=1e6, clip=0.0, warmup=0, steps=500)
    assert result.status == "failed"
    assert str(result.reason).startswith("diverged")
    assert result.steps < 100
    log = rows(tmp_path / "far")
    assert log[-1]["step"] == result.steps
    assert json.loads((tmp_path / "far" / "log.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert record(tmp_path / "far")["status"] == "failed"
    assert not (tmp_path / "far" / "state.pt").exists()
    assert (tmp_path / "far" / "loss.png").exists()


def steps_of(*losses: float | None, norm: float | None = 1.0) -> list[dict[str, Any]]:
    start = {"step": 0, "loss": None, "grad_norm": None}
    return [start, *({"step": k, "loss": loss, "grad_norm": norm} for k, loss in enumerate(losses, 1))]


def test_what_counts_as_divergence() -> None:
    assert diverged(steps_of(5.5)) is None
    assert "loss is not finite at step 2" in str(diverged(steps_of(5.5, math.nan)))
    assert "loss is not finite at step 2" in str(diverged(steps_of(5.5, None)))
    assert "norm is not finite at step 1" in str(diverged(steps_of(5.5, norm=math.inf)))
    assert diverged(steps_of(5.5, *[9.0] * 20, *[4.0] * 40)) is None, "a spike is none"
    assert diverged(steps_of(5.5, *[6.4] * 60)) is None
    assert "the median loss of the 50 steps before step 61 is 6.60" in str(diverged(steps_of(5.5, *[6.6] * 60)))


def test_what_counts_as_stuck() -> None:
    assert stuck(2.9, 3.1, 0.1) is None
    assert stuck(2.9, None, 0.3) is None
    assert "below 2.800 it would not" in str(stuck(2.9, 3.1, 0.3))
    assert "stuck at the unigram entropy" in str(stuck(3.05, 3.1, 0.1))
    assert "stuck at the unigram entropy" in str(stuck(3.15, 3.1, 0.1))
    assert "above the unigram entropy" in str(stuck(4.0, 3.1, 0.1))
    assert "not finite" in str(stuck(None, 3.1, 0.1))


def test_the_unigram_loss_is_that_of_frequencies_on_the_same_tokens(first: Path) -> None:
    text = read_text([TEXT], AutoTokenizer.from_pretrained(first), seq_len=16)
    asked = text.validation[0][:32, 1:].numpy()
    counts = np.bincount(text.stream, minlength=257) + 1
    expected = -np.log(counts / counts.sum())[asked].mean()
    assert record(first)["result"]["unigram"] == pytest.approx(expected)


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


# --- refused before anything is trained ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, ["--steps 0", "at least 1"]),
        ({"batch_size": 0}, ["--batch-size 0"]),
        ({"seq_len": 1}, ["--seq-len 1", "at least 2"]),
        ({"accumulate": 3}, ["--accumulate 3", "divides"]),
        ({"optimizer": "adam"}, ["--optimizer adam", "adamw or radam or sgd"]),
        ({"lr": 0.0}, ["--lr 0.0"]),
        ({"lr": math.nan}, ["--lr nan"]),
        ({"betas": (0.9, 1.0)}, ["--betas 0.9,1.0"]),
        ({"momentum": 1.0}, ["--momentum"]),
        ({"weight_decay": -1.0}, ["--weight-decay"]),
        ({"warmup": 31}, ["--warmup 31", "30 steps"]),
        ({"floor": 2.0}, ["--floor"]),
        ({"clip": -1.0}, ["--clip"]),
        ({"margin": -1.0}, ["--margin"]),
        ({"dtype": "fp8"}, ["--dtype fp8", "bf16"]),
        ({"eval_every": 0}, ["--eval-every"]),
        ({"eval_tokens": 8}, ["--eval-tokens 8", "16"]),
        ({"save_at": (5, 31)}, ["--save-at 31"]),
        ({"seed": -1}, ["--seed -1"]),
        ({"data_seed": -1}, ["--data-seed -1"]),
        ({"device": "tpu"}, ["--device tpu"]),
        ({"device": "cuda:7"}, ["--device cuda:7"]),
        ({"batch_size": 5000}, ["tokens for training", "5,000 sequences of 16, 80,000 tokens"]),
    ],
)
def test_impossible_options(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(DepthprobeError) as caught:
        run(tmp_path / "out", **changes)
    assert isinstance(caught.value, UsageError | CorpusError)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_trained(first: Path, tmp_path: Path) -> None:
    config = tiny()
    config.num_attention_heads = 5  # after it was checked
    with pytest.raises(UsageError, match="5 heads"):
        run(tmp_path / "out", config)
    with pytest.raises(UsageError, match="--seq-len 17; expected at most the 16 positions"):
        run(tmp_path / "out", str(first), seq_len=17)
    with pytest.raises(CorpusError, match=r"ids up to 999; expected ids below the model's vocabulary of 257"):
        run(tmp_path / "out", str(first), np.full((100, 16), 999))
    with pytest.raises(UsageError, match="no language-model head"):
        run(tmp_path / "out", nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1, enable_nested_tensor=False))
    assert not (tmp_path / "out").exists()


def test_folders_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        run(tmp_path / "file")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(OutputError, match=r"holds the config.json of something else"):
        run(tmp_path / "model")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text("[1]")
    with pytest.raises(OutputError, match="not the record of a run"):
        run(tmp_path / "odd", resume=True)
