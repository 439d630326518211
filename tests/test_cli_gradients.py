"""`depthprobe gradients`: what it writes, what it joins, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from gradient_models import Chain, Steps
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gradients")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 60}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(root / "tiny")
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(root / "encoder")
    rng = np.random.default_rng(0)
    np.save(root / "ids.npy", rng.integers(0, 60, (3, 12)))
    np.save(root / "others.npy", rng.integers(0, 60, (4, 12)))
    return root


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def test_it_makes_a_report_joins_one_and_agrees_with_python(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, ids = tmp_path / "report", folder / "ids.npy"
    assert run("gradients", folder / "tiny", "--data", ids, "--out", out) == 0
    printed = capsys.readouterr()
    assert "Gradients" in printed.out
    assert "measuring first" in printed.err
    table = pd.read_csv(out / "layers.csv")
    gradients = table[table["metric"].str.contains("gradient")].reset_index(drop=True)
    python = depthprobe.gradients(folder / "tiny", np.load(ids)).to_frame()
    pd.testing.assert_frame_equal(gradients, python)
    assert "residual_norm" in set(table["metric"])
    document = json.loads((out / "report.json").read_text())
    assert document["run"]["gradient_command"].startswith("depthprobe gradients")
    assert (out / "figures" / "gradients.png").exists()

    # again on another text: those rows are replaced, all else stays, and the page says so
    assert run("gradients", folder / "tiny", "--data", folder / "others.npy", "--no-weights", "--out", out) == 0
    assert "measuring first" not in capsys.readouterr().err
    again = pd.read_csv(out / "layers.csv")
    kept = ~table["metric"].str.contains("gradient")
    pd.testing.assert_frame_equal(again[~again["metric"].str.contains("gradient")], table[kept])
    assert set(again.loc[again["metric"] == "gradient_norm", "n"]) == {4}
    assert not again["metric"].str.startswith("weight").any()
    assert "all else was measured on" in (out / "report.html").read_text()


def test_fresh_models_have_a_report_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("gradients", folder / "tiny", "--data", folder / "ids.npy", "--fresh", "--seeds", "2", "--seed", "5")
    assert run(*command) == 0
    document = json.loads((tmp_path / "reports" / "tiny-fresh" / "report.json").read_text())
    assert document["model"]["name"] == "tiny-fresh"
    assert document["gradients"]["fresh"] == [5, 6]
    assert "seed 5" in document["model"]["notes"][0]
    assert "2 random initialisations" in (tmp_path / "reports" / "tiny-fresh" / "report.html").read_text()
    assert run("gradients", folder / "tiny", "--data", folder / "ids.npy", "--out", "reports/tiny-fresh") == 1
    assert "another" in capsys.readouterr().err


def test_an_encoder_without_a_head_has_random_gradients(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run("analyze", folder / "encoder", "--data", folder / "ids.npy", "--no-ablations", "--out", tmp_path / "a") == 0
    )
    report = depthprobe.Report.load(tmp_path / "a")
    assert report.gradients["cotangents"] == ["random"]
    assert any("no language-model head" in note for note in report.gradients["notes"])
    assert "random gradient" in capsys.readouterr().out


def test_analyze_without_gradients(folder: Path, tmp_path: Path) -> None:
    options = ("--no-ablations", "--gradient-tokens", "0", "--out", tmp_path / "a")
    assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
    report = depthprobe.Report.load(tmp_path / "a")
    assert report.gradients == {}
    assert not report.layers["metric"].str.contains("gradient").any()


def test_a_model_without_a_derivative_is_analyzed_all_the_same() -> None:
    model = Chain([1.0, 2.0])
    model.blocks = torch.nn.ModuleList([Steps(1.0), Steps(2.0)])
    inputs = torch.arange(12).reshape(2, 6)
    report = depthprobe.analyze(model, inputs, ablations=False, device="cpu")
    assert any(note.startswith("Gradients were left out: the model cannot be diff") for note in report.notes)
    assert report.gradients == {}
    assert "residual_norm" in set(report.layers["metric"])


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("tiny", ["--seeds", "2"], "--fresh"),
        ("tiny", ["--fresh", "--seeds", "0"], "--seeds"),
        ("tiny", ["--cotangent", "lose"], "loss, random or both"),
        ("tiny", ["--skip-first", "11"], "no position"),
        ("tiny", ["--memory", "0"], "--memory"),
        ("encoder", ["--cotangent", "loss"], "no language-model head"),
    ],
)
def test_wrong_requests_are_one_line_and_leave_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, options: list[str], words: str
) -> None:
    arguments = ["gradients", folder / model, "--data", folder / "ids.npy", "--out", tmp_path / "report", *options]
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Loading")]
    assert len(lines) == 1
    assert words in lines[0]
    assert list(tmp_path.iterdir()) == []
