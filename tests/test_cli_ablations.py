"""The commands that change a model: ablate, stages, prune, and analyze with its default sweep."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from depthprobe import cli
from depthprobe.ablations.table import COLUMNS
from depthprobe.report import Report

VOCAB = 96
# Figures take most of a report's time, and other tests look at them: here one test draws them all the same.
NO_FIGURES = """
import sys
from depthprobe import cli
from depthprobe.report import figures
figures.render = lambda *_, **__: b""
cli.main(sys.argv[1:])
"""
METRICS = {"delta_loss", "kl", "top1_agreement", "state_distance"}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.node.name:
        monkeypatch.setattr("depthprobe.report.figures.render", lambda *_, **__: b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2, the same again with other weights and other blocks, a headless BERT, and ids for them."""
    root = tmp_path_factory.mktemp("cli")
    for name, blocks in (("tiny", 4), ("deeper", 5)):
        torch.manual_seed(blocks)
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=blocks, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        GPT2LMHeadModel(config).save_pretrained(root / name)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes)).save_pretrained(root / "bert")
    rng = np.random.default_rng(0)
    np.save(root / "ids.npy", rng.integers(4, VOCAB, (6, 24)))
    np.save(root / "other.npy", rng.integers(4, VOCAB, (6, 24)))
    np.save(root / "many.npy", rng.integers(4, VOCAB, (24, 24)))
    return root


@pytest.fixture(scope="module")
def analyzed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report without ablations and gradients, to be copied."""
    out = tmp_path_factory.mktemp("analyzed") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthprobe.report.figures.render", lambda *_, **__: b"")
        options = ("--no-ablations", "--gradient-tokens", "0", "--out", out)
        assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
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
    *before, last = printed.err.splitlines()
    assert last.startswith("depthprobe: "), last
    assert not any(line.startswith(("depthprobe:", "Traceback")) for line in before)
    return last


def copied(report: Path, to: Path) -> Path:
    import shutil

    shutil.copytree(report, to)
    return to


def ablations(out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "ablations.csv", keep_default_na=False, dtype={"layers": str})


class TestAblate:
    def test_adds_to_the_report_that_is_there_with_figures_drawn(
        self, folder: Path, analyzed: Path, tmp_path: Path, capsys: Captured
    ) -> None:
        out = copied(analyzed, tmp_path / "report")
        before = {name: (out / name).read_bytes() for name in ("layers.csv", "pairs.csv")}
        was = json.loads((out / "report.json").read_text())
        assert "ablations.csv" not in {path.name for path in out.iterdir()}
        capsys.readouterr()
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", out) == 0
        printed = capsys.readouterr()
        assert printed.out.rstrip().endswith(str(out / "report.html"))
        assert "forward passes" in printed.err
        assert "measuring first" not in printed.err
        assert {name: (out / name).read_bytes() for name in before} == before
        now = json.loads((out / "report.json").read_text())
        assert now["run"]["command"] == was["run"]["command"]
        assert now["run"]["ablation_command"].startswith("depthprobe ")
        assert now["verification"] == was["verification"]
        assert not (out / ".chunks").exists()
        table = ablations(out)
        assert tuple(table.columns) == COLUMNS
        assert set(table["metric"]) == METRICS
        assert set(table["kind"]) == {"skip", "merge", "swap", "control"}
        assert (table["n"] == 6).all()
        assert not table[["value", "ci_low", "ci_high"]].isna().any().any()
        assert set(table.query("kind == 'skip' and unit == 'block'")["layers"]) >= {"0", "1", "2", "3"}
        assert {"0,1", "1,2", "2,3"} <= set(table.query("kind == 'merge'")["layers"])
        assert "0 (1+2) 3" in set(table["schedule"])
        assert "ablations" in (out / "report.html").read_text().lower()

    def test_joins_what_is_of_the_same_tokens_and_positions_and_says_before_it_replaces(
        self, folder: Path, analyzed: Path, tmp_path: Path, capsys: Captured
    ) -> None:
        out = copied(analyzed, tmp_path / "report")
        given = ("ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", out)

        def work() -> dict[str, int]:
            merging = json.loads((out / "report.json").read_text())["merging"]
            return {name: merging[name] for name in ("evaluations", "plain_evaluations")}

        assert run(*given, "--kinds", "skip,merge,swap", "--no-controls") == 0
        first, spent = ablations(out), work()
        assert run(*given, "--schedule", "0 (1+2) 3", "--schedule", "0 2 1 3", "--schedule", "0 1 2 3 3") == 0
        both = ablations(out)
        # a merge and a swap that one's own schedules repeat are still a merge and a swap
        pd.testing.assert_frame_equal(both[both["kind"] != "custom"].reset_index(drop=True), first)
        assert len(both) == len(first) + 3 * len(METRICS)
        assert all(work()[name] > spent[name] for name in spent), "of all that is in the table"
        again = work()
        assert run(*given, "--schedule", "0 2 1 3") == 0
        assert len(ablations(out)) == len(both), "measured again, not twice"
        assert work()["evaluations"] > again["evaluations"]
        assert "these replace them" not in capsys.readouterr().err
        # other positions, though of the same text: one's own draw, or another share
        for more in (["--seed", "1"], ["--score-positions", "0.5"]):
            assert run(*given, "--kinds", "skip", "--no-controls", *more) == 0
            said = capsys.readouterr().err
            assert said.index("these replace them") < said.index("Ablations: ")
            assert set(ablations(out)["kind"]) == {"skip"}

    def test_makes_a_report_where_there_is_none(
        self, folder: Path, analyzed: Path, tmp_path: Path, capsys: Captured
    ) -> None:
        out = tmp_path / "new"
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", "--kinds", "skip", "--out", out) == 0
        assert "measuring first" in capsys.readouterr().err
        for name in ("layers.csv", "pairs.csv"):
            theirs = (analyzed / name).read_text().splitlines()
            # of effective depth, which analyze estimates too
            assert (out / name).read_text().splitlines() == [row for row in theirs if "update_dependence" not in row]
        assert set(ablations(out)["kind"]) == {"skip"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]

    def test_schedules_of_ones_own(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        out = copied(analyzed, tmp_path / "report")
        given = ["0 (1+2) 3", "0 2 1 3", "0 (1a+2a) (1m+2m) 3", "3 2 1 0"]
        options = [part for text in given for part in ("--schedule", text)]
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", out, *options) == 0
        table = ablations(out)
        assert list(dict.fromkeys(table["schedule"])) == given
        assert len(table) == len(given) * len(METRICS)
        assert set(table["kind"]) == {"custom"}
        combine = table.drop_duplicates("schedule").set_index("schedule")["combine"]
        assert combine.to_dict() == dict(zip(given, ["sum", "", "sum", ""], strict=True))

    @pytest.mark.parametrize("combine", ["mean", "weights"])
    def test_combine(self, combine: str, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        for name in ("sum", combine):
            out = copied(analyzed, tmp_path / name)
            options = ["--kinds", "merge", "--combine", name, "--no-controls"]
            assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", out, *options) == 0
        a, b = (ablations(tmp_path / name).query("metric == 'kl'") for name in ("sum", combine))
        assert set(b["combine"]) == {combine}
        assert list(a["layers"]) == list(b["layers"])
        assert (a["value"].to_numpy() != b["value"].to_numpy()).all()

    def test_span_and_unit(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        out = copied(analyzed, tmp_path / "report")
        options = ["--kinds", "merge", "--span", "3", "--no-controls", "--out", out]
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        assert set(ablations(out)["layers"]) == {"0,1,2", "1,2,3"}
        options = ["--kinds", "skip", "--unit", "mlp", "--out", out]
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        table = ablations(out)
        assert set(table["unit"]) == {"block", "mlp"}, "on the same text new rows join the old ones"
        assert not table.duplicated(["schedule", "combine", "metric"]).any()
        table = table.query("unit == 'mlp'")
        assert set(table["layers"]) == {"0", "1", "2", "3"}

    def test_a_model_without_a_head(self, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "bert"
        assert run("ablate", folder / "bert", "--data", folder / "ids.npy", "--out", out) == 0
        assert set(ablations(out)["metric"]) == {"state_distance"}

    def test_the_numbers_are_pythons(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        import depthprobe

        out = copied(analyzed, tmp_path / "report")
        options = ["--score-positions", "0.5", "--seed", "3", "--out", out]
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        found = depthprobe.ablate(folder / "tiny", data=np.load(folder / "ids.npy"), score_positions=0.5, seed=3)
        frame = found.to_frame().reset_index(drop=True)
        saved = pd.read_csv(out / "ablations.csv", keep_default_na=False, dtype={"layers": str}).reset_index(drop=True)
        pd.testing.assert_frame_equal(saved, frame, check_exact=True, check_dtype=False)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--schedule", "0 (1+2 3"], ["character 8", "0 (1+2 ▸3"]),
            (["--schedule", "0-3 x"], ["'x' at character 5"]),
            (["--schedule", "0-3", "--schedule", "3-0"], ["character 1", "goes up"]),
            (["--schedule", ""], ["the schedule is empty"]),
            (["--schedule", "   "], ["the schedule is empty"]),
            (["--schedule", "0 (1+1)"], ["different units"]),
            (["--schedule", "0-4"], ["block 4", "0 to 3"]),
            (["--schedule", "0 (1+9a) 2"], ["block 9", "0 to 3"]),
            (["--kinds", "skip,marge"], ["'marge'", "merge"]),
            (["--kinds", ""], ["kind ''"]),
            (["--unit", "head"], ["--unit head", "attention"]),
            (["--unit", "mlp"], ["swap", "--unit block"]),
            (["--combine", "product"], ["'product'", "branch-sum"]),
            (["--combine", "branch-sum"], ["branch-sum"]),
            (["--span", "1"], ["--span 1", "2 to 4"]),
            (["--span", "5"], ["--span 5", "2 to 4"]),
            (["--score-positions", "0"], ["--score-positions 0"]),
            (["--score-positions", "1.5"], ["--score-positions 1.5"]),
            (["--batch-size", "0"], ["batch-size"]),
            (["--figures", "pdf"], ["png or svg"]),
        ],
    )
    def test_wrong_usage_is_one_line_and_leaves_nothing(
        self, options: list[str], words: list[str], folder: Path, tmp_path: Path, capsys: Captured
    ) -> None:
        out = tmp_path / "report"
        line = failure(capsys, 2, "ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", out, *options)
        assert all(word in line for word in words), line
        assert not out.exists()

    def test_sublayers_that_were_not_found(
        self, folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from depthprobe import verify
        from depthprobe.anatomy import Block

        real = verify.find_branches
        monkeypatch.setattr(
            verify, "find_branches", lambda *a, **k: tuple(Block(b.index, b.kind, ()) for b in real(*a, **k))
        )
        arguments = ["ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", tmp_path / "report"]
        for options in (["--schedule", "0-1 2a 3"], ["--unit", "attention", "--kinds", "skip"]):
            line = failure(capsys, 2, *arguments, *options)
            assert "branch was found" in line
            assert "whole blocks" in line
        assert not (tmp_path / "report").exists()

    def test_a_report_of_another_model(self, folder: Path, analyzed: Path, tmp_path: Path, capsys: Captured) -> None:
        out = copied(analyzed, tmp_path / "report")
        before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        line = failure(capsys, 1, "ablate", folder / "deeper", "--data", folder / "ids.npy", "--out", out)
        assert "another" in line
        assert "--out" in line
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before

    def test_chunks_of_other_data(
        self, folder: Path, analyzed: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from depthprobe.ablations import run as sweeps

        out = copied(analyzed, tmp_path / "report")
        save = sweeps.Store.save

        def last(*arguments: object) -> None:
            save(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sweeps.Store, "save", last)
            options = ["--batch-size", "1", "--out", out]
            assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", *options) == 130
        kept = sorted(path.name for path in (out / ".chunks").iterdir())
        arguments = ["--batch-size", "1", "--out", out, "--resume"]
        line = failure(capsys, 1, "ablate", folder / "tiny", "--data", folder / "other.npy", *arguments)
        assert "another" in line
        assert "corpus" in line
        assert sorted(path.name for path in (out / ".chunks").iterdir()) == kept
        assert run("ablate", folder / "tiny", "--data", folder / "other.npy", *arguments[:-1]) == 0, (
            "anew without --resume"
        )
        assert not (out / ".chunks").exists()


def stopped(out: Path, model: Path, data: Path, by: signal.Signals) -> subprocess.CompletedProcess[str]:
    """`ablate`, stopped after its third chunk of many."""
    command = [sys.executable, "-c", NO_FIGURES, "ablate", model, "--data", data, "--batch-size", "1", "--out", out]
    with subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        chunk = out / ".chunks" / "00000002.npz"
        until = time.monotonic() + 120
        while not chunk.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        process.send_signal(by)
        assert process.stderr is not None
        text = process.stderr.read()
        return subprocess.CompletedProcess(command, process.wait(timeout=60), "", text)


class TestStopped:
    def test_sigkill_and_resume_give_the_same_bytes(
        self, folder: Path, analyzed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from depthprobe.ablations import run as sweeps

        whole, killed = (copied(analyzed, tmp_path / name) for name in ("whole", "killed"))
        data = folder / "many.npy"
        assert stopped(killed, folder / "tiny", data, signal.SIGKILL).returncode == -signal.SIGKILL
        done = [path for path in (killed / ".chunks").iterdir() if path.suffix == ".npz"]
        assert 3 <= len(done) < 24, "killed in the middle"
        assert not (killed / "ablations.csv").exists()
        chunk, made = sweeps._chunk, []
        monkeypatch.setattr(sweeps, "_chunk", lambda *arguments: made.append(1) or chunk(*arguments))
        assert torch.get_num_threads() == 1, "the threads of the run that was killed"
        arguments = ["ablate", folder / "tiny", "--data", data, "--batch-size", "1"]
        assert run(*arguments, "--out", killed, "--resume") == 0
        assert len(made) == 24 - len(done), "what was finished is not made again"
        assert run(*arguments, "--out", whole) == 0
        assert len(made) == 24 - len(done) + 24
        assert (whole / "ablations.csv").read_bytes() == (killed / "ablations.csv").read_bytes()
        assert not (killed / ".chunks").exists()

    def test_ctrl_c_says_how_to_go_on(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        out = copied(analyzed, tmp_path / "report")
        ended = stopped(out, folder / "tiny", folder / "many.npy", signal.SIGINT)
        assert ended.returncode == 130
        last = ended.stderr.splitlines()[-1]
        assert last == "depthprobe: interrupted; finished chunks are kept, --resume goes on"
        assert "Traceback" not in ended.stderr
        assert (out / ".chunks" / "00000002.npz").exists()
        assert not (out / "ablations.csv").exists()

    def test_what_was_fetched_is_added_up(self, folder: Path, tmp_path: Path) -> None:
        """Beside the ablations of a report, whose counts are kept."""
        out = tmp_path / "report"
        given = ["ablate", folder / "tiny", "--data", folder / "ids.npy", "--out", out]
        place = ["--device-map", '{"": "disk"}']
        found = []
        for kind, more in (("skip", place), ("repeat", place), ("parallel", [])):
            assert run(*given, "--kinds", kind, *more) == 0
            found.append(Report.load(out).merging["fetched"])
        assert found[1]["bytes"] > found[0]["bytes"]
        assert found[1]["chunks"] == found[0]["chunks"] + 1
        assert found[2] == found[1], "of a run in memory nothing was fetched"

    def test_resume_with_nothing_to_resume(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        out = copied(analyzed, tmp_path / "report")
        arguments = ["--kinds", "skip", "--resume", "--out", out]
        assert run("ablate", folder / "tiny", "--data", folder / "ids.npy", *arguments) == 0
        assert set(ablations(out)["kind"]) == {"skip"}


class TestAnalyze:
    def test_the_default_sweep_is_part_of_it(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        out = tmp_path / "report"
        assert (
            run("analyze", folder / "tiny", "--data", folder / "ids.npy", "--gradient-tokens", "0", "--out", out) == 0
        )
        kl = ablations(out).query("metric == 'kl'")
        want = {("skip", str(i)) for i in range(4)}
        want |= {(kind, f"{i},{i + 1}") for kind in ("merge", "swap") for i in range(3)}
        assert len(kl) == len(want)
        assert set(zip(kl["kind"], kl["layers"], strict=True)) == want
        assert "figures" in {path.name for path in out.iterdir()}
        for name in ("layers.csv", "pairs.csv"):
            assert (out / name).read_bytes() == (analyzed / name).read_bytes(), "the sweep leaves the rest as it was"

    def test_without_it(self, analyzed: Path) -> None:
        assert "ablations.csv" not in {path.name for path in analyzed.iterdir()}
        assert json.loads((analyzed / "report.json").read_text())["ablations"]["rows"] == []

    def test_on_fewer_tokens(self, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "report"
        options = ["--ablation-tokens", "48", "--out", out]
        assert run("analyze", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        assert set(ablations(out)["n"]) == {2}
        assert set(pd.read_csv(out / "layers.csv")["n"]) == {6}


class TestStages:
    def test_writes_the_curve(self, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        out = tmp_path / "report"
        assert run("stages", folder / "tiny", "--data", folder / "ids.npy", "--out", out) == 0
        printed = capsys.readouterr()
        assert printed.out.rstrip().endswith(f"Curve: {out / 'stages.csv'}")
        assert len(re.findall(r"of 4 stages keep the KL within (?:1|3|10)% of the unigram's", printed.out)) == 3
        assert "Loading" in printed.err
        assert "Loading" not in printed.out
        assert [path.name for path in out.iterdir()] == ["stages.csv"]
        table = pd.read_csv(out / "stages.csv", keep_default_na=False)
        assert list(table["stages"]) == [4, 3, 2, 1, 0]
        values = ["relative_kl", "kl", "delta_loss", "top1_agreement"]
        columns = [f"{name}{end}" for name in values for end in ("", "_ci_low", "_ci_high")]
        assert list(table.columns) == ["stages", "schedule", "combine", *columns, "n"]
        assert table["schedule"].iloc[0] == "0-3"
        assert set(table["combine"]) == {"sum"}

    def test_into_a_report_that_is_there(self, folder: Path, analyzed: Path, tmp_path: Path) -> None:
        out = copied(analyzed, tmp_path / "report")
        before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        options = ["--limit", "2", "--combine", "mean", "--out", out]
        assert run("stages", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        assert set(after) - set(before) == {"stages.csv"}
        assert {name: after[name] for name in before} == before
        table = pd.read_csv(out / "stages.csv", keep_default_na=False)
        assert list(table["stages"]) == [4, 3, 2]
        assert set(table["combine"]) == {"mean"}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--limit", "-1"], "0 to 4"),
            (["--limit", "5"], "0 to 4"),
            (["--combine", "product"], "product"),
            (["--combine", "branch-sum"], "branch-sum"),
            (["--tokens", "24"], "at least 2 sequences"),
            (["--score-positions", "2"], "score-positions"),
        ],
    )
    def test_wrong_usage(self, options: list[str], words: str, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        out = tmp_path / "report"
        line = failure(capsys, 2, "stages", folder / "tiny", "--data", folder / "ids.npy", "--out", out, *options)
        assert words in line
        assert not out.exists()

    def test_no_head(self, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        out = tmp_path / "report"
        line = failure(capsys, 2, "stages", folder / "bert", "--data", folder / "ids.npy", "--out", out)
        assert "next-token head" in line
        assert not out.exists()


class TestPrune:
    def test_a_schedule(self, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        out = tmp_path / "new"
        options = ["--schedule", "0 2-3", "--out", out]
        assert run("prune", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        text = capsys.readouterr().out
        assert re.search(r"loss +\d+\.\d+ → \d+\.\d+ nats a token, KL \d", text)
        assert re.search(r"forward +\d+ → \d+ ms", text)
        assert "layer_range: [0, 1], [2, 4]" in text
        before, after = re.search(r"parameters +([\d,]+) → ([\d,]+)", text).groups()
        again = AutoModelForCausalLM.from_pretrained(out)
        assert again.config.num_hidden_layers == 3
        assert int(after.replace(",", "")) == again.num_parameters() < int(before.replace(",", ""))

    def test_a_number_of_blocks(self, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        options = ["--drop", "2", "--score-positions", "1", "--out", tmp_path / "new"]
        assert run("prune", folder / "tiny", "--data", folder / "ids.npy", *options) == 0
        text = capsys.readouterr().out
        for name in ("measured", "block_influence", "angular_distance"):
            assert re.search(rf"{name} +drops \d, \d: KL \d\.\d+, loss [+-]\d\.\d+ nats", text)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.num_hidden_layers == 2

    def test_a_model_without_a_head(self, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        options = ["--schedule", "0 2", "--out", tmp_path / "new"]
        assert run("prune", folder / "bert", "--data", folder / "ids.npy", *options) == 0
        assert "parameters" in capsys.readouterr().out
        assert BertModel.from_pretrained(tmp_path / "new").config.num_hidden_layers == 2

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ([], "either --schedule or --drop"),
            (["--schedule", "0-2", "--drop", "1"], "either --schedule or --drop"),
            (["--schedule", "0 (1+2) 3"], "no stage of several units"),
            (["--schedule", "0 1a 2"], "no stage of several units"),
            (["--schedule", "0-"], "character 3"),
            (["--schedule", "0-4"], "0 to 3"),
            (["--drop", "0"], "1 to 3"),
            (["--drop", "4"], "1 to 3"),
        ],
    )
    def test_wrong_usage(self, options: list[str], words: str, folder: Path, tmp_path: Path, capsys: Captured) -> None:
        arguments = ["--data", folder / "ids.npy", "--out", tmp_path / "new", *options]
        assert words in failure(capsys, 2, "prune", folder / "tiny", *arguments)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_taken(self, folder: Path, analyzed: Path, capsys: Captured) -> None:
        arguments = ["--data", folder / "ids.npy", "--schedule", "0-2", "--out", analyzed]
        assert "new or empty" in failure(capsys, 1, "prune", folder / "tiny", *arguments)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ablate", ["0-3 (4+5) 6-11", "--schedule", "--kinds", "--resume", "branch-sum", "Example"]),
        ("stages", ["stages.csv", "--limit", "unigram", "Example"]),
        ("prune", ["--schedule", "--drop", "block influence", "Example"]),
        ("analyze", ["--no-ablations", "--ablation-tokens"]),
    ],
)
def test_help_teaches(command: str, words: list[str], capsys: Captured) -> None:
    assert run(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for word in words:
        assert word in text, word


def test_help_is_quick() -> None:
    code = "import sys, depthprobe.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
