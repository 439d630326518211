"""The sentences: true of each kind of model, and different where the numbers are."""

import io
import math
import re
from dataclasses import replace

import pytest
from report_samples import HOSTILE, VARIANTS, ablated, bare, blocks_only, half, headless, interval, one_block, sample
from rich.console import Console

from depthprobe.report import screen, tables
from depthprobe.report.findings import findings, sentences
from depthprobe.report.headline import headline
from depthprobe.report.html import page


def said(report):
    return {finding.topic: f"{finding.text} {finding.more}" for finding in findings(report)}


def changed(report, metric, change, unit="block"):
    layers = report.layers.copy()
    rows = (layers["metric"] == metric) & (layers["unit"] == unit)
    for column in ("value", "ci_low", "ci_high"):
        layers.loc[rows, column] = change(layers.loc[rows, column])
    return replace(report, layers=layers)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_model_gets_whole_sentences(name):
    for sentence in [*sentences(VARIANTS[name]()), headline(VARIANTS[name]())]:
        assert "nan" not in sentence
        assert "None" not in sentence
        assert "–," not in sentence
    assert all(sentence.endswith(".") for sentence in sentences(VARIANTS[name]()))


def test_growth():
    text = said(sample())["Growth"]
    assert "10.0 at x_0, 39.0 at x_12 (× 3.90), closest to a constant rate, × 1.120 [1.115, 1.125] a block" in text
    assert "R² is 0.99 for a constant rate, 0.91 for a power law" in text
    assert "makes up 0.350 [0.330, 0.370] of the change in squared norm" in text
    report = sample()
    assert (
        "a power law, exponent 0.520 [0.500, 0.540]"
        in said(replace(report, growth={**report.growth, "r2_power": 1.0}))["Growth"]
    )
    poor = replace(report, growth={**report.growth, "r2_power": 0.2, "r2_rate": 0.1})
    assert "no fitted law that describes it well" in said(poor)["Growth"]
    humped = changed(report, "residual_norm", lambda v: 100 - (v - 25) ** 2 / 10)
    assert "largest at x_8" in said(humped)["Growth"]


def test_the_two_laws_are_compared_over_the_same_states():
    """Exponential from x_1 on, with a small embedding before it: a rate over x_0 too would fit badly."""
    growth = {**sample().growth, "growth_rate_after": interval(1.1, 0.005), "r2_rate_after": 1.0, "r2_rate": 0.59}
    text = said(replace(sample(), growth=growth))["Growth"]
    assert "closest to a constant rate, × 1.100" in text
    assert re.search(r"R² is 1\S* for a constant rate, 0.91 for a power law", text)


def test_a_parallel_model_is_said_to_be_so_once():
    report = sample()
    anatomy = {**report.anatomy, "summary": "pre, parallel (not so in block 3)", "parallel": True}
    assert "12 blocks, pre (not so in block 3) norm, parallel, width 64" in headline(replace(report, anatomy=anatomy))


@pytest.mark.parametrize(
    ("count", "words"), [(999_885_952, "1 B"), (999_400_000, "999 M"), (999_600, "1 M"), (1_234, "1.23 k")]
)
def test_sizes(count, words):
    report = sample()
    assert f"{words} parameters" in headline(replace(report, model={**report.model, "parameters": count}))


def test_few_documents_are_few_however_many_sequences():
    report = sample()
    few = replace(report, corpus={**report.corpus, "documents": 2})
    assert "only 2 documents" in said(few)["Few documents"]
    part = ablated(replace(report, corpus={**report.corpus, "documents": 20}))
    part = replace(part, merging={**part.merging, "clusters": 8})
    assert "at most 20 documents" in said(part)["Few documents"]
    (found,) = (finding for finding in findings(part) if finding.topic == "Few documents")
    assert "rest on 8 of them" in found.more
    assert not {"Few documents", "Few sequences"} & said(report).keys()


def test_post_norm_streams_are_not_said_to_grow():
    text = said(headless())["Growth"]
    assert "does not accumulate" in text
    assert "closest to" not in text
    assert "cross term" not in text
    assert "Lens" not in said(headless())


def test_laws_are_not_fitted_to_two_states():
    assert "closest" not in said(one_block())["Growth"]
    assert "Interaction" not in said(one_block())


@pytest.mark.parametrize(("low", "high", "word"), [(1.01, 1.2, "growing"), (0.8, 0.99, "shrinking"), (0.9, 1.1, "not told apart"), (None, None, "not told apart")])  # fmt: skip  # noqa: E501
def test_update_size_reads_its_interval(low, high, word):
    report = sample()
    rate = {"value": 1.0, "ci_low": low, "ci_high": high}
    assert word in said(replace(report, growth={**report.growth, "update_growth_rate": rate}))["Update size"]


def test_ratio_early_and_late():
    assert "0.718 of the stream in the first third of the blocks, 0.282 in the last" in said(sample())["Update ratio"]
    assert "least in block 11: 0.200 [0.190, 0.210]" in said(sample())["Update ratio"]


def test_alignment_counts_only_signs_that_the_interval_tells():
    text = said(sample())["Alignment"]
    assert "The blocks' update points along the stream in blocks 0–4, against the stream in blocks 5–11 (the" in text
    assert "(the sign changes once)" in text
    assert "The MLP's" in text
    assert "The MLP's" not in said(blocks_only())["Alignment"]
    assert "no sign that this sample can tell in block 5" in said(half())["Alignment"]
    assert "no sign that this sample can tell in block 0" in said(one_block())["Alignment"]


def test_interaction_against_its_control():
    text = said(sample())["Interaction"]
    assert "Block 11 needs block 10's update least: interaction error 0.236 [0.225, 0.248], below its control" in text
    assert "5 below, 3 above, 3 not apart from the control" in text
    assert "above its control" in said(changed(sample(), "interaction_error", lambda v: v + 1))["Interaction"]
    assert "11 not apart from the control" in said(half())["Interaction"]  # the difference is below rounding


def test_angles_and_lens():
    assert "Blocks 8–11 together turn the stream by 0.0800 [0.0780, 0.0820]: at 4 of 12" in said(sample())["Angles"]
    report = sample()
    far = replace(report, pairs=report.pairs.assign(value=report.pairs["value"] + 0.2))
    assert "No two states are within" in said(far)["Angles"]
    assert "over 50% from x_9, 90% only at x_12" in said(sample())["Lens"]
    dip = report.layers["metric"].eq("lens_top1") & report.layers["layer"].eq(11)
    layers = report.layers.copy()
    layers.loc[dip, "value"] = 0.4
    assert "over 50% only at x_12" in said(replace(report, layers=layers))["Lens"]


def test_sinks_and_sequences():
    assert "left out of the averages" in said(sample())["Sinks"]
    report = sample()
    counted = replace(report, corpus={**report.corpus, "skip_first": 0})
    assert "counted in the averages" in said(counted)["Sinks"]
    assert "No position" in said(bare())["Sinks"]
    assert "Few sequences" not in said(sample())
    assert "only 8 sequences" in said(sample(sequences=8))["Few sequences"]
    assert "one sequence only" in said(one_block())["Few sequences"]
    assert "bfloat16" in said(half())["Precision"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (1234567, "1,234,567"), (0.123456, "0.123"), (-0.5, "−0.500"), (21987.4, "21,987"), (9.999, "10.0"),
     (1.2e-7, "1.20e−7"), (3e9, "3.00e9"), (None, "–"), (math.nan, "–"), (math.inf, "–"), (1, "1")],
)  # fmt: skip
def test_numbers(value, text):
    assert tables.number(value) == text


def test_ranges():
    assert tables.ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert tables.ranges([]) == ""


def test_anatomy_groups_equal_blocks():
    report = sample()
    blocks = [dict(block) for block in report.anatomy["blocks"]]
    for index in (3, 7):
        blocks[index] = {
            **blocks[index],
            "mlp": {"placement": "pre", "module": f"h.{index}.mlp", "scale": 0.22, "skip_scale": 1},
        }
    rows = tables.anatomy_rows({**report.anatomy, "blocks": blocks})
    assert [row["blocks"] for row in rows] == ["0–2, 4–6, 8–11", "3, 7"]
    assert rows[1]["mlp"] == "pre (h.*.mlp), branch × 0.220"
    assert tables.anatomy_rows(blocks_only().anatomy) == [
        {"blocks": "0–11", "attention": "not found", "mlp": "not found"}
    ]


def test_layer_table_spreads_its_lines():
    table = tables.layer_table(sample(30), 6)
    assert [layer for layer, _ in table.rows] == [0, 6, 12, 18, 24, 30]
    assert table.rows[-1][1][1] == ""  # the last state has no update


@pytest.mark.parametrize("name", VARIANTS)
def test_the_terminal_gets_one_plain_screen(name):
    out = io.StringIO()
    screen.show(VARIANTS[name](), Console(file=out, width=80, highlight=False))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 39
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in out.getvalue()
    assert "Growth" in out.getvalue()
    assert ("failed" in out.getvalue()) == (name == "blocks_only")


def test_page_escapes_names_and_is_self_contained():
    text = page(replace(VARIANTS["hostile"](), layers=bare().layers, pairs=bare().pairs, growth=bare().growth))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "{{ 7 * 7 }}" in text
    assert "\u202e" in HOSTILE
    assert "\u202e" not in text
    assert not re.search(r"(src|href|srcset)=\"(?!data:|#)", text)
    assert "url(" not in text
    assert "@import" not in text


def test_page_says_why_something_is_missing():
    text = page(bare())
    assert "Not shown: CKA and linearity were refused" in text
    assert "logit lens" not in text.lower()
    assert "Not shown: The logit lens was left out" in page(headless())
    assert "✗ fails" in page(blocks_only())
    assert text.count("<img") == 1


def test_page_of_thirty_blocks_is_small_and_carries_every_formula_it_draws():
    text = page(sample(30))
    for name in (
        "interaction_error_control",
        "cka_adjacent",
        "angular_distance",
        "growth_rate",
        "lens_kl",
        "update_share",
    ):
        assert f"<code>{name}</code>" in text
    assert "x<sub>l+1</sub>" in text
    assert "depthprobe analyze models/sample-12" in text
    assert len(text.encode()) < 2_500_000


def test_notebook_fragment_is_escaped():
    text = VARIANTS["hostile"]()._repr_html_()
    assert "<script" not in text
    assert "interaction" in text
