"""`depthprobe depth`: what it writes and joins, that Python and the saved report agree, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe import cli
from depthprobe.report import Report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("depth")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": 60}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(root / "tiny")
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(root / "encoder")
    np.save(root / "ids.npy", np.random.default_rng(0).integers(0, 60, (6, 16)))
    return root


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def test_command_python_and_saved_report_agree(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    assert run("depth", folder / "tiny", "--data", folder / "ids.npy", "--out", out) == 0
    printed = capsys.readouterr()
    assert "No estimate" in printed.out or "Of 3 blocks" in printed.out
    assert "forward passes over 6 × 16 tokens" in printed.err
    table = pd.read_csv(out / "depth.csv", keep_default_na=False)
    python = depthprobe.effective_depth(folder / "tiny", np.load(folder / "ids.npy")).to_frame()
    assert table[["name", "unit", "variant", "of", "passes_gate"]].equals(
        python[["name", "unit", "variant", "of", "passes_gate"]]
    )
    assert table["value"].to_numpy() == pytest.approx(python["value"].to_numpy(), rel=1e-12)
    saved = Report.load(out)
    assert saved.depth["value"].tolist() == table["value"].tolist()
    assert saved.phases["sequences"] == 6
    document = json.loads((out / "report.json").read_text())
    assert document["run"]["depth_command"].startswith("depthprobe depth")
    assert {row["control"] for row in document["deep"]["controls"]} == {"random-init", "random-tokens"}
    for name in ("depth", "stages", "effects", "depth_profile", "thresholds"):
        assert (out / "figures" / f"{name}.png").exists(), name

    # once more, less of it: those rows are replaced, and the layers stay as they were
    layers = (out / "layers.csv").read_bytes()
    options = ("--estimators", "dependence", "--control", "none", "--no-phases")
    assert run("depth", folder / "tiny", "--data", folder / "ids.npy", "--out", out, *options) == 0
    assert set(pd.read_csv(out / "depth.csv")["name"]) == {"dependence"}
    assert (out / "layers.csv").read_bytes() == layers
    assert not (out / "figures" / "stages.png").exists()


def test_analyze_has_a_budget(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("analyze", folder / "tiny", "--data", folder / "ids.npy", "--no-ablations", "--gradient-tokens", 0)
    assert run(*given, "--out", tmp_path / "with") == 0
    assert (tmp_path / "with" / "depth.csv").exists()
    assert run(*given, "--depth-tokens", 0, "--out", tmp_path / "without") == 0
    assert not (tmp_path / "without" / "depth.csv").exists()
    capsys.readouterr()
    assert run(*given, "--depth-tokens", -1) == 2
    assert "--depth-tokens -1" in capsys.readouterr().err


def test_an_encoder_without_a_head(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("--estimators", "stages,dependence,lens", "--control", "random-tokens")
    assert run("depth", folder / "encoder", "--data", folder / "ids.npy", "--out", out, *options) == 0
    assert set(pd.read_csv(out / "depth.csv")["name"]) == {"dependence"}
    notes = Report.load(out).deep["notes"]
    assert any("stages was left out" in note and "next-token head" in note for note in notes)
    assert "stages was left out" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--estimators", "deep"), "stages, dependence"),
        (("--estimators", ","), "some of"),
        (("--control", "twin"), "random-init"),
        (("--unit", "head"), "block or sublayer"),
        (("--probes", "0"), "at least 1"),
        (("--memory", "0"), "more than 0"),
        (("--figures", "pdf"), "png or svg"),
        (("--batch-size", "none"), "a positive number"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_is_loaded(
    options: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("depth", "nowhere", *options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_the_report_that_is_made_first_leaves_out_the_same_positions(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("--estimators", "crossing", "--control", "none", "--no-phases", "--skip-first", 3)
    assert run("depth", folder / "tiny", "--data", folder / "ids.npy", "--out", out, *options) == 0
    report = Report.load(out)
    assert report.corpus["skip_first"] == report.deep["skip_first"] == 3
