"""`depthprobe compare` from training to verdict: the same numbers by every way, reports that are reused, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from lab_runs import run as train_run
from lab_runs import tiny
from report_samples import sample

import depthprobe
from depthprobe import Comparison, Report, cli
from depthprobe.comparison.analyzed import _ANALYZING, _matching, _of_text
from depthprobe.comparison.runs import open_run
from depthprobe.contrast import paired
from depthprobe.report import compare_html, files

WAY = ("--tokens", "64", "--seq-len", "16")
OPTIONS = {"tokens": 64, "seq_len": 16, "seed": 0, "device": "cpu"}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr(compare_html, "render", lambda *_: b"")
    monkeypatch.setattr(files.figures, "render", lambda *_: b"")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds each of a pre- and a post-LN model of 3 blocks, that kept checkpoints."""
    root = tmp_path_factory.mktemp("lab")
    for placement in ("pre", "post"):
        for seed in (1, 2):
            model = tiny(placement=placement, num_hidden_layers=3, hidden_size=16)
            train_run(root / f"{placement}-s{seed}", model, seed=seed, save_at=(0, 10) if seed == 1 else ())
    return root


@pytest.fixture(scope="module")
def home(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose reports/ holds those of all of their checkpoints."""
    root = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.figures, "render", lambda *_: b"")
        told: list[str] = []
        depthprobe.compare(*sorted(lab.iterdir()), reports=root / "reports", say=told.append, **OPTIONS)
    assert sum("analyzing it on 4 × 16 tokens" in text for text in told) == 8
    return root


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def same(a: Comparison, b: Comparison) -> None:
    for name in ("table", "differences", "verdict"):
        pd.testing.assert_frame_equal(getattr(a, name), getattr(b, name))


def test_from_training_to_verdict_by_every_way(
    lab: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert run("compare", lab / "pre-s1", lab / "post-s1", *WAY, "--device", "cpu") == 0
    printed = capsys.readouterr()
    assert printed.err.count("is of this model and text") == 6  # three checkpoints each
    assert "at equal tokens of training, 1,920" in printed.out
    assert "Verdict:" in printed.out
    assert "reports/compare/compare.html" in printed.out
    assert len(printed.out.splitlines()) < 50
    line = Comparison.load("reports/compare")
    assert line.run["command"].startswith("depthprobe compare")
    assert [run["checkpoints"] for run in line.runs] == [[0, 10, 30]] * 2
    assert (home / "reports" / "pre-s1" / "step-10" / "report.json").exists()

    python = depthprobe.compare(lab / "pre-s1", lab / "post-s1", **OPTIONS)
    same(line, python)
    python.save("reports/python")
    for name in ("compare.csv", "differences.csv", "verdict.csv"):
        assert Path("reports/python", name).read_bytes() == Path("reports/compare", name).read_bytes()

    # from saved reports, all but what only the other checkpoints tell
    saved = depthprobe.compare(Path("reports/pre-s1"), Path("reports/post-s1"))
    pd.testing.assert_frame_equal(saved.table, line.table)
    pd.testing.assert_frame_equal(saved.verdict, line.verdict)
    alike = line.differences["method"].str.contains("equal tokens")
    pd.testing.assert_frame_equal(saved.differences, line.differences[alike].reset_index(drop=True))


def test_at_equal_loss_the_losses_are_equal_and_the_rest_lies_between(
    lab: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    found = depthprobe.compare(lab / "pre-s1", lab / "post-s1", **OPTIONS)
    losses = {}
    for name in ("pre-s1", "post-s1"):
        log = [json.loads(text) for text in (lab / name / "log.jsonl").read_text().splitlines()]
        losses[name] = {row["step"]: row["val_loss"] for row in log if row["step"] in (0, 10, 30)}
    level = max(min(each.values()) for each in losses.values())
    assert [one["name"] for one in found.levels] == ["equal tokens", "equal loss"]
    rows = found.differences[found.differences["method"].str.contains("equal validation loss")]
    loss = rows[rows["metric"] == "val_loss"].iloc[0]
    assert (loss["value_a"], loss["value_b"]) == pytest.approx((level, level))
    # by hand, from the reports of the two checkpoints around that loss
    name = next(name for name, each in losses.items() if min(each.values()) != level)
    before, after = (0, 10) if losses[name][10] <= level else (10, 30)
    weight = (level - losses[name][before]) / (losses[name][after] - losses[name][before])
    values = []
    for step in (before, after):
        folder = Path("reports", name) / (f"step-{step}" if step < 30 else ".")
        frame = depthprobe.Report.load(folder).layers
        frame = frame[(frame["metric"] == "update_ratio") & (frame["unit"] == "mlp") & (frame["layer"] == 2)]
        values.append(frame["value"].iloc[0])
    got = rows[(rows["metric"] == "update_ratio") & (rows["unit"] == "mlp") & (rows["where"] == "late")].iloc[0]
    side = "value_a" if name == "pre-s1" else "value_b"
    assert got[side] == pytest.approx((1 - weight) * values[0] + weight * values[1])


def test_groups_of_seeds_from_patterns(
    lab: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    groups = [text for name in ("pre", "post") for text in ("--group", f"{name}={lab / name}-s*")]
    assert run("compare", *groups, *WAY, "--device", "cpu", "--out", "out") == 0
    assert "2 models of 4 runs" in capsys.readouterr().out
    found = Comparison.load("out")
    assert [line["name"] for line in found.lines] == ["pre", "post"]
    assert [run["seed"] for run in found.runs] == [1, 2, 1, 2]
    table = found.table[(found.table["metric"] == "update_ratio") & (found.table["unit"] == "block")]
    each = {run["name"]: table[(table["run"] == run["name"]) & (table["layer"] == 2)]["value"].iloc[0]
            for run in found.runs}  # fmt: skip
    expected = paired([each["pre-s1"], each["pre-s2"]], [each["post-s1"], each["post-s2"]])
    rows = found.differences
    got = rows[(rows["metric"] == "update_ratio") & (rows["unit"] == "block") & (rows["where"] == "late")].iloc[0]
    assert (got["difference"], got["ci_low"], got["ci_high"]) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    python = depthprobe.compare(
        groups={name: [lab / f"{name}-s{seed}" for seed in (1, 2)] for name in ("pre", "post")}, **OPTIONS
    )
    same(found, python)


def test_a_report_of_something_else_is_left_alone(
    lab: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "reports" / "pre-s2"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(sample().to_json())
    before = (folder / "report.json").read_bytes()
    assert run("compare", lab / "pre-s2", *WAY, "--device", "cpu") == 0
    assert (folder / "report.json").read_bytes() == before
    others = sorted(path.name for path in folder.parent.iterdir())
    assert len(others) == 3
    assert others[2].startswith("pre-s2-")
    assert others[2] in capsys.readouterr().err
    same(Comparison.load("reports/compare"), depthprobe.compare(lab / "pre-s2", reports=home / "reports", **OPTIONS))
    # the next time that one is found; another text has one more of its own
    told: list[str] = []
    depthprobe.compare(lab / "pre-s2", say=told.append, **OPTIONS)
    assert "is of this model and text" in told[0]
    depthprobe.compare(lab / "pre-s2", say=told.append, **{**OPTIONS, "tokens": 48})
    assert "analyzing it on 3 × 16 tokens" in told[1]
    assert len(list(folder.parent.iterdir())) == 4


def test_facts_of_the_training_are_those_of_its_record(lab: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    record = json.loads((lab / "post-s2" / "run.json").read_text())
    found = depthprobe.compare(lab / "post-s2", **OPTIONS).runs[0]
    assert found["trained_tokens"] == record["result"]["tokens"] == 30 * 4 * 16
    assert found["val_loss"] == record["result"]["val_loss"]
    assert found["seed"] == 2
    assert found["placement"] == "post"


def reports(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "report.json").write_text(sample(4).to_json())
    return [folder / name for name in names]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "no run; expected at least one"),
        (["--group", "pre"], 2, "--group pre; expected NAME=PATTERN"),
        (["--group", "=x"], 2, "NAME=PATTERN"),
        (["--group", "pre=nothing-*"], 2, "fits nothing"),
        (["--group", "a=one", "--group", "a=two"], 2, "given twice"),
        (["--group", "a=one", "--group", "b=one"], 2, "two groups"),
        (["one", "--figures", "gif"], 2, "png or svg"),
        (["old"], 1, "schema version 99"),
        (["broken"], 1, "is not JSON"),
        (["empty"], 1, "neither a report nor a checkpoint"),
        (["./nowhere"], 1, "no such file"),
        (["one", "two", "--out", "one/report.json"], 1, "is a file"),
    ],
)
def test_wrong_requests_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, status, words
) -> None:
    monkeypatch.chdir(tmp_path)
    reports(tmp_path, "one", "two", "old", "broken")
    (tmp_path / "empty").mkdir()
    text = (tmp_path / "one" / "report.json").read_text()
    (tmp_path / "old" / "report.json").write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    (tmp_path / "broken" / "report.json").write_text(text[:100])
    before = sorted(tmp_path.rglob("*"))
    assert run("compare", *arguments) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_group_may_name_runs_that_are_given_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports(tmp_path, "a-s1", "b")
    assert run("compare", "b", "a-s1/", "--group", "a=a-s*", "--out", "out") == 0
    found = Comparison.load("out")
    assert [(run["name"], run["group"]) for run in found.runs] == [("b", ""), ("a-s1", "a")]
    np.testing.assert_allclose(found.differences["difference"], 0, atol=1e-12)


def test_a_report_of_other_ids_or_other_options_is_not_taken_for_the_one_asked_for(home: Path, lab: Path) -> None:
    """The text's hash and the sizes may agree though BOS, the tokenizer or an option that was not named do not."""
    (found,) = (Report.load(path.parent) for path in (home / "reports").glob("pre-s2/report.json"))
    options = {name: found.run["options"][name] for name in ("seed", *_ANALYZING)}
    mine = {
        "fingerprint": found.model["fingerprint"], "dtype": found.model["dtype"], "corpus": _of_text(found.corpus),
        "options": options,
    }  # fmt: skip
    assert _matching(home / "reports" / "pre-s2", mine) is not None
    for name, other in (("bos", "Nothing was put in front."), ("first_ids", [0] * 16)):
        assert (
            _matching(home / "reports" / "pre-s2", {**mine, "corpus": _of_text({**found.corpus, name: other})}) is None
        )
    assert _matching(home / "reports" / "pre-s2", {**mine, "options": {**options, "skip_first": 3}}) is None


def test_a_run_that_diverged_is_a_failed_one_at_its_last_checkpoint(lab: Path, home: Path, tmp_path: Path) -> None:
    """Its last weights were not fit to be kept, and the checkpoint before knows nothing of it."""
    run_ = shutil.copytree(lab / "pre-s1", tmp_path / "pre-s1")
    (run_ / "config.json").unlink()
    record = json.loads((run_ / "run.json").read_text())
    record["result"] |= {"status": "failed", "reason": "diverged: the loss is not finite at step 12"}
    (run_ / "run.json").write_text(json.dumps(record))
    found = open_run(run_, reports=tmp_path / "reports", options=OPTIONS)
    assert found.points[-1].training.step == 10
    assert found.points[-1].training.failed == "diverged: the loss is not finite at step 12"
    assert found.points[0].training.failed is None
