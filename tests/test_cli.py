"""The command line: what it prints, what it writes, and how it fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from depthprobe import cli
from depthprobe.glossary import METRICS

VOCAB = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 without a tokenizer, and ids for it."""
    root = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(root / "tiny")
    rng = np.random.default_rng(0)
    np.save(root / "ids.npy", rng.integers(0, VOCAB, (6, 48)))
    np.save(root / "beyond.npy", np.full((6, 48), VOCAB))
    np.save(root / "long.npy", rng.integers(0, VOCAB, (6, 100)))
    (root / "text.txt").write_text("some text that nothing here can tokenise")
    return root


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def failure(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    """Run, expect a failure, and return its one line."""
    assert run(*arguments) == status
    progress = ("Loading", "Verified", "Gradients", "Effective depth", "Ablations", "About")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1, lines
    assert lines[0].startswith("depthprobe: ")
    return lines[0]


def test_analyze_writes_what_the_design_names(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", "--out", out) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip().endswith(str(out / "report.html"))
    assert "3 blocks" in printed.out
    assert "forward passes" in printed.err
    tables = {"layers.csv", "pairs.csv", "ablations.csv", "depth.csv"}
    assert {path.name for path in out.iterdir()} == {"report.html", "report.json", "figures"} | tables
    layers = pd.read_csv(out / "layers.csv")
    assert list(layers.columns) == ["layer", "unit", "metric", "value", "ci_low", "ci_high", "n"]
    weights = layers["metric"].str.startswith("weight")
    assert set(layers["unit"][~weights]) == {"block", "attention", "mlp"}
    assert {"mlp.c_fc.weight", "transformer.wte.weight"} < set(layers["unit"][weights])
    assert set(layers["metric"]) <= set(METRICS)
    assert not layers["value"].isna().any()
    pairs = pd.read_csv(out / "pairs.csv")
    assert list(pairs.columns) == ["i", "j", "metric", "value", "ci_low", "ci_high", "n"]
    assert sorted(set(zip(pairs["i"], pairs["j"], strict=True))) == [(i, j) for i in range(4) for j in range(i + 1, 4)]
    document = json.loads((out / "report.json").read_text())
    assert document["schema_version"] == 1
    assert document["run"]["command"].split()[:3] == ["depthprobe", "analyze", str(folder / "tiny")]
    assert all(check["passed"] for check in document["verification"])


def test_the_printed_command_gives_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", "--out", tmp_path / name) == 0
    for table in ("layers.csv", "pairs.csv"):
        assert (tmp_path / "a" / table).read_bytes() == (tmp_path / "b" / table).read_bytes()


def test_python_gives_the_numbers_of_the_command_line(folder: Path, tmp_path: Path) -> None:
    import depthprobe

    assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", "--out", tmp_path / "a") == 0
    report = depthprobe.analyze(folder / "tiny", data=np.load(folder / "ids.npy"))
    saved = depthprobe.Report.load(tmp_path / "a")
    pd.testing.assert_frame_equal(report.layers, saved.layers, check_exact=True)
    pd.testing.assert_frame_equal(report.pairs, saved.pairs, check_exact=True)


QUICK = ("--no-ablations", "--gradient-tokens", "0", "--depth-tokens", "0")


@pytest.mark.parametrize("command", [("analyze", *QUICK), ("ablate", "--kinds", "skip"), ("gradients",), ("stages",)])
def test_models_of_one_name_do_not_overwrite_each_other(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder / "tiny", tmp_path / name / "last")
    monkeypatch.chdir(tmp_path)
    data = ("--data", folder / "ids.npy")
    assert run("analyze", "a/last", *data, *QUICK) == 0
    before = (tmp_path / "reports/last/report.json").read_bytes()
    text = failure(capsys, 1, command[0], "b/last", *data, *command[1:])
    assert "reports/last holds the report of" in text
    assert text.index("b/last") < text.index("--out")
    assert (tmp_path / "reports/last/report.json").read_bytes() == before
    assert run("analyze", tmp_path / "a/../a/last", *data, *QUICK) == 0  # the same one, spelt otherwise
    assert run("analyze", "b/last", *data, *QUICK, "--out", "reports/last") == 0  # asked for by its name


@pytest.mark.parametrize("several", [False, True])
def test_a_report_that_cannot_be_read_is_not_cured_by_the_same_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], several: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports/tiny").mkdir(parents=True)
    (tmp_path / "reports/tiny/report.json").write_text("{")
    specs = [folder / "tiny", folder / "nowhere"] if several else [folder / "tiny"]
    assert run("analyze", *specs, "--data", folder / "ids.npy", *QUICK) == 1
    said = "".join(capsys.readouterr())
    assert "reports/tiny holds a report that cannot be read: " in said
    assert "remove it, or choose another --out" in said
    assert "run `depthprobe analyze` again" not in said


@pytest.fixture
def kept_threads() -> Iterator[None]:
    """Leave torch's threads to the other tests as they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kept_threads")
@pytest.mark.parametrize("command", ["analyze", "ablate", "stages", "prune", "depth", "gradients"])
def test_every_command_that_computes_takes_threads(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--out", "missing-folder/new", "--drop", "1"] if command == "prune" else []
    assert "--threads 0" in failure(capsys, 2, command, "missing-folder/", *needed, "--threads", "0")
    before = torch.get_num_threads()
    for given, wanted in ([], before), (["--threads", before + 2], before + 2):
        assert "no such file" in failure(capsys, 1, command, "missing-folder/", *needed, *given)
        assert torch.get_num_threads() == wanted


@pytest.mark.usefixtures("kept_threads")
def test_the_report_says_how_many_threads(folder: Path, tmp_path: Path) -> None:
    import depthprobe

    before = torch.get_num_threads()
    assert depthprobe.analyze(folder / "tiny", data=np.load(folder / "ids.npy")).run["machine"]["threads"] == before
    assert torch.get_num_threads() == before  # Python's user sets them
    given = ("--threads", before + 1, "--no-ablations", "--gradient-tokens", 0, "--depth-tokens", 0)
    assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", "--out", tmp_path, *given) == 0
    assert depthprobe.Report.load(tmp_path).run["machine"]["threads"] == before + 1


def test_inspect_prints_blocks_and_deltas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", folder / "tiny") == 0
    out = capsys.readouterr().out
    assert "transformer.h" in out
    assert "pre" in out
    assert "0–2" in out or "0-2" in out


def test_metrics_prints_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("metrics") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in METRICS)
    assert run("metrics", "cosine_adjacent") == 0
    assert "cos(x_l, x_{l+1})" in capsys.readouterr().out
    assert "cosine_adjacent" in failure(capsys, 2, "metrics", "cosine_adjacnt")


@pytest.mark.parametrize("command", ["analyze", "inspect", "metrics"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_help_is_quick() -> None:
    code = "import sys, depthprobe.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["missing-folder/"], 1, "no such file"),
        (["TINY", "--data", "ROOT/beyond.npy"], 1, str(VOCAB)),
        (["TINY", "--data", "ROOT/text.txt"], 1, "tokenizer"),
        (["TINY", "--data", "ROOT/nothing.npy"], 1, "nothing.npy"),
        (["TINY", "--data", "ROOT/long.npy"], 1, "64"),
        (["TINY", "--data", "ROOT/ids.npy", "--seq-len", "65"], 2, "64"),
        (["TINY", "--data", "ROOT/ids.npy", "--batch-size", "none"], 2, "batch-size"),
        (["TINY", "--data", "ROOT/ids.npy", "--batch-size", "0"], 2, "batch-size"),
        (["TINY", "--data", "ROOT/ids.npy", "--skip-first", "48"], 2, "skip-first"),
        (["TINY", "--data", "ROOT/ids.npy", "--skip-first", "-1"], 2, "skip-first"),
        (["TINY", "--data", "ROOT/ids.npy", "--lens-positions", "-1"], 2, "lens-positions"),
        (["TINY", "--data", "ROOT/ids.npy", "--gradient-tokens", "-1"], 2, "gradient-tokens"),
        (["TINY", "--data", "ROOT/ids.npy", "--ablation-tokens", "0"], 2, "--no-ablations"),
        (["TINY", "--data", "ROOT/ids.npy", "--dtype", "float8"], 2, "float8"),
        (["TINY", "--data", "ROOT/ids.npy", "--bos", "maybe"], 2, "maybe"),
        (["TINY", "--data", "ROOT/ids.npy", "--figures", "pdf"], 2, "png or svg"),
        (["TINY", "--data", "ROOT/ids.npy", "--out", "ROOT/text.txt"], 1, "is a file"),
        (["TINY", "--data", "ROOT/ids.npy", "--out", "ROOT/text.txt/below"], 1, "is a file"),
        (["TINY", "--data", "ROOT/ids.npy", "--out", "/proc/depthprobe"], 1, "/proc/depthprobe"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [o.replace("TINY", str(folder / "tiny")).replace("ROOT", str(folder)) for o in options]
    assert words in failure(capsys, status, "analyze", *options)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "report"
    line = failure(capsys, 1, "analyze", folder / "tiny", "--data", folder / "ids.npy", "--out", out)
    assert "No space left" in line
    assert list(tmp_path.iterdir()) == []


def test_activations_that_are_not_finite_name_the_block(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder / "tiny")
    model.transformer.h[1].mlp.c_proj.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path / "hot")
    capsys.readouterr()
    line = failure(capsys, 1, "analyze", tmp_path / "hot", "--data", folder / "ids.npy", "--out", tmp_path / "report")
    assert "block 1" in line
    assert "float32" in line
    assert not (tmp_path / "report").exists()


def test_debug_shows_the_traceback(folder: Path) -> None:
    from depthprobe.errors import CorpusError

    with pytest.raises(CorpusError):
        cli.main(["analyze", str(folder / "tiny"), "--data", str(folder / "beyond.npy"), "--debug"])


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("analyze") == 2
    assert "CHECKPOINT" in capsys.readouterr().err
    assert run("analyse", "gpt2") == 2


def test_interrupt_is_130_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "many.npy", rng.integers(0, VOCAB, (20_000, 48)))
    command = [sys.executable, "-m", "depthprobe", "analyze", folder / "tiny", "--data", tmp_path / "many.npy"]
    command += ["--tokens", "960000", "--out", tmp_path / "report"]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("About"):  # the first batch is done, many are to come
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert rest.strip() == "depthprobe: interrupted; nothing was written"
    assert not (tmp_path / "report").exists()


def test_unexpected_errors_are_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import depthprobe.prepare

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(depthprobe.prepare, "prepare", broken)
    assert failure(capsys, 1, "analyze", folder / "tiny") == "depthprobe: RuntimeError: two lines; --debug shows where"
