"""`depthprobe analyze` with several checkpoints: a report each, what is finished is kept, a failure stops no other."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lab_runs import run as train_run
from lab_runs import tiny
from transformers import GPT2Config, GPT2LMHeadModel

import depthprobe.measure
import depthprobe.prepare
from depthprobe import Comparison, Report, cli
from depthprobe.commands.several import names_of
from depthprobe.report import compare_html, files

VOCAB = 64
FEW = ("--tokens", "64", "--no-ablations", "--gradient-tokens", "0", "--depth-tokens", "0", "--lens-positions", "0",
       "--no-interaction", "--device", "cpu")  # fmt: skip
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr(compare_html, "render", lambda *_: b"")
    monkeypatch.setattr(files.figures, "render", lambda *_: b"")


def gpt2(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, one that cannot be read, two of the same name, a lab run with steps, and ids for all of them."""
    root = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(("a", "b", "c", "x/final", "y/final")):
        gpt2(root / name, seed)
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    train_run(root / "lab", tiny(hidden_size=16, num_hidden_layers=1), save_at=(2, 10))
    rng = np.random.default_rng(0)
    np.save(root / "ids.npy", rng.integers(0, VOCAB, (4, 16)))
    np.save(root / "other.npy", rng.integers(0, VOCAB, (4, 16)))
    return root


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of a, b and c with their comparison, to be copied."""
    out = tmp_path_factory.mktemp("finished") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_html, "render", lambda *_: b"")
        patch.setattr(files.figures, "render", lambda *_: b"")
        assert analyze(root, "a", "b", "c", "--out", out) == 0
    return out


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def analyze(root: Path, *arguments: object, data: str = "ids.npy") -> int:
    """Names of the fixture's models become their paths."""
    given = [root / one if isinstance(one, str) and (root / one).exists() else one for one in arguments]
    return run("analyze", *given, "--data", root / data, *FEW)


def measures(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda turn: None) -> list[int]:
    """Grows by one with every measuring that begins; `before` is called with how many there were before it."""
    plain, seen = depthprobe.measure.measure, []

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(len(seen))
        before(seen[-1])
        return plain(*arguments, **options)

    monkeypatch.setattr(depthprobe.measure, "measure", counted)
    return seen


def states(printed: str) -> dict[str, str]:
    """The table at the end: checkpoint → done, kept or failed."""
    table = printed[printed.rindex("checkpoint  ") :]
    return dict(re.findall(r"^(\S+) +(done|kept|failed)\b", table, re.MULTILINE))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_report_each_and_one_comparison(root: Path, tmp_path: Path, capsys: Captured) -> None:
    assert analyze(root, "a", "b", "c", "--out", tmp_path) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.err.splitlines() if " of 3: " in line] == [
        f"{place} of 3: {root / name}" for place, name in enumerate("abc", 1)
    ]
    assert states(printed.out) == dict.fromkeys("abc", "done")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "compare"}
    assert [one["name"] for one in Comparison.load(tmp_path / "compare").runs] == ["a", "b", "c"]
    assert len({Report.load(tmp_path / name).model["fingerprint"] for name in "abc"}) == 3
    # the numbers are those of the checkpoint alone
    assert analyze(root, "b", "--out", tmp_path / "alone") == 0
    assert (tmp_path / "alone" / "layers.csv").read_bytes() == (tmp_path / "b" / "layers.csv").read_bytes()


def test_without_a_comparison(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert analyze(root, "a", "b", "--no-compare") == 0
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {"a", "b"}
    assert "omparison" not in capsys.readouterr().err


def test_what_is_finished_is_not_measured_again(
    root: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    shutil.rmtree(out / "c")
    before = {name: contents(out / name) for name in "ab"}
    seen = measures(monkeypatch)
    assert analyze(root, "a", "b", "c", "--out", out, "--batch-size", "2") == 0  # no matter to the numbers
    printed = capsys.readouterr()
    assert states(printed.out) == {"a": "kept", "b": "kept", "c": "done"}
    assert len(seen) == 1
    assert {name: contents(out / name) for name in "ab"} == before
    assert analyze(root, "a", "b", "c", "--out", out) == 0
    printed = capsys.readouterr()
    assert len(seen) == 1
    assert printed.err.count("nothing to measure") == 3
    assert "Measuring" not in printed.err
    assert "Verified" not in printed.err
    pd.testing.assert_frame_equal(Comparison.load(out / "compare").table, Comparison.load(finished / "compare").table)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--skip-first", "2"], "skip_first: 1, here 2"),
        (["--seed", "1"], "seed: 0, here 1"),
        (["--seq-len", "8"], "seq_len: None, here 8"),
        (["--dtype", "bfloat16"], "dtype: float32, here bfloat16"),
        (["other.npy"], "sha256 of the text: "),
        (["weights"], "fingerprint of the model: "),
        (["revision"], "revision: v1, here None"),
        (["damaged"], "is not JSON"),
    ],
)
def test_another_report_is_never_overwritten(
    root: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    options: list[str],
    words: str,
) -> None:
    out, what, data = Path(shutil.copytree(finished, tmp_path / "out")), options[0], "ids.npy"
    if what == "other.npy":
        options, data = [], what
    elif what == "weights":  # those of a were trained on, and are there under its name
        options = []
        shutil.rmtree(out / "a")
        shutil.copytree(finished / "b", out / "a")
    elif what in ("revision", "damaged"):
        options = []
        document = json.loads((out / "a" / "report.json").read_text())
        document["model"]["revision"] = "v1"
        (out / "a" / "report.json").write_text(json.dumps(document) if what == "revision" else "{")
    before = contents(out)
    seen = measures(monkeypatch)
    assert analyze(root, "a", "a/../a", "--out", out, "--no-compare", *options, data=data) == 1
    printed = capsys.readouterr()
    assert states(printed.out) == {"a": "failed"}
    assert words in printed.err
    if what != "damaged":
        assert "choose another --out" in printed.err
    assert seen == []
    assert contents(out) == before


def test_other_options_are_refused_before_anything_is_loaded(
    root: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(depthprobe.prepare, "prepare", None)
    assert analyze(root, "a", "b", "--out", finished, "--skip-first", "2") == 1
    assert capsys.readouterr().err.count("skip_first: 1, here 2") == 3  # each, and the last line


def test_a_broken_one_does_not_stop_the_others(root: Path, tmp_path: Path, capsys: Captured) -> None:
    assert analyze(root, "a", "broken", "c", "--out", tmp_path) == 1
    printed = capsys.readouterr()
    assert states(printed.out) == {"a": "done", "broken": "failed", "c": "done"}
    assert "config" in printed.out[printed.out.index("failed") :], "the cause stands in the table"
    assert printed.err.splitlines()[-1].startswith("depthprobe: 1 of 3 failed, as broken: ")
    assert [one["name"] for one in Comparison.load(tmp_path / "compare").runs] == ["a", "c"]
    assert not (tmp_path / "broken").exists()


def test_the_status_is_that_of_the_first_failure(root: Path, tmp_path: Path, capsys: Captured) -> None:
    """Sequences longer than the text's are wrong usage, 2; a checkpoint that cannot be read is 1."""
    for names, status in ((("a", "broken"), 2), (("broken", "a"), 1)):
        assert analyze(root, *names, "--out", tmp_path / "out", "--seq-len", "32") == status
        printed = capsys.readouterr()
        assert set(states(printed.out).values()) == {"failed"}
        assert f"2 of 2 failed, first {names[0]}: " in printed.err
        assert "No comparison: none of the checkpoints was finished" in printed.err
    assert not (tmp_path / "out").exists()


def test_an_unexpected_error_is_noted_unless_debugged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fails(turn: int) -> None:
        if turn == 0:
            raise ZeroDivisionError("two\nlines")

    measures(monkeypatch, fails)
    assert analyze(root, "a", "b", "--out", tmp_path) == 1
    printed = capsys.readouterr()
    assert states(printed.out) == {"a": "failed", "b": "done"}
    assert "a: failed, ZeroDivisionError: two lines; --debug shows where" in printed.err
    assert "No comparison: 1 of the checkpoints was finished" in printed.err
    assert not (tmp_path / "compare").exists()
    measures(monkeypatch, fails)
    with pytest.raises(ZeroDivisionError):
        cli.main(["analyze", str(root / "a"), str(root / "c"), "--out", str(tmp_path / "new"), "--debug", *FEW,
                  "--data", str(root / "ids.npy")])  # fmt: skip


def test_a_model_is_let_go_before_the_next_is_opened(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure too, where a traceback refers to the model in a circle; nobody but us collects such circles."""
    plain, seen = depthprobe.prepare.load, []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert [one for one in seen if one() is not None] == []
        checkpoint = plain(*arguments, **options)
        seen.append(weakref.ref(checkpoint.model))
        return checkpoint

    def fails(turn: int) -> None:
        if turn == 1:
            error = ZeroDivisionError()
            raise error

    monkeypatch.setattr(depthprobe.prepare, "load", watched)
    measures(monkeypatch, fails)
    gc.disable()
    try:
        assert analyze(root, "a", "b", "c", "--no-compare", "--out", tmp_path) == 1
    finally:
        gc.enable()
    assert len(seen) == 3
    assert states_of(tmp_path) == {"a", "c"}


def states_of(out: Path) -> set[str]:
    """The folders with a report."""
    return {path.parent.name for path in out.glob("*/report.json")}


def test_interrupt_ends_at_once_and_says_what_is_finished(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    seen = measures(monkeypatch, lambda turn: signal.raise_signal(signal.SIGINT) if turn == 1 else None)
    assert analyze(root, "a", "b", "c", "--out", tmp_path) == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == (
        f"depthprobe: interrupted; finished are a, in {tmp_path}; the same command goes on from there"
    )
    assert "3 of 3" not in printed.err
    assert len(seen) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_equal_names_are_told_apart(root: Path, tmp_path: Path, capsys: Captured) -> None:
    assert analyze(root, "x/final", "y/final", "a", "--out", tmp_path) == 0
    assert states_of(tmp_path) == {"x-final", "y-final", "a"}
    assert len({Report.load(tmp_path / name).model["fingerprint"] for name in ("x-final", "y-final")}) == 2
    assert [one["name"] for one in Comparison.load(tmp_path / "compare").runs] == ["x-final", "y-final", "a"]


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one/step-1", "runs/two/step-1", "p-q/r", "p/q-r", "compare", "A", "u/a", "out"):
        Path(name).mkdir(parents=True)
    for name in ("m.gguf", "n.gguf", "n.pt", "out/ckpt.pt"):
        Path(name).touch()
    # a name that says little has that of its run, with or without others
    assert names_of(["runs/one/step-1"]) == ["one-step-1"]
    assert names_of(["runs/one/step-1", "runs/two/step-1"]) == ["one-step-1", "two-step-1"]
    assert names_of(["m.gguf", "out/ckpt.pt"]) == ["m", "out"]
    assert names_of(["org/n", "org/n@v1", "other/n"]) == ["org-n", "n@v1", "other-n"]
    assert names_of(["org/n@refs/pr/1"]) == ["n@refs-pr-1"]
    assert names_of(["compare"]) == [f"{tmp_path.name}-compare"], "the comparison's folder"
    for clash in (["p-q/r", "p/q-r"], ["n.gguf", "n.pt"], ["A", "u/a"], ["org/compare", "x/compare"]):
        found = names_of(clash)
        assert len({name.casefold() for name in found} | {"compare"}) == 3, found


def test_a_pattern_of_steps_in_natural_order(root: Path, tmp_path: Path, capsys: Captured) -> None:
    assert analyze(root, root / "lab" / "step-*", "lab", "--out", tmp_path) == 0
    printed = capsys.readouterr()
    assert list(states(printed.out)) == ["lab-step-2", "lab-step-10", "lab"]
    found = Comparison.load(tmp_path / "compare")
    assert [one["trained_tokens"] for one in found.runs] == [2 * 64, 10 * 64, 30 * 64]


def test_a_pattern_takes_checkpoints_only(root: Path, tmp_path: Path, capsys: Captured) -> None:
    assert analyze(root, root / "lab" / "*", "--no-compare", "--out", tmp_path) == 0
    assert states_of(tmp_path) == {"lab-step-2", "lab-step-10"}
    assert "fits what is no checkpoint too: config.json, " in capsys.readouterr().err


@pytest.fixture
def hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A cache with two revisions of org/tiny, and no network; revision → commit."""
    commits = {"step1": "1" * 40, "step10": "a" * 40}
    home = tmp_path / "cache" / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    for name, (revision, commit) in zip("ab", commits.items(), strict=True):
        (home / "refs" / revision).write_text(commit)
        shutil.copytree(root / name, home / "snapshots" / commit)

    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-3, "no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return commits


def test_revisions_of_a_hub_checkpoint(root: Path, hub: dict[str, str], tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert analyze(root, "org/tiny", "--revisions", "step1, step10,step20", "--out", out) == 1
    printed = capsys.readouterr()
    assert states(printed.out) == {"tiny@step1": "done", "tiny@step10": "done", "tiny@step20": "failed"}
    found = {name: Report.load(out / f"tiny@{name}").model for name in hub}
    assert {name: model["revision"] for name, model in found.items()} == hub
    assert found["step1"]["fingerprint"] != found["step10"]["fingerprint"]
    assert [one["name"] for one in Comparison.load(out / "compare").runs] == ["tiny@step1", "tiny@step10"]
    assert analyze(root, "org/tiny", "--revisions", "step1,step10", "--out", out) == 0
    assert set(states(capsys.readouterr().out).values()) == {"kept"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "--revisions", "v1,v2"], "which has no revisions"),
        (["./nowhere", "--revisions", "v1,v2"], "which has no revisions"),
        (["org/m", "org/n", "--revisions", "v1,v2"], "several checkpoints"),
        (["org/*", "--revisions", "v1,v2"], "several checkpoints"),
        (["org/m@v0", "--revisions", "v1,v2"], "another revision"),
        (["org/m", "--revision", "v0", "--revisions", "v1,v2"], "another revision"),
        (["org/m", "--revisions", "v1,,v2"], "names with commas"),
        (["org/m", "--revisions", ""], "names with commas"),
        (["nothing-*"], "the pattern nothing-* fits nothing"),
        (["empty*", "org/m"], "fits no checkpoint"),
        (["org/m", "org/n", "--data", "-"], "--data - is given with several"),
    ],
)
def test_wrong_requests_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "empty"):
        Path(name).mkdir()
    assert run("analyze", *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "empty"}
