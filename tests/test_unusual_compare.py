"""Comparisons of what is hardly there: broken reports, no intervals, the same run twice, models that have little."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_samples import ablated, sample
from rich.console import Console
from test_report_depth import deepened
from transformers import GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe import Comparison, cli
from depthprobe.contrast import ratio
from depthprobe.errors import NonFiniteError, OutputError, UsageError
from depthprobe.estimate import Interval
from depthprobe.report import Report
from depthprobe.report.compare_screen import show_comparison
from depthprobe.report.tables import interval

PHASES = {
    "clusters": {"count": 2, "ends": [[0, 3], [4, 12]], "clear": True, "silhouette": 0.6, "ci_low": 0.5,
                 "ci_high": 0.7, "drift": 0.3, "share": 0.9, "counts": []},
    "boundaries": [{"after": 3, "distance": 0.2, "chosen": True, "share": 0.9}],
    "readable": [{"target": "position", "state": 0, "accuracy": 0.5, "ci_low": 0.4, "ci_high": 0.6, "baseline": 0.1,
                  "train": 100}],
    "first": {"position": {"state": 0, "ci_low": 0, "ci_high": 0, "best": 0.5, "baseline": 0.1}},
    "sequences": 32, "notes": [],
}  # fmt: skip


def document() -> dict[str, Any]:
    report = ablated(deepened(passing=(("stages", "3%", 8.0),)))
    return dict(json.loads(replace(report, phases=PHASES).to_json()))


def changed(path: tuple[Any, ...], value: Any) -> str:
    """The saved report with one value put elsewhere; ... takes it out."""
    found = document()
    inner: Any = found
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(found)


def keep(text: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "report.json").write_text(text)
    return folder


# --- saved reports that somebody edited ------------------------------------------------------------------------------


def test_a_whole_report_is_read() -> None:
    assert Report.from_json(json.dumps(document())).phases == PHASES


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model",), {}, "model has no 'name'; expected a text"),
        (("model", "blocks"), ..., "model has no 'blocks'; expected a whole number, 1 or more"),
        (("model", "blocks"), 0, "model.blocks is 0"),
        (("model", "width"), None, "model.width is null"),
        (("model", "vocab_size"), "many", "model.vocab_size is 'many'"),
        (("model", "fingerprint"), [1], "model.fingerprint is [1]"),
        (("corpus", "sha256"), ["a"], "corpus.sha256 is ['a']"),
        (("corpus", "first_tokens"), 5, "corpus.first_tokens is 5; expected a list"),
        (("corpus", "sequences"), True, "corpus.sequences is True"),
        (("resolution",), {"update_ratio": "small"}, "resolution.update_ratio is 'small'"),
        (("verification", 0, "passed"), "yes", "verification[0].passed is 'yes'; expected true or false"),
        (("merging", "rho", "median"), {"value": 1.0}, "merging.rho.median has no 'ci_low'; expected a number or null"),
        (("growth", "growth_power"), 0.5, "growth.growth_power is 0.5; expected an object"),
        (("deep", "sequences"), "x", "deep.sequences is 'x'"),
        (("deep", "gate", 0, "passed"), "False", "deep.gate[0].passed is 'False'; expected true or false"),
        (("deep", "controls", 0, "control"), "twin", "expected random-init or random-tokens"),
        (("deep", "controls", 0, "value"), None, "deep.controls[0].value is null; expected a number"),
        (("deep", "curves", "stages/stages", "columns"), ["stages"], "has no column 'relative_kl'"),
        (("deep", "curves", "stages/stages", "rows", 0), [1], "row 0 of deep.curves.stages/stages has not 4 values"),
        (("deep", "curves", "stages/stages", "rows", 0, 1), "x", "relative_kl of row 0 of deep.curves.stages/stages"),
        (("phases", "clusters", "ends"), ..., "phases.clusters has no 'ends'"),
        (("phases", "boundaries", 0, "share"), "most", "phases.boundaries[0].share is 'most'"),
        (("phases", "readable", 0, "ci_low"), {}, "phases.readable[0].ci_low is {}; expected a number"),
        (("phases", "readable"), "none", "phases.readable is 'none'; expected a list"),
        (("phases", "notes"), [None], "phases.notes[0] is null; expected a text"),
        (("depth",), {"rows": []}, "table 'depth'"),
        (("depth", "columns", 0), "estimator", "its columns are"),
        (("depth", "rows", 0), [1, 2], "row 0 has not 9 values"),
        (("depth", "rows", 0, 3), None, "value of row 0 is null, not a number"),
        (("depth", "rows", 0, 3), "deep", "value of row 0 is 'deep', not a number"),
        (("depth", "rows", 0, 7), "False", "passes_gate of row 0 is 'False', not true or false"),
        (("depth", "rows", 0, 0), None, "name of row 0 is null, not a text"),
        (("layers", "rows", 0, 3), None, "value of row 0 is null"),
        (("layers", "rows", 0, 0), 1.5, "layer of row 0 is 1.5, not a whole number"),
        (("layers", "rows"), {}, "its rows are {}"),
        (("schema_version",), 99, "schema version 99; expected 1"),
        (("layers",), ..., "no field 'layers'"),
    ],
)  # fmt: skip
def test_a_broken_report_is_one_line_that_says_where(
    path: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    folder = keep(changed(path, value), tmp_path / "broken")
    for read in (lambda: Report.load(folder), lambda: depthprobe.compare(folder)):
        with pytest.raises(OutputError) as refused:
            read()
        assert words in str(refused.value)
        assert str(folder) in str(refused.value)
        assert "analyze" in str(refused.value)


@pytest.mark.parametrize("text", [json.dumps(document())[:-500], "", "[]", "{}", '{"schema_version": 1}', "\0"])
def test_a_truncated_report_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"report\.json"):
        depthprobe.compare(keep(text, tmp_path / "broken"))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_wherever_it_stands(constant: str, tmp_path: Path) -> None:
    text = changed(("deep", "seconds"), "here").replace('"here"', constant)
    with pytest.raises(OutputError, match=f"{constant} is no number"):
        Report.load(keep(text, tmp_path / "broken"))


def test_a_report_from_before_effective_depth_is_compared_without_it() -> None:
    old = {name: value for name, value in document().items() if name not in ("depth", "deep", "phases")}
    found = depthprobe.compare(Report.from_json(json.dumps(old)))
    assert "sample-12 without estimates of effective depth." in found.notes
    assert "stages 3%" not in set(found.table["metric"])


def test_an_estimate_that_is_no_number_is_named_and_not_written(tmp_path: Path) -> None:
    report = deepened(passing=(("stages", "3%", math.nan),))
    with pytest.raises(NonFiniteError, match="stages is nan at unit block, variant '3%'"):
        report.save(tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_broken_comparison_is_refused() -> None:
    text = json.loads(depthprobe.compare(sample(), sample(6)).to_json())
    for change, words in (
        ({"lines": 5}, "lines is 5"),
        ({"runs": [{**text["runs"][0], "blocks": "x"}]}, r"runs\[0\].blocks is 'x'"),
        ({"verdict": {**text["verdict"], "rows": [[1]]}}, "row 0 has not 9 values"),
        ({"table": {**text["table"], "rows": [["a", "", 0, 0, "block", "m", None, None, None, 1]]}}, "value of row 0"),
    ):
        with pytest.raises(OutputError, match=words):
            Comparison.from_json(json.dumps({**text, **change}))


# --- numbers without an interval, or with an open one ----------------------------------------------------------------


def without_intervals(report: Report) -> Report:
    return replace(report, layers=report.layers.assign(ci_low=math.nan, ci_high=math.nan))


def test_a_ratio_of_values_without_intervals_has_none() -> None:
    none = Interval(2.0, math.nan, math.nan)
    for a, b in ((none, none), (none, Interval(1.0, 0.5, 2.0)), (Interval(1.0, 0.5, 2.0), none)):
        found = ratio(a, b)
        assert found.value == a.value / b.value
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_one_sequence_is_compared_with_itself(tmp_path: Path) -> None:
    report = without_intervals(sample(sequences=1))
    found = depthprobe.compare(report, report)
    judged = found.verdict[found.verdict["value"].notna()]
    assert len(judged)
    assert not np.isinf(judged[["ci_low", "ci_high"]].astype(float)).any(axis=None)
    assert set(judged.loc[judged["ci_low"].isna(), "verdict"]) == {"undecided"}
    found.save(tmp_path / "same")
    assert Comparison.load(tmp_path / "same").to_json() == found.to_json()
    assert not found.differences["difference"].any()


def test_an_open_interval_is_kept_and_shown(tmp_path: Path) -> None:
    layers = sample().layers
    early = (layers["metric"] == "update_ratio") & (layers["unit"] == "block") & (layers["layer"] < 4)
    found = depthprobe.compare(replace(sample(), layers=layers.assign(ci_low=layers["ci_low"].where(~early, -0.1))))
    row = found.verdict[found.verdict["criterion"].str.startswith("‖Δ‖/‖x‖ falls")].iloc[0]
    assert row["ci_high"] == math.inf
    assert row["verdict"] == "undecided"
    found.save(tmp_path / "open")
    again = Comparison.load(tmp_path / "open")
    assert math.inf in set(again.verdict["ci_high"])
    assert again.to_json() == found.to_json()
    screen = io.StringIO()
    show_comparison(again, Console(file=screen, width=140))
    assert ", ∞)" in screen.getvalue()
    assert ", ∞)" in (tmp_path / "open" / "compare.html").read_text()
    assert interval(1.0, math.inf) == "[1.00, ∞)"
    assert interval(math.nan, math.inf) == interval(None, None) == ""


# --- what goes together ----------------------------------------------------------------------------------------------


def test_depth_in_other_units_or_on_other_texts_is_unfair() -> None:
    blocks = deepened(passing=(("stages", "3%", 8.0),))
    halves = replace(
        blocks, depth=blocks.depth.assign(unit="sublayer"), deep={**blocks.deep, "unit": "sublayer", "sequences": 4}
    )
    found = " ".join(depthprobe.compare(blocks, halves).warnings)
    assert "Depth counted in different units: blocks (sample-12 #1); sublayers (sample-12 #2)." in found
    assert "Depth estimated on different texts: 16 × 128 (sample-12 #1); 4 × 128 (sample-12 #2)." in found
    other = replace(blocks, deep={**blocks.deep, "sha256": "cd" * 32, "corpus": "poems"})
    assert "16 × 128 of poems" in " ".join(depthprobe.compare(blocks, other).warnings)
    same = " ".join(depthprobe.compare(blocks, blocks, sample()).warnings)
    assert "Depth" not in same


def test_a_run_that_cannot_be_analyzed_is_named(tmp_path: Path) -> None:
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.transformer.h[1].mlp.c_proj.weight.data *= 1e38
    model.save_pretrained(tmp_path / "broken")
    ids = np.arange(32).reshape(4, 8) % 20
    with pytest.raises(NonFiniteError, match=f"^{tmp_path / 'broken'}: .* not finite"):
        depthprobe.compare(sample(), tmp_path / "broken", data=ids, reports=tmp_path / "reports")


def test_a_group_is_not_called_like_another_run() -> None:
    with pytest.raises(UsageError, match="group 'sample-12' is called like a run"):
        depthprobe.compare(sample(), groups={"sample-12": [replace(sample(), model={**sample().model, "name": "b"})]})


def test_a_comparison_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(depthprobe.compare(sample()).to_json())
    with pytest.raises(OutputError, match="holds a comparison; expected a report or a checkpoint"):
        depthprobe.compare(tmp_path)
    with pytest.raises(OutputError, match="is a comparison; expected a report"):
        depthprobe.compare(tmp_path / "compare.json")


def test_an_interrupted_comparison_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("depthprobe.comparison.build.open_run", stop)
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", str(keep(json.dumps(document()), tmp_path / "a")), "--out", str(tmp_path / "out")])
    assert left.value.code == 130
    said = "depthprobe: interrupted; no comparison was written; reports that were done are kept"
    assert capsys.readouterr().err.strip() == said
    assert not (tmp_path / "out").exists()


# --- the same run under several names --------------------------------------------------------------------------------


def test_a_run_is_one_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(json.dumps(document()), tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for other in ("a", "a/", "./a", "../" + tmp_path.name + "/a", "a/report.json", "link"):
        with pytest.raises(UsageError, match="is in two groups"):
            depthprobe.compare(groups={"one": [tmp_path / "a"], "two": [other]})
        assert len(depthprobe.compare(other, groups={"one": [tmp_path / "a"]}).runs) == 1
