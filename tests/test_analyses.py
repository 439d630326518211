"""The scripts in analyses/: what they write is whole, agrees with the library, and goes on after a stop."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch

import depthprobe
from depthprobe.ablations import run as sweeping
from depthprobe.ablations.schedule import parse
from depthprobe.ablations.table import COLUMNS

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "data" / "gpt2-manual")
FEW = ["--tokens", "96", "--seq-len", "32", "--batch-size", "1"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "analyses" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layer_merge, painters = script("layer_merge"), script("painters")
SMALL = {
    "layer_merge": [MODEL, "--spans", "2,3", "--combine", "sum,attention-first", *FEW],
    "painters": [MODEL, "--middle", "2-5", "--shuffles", "2", *FEW],
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged")
    assert layer_merge.main([*SMALL["layer_merge"], "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("painted")
    assert painters.main([*SMALL["painters"], "--out", str(out)]) == 0
    return out


def table(out: Path) -> pd.DataFrame:
    return pd.read_csv(next(out.glob("*.csv")), keep_default_na=False, dtype={"layers": str})


def is_png(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 10_000


def test_layer_merge_writes_every_merge_and_control(merged: Path) -> None:
    found = table(merged)
    assert list(found.columns) == ["checkpoint", *COLUMNS]
    assert set(found["checkpoint"]) == {"gpt2-manual"}
    kl = found[found["metric"] == "kl"]
    merges = kl[kl["kind"] == "merge"]
    sizes = merges.groupby(["unit", merges["layers"].str.count(",") + 1]).size()
    assert sizes.to_dict() == {("block", 2): 7, ("block", 3): 6, ("sublayer", 2): 7, ("sublayer", 3): 6}
    assert kl["kind"].value_counts().to_dict() == {"merge": 26, "skip": 8 + 7, "swap": 7, "control": 6 + 7}
    assert not kl.duplicated(["schedule", "combine"]).any()
    figures = {"merge_kl", "controls_kl", "merge_state_distance", "controls_state_distance"}
    assert {path.stem for path in merged.glob("*.png")} == figures
    assert all(is_png(path) for path in merged.glob("*.png"))
    assert not (merged / ".chunks").exists()


def test_layer_merge_agrees_with_the_library(merged: Path) -> None:
    kl = table(merged).query("metric == 'kl' and kind == 'merge'")
    given = ["0-2 (3+4) 5-7", "0-2 (3a+4a) (3m+4m) 5-7"]
    own = depthprobe.ablate(MODEL, given, tokens=96, seq_len=32, score_positions=0.25, batch_size=1).to_frame()
    for schedule in given:
        expected = own.query("metric == 'kl' and schedule == @schedule")["value"].item()
        assert kl[kl["schedule"] == schedule]["value"].item() == pytest.approx(expected, rel=1e-6)


def test_layer_merge_prints_medians_and_rho(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "gpt2-manual"
    shutil.copytree(MODEL, other)
    line = [MODEL, str(other), "--spans", "2", "--combine", "sum,branch-sum", *FEW, "--out", str(out)]
    assert layer_merge.main(line) == 0
    printed = capsys.readouterr()
    assert "Left out: branch-sum of 2" in printed.err  # a pre-LN model has no norm to share
    found = table(out)
    assert set(found["checkpoint"]) == {MODEL, str(other)}  # two of one name are told apart by what was given
    merges = found.query("metric == 'kl' and kind == 'merge'").iloc[:7]
    skips = found.query("metric == 'kl' and kind == 'skip'")
    skips = skips[~skips["layers"].str.contains(",")].iloc[:7]
    assert f"{merges['value'].median():.4f}" in printed.out
    ratio = np.median(merges["value"].to_numpy() / skips["value"].to_numpy())
    assert f"{ratio:.3f} [" in printed.out.split("median ρ")[1]


def test_painters_writes_every_variant_of_every_window(painted: Path) -> None:
    found = table(painted)
    assert list(found.columns) == ["variant", "blocks_changed", "seed", *COLUMNS]
    loss = found[found["metric"] == "delta_loss"].set_index(["variant", "blocks_changed"])["schedule"]
    assert loss[("skip", 2)] == "0-2 5-7"
    assert loss[("skip", 4)] == "0-1 6-7"
    assert loss[("repeat", 4)] == "0-1 4 4 4 4 6-7"
    assert loss[("reverse", 4)] == "0-1 5 4 3 2 6-7"
    assert loss[("parallel", 4)] == "0-1 (2+3+4+5) 6-7"
    orders = [tuple(stage[0].layer for stage in parse(text).stages) for text in loss[("shuffle", 4)]]
    assert len(set(orders)) == 2
    assert all(sorted(order) == list(range(8)) and order[:2] == (0, 1) and order[6:] == (6, 7) for order in orders)
    assert set(found.query("variant == 'parallel'")["combine"]) == {"mean"}
    assert is_png(painted / "painters.png")


def test_painters_orders_by_measured_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert painters.main([*SMALL["painters"], "--out", str(tmp_path / "out")]) == 0
    whole = capsys.readouterr().out.split("the whole middle, 4 blocks")[1]
    printed = [line.split() for line in whole.splitlines()[1:6]]
    loss = table(tmp_path / "out").query("metric == 'delta_loss' and blocks_changed == 4")
    means = loss.groupby("variant")["value"].mean().sort_values()
    assert [line[0] for line in printed] == list(means.index)
    assert [float(line[1]) for line in printed] == pytest.approx(list(means), abs=6e-4)
    assert "Published" in whole


@pytest.mark.parametrize(("text", "expected"), [(None, (1, 6)), ("2-5", (2, 5)), ("0-7", (0, 7))])
def test_middle(text: str | None, expected: tuple[int, int]) -> None:
    assert painters.middle(8, text) == expected


def test_windows_share_their_centre() -> None:
    assert painters.windows(6, 23, 4) == [range(14, 16), range(12, 18), range(10, 20), range(8, 22), range(6, 24)]


@pytest.mark.parametrize("name", ["layer_merge", "painters"])
def test_goes_on_after_a_stop(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"layer_merge": layer_merge, "painters": painters}[name]
    whole = request.getfixturevalue({"layer_merge": "merged", "painters": "painted"}[name])
    line = [*SMALL[name], "--out", str(tmp_path)]
    made: list[int] = []
    chunk = sweeping._chunk

    def stops(*args: object) -> object:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return chunk(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sweeping, "_chunk", stops)
    with pytest.raises(KeyboardInterrupt):
        module.main(line)
    assert not list(tmp_path.glob("*.csv"))
    monkeypatch.setattr(sweeping, "_chunk", lambda *args: made.append(1) or chunk(*args))
    assert module.main(line) == 0
    assert len(made) == 3  # one a sequence, none twice
    csv = next(whole.glob("*.csv"))
    assert (tmp_path / csv.name).read_bytes() == csv.read_bytes()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("layer_merge", [MODEL], "given twice"),
        ("layer_merge", ["--spans", "1"], "at least two blocks"),
        ("layer_merge", ["--spans", "two"], "numbers of blocks"),
        ("layer_merge", ["--combine", "max"], "--combine max"),
        ("layer_merge", ["--score-positions", "0"], "a share above 0"),
        ("painters", ["--middle", "6-23"], "within 0-7"),
        ("painters", ["--middle", "six"], "first and last block"),
        ("painters", ["--step", "0"], "at least 1"),
    ],
)
def test_wrong_usage_is_one_line(
    name: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = {"layer_merge": layer_merge, "painters": painters}[name]
    out = tmp_path / "out"
    assert module.main([MODEL, *options, *FEW, "--out", str(out)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Loading")]
    assert len(lines) == 1
    assert said in lines[0]
    assert not out.exists()


def test_bench_sweep_counts_and_compares() -> None:
    line = [sys.executable, "analyses/bench_sweep.py", MODEL, "--tokens", "64", "--repeats", "1", "--threads", "1"]
    done = subprocess.run([*line, "--no-memory"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "15 schedules; planned block evaluations a batch: shared 57, plain 112" in done.stdout
    # 120: the plain loop's 112 and the 8 of the unmodified run, which the shared sweep has among its 57
    assert done.stdout.count("block evaluations made: shared 57, plain 120") == 3
    assert done.stdout.count("shared / plain, CPU time: median") == 3


def test_the_plain_loop_of_the_bench_does_the_same_work() -> None:
    from depthprobe.ablations.units import Units
    from depthprobe.prepare import prepare

    bench = script("bench_sweep")
    _, corpus, anatomy = prepare(MODEL, tokens=64, seq_len=32)
    stream = anatomy.stream
    entry = stream.enter(corpus.inputs)
    given = [parse("0-2 (3+4) 5-7"), parse("0-2 4-7")]
    swept = sweeping.sweep(anatomy, corpus, given, sweeping.SweepSettings(0.5))
    reference = bench.Reference(
        stream, list(stream.states(entry))[-1], bench.Scored.next_token(corpus.inputs, np.arange(2), 0.5, 0)
    )
    for place, schedule in enumerate(given):
        with torch.no_grad():
            last = bench.full_pass(Units(anatomy), entry, schedule)
            effects = bench.compare_all(reference, last, corpus.inputs)
        for name, values in effects.items():
            assert values == pytest.approx(swept.effects[name][:, place], rel=1e-5, abs=1e-7)
