"""bench_dtype.py, and with it what `--dtype bfloat16` changes in a trained model's numbers."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from depthprobe import Report, analyze
from depthprobe.report.findings import findings

ROOT = Path(__file__).parent.parent
with pytest.MonkeyPatch.context() as _patch:
    # scripts import each other as they do where they are run: from their own folder
    _patch.syspath_prepend(str(ROOT / "analyses"))
    bench = importlib.import_module("bench_dtype")
# How far a metric may be from float32, as a share of its largest value. What is counted over the few positions that are
# read out changes by whole ones; what a straight line explains of the updates is a small part of much larger states.
EVERY = 0.01
WIDER = {"lens_top1": 0.03, "top1_agreement": 0.08, "linearity_update": 0.15}


@pytest.fixture(scope="module", params=["pre", "post"])
def reports(request: pytest.FixtureRequest) -> dict[str, Report]:
    """Of a trained checkpoint, which has its weights in float32."""
    path = ROOT / "data" / "checkpoints" / request.param
    few = {"tokens": 512, "gradient_tokens": 0, "depth_tokens": 0}
    return {dtype: analyze(path, dtype=dtype, device="cpu", **few) for dtype in bench.DTYPES}


def test_bfloat16_states_its_floor_and_keeps_the_numbers(reports: dict[str, Report]) -> None:
    full, half = reports["float32"], reports["bfloat16"]
    floor = half.resolution["update_ratio"]
    assert torch.finfo(torch.bfloat16).eps / 8 < floor < torch.finfo(torch.bfloat16).eps
    said = [finding.text for finding in findings(half) if finding.topic == "Precision"]
    assert len(said) == 1
    assert "Run in bfloat16: rounding alone gives" in said[0]
    found = bench.changes(full, half)
    assert {each["table"] for each in found} == {"layers", "pairs", "ablations"}
    assert len(found) > 25
    for each in found:
        assert each["of_largest"] <= WIDER.get(each["metric"], EVERY), each
    assert max(each["of_largest"] for each in found) > 1e-4  # it is another precision
    assert sum(each["rows"] for each in found) > 20 * sum(each["below"] for each in found)


def test_changes_are_what_was_changed(reports: dict[str, Report]) -> None:
    full = replace(reports["float32"], layers=reports["float32"].layers.query("metric in ['update_ratio', 'lens_kl']"))
    assert all(each["relative"] == each["of_largest"] == 0 for each in bench.changes(full, full))
    layers = full.layers.copy()
    row = layers.query("metric == 'update_ratio'")["value"].idxmin()
    least, largest = layers["value"][row], layers.query("metric == 'update_ratio'")["value"].max()
    layers.loc[row, "value"] = 3 * least  # beyond its interval
    half = replace(full, layers=layers, resolution={"lens_kl": 1e9})
    found = {(each["table"], each["metric"]): each for each in bench.changes(full, half)}
    of = found["layers", "update_ratio"]
    count = len(layers.query("metric == 'update_ratio'"))
    assert of["relative"] == pytest.approx(2)
    assert of["of_largest"] == pytest.approx(2 * least / largest)
    assert of["inside"] == pytest.approx(1 - 1 / count)
    assert (of["rows"], of["below"]) == (count, 0)
    kl = found["layers", "lens_kl"]
    assert (kl["rows"], kl["below"], kl["relative"]) == (0, len(layers.query("metric == 'lens_kl'")), None)


def test_rounds_take_turns_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock) ** 2))  # every part takes longer
    given = [str(ROOT / "data" / "checkpoints" / "pre"), "--tokens", "128", "--repeats", "3", "--parts"]
    out = tmp_path / "new" / "dtype.json"
    assert bench.main([*given, "--threads", str(torch.get_num_threads()), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    turns = [line.split(": ")[1].split()[0] for line in printed.err.splitlines() if ", round " in line]
    assert turns == ["float32", "bfloat16", "bfloat16", "float32", "float32", "bfloat16"]
    found = json.loads(out.read_text())
    assert {"versions", "machine", "created", "repeats", "tokens"} <= set(found)
    (entry,) = found["checkpoints"]
    assert len(entry["rounds"]) == 3
    each = [done["bfloat16"]["probes"][0] / done["float32"]["probes"][0] for done in entry["rounds"]]
    assert each[1] < 1 < min(each[0], each[2])  # by the clock above, what comes second is slower
    ratio = entry["ratios"]["probes"]["clock"]
    assert (ratio["ratio"], ratio["low"], ratio["high"]) == (sorted(each)[1], min(each), max(each))
    assert "| layers: update_ratio |" in printed.out
    assert bench.main([*given, "--repeats", "0"]) == 2
