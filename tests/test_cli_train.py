"""`depthprobe train`: options reach the model and the loop, failures are one line, several processes are as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthprobe import cli
from depthprobe.lab import LabConfig, TrainSettings, train

WORDS = ["stream", "block", "norm", "update", "depth", "layer", "grows", "falls", "is", "the", "a", "of"]
SHORT = ["--steps", "30", "--warmup", "5", "--eval-every", "10", "--lr", "0.01", "--eval-tokens", "512"]
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--batch-size", "4", "--seq-len", "16", "--device", "cpu"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(WORDS, 12_000)))
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "trained"
    assert run("train", *SMALL, *SHORT, "--data", text, "--save-at", "0,10", "--out", out) == 0
    return out


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def failure(capsys: Captured, status: int, *arguments: object) -> str:
    """Run, expect a failure, and return its one line."""
    capsys.readouterr()
    assert run(*arguments) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("depthprobe: ")
    return lines[0]


def record(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "run.json").read_text()))


def curve(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_command_is_pythons(trained: Path, text: Path, tmp_path: Path) -> None:
    config = LabConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    settings = TrainSettings(
        steps=30, warmup=5, eval_every=10, lr=0.01, eval_tokens=512, batch_size=4, seq_len=16, device="cpu"
    )
    train(config, settings, tmp_path / "same", text)
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert [row["loss"] for row in curve(tmp_path / "same")] == [row["loss"] for row in curve(trained)]
    assert record(trained)["command"].startswith("depthprobe train --layers 2")
    assert {path.name for path in trained.iterdir() if path.is_dir()} == {"step-0", "step-10"}


def test_what_is_printed(text: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert run("train", *SMALL, *SHORT, "--data", text, "--out", out) == 0
    printed = capsys.readouterr()
    assert f"validation loss {record(out)['result']['val_loss']:.3f} nats" in printed.out
    assert "after 30 of 30 steps" in printed.out
    assert printed.out.rstrip().endswith(str(out / "run.json"))
    assert "failed" not in printed.out
    assert "steps" in printed.err, "the time left"


def test_the_checkpoint_is_inspected(trained: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert run("inspect", trained) == 0
    assert "pre" in capsys.readouterr().out


def test_a_failed_run_is_a_result(text: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "far"
    options = ["--optimizer", "sgd", "--lr", "1e6", "--clip", "0", "--warmup", "0", "--steps", "90"]
    assert run("train", *SMALL, *options, "--data", text, "--out", out) == 0
    assert "failed: diverged: " in capsys.readouterr().out
    assert record(out)["status"] == "failed"
    out = tmp_path / "slow"
    assert run("train", *SMALL, "--lr", "1e-6", "--steps", "5", "--warmup", "0", "--data", text, "--out", out) == 0
    assert "failed: it ended above the unigram entropy" in capsys.readouterr().out


def test_every_option_arrives(text: Path, tmp_path: Path) -> None:
    """Values unlike the defaults, looked up in the record."""
    model: dict[str, tuple[list[object], object]] = {
        "placement": (["--placement", "sandwich"], "sandwich"),
        "num_hidden_layers": (["--layers", 4], 4),
        "hidden_size": (["--width", 24], 24),
        "num_attention_heads": (["--heads", 3], 3),
        "mlp_ratio": (["--mlp-ratio", 2], 2.0),
        "norm": (["--norm", "rmsnorm"], "rmsnorm"),
        "initialisation": (["--init", "gpt2"], "gpt2"),
        "layernorm_scaling": (["--layernorm-scaling"], True),
        "residual_attention": (["--residual-attention"], True),
        "qk_norm": (["--qk-norm"], True),
        "parallel_pairs": (["--parallel-pairs", "blocks"], "blocks"),
        "causal": (["--bidirectional"], False),
    }
    settings: dict[str, tuple[list[object], object]] = {
        "steps": (["--steps", 6], 6),
        "batch_size": (["--batch-size", 6], 6),
        "seq_len": (["--seq-len", 12], 12),
        "accumulate": (["--accumulate", 2], 2),
        "optimizer": (["--optimizer", "radam"], "radam"),
        "lr": (["--lr", "0.002"], 0.002),
        "betas": (["--betas", "0.8,0.9"], [0.8, 0.9]),
        "momentum": (["--momentum", "0.5"], 0.5),
        "weight_decay": (["--weight-decay", "0.2"], 0.2),
        "warmup": (["--warmup", 2], 2),
        "floor": (["--floor", "0.3"], 0.3),
        "clip": (["--clip", "0.7"], 0.7),
        "dtype": (["--dtype", "bf16"], "bf16"),
        "eval_every": (["--eval-every", 3], 3),
        "eval_tokens": (["--eval-tokens", 120], 120),
        "margin": (["--margin", "0.05"], 0.05),
        "save_at": (["--save-at", "1,3"], [1, 3]),
        "seed": (["--seed", 5], 5),
        "data_seed": (["--data-seed", 7], 7),
        "device": (["--device", "cpu"], "cpu"),
    }
    given = [part for parts, _ in (*model.values(), *settings.values()) for part in parts]
    assert run("train", *given, "--data", text, "--tokenizer", "bytes", "--out", tmp_path / "out") == 0
    found = record(tmp_path / "out")
    fixed = {"vocab_size", "max_position_embeddings", "norm_eps", "tie_word_embeddings"}
    assert found["model"].keys() - fixed == model.keys(), "every option of the architecture has one of the command"
    assert {name: found["model"][name] for name in model} == {name: value for name, (_, value) in model.items()}
    assert found["settings"] == {name: value for name, (_, value) in settings.items()}


def test_from_a_checkpoint_and_with_its_tokenizer(trained: Path, text: Path, tmp_path: Path, capsys: Captured) -> None:
    short = ["--steps", 5, "--warmup", 0, "--batch-size", 4, "--seq-len", 16, "--data", text, "--device", "cpu"]
    assert run("train", "--from", trained / "step-10", *short, "--eval-tokens", 512, "--out", tmp_path / "tuned") == 0
    assert curve(tmp_path / "tuned")[0]["val_loss"] == curve(trained)[10]["val_loss"]
    assert run("train", *SMALL, *short, "--tokenizer", trained, "--out", tmp_path / "new") == 0
    assert record(tmp_path / "new")["model"]["vocab_size"] == 257


def test_resume(trained: Path, text: Path, capsys: Captured) -> None:
    again = ["train", *SMALL, *SHORT, "--data", text, "--save-at", "0,10", "--out", trained]
    assert "holds a run" in failure(capsys, 1, *again)
    before = (trained / "run.json").read_bytes()
    assert run(*again, "--resume") == 0
    assert f"{record(trained)['result']['val_loss']:.3f}" in capsys.readouterr().out
    assert (trained / "run.json").read_bytes() == before
    assert "another lr" in failure(capsys, 1, *again, "--resume", "--lr", "0.02")


def test_an_interrupt_says_whether_there_is_anything_to_go_on_from(
    trained: Path, text: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("depthprobe.lab.training.train", stop)
    for kept in (False, True):
        out = tmp_path / str(kept)
        out.mkdir()
        if kept:
            (out / "state.pt").touch()
        said = failure(capsys, 130, "train", *SMALL, *SHORT, "--data", text, "--out", out)
        assert ("--resume goes on" if kept else "nothing is kept") in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--heads", "5"], ["5 heads", "width"]),
        (["--layers", "0"], ["num_hidden_layers=0"]),
        (["--placement", "sideways"], ["'sideways'", "pre, post"]),
        (["--norm", "instancenorm"], ["instancenorm", "causal"]),
        (["--norm", "batchnorm"], ["batchnorm", "causal"]),
        (["--init", "admin"], ["admin", "post"]),
        (["--layers", "3", "--parallel-pairs", "blocks"], ["even number"]),
        (["--lr", "-1"], ["--lr -1.0"]),
        (["--warmup", "99"], ["--warmup 99"]),
        (["--betas", "0.9"], ["--betas 0.9", "two numbers"]),
        (["--betas", "a,b"], ["--betas a,b"]),
        (["--save-at", "ten"], ["--save-at ten"]),
        (["--from", "somewhere"], ["--from", "architecture"]),
        (["--batch-size", "0"], ["--batch-size 0"]),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(
    options: list[str], words: list[str], text: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    line = failure(capsys, 2, "train", *SMALL, *SHORT, *options, "--data", text, "--out", out)
    assert all(word in line for word in words), line
    assert not out.exists()


def test_a_short_run_has_a_short_warm_up(text: Path, tmp_path: Path) -> None:
    for steps, warmup in ((30, 3), (5, 0)):
        out = tmp_path / str(steps)
        options = ["--steps", steps, "--eval-every", 5, "--eval-tokens", 512, "--device", "cpu", "--data", text]
        assert run("train", *SMALL, *options, "--out", out) in (0, 1)  # so short a run may learn nothing
        assert json.loads((out / "run.json").read_text())["settings"]["warmup"] == warmup


def test_a_text_shorter_than_a_batch(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "short.txt").write_text("too short for a batch of sequences, " * 4)
    line = failure(capsys, 1, "train", *SHORT, "--data", tmp_path / "short.txt", "--out", tmp_path / "out")
    assert "at least one" in line
    assert not (tmp_path / "out").exists()


def test_two_processes_are_one(trained: Path, text: Path, tmp_path: Path) -> None:
    """torchrun with gloo: the gradients are averaged, so that the losses are those of one process."""
    out = tmp_path / "two"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "depthprobe", "train", *SMALL, *SHORT, "--data", str(text), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, printed
    assert printed.count("after 30 of 30 steps") == 1, "only one prints"
    one, two = curve(trained), curve(out)
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    for name in ("loss", "val_loss", "grad_norm"):
        a, b = ([row[name] or 0.0 for row in rows] for rows in (one, two))
        np.testing.assert_allclose(a, b, rtol=1e-3 if name == "grad_norm" else 2e-5, err_msg=name)
    assert [row["loss"] for row in one] != [row["loss"] for row in two], "it was not divided"
    assert record(out)["processes"] == 2
