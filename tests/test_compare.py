"""Models side by side: what is compared, with which interval, at what level, what is unfair, what is written."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from report_samples import HOSTILE, ablated, blocks_only, half, headless, hostile, one_block, sample, sloped
from rich.console import Console
from scipy import stats

import depthprobe
from depthprobe import Comparison
from depthprobe.comparison.build import _compared
from depthprobe.comparison.levels import levels
from depthprobe.comparison.lines import lines_of
from depthprobe.comparison.measures import measures, parts
from depthprobe.comparison.runs import Point, Run, Training, named_apart
from depthprobe.contrast import difference, over_seeds, paired, ratio, smallest_effect, unpaired
from depthprobe.errors import OutputError, UsageError
from depthprobe.estimate import Interval
from depthprobe.report import compare_html
from depthprobe.report.compare_panels import available, draw
from depthprobe.report.compare_screen import show_comparison
from depthprobe.report.compare_tables import difference_tables, scalars
from depthprobe.report.panels import LIGHT


def named(report, name, print_=None, **model):
    return replace(report, model={**report.model, "name": name, "fingerprint": print_ or name, **model})


def keep(report, folder):
    """What `compare` reads of a saved report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.to_json())


def scaled(report, factor, metric="update_ratio"):
    """The report with all values of a metric times a factor."""
    layers = report.layers.copy()
    chosen = layers["metric"] == metric
    layers.loc[chosen, ["value", "ci_low", "ci_high"]] *= factor
    return replace(report, layers=layers)


def run(name, *points, seed=None, group=""):
    """A run of (report, tokens, loss) points."""
    made = [Point(report, Training(seed, k, tokens, loss, "text")) for k, (report, tokens, loss) in enumerate(points)]
    return Run(name, name, "made", tuple(made), seed, group)


def row(frame, **wanted):
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1, frame
    return frame.iloc[0]


# --- arithmetic ----------------------------------------------------------------------------------------------------


def test_a_difference_keeps_each_side_to_itself() -> None:
    found = difference(Interval(5.0, 2.0, 6.0), Interval(1.0, -3.0, 2.0))
    assert found.value == 4.0
    assert found.low == pytest.approx(4 - math.hypot(3, 1))  # a's lower, b's upper half
    assert found.high == pytest.approx(4 + math.hypot(1, 4))


def test_a_difference_of_independent_values_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 4000), rng.normal(1, 2, 4000)
    found = [
        difference(Interval(x, x - 1.96, x + 1.96), Interval(y, y - 3.92, y + 3.92)) for x, y in zip(a, b, strict=True)
    ]
    covered = np.mean([each.low < 2 < each.high for each in found])
    assert 0.94 < covered < 0.96


def test_a_ratio_is_as_wide_as_any_correlation_makes_it() -> None:
    found = ratio(Interval(4.0, 3.0, 5.0), Interval(2.0, 1.0, 2.5))
    assert (found.value, found.low, found.high) == (2.0, 3.0 / 2.5, 5.0)
    assert ratio(Interval(4.0, 3.0, 5.0), Interval(2.0, -1.0, 3.0)).high == math.inf


def test_seeds_agree_with_scipy() -> None:
    a, b = [1.0, 2.5, 2.0, 4.0, 3.5], [0.5, 2.0, 2.2, 3.0, 3.1]
    for found, test in (
        (over_seeds(a), stats.ttest_1samp(a, 0)),
        (paired(a, b), stats.ttest_rel(a, b)),
        (unpaired(a, b[:4]), stats.ttest_ind(a, b[:4], equal_var=False)),
    ):
        assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval()))
    assert math.isnan(over_seeds([1.0]).low)
    assert math.isnan(unpaired(a, [1.0]).low)
    assert unpaired([2.0, 2.0], [1.0, 1.0]) == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize(("sizes", "known"), [((5, None), 1.7), ((5, 5), 2.0), ((20, None), 0.66)])
def test_the_smallest_effect_is_found_four_times_of_five(sizes, known) -> None:
    effect = smallest_effect(*sizes)
    assert effect == pytest.approx(known, abs=0.03)
    rng = np.random.default_rng(1)
    a = rng.normal(effect, 1, (20_000, sizes[0]))
    if sizes[1] is None:
        p = stats.ttest_1samp(a, 0, axis=1).pvalue
    else:
        p = stats.ttest_ind(a, rng.normal(0, 1, (20_000, sizes[1])), axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.015)
    assert smallest_effect(1) == math.inf


# --- what is compared ----------------------------------------------------------------------------------------------


def test_states_and_units_stand_at_their_relative_depth() -> None:
    found = measures(sloped(sample(4)))
    norms = found[(found["metric"] == "residual_norm") & (found["unit"] == "block")]
    assert norms["relative_depth"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    for metric, unit in (("update_ratio", "block"), ("update_ratio", "mlp")):
        rows = found[(found["metric"] == metric) & (found["unit"] == unit)]
        assert rows["relative_depth"].tolist() == [0.125, 0.375, 0.625, 0.875]
    assert found["relative_depth"].dropna().between(0, 1).all()  # weights outside the blocks too


def test_thirds_are_medians_and_ends_go_along() -> None:
    found = parts(measures(sample(12)))
    values = [0.8 - 0.6 * layer / 11 for layer in range(12)]
    early = found["update_ratio", "block", "early"]
    assert early.value == pytest.approx(np.median(values[:4]))
    assert early.high == pytest.approx(np.median([1.04 * value + 0.002 for value in values[:4]]))
    assert found["update_ratio", "block", "late"].value == pytest.approx(np.median(values[8:]))
    assert found["growth_power", "model", "model"].value == 0.52
    # ρ stands at its own pairs, and as one number
    with_rho = parts(measures(ablated(sample(12))))
    assert with_rho["rho_slope", "model", "model"] == Interval(-0.7, pytest.approx(-0.9), pytest.approx(-0.5))
    assert ("rho", "block", "late") in with_rho


def test_the_loss_is_that_of_the_sweep_then_of_the_gradients_then_of_the_lens() -> None:
    def loss(report):
        return parts(measures(report))["loss", "model", "model"].value

    assert loss(ablated(sample())) == 2.861
    assert loss(sloped(sample())) == 3.1
    assert loss(sample()) == 3.0
    assert loss(sloped(sample(), fresh=3)) == 3.0  # a fresh model's loss is none of the model's
    assert ("loss", "model", "model") not in parts(measures(headless()))


def test_a_known_difference_is_found_with_its_interval() -> None:
    a, b = named(sample(), "a"), named(scaled(sample(), 2.0), "b")
    found = depthprobe.compare(b, a)
    middle = np.median([0.8 - 0.6 * layer / 11 for layer in range(4, 8)])
    got = row(found.differences, metric="update_ratio", unit="block", where="middle")
    assert (got["a"], got["b"]) == ("b", "a")
    assert (got["value_a"], got["value_b"], got["difference"]) == pytest.approx((2 * middle, middle, middle))
    reach = 0.04 * middle + 0.002
    assert got["ci_high"] - got["difference"] == pytest.approx(math.hypot(2 * reach, reach))
    assert "as if independent" in got["method"]
    same = row(found.differences, metric="growth_power", where="model")
    assert same["difference"] == 0
    assert same["ci_low"] < 0 < same["ci_high"]
    shown = difference_tables(found)[0]
    apart = {(cell["metric"], cell["unit"], cell["where"]) for cell in shown["rows"] if cell["apart"]}
    assert ("update_ratio", "block", "middle") in apart
    assert {metric for metric, _, _ in apart} == {"update_ratio"}


def test_no_difference_is_drawn_below_rounding() -> None:
    coarse = named(half(), "coarse")
    found = depthprobe.compare(coarse, named(scaled(half(), 1.05), "other")).differences
    got = row(found, metric="update_ratio", unit="block", where="late")
    assert abs(got["difference"]) < 0.05
    assert "rounding" in got["method"]


# --- groups --------------------------------------------------------------------------------------------------------

FACTORS = {"a": (1.0, 1.1, 0.9, 1.05, 0.95), "b": (1.5, 1.62, 1.38, 1.56, 1.44)}


def seeds(name, numbers=(1, 2, 3, 4, 5), report=None):
    base = report or sample()
    return [
        run(f"{name}-s{number}", (named(scaled(base, factor), f"{name}{number}"), 100, None), seed=number, group=name)
        for number, factor in zip(numbers, FACTORS[name], strict=False)
    ]


def test_a_group_is_a_line_whose_unit_is_the_seed() -> None:
    found = _compared(seeds("a"), None)
    assert [line["name"] for line in found.lines] == ["a"]
    late = 0.8 - 0.6 * 10 / 11
    got = row(found.table, run="", group="a", metric="update_ratio", unit="block", layer=10)
    values = [late * factor for factor in FACTORS["a"]]
    expected = stats.ttest_1samp(values, 0).confidence_interval()
    assert got["n"] == 5
    assert got["value"] == pytest.approx(np.mean(values))
    assert (got["ci_low"], got["ci_high"]) == pytest.approx(tuple(expected))
    # the seeds stand there too, and in no other group
    assert set(found.table["run"]) == {"", *(f"a-s{k}" for k in range(1, 6))}
    assert scalars(found).headings == ("a",)


def test_groups_of_equal_seeds_are_paired() -> None:
    b = seeds("b")
    found = _compared([*seeds("a"), *reversed(b)], None)  # the order of the runs does not matter
    late = np.median([0.8 - 0.6 * layer / 11 for layer in range(8, 12)])
    a_values, b_values = ([late * factor for factor in FACTORS[name]] for name in "ab")
    expected = stats.ttest_rel(a_values, b_values).confidence_interval()
    got = row(found.differences, metric="update_ratio", unit="block", where="late")
    assert (got["ci_low"], got["ci_high"]) == pytest.approx(tuple(expected))
    assert "5 pairs of equal seeds" in got["method"]
    assert "1.7 SD" in got["method"]
    assert any("paired" in note for note in found.notes)


def test_groups_of_other_seeds_are_independent() -> None:
    found = _compared([*seeds("a"), *seeds("b", (11, 12, 13, 14))], None)
    late = np.median([0.8 - 0.6 * layer / 11 for layer in range(8, 12)])
    a_values, b_values = [late * x for x in FACTORS["a"]], [late * x for x in FACTORS["b"][:4]]
    expected = stats.ttest_ind(a_values, b_values, equal_var=False).confidence_interval()
    got = row(found.differences, metric="update_ratio", unit="block", where="late")
    assert (got["ci_low"], got["ci_high"]) == pytest.approx(tuple(expected))
    assert "Welch" in got["method"]


def test_a_single_run_beside_a_group_has_no_interval() -> None:
    found = _compared([*seeds("a"), run("alone", (named(sample(), "alone"), 100, None))], None)
    got = row(found.differences, metric="update_ratio", unit="block", where="late")
    assert math.isnan(got["ci_low"])
    assert "one run against 5 seeds" in got["method"].replace("1 run", "one run")


def test_a_group_is_of_one_model() -> None:
    with pytest.raises(UsageError, match="6 and 12 blocks"):
        lines_of([*seeds("a"), *seeds("a", report=sample(6))])
    twice = run("again", (named(sample(), "a1"), 100, None), group="a")
    with pytest.raises(UsageError, match="the same weights twice"):
        lines_of([*seeds("a"), twice])
    with pytest.raises(UsageError, match="two groups"):
        depthprobe.compare(groups={"a": ["x"], "b": ["x"]})


# --- levels --------------------------------------------------------------------------------------------------------


def test_equal_loss_lies_on_the_line_between_checkpoints() -> None:
    """update_ratio is 1 + loss times the sample's, in both runs, so that nothing is left of the difference."""

    def trained(name, *losses):
        return run(name, *((named(scaled(sample(), 1 + loss), name), 10 * k, loss) for k, loss in enumerate(losses)))

    runs = [trained("fast", 5.0, 2.0, 1.0), trained("slow", 4.5, 3.0, 1.6)]
    found, notes = levels(runs)
    assert [level.name for level in found] == ["equal tokens", "equal loss"]
    assert notes == []
    assert "1.600" in found[1].words
    first, second = (parts(frame) for frame in found[1].frames)
    key = ("update_ratio", "block", "middle")
    expected = 2.6 * np.median([0.8 - 0.6 * layer / 11 for layer in range(4, 8)])
    assert first[key].value == pytest.approx(expected)
    assert second[key].value == pytest.approx(expected)
    assert first["val_loss", "model", "model"].value == pytest.approx(1.6)
    rows = _compared(runs, None).differences
    at_loss = row(rows[rows["method"].str.contains("equal validation loss")], metric=key[0], unit=key[1], where=key[2])
    assert at_loss["difference"] == pytest.approx(0, abs=1e-12)


def test_equal_tokens_lie_between_checkpoints_too() -> None:
    long = run("long", *((named(scaled(sample(), 1 + k), "long"), 100 * k, None) for k in range(4)))
    short = run("short", (named(sample(), "short"), 150, None))
    found, _ = levels([long, short])
    assert [level.name for level in found] == ["as they are", "equal tokens"]
    assert "150" in found[1].words
    values = parts(found[1].frames[0])["update_ratio", "block", "early"]
    plain = parts(measures(sample()))["update_ratio", "block", "early"]
    assert values.value == pytest.approx(2.5 * plain.value)
    # a run that has nothing around that many tokens
    found, notes = levels([run("long", (sample(), 300, None)), short])
    assert [level.name for level in found] == ["as they are"]
    assert "long has no checkpoints around 150" in notes[0]
    found, notes = levels([run("unknown", (sample(), None, None)), short])
    assert "how long unknown was trained is not recorded" in notes[0]


def test_losses_that_do_not_overlap_or_compare_are_refused() -> None:
    a = run("a", (sample(), 0, 5.0), (sample(), 10, 3.0))
    b = run("b", (sample(), 0, 2.5), (sample(), 10, 2.0))
    found, notes = levels([a, b])
    assert [level.name for level in found] == ["equal tokens"]
    assert "do not overlap (a 3.000 to 5.000, b 2.000 to 2.500)" in notes[0]
    other = replace(b, points=tuple(replace(p, training=replace(p.training, text="other")) for p in a.points))
    assert "different texts" in levels([a, other])[1][0]
    assert "no validation loss of c" in levels([a, run("c", (sample(), 10, None))])[1][0]


def test_a_loss_that_was_crossed_twice_is_taken_the_last_time() -> None:
    bumpy = run("bumpy", *((scaled(sample(), 1 + k), 10 * k, loss) for k, loss in enumerate((3.0, 1.0, 3.0, 1.5))))
    level = levels([bumpy, run("flat", (sample(), 30, 2.25))])[0][-1]
    value = parts(level.frames[0])["update_ratio", "block", "early"].value
    assert value == pytest.approx(3.5 * parts(measures(sample()))["update_ratio", "block", "early"].value)


# --- fairness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus": {"sha256": "cd" * 32}}, "Different texts"),
        ({"model": {"vocab_size": 50_000}}, "Different tokenizers"),
        ({"corpus": {"first_tokens": ["Th", "e"]}}, "Different tokenizers"),
        ({"corpus": {"tokens": 128}}, "Different lengths"),
        ({"corpus": {"skip_first": 0}}, "Different positions left out"),
        ({"model": {"dtype": "bfloat16"}}, "Different dtypes"),
        ({"model": {"objective": "masked"}}, "Different objectives"),
        ({"model": {"width": 128}}, "Different widths"),
    ],
)
def test_what_is_unfair_is_said(change, words) -> None:
    a = named(sample(), "a")
    b = named(sample(), "b")
    b = replace(b, **{part: {**getattr(b, part), **values} for part, values in change.items()})
    found = depthprobe.compare(a, b).warnings
    assert [warning.split(":")[0] for warning in found] == [words]
    assert "a" in found[0]


def test_gradients_of_sequences_of_another_length_are_unfair() -> None:
    """A token's share of the loss goes with one over their length."""
    a, b = named(sloped(sample()), "a"), named(sloped(sample()), "b")
    assert depthprobe.compare(a, b).warnings == []
    shorter = replace(b, gradients={**b.gradients, "tokens": b.gradients["tokens"] // 4})
    (found,) = depthprobe.compare(a, shorter).warnings
    assert found.startswith("Gradients taken on different texts: ")


def test_changed_models_on_another_text_are_unfair() -> None:
    a, b = named(ablated(sample()), "a"), named(ablated(sample()), "b")
    assert depthprobe.compare(a, b).warnings == []
    other = replace(b, merging={**b.merging, "sha256": "ef" * 32, "corpus": "code.txt"})
    (found,) = depthprobe.compare(a, other).warnings
    assert found.startswith("Models changed on different texts: ")
    assert "of code.txt" in found
    assert ("loss", "model", "model") in parts(measures(b))
    assert parts(measures(other))["loss", "model", "model"].value == 3.0, "of the report's own text"


def test_rho_of_another_cost_is_left_out() -> None:
    a, b = named(ablated(sample()), "a"), named(ablated(sample(post=True)), "b")
    assert any(metric.startswith("rho") for metric in depthprobe.compare(a, b).differences["metric"])
    rho = {**b.merging["rho"], "cost": "state_distance"}
    found = depthprobe.compare(a, replace(b, merging={**b.merging, "rho": rho}))
    assert any(
        warning.startswith("Costs of changes of different kinds: KL (a); distance") for warning in found.warnings
    )
    assert not any(metric.startswith("rho") for metric in found.differences["metric"])
    pairs = found.verdict[found.verdict["run"] == "a − b"]
    assert not pairs["criterion"].str.contains("ρ falls faster").any()


def test_a_fair_comparison_has_no_warning() -> None:
    assert depthprobe.compare(named(sample(), "a"), named(sample(post=True), "b")).warnings == []


def test_too_few_documents_for_a_verdict_are_said() -> None:
    few, many = named(sample(), "a"), named(sample(), "b")
    few = replace(few, corpus={**few.corpus, "documents": 2})
    notes = depthprobe.compare(few, many).notes
    assert "a: intervals rest on 2 documents, and a verdict needs 8: --tokens reads more." in notes
    assert not any("rest on" in note for note in depthprobe.compare(many, named(sample(post=True), "c")).notes)


def test_other_warnings() -> None:
    shorter = depthprobe.compare(named(sample(), "a"), named(sample(6), "b"))
    assert any("numbers of blocks: 12 (a); 6 (b)" in warning for warning in shorter.warnings)
    apart = depthprobe.compare(named(sample(), "a"), named(blocks_only(), "b"))
    assert any(warning.startswith("Different units") for warning in apart.warnings)
    assert any("attention and MLP apart" in note for note in apart.notes)
    fresh = depthprobe.compare(named(sample(), "a"), named(sloped(fresh=10), "b"))
    assert any("random initialisation" in warning for warning in fresh.warnings)
    failed = run("stuck", (sample(), 10, 3.1))
    failed = replace(failed, points=(replace(failed.points[0], training=Training(failed="stuck at the unigram")),))
    assert "a failed run, not a worse model" in _compared([failed], None).warnings[0]


@pytest.mark.parametrize("names", [("pre[warm]", "pre[cold]"), ("a[/b]", "b")])
def test_names_are_no_markup(names) -> None:
    out = io.StringIO()
    show_comparison(depthprobe.compare(*(named(sample(), name) for name in names)), Console(file=out, width=120))
    assert all(name in out.getvalue() for name in names)


def test_a_name_that_begins_with_an_underscore_is_in_the_legend() -> None:
    found = depthprobe.compare(named(sample(), "_old"), named(sample(post=True), "new"))
    panel = available(found)[0]
    axes = np.atleast_1d(Figure().subplots(len(panel.metrics)))
    draw(found, panel, axes, LIGHT)
    assert [text.strip() for text in axes[0].get_legend_handles_labels()[1]] == ["_old", "new"]


# --- edges ---------------------------------------------------------------------------------------------------------


def test_one_run_has_a_table_and_a_verdict_and_no_differences() -> None:
    found = depthprobe.compare(ablated())
    assert found.differences.empty
    assert not found.table.empty
    assert set(found.verdict["verdict"]) > {"cannot be judged here"}
    assert Comparison.from_json(found.to_json()).to_json() == found.to_json()


def test_the_same_run_twice_and_equal_names_are_told_apart(tmp_path) -> None:
    report = named(sample(), "model")
    found = depthprobe.compare(report, report)
    assert [run["name"] for run in found.runs] == ["model #1", "model #2"]
    assert "model #1, model #2 are the same weights." in found.warnings
    assert (found.differences["difference"] == 0).all()
    for folder in ("a", "b"):
        keep(named(sample(), folder), tmp_path / folder / "model")
    found = depthprobe.compare(tmp_path / "a" / "model", tmp_path / "b" / "model")
    assert [run["name"] for run in found.runs] == ["a/model", "b/model"]
    assert [run.name for run in named_apart([run("x", (sample(), 1, 1.0)), run("y", (sample(), 1, 1.0))])] == ["x", "y"]


def test_many_runs_are_each_put_beside_the_first(monkeypatch) -> None:
    found = depthprobe.compare(*(named(sample(4, lens=False), f"m{k}") for k in range(12)))
    assert set(found.differences["a"]) == {"m0"}
    assert set(found.differences["b"]) == {f"m{k}" for k in range(1, 12)}
    assert any("12 lines" in note for note in found.notes)
    monkeypatch.setattr(compare_html, "render", lambda *_: b"")
    assert "the first 10 of 12 lines" in compare_html.page(found)
    ax = Figure().subplots()
    draw(found, available(found)[0], [ax], LIGHT)
    styles = {(line.get_color(), line.get_marker()) for line in ax.lines}
    assert len(styles) == len(ax.lines) == 10


@pytest.mark.parametrize(
    "report", [headless(), blocks_only(), one_block(), ablated(headless(), head=False), sample(2, sequences=1)]
)
def test_reduced_reports_are_compared_as_far_as_they_go(report) -> None:
    found = depthprobe.compare(named(report, "less"), named(sample(), "more"))
    assert not found.table.empty
    assert "NaN" not in found.to_json()
    assert Comparison.from_json(found.to_json()).to_json() == found.to_json()
    show_comparison(found, Console(file=io.StringIO()))
    for panel in available(found):
        draw(found, panel, list(Figure().subplots(len(panel.metrics), 1, squeeze=False)[:, 0]), LIGHT)
    if report.model["objective"] is None:
        assert any("language-model head" in note and "less" in note for note in found.notes)
    assert any("changed models" in note for note in found.notes)


def test_reports_that_cannot_be_read_are_named(tmp_path) -> None:
    folder = tmp_path / "good"
    keep(sample(), folder)
    text = (folder / "report.json").read_text()
    (tmp_path / "old.json").write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(OutputError, match=r"old\.json has schema version 99; expected 1"):
        depthprobe.compare(folder, tmp_path / "old.json")
    (tmp_path / "broken.json").write_text(text[:-40])
    with pytest.raises(OutputError, match=r"broken\.json is not JSON"):
        depthprobe.compare(tmp_path / "broken.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match="neither a report nor a checkpoint"):
        depthprobe.compare(tmp_path / "empty")
    document = json.loads(text)
    for optional in ("ablations", "merging", "gradients", "depth", "deep", "phases"):
        del document[optional]
    (tmp_path / "early.json").write_text(json.dumps(document))  # of before there were these tables
    assert any("No report has" not in note for note in depthprobe.compare(tmp_path / "early.json").notes)
    with pytest.raises(UsageError, match="nothing to compare"):
        depthprobe.compare()
    with pytest.raises(UsageError, match="a list of runs"):
        depthprobe.compare([tmp_path / "a", tmp_path / "b"])


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "out"
    reports = named(ablated(sloped()), "pre"), named(ablated(sloped(sample(6, post=True))), "post")
    for report in reports:
        keep(report, folder.parent / report.model["name"])
    found = depthprobe.compare(folder.parent / "pre", folder.parent / "post")
    return found, found.save(folder).parent, reports


def test_files_hold_the_same_numbers_as_python(saved) -> None:
    found, folder, reports = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "compare.csv", "compare.html", "compare.json", "differences.csv", "figures", "verdict.csv"]  # fmt: skip
    for name, table in (("compare", found.table), ("differences", found.differences), ("verdict", found.verdict)):
        again = pd.read_csv(folder / f"{name}.csv", keep_default_na=False, na_values=[""])
        assert list(again.columns) == list(table.columns)
        for column in ("value", "ci_low", "ci_high", "difference"):
            if column in table:
                np.testing.assert_array_equal(again[column], table[column])
    assert Comparison.load(folder).to_json() == found.to_json() == Comparison.load(folder / "compare.json").to_json()
    # from reports in memory, the same again
    memory = depthprobe.compare(*reports)
    pd.testing.assert_frame_equal(memory.table, found.table)
    pd.testing.assert_frame_equal(memory.differences, found.differences)
    pd.testing.assert_frame_equal(memory.verdict, found.verdict)


def test_every_figure_there_are_numbers_for_is_written(saved) -> None:
    found, folder, _ = saved
    names = {f"compare_{panel.name}.png" for panel in available(found)}
    assert {path.name for path in (folder / "figures").iterdir()} == names
    assert len(names) == 7
    page = (folder / "compare.html").read_text()
    assert page.count("<img ") == 7
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_saving_again_replaces_its_own_files_and_no_others(tmp_path) -> None:
    keep(sample(), tmp_path)
    (tmp_path / "figures").mkdir()
    for mine in ("growth.png", "compare_rho.png"):
        (tmp_path / "figures" / mine).write_text("of before")
    (tmp_path / "differences.csv").write_text("of before")
    before = (tmp_path / "report.json").read_bytes()
    depthprobe.compare(named(headless(), "a")).save(tmp_path, figures="svg")
    assert (tmp_path / "report.json").read_bytes() == before
    assert (tmp_path / "figures" / "growth.png").exists()
    assert not (tmp_path / "figures" / "compare_rho.png").exists()
    assert not (tmp_path / "differences.csv").exists()
    assert (tmp_path / "figures" / "compare_growth.svg").exists()


def test_a_formula_at_the_beginning_of_a_sentence_stays_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(compare_html, "render", lambda *_: b"")
    page = compare_html.page(depthprobe.compare(ablated()))
    assert "<dd>ρ falls with depth" in page
    assert "<dd>Updates have equal size" in page


def test_names_are_text_and_nothing_else(monkeypatch) -> None:
    attacked = named(hostile(), HOSTILE)
    monkeypatch.setattr(compare_html, "render", lambda *_: b"")
    page = compare_html.page(depthprobe.compare(attacked, named(sample(), "plain")))
    assert "<script>" not in page
    assert "\u202e" not in page
    assert "{{ 7 * 7 }}" in page.replace("&#39;", "'")


def test_a_comparison_of_another_version_or_kind_is_refused(saved, tmp_path) -> None:
    _, folder, _ = saved
    text = (folder / "compare.json").read_text()
    (tmp_path / "compare.json").write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(OutputError, match="schema version 2"):
        Comparison.load(tmp_path)
    with pytest.raises(OutputError, match="not a comparison"):
        Comparison.from_json(sample().to_json())
    with pytest.raises(OutputError, match="'runs' of the comparison is broken"):
        Comparison.from_json('{"schema_version": 1, "kind": "comparison"}')
    with pytest.raises(OutputError, match="cannot read"):
        Comparison.load(tmp_path / "nowhere")


def test_depth_estimates_stand_side_by_side() -> None:
    columns = ["name", "unit", "variant", "value", "ci_low", "ci_high", "of", "passes_gate", "note"]
    rows = [
        ("stages", "block", "3%", 5.0, 4.5, 5.5, 12, True, ""),
        ("dependence", "block", "", 3.0, 2.8, 3.2, 12, False, ""),
    ]
    report = replace(sample(), depth=pd.DataFrame(rows, columns=columns), deep={"sequences": 16})
    found = depthprobe.compare(named(report, "a"), named(report, "b"))
    assert row(found.table, run="a", metric="stages 3%")["n"] == 16
    assert row(found.differences, metric="stages 3%")["difference"] == 0
    other = depthprobe.compare(
        named(replace(report, depth=report.depth.assign(value=[6.0, 1.0])), "a"), named(report, "b")
    )
    (differences,) = difference_tables(other)
    cells = {
        cell["metric"]: cell for cell in differences["rows"] if cell["unit"] == "block" and cell["where"] == "model"
    }
    assert not cells["dependence"]["apart"], "a diagnostic"
    assert cells["dependence"]["shown"].endswith("does not pass the gate")
    assert "gate" not in cells["stages 3%"]["shown"]
    # on the first screen only what passes the gate, model by model
    shown = dict(scalars(found).rows)
    assert shown["depth: stages 3%, blocks"] == ("5.00 [4.50, 5.50]", "5.00 [4.50, 5.50]")
    assert not any("dependence" in words for words in shown)
    failed = replace(report, depth=report.depth.assign(passes_gate=False))
    apart = dict(scalars(depthprobe.compare(named(report, "a"), named(failed, "b"))).rows)
    assert apart["depth: stages 3%, blocks"] == ("5.00 [4.50, 5.50]", "")
    seeds = [run("s1", (named(report, "a"), 1, None), group="g"), run("s2", (named(failed, "b"), 1, None), group="g")]
    assert _compared(seeds, None).lines[0]["gate"] == []
