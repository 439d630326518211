"""What goes wrong in training: kills, which a run survives; runs that come to nothing; requests that are refused."""

from __future__ import annotations

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
import pytest
import torch
from lab_runs import SMALL, TEXT, TINY, curve, record, rows, run, tiny, weights
from torch import nn
from transformers import AutoTokenizer

from depthprobe.errors import CorpusError, DepthprobeError, OutputError, UsageError
from depthprobe.lab import LabConfig, TrainSettings, train
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.lab.outcome import diverged, stuck
from depthprobe.lab.runlog import Log
from depthprobe.lab.text import read_text
from depthprobe.processes import Processes


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps."""
    out = tmp_path_factory.mktemp("lab") / "first"
    run(out)
    return out


# --- killed and resumed --------------------------------------------------------------------------------------------

KILLED = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from lab_runs import run
run(Path(sys.argv[1]), steps=60, eval_every=20, save_at=(0, 50))
"""


def test_killed_and_resumed(tmp_path: Path) -> None:
    """A real SIGKILL between two saved states: the resumed run ends with the same weights and log, to the last bit."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    out, hold = tmp_path / "killed", tmp_path / "hold"
    script = KILLED.replace("run(Path", f"import depthprobe.lab.loop as loop\n{_SLOW.format(hold=str(hold))}\nrun(Path")
    with subprocess.Popen([sys.executable, "-c", script, str(out)], env=environment) as process:
        try:
            until = time.monotonic() + 900
            while not hold.exists():  # it waits at step 53 of 60, the last state being that of step 40
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
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
        time.sleep(3600)
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
        if done > 0:
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
        ({"device": "tpu"}, ["device 'tpu'"]),
        ({"device": "cuda:7"}, ["device 'cuda:7'"]),
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


def test_a_text_made_for_the_other_kind_of_prediction(tmp_path: Path) -> None:
    """Every position of a bidirectional model sees itself: it would be asked for what it is given."""
    plain, hidden = byte_tokenizer(positions=16), byte_tokenizer(masked=True, positions=16)
    for causal, tokenizer, objective in ((False, plain, "causal"), (True, hidden, "masked")):
        text = read_text([TEXT], tokenizer, seq_len=16, objective=objective)
        wanted = "causal" if causal else "masked"
        with pytest.raises(UsageError, match=f"made for {objective} prediction, and the model's is {wanted}"):
            train(tiny(causal=causal), SMALL, tmp_path / "out", text)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_finished_run_has_no_other_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, steps=10, save_at=(0, 4))
    run(tmp_path, steps=10, save_at=(4,), resume=True)
    with pytest.raises(UsageError, match=r"--save-at 6, and the run in .* is past it"):
        run(tmp_path, steps=10, save_at=(4, 6), resume=True)


def test_a_process_without_a_sequence_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel waits for all processes where it is called first, and one may have nothing to check."""
    called: list[bool] = []

    def wrap(self: Processes, model: nn.Module) -> nn.Module:
        model.train()
        outer = nn.Module()
        outer.forward = lambda **given: called.append(model.training) or model(**given)  # type: ignore[method-assign]
        return outer

    monkeypatch.setattr(Processes, "wrap", wrap)
    run(tmp_path, steps=3, warmup=0)
    assert called == [True] * 3, "no validation among them"
