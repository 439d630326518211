"""What models say of the claims: every criterion on reports whose answer is known, and when none is given."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from report_samples import ablated, blocks_only, half, interval, sample, sloped
from scipy import stats

from depthprobe.criteria import CLAIMS, CRITERIA, MARGIN
from depthprobe.depth.gate import FEWEST, static_gate
from depthprobe.estimate import Interval
from depthprobe.evidence import rho_slope
from depthprobe.report.schema import DEPTH_COLUMNS
from depthprobe.verdict import CANNOT, VERDICTS, Case, judge, verdict

NAMES = (
    "G1",
    "G2",
    "G4",
    "W1",
    "W2",
    "V1",
    "R1",
    "R2",
    "M1",
    "M2",
    "M3",
    "D1",
    "D2",
    "D4",
    "D3",
    "P1",
    "P2",
    "S1",
    "N1",
)


def case(report, name="model", **more):
    return Case(name, (report,), **more)


def rows(table, claim, words="", run=None):
    found = table[(table["claim"] == claim) & table["criterion"].str.contains(words, regex=False)]
    return found if run is None else found[found["run"] == run]


def one(table, claim, words, run="model"):
    found = rows(table, claim, words, run)
    assert len(found) == 1, found
    return found.iloc[0]


def shaped(report, metric, values, spread=0.01, unit="block"):
    """The report with a metric's values by layer, each with an interval of this half-width relative to it."""
    layers = report.layers.copy()
    chosen = (layers["metric"] == metric) & (layers["unit"] == unit)
    numbers = np.array([values(layer) for layer in layers.loc[chosen, "layer"]], dtype=float)
    layers.loc[chosen, "value"] = numbers
    layers.loc[chosen, "ci_low"], layers.loc[chosen, "ci_high"] = numbers * (1 - spread), numbers * (1 + spread)
    return replace(report, layers=layers)


# --- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "region", "expected"),
    [
        ((0.2, 0.4), (-math.inf, 0.5), "supported"),
        ((0.6, 0.8), (-math.inf, 0.5), "contradicted"),
        ((0.2, 0.6), (-math.inf, 0.5), "undecided"),  # the mean lies on the right side
        ((0.2, 0.5), (-math.inf, 0.5), "undecided"),
        ((0.5, 0.8), (-math.inf, 0.5), "contradicted"),
        ((0.95, 1.05), (0.9, 1.1), "supported"),
        ((0.85, 1.05), (0.9, 1.1), "undecided"),
        ((0.8, 1.2), (0.9, 1.1), "undecided"),  # too wide to be equivalent
        ((0.7, 0.9), (0.9, 1.1), "contradicted"),
        ((1.1, 1.3), (0.9, 1.1), "contradicted"),
        ((math.nan, math.nan), (0.9, 1.1), "undecided"),
    ],
)
def test_the_whole_interval_must_lie_on_one_side(ends, region, expected) -> None:
    assert judge(Interval(sum(ends) / 2, *ends), *region) == expected


def test_an_effect_that_is_not_there_is_seldom_supported() -> None:
    """At the region's edge itself, a claim is supported in 2.5 % of samples."""
    values = np.random.default_rng(0).normal(0.0, 1.0, 20_000)
    found = [judge(Interval(v, v - 1.96, v + 1.96), -math.inf, 0.0) for v in values]
    assert np.mean([word == "supported" for word in found]) == pytest.approx(0.025, abs=0.005)


# --- the table -----------------------------------------------------------------------------------------------------


def test_all_claims_are_listed_in_their_order_once_or_more() -> None:
    assert tuple(claim.name for claim in CLAIMS) == NAMES
    assert MARGIN == 0.10
    for given in ([case(sample())], [case(ablated(sample(6, post=True)))], [case(blocks_only())]):
        table = verdict(given)
        assert tuple(dict.fromkeys(table["claim"])) == NAMES
        assert set(table["verdict"]) <= set(VERDICTS)
        assert (table["reason"] != "").all()
        judged = table["verdict"] != CANNOT
        assert table.loc[judged, "value"].notna().all()
        assert (table.loc[judged, "source"] != "").all()


def test_claims_that_need_training_runs_say_which() -> None:
    table = verdict([case(ablated(sample()))])
    for name in ("G4", "W1", "W2", "V1", "M3", "D4", "D3", "P1", "P2", "S1", "N1"):
        found = rows(table, name)
        assert found["verdict"].tolist() == [CANNOT]
        assert found["reason"].iloc[0].startswith("needs training runs: ")
    assert all(criterion.sentence and criterion.source and criterion.low < criterion.high for criterion in CRITERIA)


# --- R1, R2, M1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "spread", "expected"),
    [
        (lambda l: 5.0, 0.01, "supported"),
        (lambda l: 5.0, 0.08, "undecided"),
        (lambda l: 5.0 * 1.2**l, 0.01, "contradicted"),
        (lambda l: 5.0 if l < 4 or l > 7 else 8.0, 0.01, "contradicted"),  # the middle counts too
    ],
)
def test_r1_equal_updates(size, spread, expected) -> None:
    table = verdict([case(shaped(sample(), "update_norm", size, spread))])
    assert one(table, "R1", "equal size")["verdict"] == expected


@pytest.mark.parametrize(
    ("power", "r2", "expected"),
    [(1.0, 0.95, "supported"), (0.52, 0.95, "contradicted"), (0.93, 0.95, "undecided"), (1.0, 0.5, None)],
)
def test_r1_growth(power, r2, expected) -> None:
    report = sample()
    growth = {**report.growth, "growth_power": interval(power, 0.05), "r2_power": r2}
    found = rows(verdict([case(replace(report, growth=growth))]), "R1", "grows like l")
    assert found["verdict"].tolist() == ([expected] if expected else [])


def test_r1_of_a_model_too_shallow_to_grow_by_a_law() -> None:
    report = sample(3)
    aligned = {
        **report.growth,
        "growth_power": interval(1.0, 0.01),
        "r2_power": 1.0,
        "cross_share": interval(0.49, 0.01),
    }
    deep, shallow = (
        verdict([case(replace(report, growth=aligned, model={**report.model, "blocks": blocks}))]) for blocks in (3, 2)
    )
    assert one(deep, "R1", "grows like l")["verdict"] == "supported"
    assert one(deep, "R1", "cross term")["verdict"] == "contradicted"
    assert rows(shallow, "R1", "grows like l").empty
    assert rows(shallow, "R1", "cross term").empty
    assert rows(shallow, "R1")["reason"].str.contains("2 blocks, 3 are needed").any()


def test_r1_alignment_and_post_ln() -> None:
    assert one(verdict([case(sample())]), "R1", "cross term")["verdict"] == "contradicted"  # 0.33 to 0.37
    post = rows(verdict([case(sample(post=True))]), "R1")
    assert post["verdict"].tolist() == [CANNOT]
    assert "not about post-LN" in post["reason"].iloc[0]


def test_r2_needs_more_than_the_margin() -> None:
    table = verdict([case(sample())])
    assert one(table, "R2", "‖Δ‖/‖x‖ falls")["verdict"] == "supported"
    slight = verdict([case(shaped(sample(), "update_ratio", lambda l: 0.5 - 0.001 * l, 0.001))])
    assert one(slight, "R2", "‖Δ‖/‖x‖ falls")["verdict"] == "contradicted"  # it falls, by 1.6 %
    got = one(slight, "R2", "‖Δ‖/‖x‖ falls")
    early, late = np.median([0.5, 0.499, 0.498, 0.497]), np.median([0.492, 0.491, 0.49, 0.489])
    assert got["value"] == pytest.approx(late / early)
    assert got["ci_low"] == pytest.approx(late * 0.999 / (early * 1.001))
    assert got["ci_high"] == pytest.approx(late * 1.001 / (early * 0.999))


def test_m1_small_falling_and_below_its_control() -> None:
    table = verdict([case(sample())])
    assert one(table, "M1", "error is small")["verdict"] == "contradicted"  # 0.2 to 0.3 in the last third
    assert one(table, "M1", "error falls")["verdict"] == "supported"
    assert one(table, "M1", "control")["verdict"] == "supported"
    small = verdict([case(shaped(sample(), "interaction_error", lambda l: 0.05))])
    assert one(small, "M1", "error is small")["verdict"] == "supported"
    assert one(small, "M1", "error falls")["verdict"] == "contradicted"


def test_m1_an_error_of_exactly_0_is_small() -> None:
    """Blocks that write nothing."""
    found = one(verdict([case(shaped(sample(), "interaction_error", lambda l: 0.0))]), "M1", "error is small")
    assert found["verdict"] == "supported"


def test_what_is_rounding_alone_is_not_judged() -> None:
    coarse = half()
    coarse = replace(coarse, resolution={**coarse.resolution, "interaction_error": 0.9})
    found = rows(verdict([case(coarse)]), "M1")
    assert found["verdict"].tolist() == [CANNOT]
    assert "rounding" in found["reason"].iloc[0]


# --- M2 ------------------------------------------------------------------------------------------------------------


def test_m2_by_the_stored_slope_for_pre() -> None:
    table = verdict([case(ablated())])
    assert one(table, "M2", "falls with depth in pre-LN")["verdict"] == "supported"  # −0.9 to −0.5
    flat = ablated()
    merging = {**flat.merging, "rho": {**flat.merging["rho"], "slope": interval(-0.02, 0.03)}}
    flat = verdict([case(replace(flat, merging=merging))])
    assert one(flat, "M2", "falls with depth in pre-LN")["verdict"] == "contradicted"  # by less than 10 %
    assert "no block was both skipped and merged" in rows(verdict([case(sample())]), "M2")["reason"].iloc[0]


def test_m2_of_post_ln_takes_the_cheapest_merge() -> None:
    """In the sample, attention first costs half of what `sum` costs, and ρ falls from 0.3 to 0.15 over the depth."""
    report = ablated(sample(post=True))
    found = rho_slope(report)
    x = np.arange(11) / 10
    log_ratio = np.log([0.5 * (0.6 - 0.3 * l / 10) for l in range(11)])
    assert found.value == pytest.approx(stats.linregress(x, log_ratio).slope)
    # ends of the sample's costs are 10 % and 1e-4 away; the widths of all log costs add up, by how far out they stand
    skips = np.array([0.08 + 2 * math.exp(-2 * l) + 1.5 * math.exp(-2 * (11 - l)) for l in range(11)])
    widths = sum(np.log((1.1 * cost + 1e-4) / (0.9 * cost - 1e-4)) for cost in (skips, skips * np.exp(log_ratio)))
    weights = np.abs(x - x.mean()) / ((x - x.mean()) ** 2).sum()
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(weights @ widths)
    table = verdict([case(report, "post")])
    assert one(table, "M2", "does not fall with depth in post-LN", "post")["verdict"] == "contradicted"
    assert rows(table, "M2", "pre-LN, by more").empty


def test_m2_pair_is_the_difference_of_the_slopes() -> None:
    pre, post = ablated(), ablated(sample(post=True))
    table = verdict([case(post, "b"), case(pre, "a")])
    got = one(table, "M2", "falls faster", "a − b")
    other = rho_slope(post)
    assert got["value"] == pytest.approx(-0.7 - other.value)
    assert got["ci_high"] - got["value"] == pytest.approx(math.hypot(0.2, other.value - other.low))
    shorter = verdict([case(pre, "a"), case(ablated(sample(6, post=True)), "b")])
    assert rows(shorter, "M2", "falls faster").empty  # different numbers of blocks


# --- G1, G2, D2 ----------------------------------------------------------------------------------------------------


def fresh(post, ratio, count=10, spread=0.02):
    report = sloped(sample(post=post), fresh=count)
    report = replace(report, gradients={**report.gradients, "ratio_median": interval(ratio, spread)})
    blocks = [{**block, "mlp": {**block["mlp"], "module": "mlp"}} for block in report.anatomy["blocks"]]
    return replace(report, anatomy={**report.anatomy, "blocks": blocks})


def test_g1_and_g2_are_judged_at_initialisation_alone() -> None:
    table = verdict([case(fresh(True, 0.3), "post"), case(fresh(False, 2.9), "pre")])
    assert one(table, "G1", "gradients fall: the median", "post")["verdict"] == "supported"
    # of the sample's weights: 1.1^11 times larger at the top, the last matrix of the MLP
    weights = one(table, "G1", "second matrix", "post")
    assert weights["value"] == pytest.approx(1.1**-11)
    assert weights["verdict"] == "supported"
    assert one(table, "G2", "gradients are flat: the median", "pre")["verdict"] == "contradicted"
    assert "10 initialisations" in one(table, "G2", "gradients are flat: the median", "pre")["reason"]
    flat = verdict([case(fresh(False, 1.01, spread=0.05), "pre")])
    assert one(flat, "G2", "gradients are flat: the median", "pre")["verdict"] == "supported"


def test_step_0_is_no_trained_model() -> None:
    table = verdict([case(sample(), tokens=0)])
    found = table[table["claim"].isin(["R1", "R2", "M1"])]
    assert set(found["verdict"]) == {CANNOT}
    assert found["reason"].str.contains("a random initialisation: the claim is about trained models").all()
    assert (
        "1 initialisations, 10 are needed"
        in rows(verdict([case(sloped(sample(post=True)), tokens=0)]), "G1")["reason"].iloc[0]
    )


def test_too_few_blocks_name_what_is_missing() -> None:
    """The last of four blocks has no next one, and so no interaction."""
    report = sample(4)
    keep = (report.layers["metric"] != "interaction_error") | (report.layers["layer"] < 2)
    found = rows(verdict([case(replace(report, layers=report.layers[keep]))]), "M1")
    assert "interaction_error has no value in some third of 4 blocks" in found["reason"].iloc[0]


def test_one_block_has_no_gradient_from_top_to_bottom() -> None:
    report = fresh(False, 1.0)
    one_ = replace(report, model={**report.model, "blocks": 1})
    found = rows(verdict([case(one_)]), "G2")
    assert found["verdict"].tolist() == [CANNOT]
    assert "one block has no first and last" in found["reason"].iloc[0]


def test_the_clusters_of_an_interval_are_named() -> None:
    report = sample()
    few = replace(report, corpus={**report.corpus, "documents": 3})
    reasons = verdict([case(few)])["reason"]
    assert reasons.str.contains("over the 3 documents of one model, of which 8 are the least").any()
    one_text = replace(report, corpus={**report.corpus, "documents": None})
    assert verdict([case(one_text)])["reason"].str.contains(r"over the \d+ sequences of one model").any()
    # changed models are run on part of the text, which may have fewer of its documents
    report = ablated(report)
    part = replace(report, corpus={**report.corpus, "documents": 30}, merging={**report.merging, "clusters": 5})
    m2, m1 = (rows(verdict([case(part)]), name)["reason"] for name in ("M2", "M1"))
    assert m2.iloc[:2].str.contains("over the 5 documents of one model").all()
    assert m1.str.contains("over the 30 documents of one model").all()


def test_an_interval_over_a_handful_of_documents_decides_nothing() -> None:
    report = sample()
    assert set(verdict([case(report)])["verdict"]) & {"supported", "contradicted"}
    few = replace(report, corpus={**report.corpus, "documents": FEWEST - 1})
    assert not set(verdict([case(few)])["verdict"]) & {"supported", "contradicted"}
    enough = replace(report, corpus={**report.corpus, "documents": FEWEST})
    assert set(verdict([case(enough)])["verdict"]) & {"supported", "contradicted"}


def test_a_merge_that_costs_nothing_is_no_evidence_against_m2() -> None:
    report = ablated(sample())
    free = {"value": 0.0, "ci_low": 0.0, "ci_high": 0.0}
    merging = {**report.merging, "rho": {**report.merging["rho"], "median": free}}
    assert one(verdict([case(replace(report, merging=merging))]), "M2", "in the median")["verdict"] == "supported"


def test_g1_needs_enough_initialisations_and_no_training() -> None:
    few = rows(verdict([case(fresh(True, 0.3, 3))]), "G1")
    assert few["verdict"].tolist() == [CANNOT]
    assert "3 initialisations, 10 are needed" in few["reason"].iloc[0]
    trained = rows(verdict([case(sloped(sample(post=True)))]), "G1")
    assert "a trained model" in trained["reason"].iloc[0]
    # and what is about trained models is not judged at initialisation
    at_start = rows(verdict([case(fresh(False, 1.0))]), "R2")
    assert "random initialisation" in at_start["reason"].iloc[0]


def test_d2_is_about_the_weakest_branch_of_post_ln() -> None:
    report = sample(post=True)
    strong = replace(report, layers=report.layers)
    for unit in ("attention", "mlp"):
        strong = shaped(strong, "update_energy_share", lambda l: 0.4 - 0.02 * l, unit=unit)
    got = one(verdict([case(strong)]), "D2", "at every norm")
    assert got["verdict"] == "supported"
    assert got["value"] == pytest.approx(0.4 - 0.22)
    weak = shaped(strong, "update_energy_share", lambda l: 0.02 if l == 7 else 0.4, unit="mlp")
    assert one(verdict([case(weak)]), "D2", "at every norm")["verdict"] == "contradicted"
    assert rows(verdict([case(sample())]), "D2")["verdict"].tolist() == [CANNOT]
    assert "not found apart" in rows(verdict([case(sample(units=("block",), post=True))]), "D2")["reason"].iloc[0]


# --- D1 ------------------------------------------------------------------------------------------------------------


def deep(value, twin=1.0, gate=True, post=False):
    table = pd.DataFrame([("stages", "block", "3%", value, value - 0.5, value + 0.5, 12, gate, "")],
                         columns=list(DEPTH_COLUMNS)).astype(DEPTH_COLUMNS)  # fmt: skip
    control = {"control": "random-init", "name": "stages", "unit": "block", "variant": "3%", "value": twin, "of": 12}
    return replace(sample(post=post), depth=table, deep={"controls": [control]})


def group(name, values, post=False, seeds=(1, 2, 3, 4, 5), tokens=1000, **more):
    return Case(name, tuple(deep(value, post=post, **more) for value in values), seeds[: len(values)], tokens)


PRE, POST = (4.0, 4.2, 3.8, 4.4, 3.9), (8.0, 8.4, 7.8, 8.1, 8.3)


def test_d1_is_judged_over_seeds_paired_where_they_match() -> None:
    got = one(verdict([group("pre", PRE), group("post", POST, True)]), "D1", "stages 3% of blocks", "pre − post")
    expected = stats.ttest_rel(np.array(PRE) / 12, np.array(POST) / 12).confidence_interval()
    assert (got["ci_low"], got["ci_high"]) == pytest.approx(tuple(expected))
    assert got["verdict"] == "supported"
    assert "5 pairs of seeds, which show effects from 1.7 SD on" in got["reason"]
    # the order of the seeds does not matter
    turned = group("post", POST[::-1], True, (5, 4, 3, 2, 1))
    again = one(verdict([group("pre", PRE), turned]), "D1", "stages 3% of blocks", "pre − post")
    assert again["ci_low"] == pytest.approx(got["ci_low"])
    others = group("post", POST, True, (11, 12, 13, 14, 15))
    welch = one(verdict([group("pre", PRE), others]), "D1", "stages 3% of blocks", "pre − post")
    expected = stats.ttest_ind(np.array(PRE) / 12, np.array(POST) / 12, equal_var=False).confidence_interval()
    assert (welch["ci_low"], welch["ci_high"]) == pytest.approx(tuple(expected))


def test_d1_takes_the_excess_over_each_twin() -> None:
    pre = Case("pre", tuple(deep(value, twin=value - 1) for value in PRE), (1, 2, 3, 4, 5), 1000)
    got = one(verdict([pre, group("post", POST, True)]), "D1", "stages 3% of blocks", "pre − post")
    assert got["value"] == pytest.approx(1 / 12 - np.mean(np.array(POST) - 1) / 12)


def test_d1_a_mean_on_the_right_side_is_not_enough() -> None:
    wide = group("pre", (2.0, 12.0, 4.0, 11.0, 1.0))
    got = one(verdict([wide, group("post", POST, True)]), "D1", "stages 3% of blocks", "pre − post")
    assert got["value"] < -MARGIN
    assert got["verdict"] == "undecided"
    same = one(verdict([group("pre", POST), group("post", POST, True)]), "D1", "stages 3% of blocks", "pre − post")
    assert same["verdict"] == "contradicted"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        (group("pre", PRE[:1]), "one seed of pre"),
        (group("pre", PRE, tokens=2000), "tokens that they were trained on are different"),
        (group("pre", PRE, tokens=None), "tokens that they were trained on are unknown"),
        (group("pre", PRE, gate=False), "no estimate of depth passes the gate"),
        (replace(group("pre", PRE), failed="pre-s1: stuck"), "its training failed: pre-s1: stuck"),
        (Case("pre", (sample(), sample()), (1, 2), 1000), "effective depth was not estimated"),
        (Case("post", (deep(5.0, post=True),), (1,), 1000), "no pre-LN model among those given"),
    ],
)
def test_d1_is_refused_with_a_reason(pre, words) -> None:
    found = rows(verdict([pre, group("post", POST, True)]), "D1")
    assert found["verdict"].tolist() == [CANNOT]
    assert words in found["reason"].iloc[0]


# --- groups and failures -------------------------------------------------------------------------------------------


def test_of_a_group_the_interval_is_over_seeds() -> None:
    reports = tuple(shaped(sample(), "interaction_error", lambda l, x=x: x) for x in (0.04, 0.05, 0.06, 0.05, 0.045))
    got = one(verdict([Case("group", reports, (1, 2, 3, 4, 5))]), "M1", "error is small", "group")
    expected = stats.ttest_1samp([0.04, 0.05, 0.06, 0.05, 0.045], 0).confidence_interval()
    assert (got["ci_low"], got["ci_high"]) == pytest.approx(tuple(expected))
    assert "over 5 seeds" in got["reason"]
    assert got["verdict"] == "supported"


def test_a_failed_run_is_failed_and_not_worse() -> None:
    table = verdict([case(ablated(), failed="stuck at the unigram entropy")])
    assert set(table["verdict"]) == {CANNOT}
    assert "its training failed: stuck at the unigram entropy" in rows(table, "R1")["reason"].iloc[0]


def test_a_model_whose_placement_is_not_known_is_not_judged() -> None:
    report = blocks_only()
    report = replace(report, anatomy={**report.anatomy, "summary": "unknown (no branches found)"})
    for name in ("R1", "M1", "M2", "D2"):
        found = rows(verdict([case(report)]), name)
        assert found["verdict"].tolist() == [CANNOT]
        assert "placement is not known" in found["reason"].iloc[0]


def test_one_sequence_decides_nothing() -> None:
    table = verdict([case(sample(12, sequences=1))])
    found = one(table, "R2", "‖Δ‖/‖x‖ falls")
    assert found["verdict"] == "undecided"
    assert "no interval" in found["reason"]


def test_d1_asks_every_estimate_that_has_a_gate() -> None:
    asked = " ".join(criterion.sentence for criterion in CRITERIA if criterion.claim == "D1")
    for name, variant in static_gate():
        assert (f"{f'{name} {variant}'.strip()} of blocks" in asked) == (name != "participation")
