"""Changed models in the report: their table, figures, sentences and section, with whatever is missing."""

import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_samples import VARIANTS, ablated, bare, headless, hostile_ablations, one_schedule, sample
from rich.console import Console

from depthprobe.errors import NonFiniteError, OutputError
from depthprobe.glossary import METRICS
from depthprobe.report import Report, figures, screen
from depthprobe.report.ablation_tables import headline_merge, merges, others, schedule_table, series
from depthprobe.report.findings import findings
from depthprobe.report.headline import caveat
from depthprobe.report.html import page
from depthprobe.report.panels import DARK, LIGHT
from depthprobe.report.schema import ABLATION_COLUMNS

CHANGED = [name for name in VARIANTS if not VARIANTS[name]().ablations.empty]
NEW = ["merge_cost", "rho", "delta_loss", "other_changes", "proxies"]


def said(report):
    return {finding.topic: f"{finding.text} {finding.more}" for finding in findings(report)}


def drawn(report):
    return [name for name in figures.available(report) if name in NEW]


def costs(report, schedule, factor):
    """The report with the costs of some schedules multiplied; the choice is a mask over the rows."""
    rows = report.ablations.copy()
    chosen = schedule(rows) & rows["metric"].isin(["kl", "state_distance"])
    rows.loc[chosen, ["value", "ci_low", "ci_high"]] *= factor
    return replace(report, ablations=rows)


def small(report):
    """The report without the unmodified run's rows but its norms, so that a page of it is quick to make."""
    return replace(report, layers=bare().layers, pairs=bare().pairs, growth=bare().growth)


def test_the_table_is_written_and_taken_away_again(tmp_path):
    report = small(ablated())
    report.save(tmp_path)
    table = pd.read_csv(tmp_path / "ablations.csv", keep_default_na=False, na_values={"ci_low": "", "ci_high": ""})
    assert list(table.columns) == list(ABLATION_COLUMNS)
    assert list(table["schedule"]) == list(report.ablations["schedule"])
    np.testing.assert_array_equal(table["value"], report.ablations["value"])
    assert (tmp_path / "figures" / "merge_cost.png").exists()
    again = Report.load(tmp_path)
    pd.testing.assert_frame_equal(again.ablations, report.ablations)
    assert again.merging == report.merging
    bare().save(tmp_path)
    assert not (tmp_path / "ablations.csv").exists()
    assert not (tmp_path / "figures" / "merge_cost.png").exists()
    assert (tmp_path / "layers.csv").exists()


def test_a_folder_where_the_table_would_be_stops_everything(tmp_path):
    (tmp_path / "ablations.csv").mkdir()
    with pytest.raises(OutputError, match=r"ablations\.csv is a folder"):
        small(ablated()).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ablations.csv"]
    bare().save(tmp_path)  # nothing of ours
    assert (tmp_path / "ablations.csv").is_dir()


def test_reports_of_before_there_were_ablations_load():
    document = json.loads(ablated().to_json())
    for name in ("ablations", "merging"):
        del document[name]
    old = Report.from_json(json.dumps(document))
    assert old.ablations.empty
    assert list(old.ablations.columns) == list(ABLATION_COLUMNS)
    assert old.merging == {}
    assert "Merging" not in said(old)
    assert old.to_json() == sample().to_json()
    with pytest.raises(OutputError, match=r"table 'ablations' of .* is broken"):
        Report.from_json(json.dumps({**document, "ablations": {"columns": ["a"], "rows": []}, "merging": {}}))
    with pytest.raises(OutputError, match=r"'merging' of .* is a list"):
        Report.from_json(json.dumps({**document, "merging": []}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_cost_that_is_not_finite_is_refused_by_name(tmp_path, value):
    report = ablated()
    report.ablations.loc[0, "value"] = value
    with pytest.raises(NonFiniteError, match=r"state_distance is (nan|inf) at schedule '1-11' \(float32\)"):
        report.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_every_metric_has_its_formula():
    for name in set(ablated().ablations["metric"]):
        assert METRICS[name].table == "ablations"
    assert METRICS["rho"].table == "report"


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_every_figure_has_ink_and_stays_inside(name, theme):
    report = VARIANTS[name]()
    for figure in drawn(report):
        image = Image.open(io.BytesIO(figures.render(report, figure, "png", theme))).convert("L")
        pixels = np.asarray(image).astype(int)
        paper = pixels[0, 0]
        assert 0.005 < (abs(pixels - paper) > 8).mean() < 0.5
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert (abs(edge - paper) <= 2).all(), f"{figure} runs out of the picture"
        alt = figures.alt_text(report, figure)
        assert len(alt) > 20
        assert "$" not in alt or "hostile" in name


def test_what_is_drawn():
    assert drawn(sample()) == []
    assert drawn(ablated()) == ["merge_cost", "rho", "delta_loss", "proxies"]
    assert drawn(VARIANTS["ablated_more"]()) == NEW
    assert drawn(VARIANTS["ablated_headless"]()) == ["merge_cost", "rho", "proxies"]
    assert drawn(VARIANTS["ablated_one_block"]()) == ["delta_loss", "proxies"]
    assert drawn(one_schedule()) == []
    assert set(series(ablated(), "kl")) == {"skip", "skip both", "swap", "apart", "random"}
    assert set(series(VARIANTS["no_controls"](), "kl")) == {"skip", "swap"}
    assert "random vector" in figures.alt_text(ablated(), "merge_cost")
    assert "random vector" not in figures.alt_text(VARIANTS["no_controls"](), "merge_cost")
    assert [one.label for one in others(VARIANTS["ablated_more"](), "kl")] == [
        "repeat", "skip attention", "attention ∥ MLP"]  # fmt: skip
    assert figures.reason_missing(VARIANTS["ablated_headless"](), "delta_loss").startswith("Ablations are measured by")


def test_a_merge_is_told_from_its_controls():
    found = series(ablated(), "kl")
    both, apart, random = found["skip both"].rows, found["apart"].rows, found["random"].rows
    assert list(both["layer"]) == list(range(11))
    assert both["schedule"][4] == "0-3 6-11"
    assert list(apart["layer"]) == list(range(10))
    assert apart["schedule"][4] == "0-3 (4+6) 5 7-11"
    assert set(random["combine"]) == {""}
    assert headline_merge(ablated(), "kl").rows["schedule"][4] == "0-3 (4+5) 6-11"


def test_costs_of_nothing_have_a_place_on_the_axis():
    report = costs(ablated(), lambda rows: rows["kind"].isin(["skip", "merge"]), 0.0)
    figures.render(report, "merge_cost")
    everything = costs(ablated(), lambda rows: rows["kind"] != "", 0.0)
    pixels = np.asarray(Image.open(io.BytesIO(figures.render(everything, "merge_cost"))).convert("L"))
    assert (pixels < 200).mean() > 0.005


def test_post_norm_takes_the_best_way_to_combine_and_names_it():
    report = VARIANTS["ablated_headless"]()
    assert [one.label for one in merges(report, "state_distance")] == ["attention first", "sum", "branch-sum"]
    assert "Merging two neighbours (attention first)" in said(report)["Merging"]
    assert "attention first was taken as the cheapest for this post-LN model" in said(report)["Merging"]
    dear = costs(report, lambda rows: rows["unit"] == "sublayer", 9.0)
    assert headline_merge(dear, "state_distance").label == "branch-sum"
    poor = dear.ablations.assign(combine=dear.ablations["combine"].replace("branch-sum", "weights"))
    assert headline_merge(replace(dear, ablations=poor), "state_distance").label == "sum"  # a baseline never headlines
    assert headline_merge(ablated(), "kl").label == "sum"
    assert "ways to combine" not in said(ablated())["Merging"]


def test_merges_are_not_compared_with_controls_made_in_another_way():
    """Post-LN's cheapest way is attention first; the merge of l and l+2 and the random vector are of merges by sum."""
    post, pre = ablated(sample(post=True)), ablated()
    assert headline_merge(post, "kl").label == "attention first"
    for words in ("a merge of l and l+2", "a random vector"):
        assert words in said(pre)["Merging"]
        assert words not in said(post)["Merging"]
    assert "skipping block l at" in said(post)["Merging"]
    assert "random vector (by sum)" in figures.alt_text(post, "merge_cost")
    assert "(by sum)" not in figures.alt_text(pre, "merge_cost")


def test_skipping_and_merging():
    text = said(ablated())
    assert "one block costs least for block 6, KL 0.0801 [0.0720, 0.0882] nats and loss +0.0621 [" in text["Skipping"]
    assert "most for block 0, KL 2.08" in text["Skipping"]
    assert "0 of 12 single skips cost less than 0.05 nats of KL." in text["Skipping"]
    merging = text["Merging"]
    assert "costs least for blocks 8 and 9, KL 0.0301 [0.0270, 0.0333] nats" in merging
    assert "less than skipping block 8 costs, 0.0837 [0.0752, 0.0922]" in merging
    assert "7 of 11 adjacent merges cost less than 0.05 nats of KL (7 with the whole interval)" in merging
    assert "skipping block l at 11 of 11 places" in merging
    assert "a random vector at 0 of 11 places" in merging
    merged = ablated().ablations["kind"] == "merge"
    assert ": more than skipping block" in said(costs(ablated(), lambda rows: merged, 5))["Merging"]
    assert ": not told apart from what skipping block" in said(costs(ablated(), lambda rows: merged, 2.75))["Merging"]
    assert "random vector" not in said(VARIANTS["no_controls"]())["Merging"]
    assert "loss" not in said(VARIANTS["ablated_headless"]())["Skipping"]
    assert "nats" not in said(VARIANTS["ablated_headless"]())["Merging"]
    assert "the attention of one block costs least for block 15" in said(VARIANTS["ablated_more"]())["Skipping"]
    assert "Skipping block 0 costs KL 3.58 nats" in said(VARIANTS["ablated_one_block"]())["Skipping"]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.1, 0.9, "it rises with depth"), (-0.9, -0.1, "it falls with depth"), (-0.1, 0.9, "no slope with depth"),
     (None, None, "no slope with depth that this sample can tell")],
)  # fmt: skip
def test_the_slope_reads_its_interval(low, high, words):
    report = ablated()
    slope = {"value": 0.3, "ci_low": low, "ci_high": high}
    changed = replace(report, merging={**report.merging, "rho": {**report.merging["rho"], "slope": slope}})
    assert words in said(changed)["Merge/skip"]
    assert "may only say that late blocks do less" in said(changed)["Merge/skip"]
    figures.render(changed, "rho")


@pytest.mark.parametrize(("middle", "words"), [(0.45, "below 1;"), (1.6, "above 1;"), (1.01, "not told apart from 1;")])
def test_rho_against_one(middle, words):
    report = ablated()
    median = {"value": middle, "ci_low": middle - 0.05, "ci_high": middle + 0.05}
    changed = replace(report, merging={**report.merging, "rho": {**report.merging["rho"], "median": median}})
    assert words in said(changed)["Merge/skip"]


@pytest.mark.parametrize(
    ("low", "words"),
    [(0.75, "close to the measured one"), (0.2, "no substitute"), (-0.1, "cannot stand in"), (None, "cannot stand in")],
)
def test_a_proxy_is_trusted_by_its_interval(low, words):
    report = ablated()
    rows = [{**row, "value": 0.8, "ci_low": low, "ci_high": 0.9} if row["proxy"] == "update_ratio" else row
            for row in report.merging["proxies"]]  # fmt: skip
    against = [{**row, "value": -0.6, "ci_low": -0.8, "ci_high": -0.3} for row in rows]
    assert "the wrong way round" in said(replace(report, merging={**report.merging, "proxies": against}))["Proxies"]
    text = said(replace(report, merging={**report.merging, "proxies": rows}))["Proxies"]
    assert "Of 4 cheap proxies update_ratio orders 12 places" in text
    assert words in text
    assert "block_influence 0.610 [0.530, 0.690]" in text


def test_other_findings():
    assert "66 schedules took 480 block evaluations instead of 1,080" in said(ablated())["Shared work"]
    report = one_schedule()
    assert "The schedule 0-3 (4+5) 6-11 costs KL 0.0387" in said(report)["Schedules"]
    assert {"Skipping", "Merging", "Merge/skip", "Proxies"} & set(said(report)) == set()
    alone = replace(report, merging={**report.merging, "evaluations": 23, "plain_evaluations": 11})
    assert "Shared work" not in said(alone)  # nothing was saved
    assert "Schedules" not in said(ablated())
    assert len(said(hostile_ablations())["Merging"]) < 1500
    assert "rest on only 8 sequences" in said(ablated())["Few sequences"]
    assert "Changed models were run on 4 of them" in said(ablated(sample(sequences=8), sequences=4))["Few sequences"]
    assert "Few sequences" not in said(ablated(sequences=32))
    assert said(replace(ablated(), merging={}))["Few sequences"] == said(ablated())["Few sequences"]
    assert "if blocks were removed or merged" in caveat(sample())
    assert "one change at a time" in caveat(ablated())
    deep = caveat(replace(sample(), depth=pd.DataFrame({"name": ["stages"]})))
    assert "skip or merge units" in deep
    assert "does not say how the loss would change" not in deep


@pytest.mark.parametrize("name", CHANGED)
def test_the_terminal_gets_three_lines_more_at_most(name):
    def lines(report):
        out = io.StringIO()
        screen.show(report, Console(file=out, width=80, highlight=False))
        assert all(len(line) <= 80 for line in out.getvalue().splitlines())
        return out.getvalue().splitlines()

    report = VARIANTS[name]()
    plain = replace(report, ablations=sample().ablations, merging={})
    assert len(lines(report)) <= min(40, len(lines(plain)) + 3)
    assert len(lines(report)) > len(lines(plain))


def test_the_cheapest_and_the_dearest():
    table = schedule_table(ablated())
    assert table.metrics == ("kl", "delta_loss", "top1_agreement")
    (cheap, cheapest), (dear, dearest) = table.parts
    assert (cheap, dear) == ("The 10 cheapest", "The 10 dearest")
    assert len(cheapest) == len(dearest) == 10
    assert table.left_out == 66 - 20
    assert dearest[0][0] == "2-11"  # without the first two blocks
    assert cheapest[0][0] == "0-7 (8+9) 10-11"
    rows = ablated().ablations
    best = rows[(rows["metric"] == "kl") & ~rows["schedule"].str.startswith("random")]["value"].min()
    assert cheapest[0][3][0].startswith(f"{best:.4f} [")
    assert "[" not in cheapest[0][3][1]
    assert not any("random" in row[0] for row in cheapest + dearest)
    few = schedule_table(VARIANTS["ablated_one_sequence"]())
    assert len(few.parts) == 1
    assert few.left_out == 3  # the random vectors
    assert "[" not in few.parts[0][1][0][3][0]
    assert schedule_table(VARIANTS["ablated_headless"]()).metrics == ("state_distance",)


def test_one_schedule_combined_in_two_ways_is_two_rows():
    report = VARIANTS["ablated_headless"]()
    rows = [row for _, part in schedule_table(report, 50).parts for row in part if row[0] == "0-1 (2+3) 4-5"]
    assert sorted(combine for _, _, combine, _ in rows) == ["branch-sum", "sum"]
    assert len({cells for *_, cells in rows}) == 2


def test_the_section_stands_after_the_unmodified_run():
    text = page(ablated())
    places = [text.index(f'id="{name}"') for name in ("lens", "changes", "merge_cost", "schedules", "numbers")]
    assert places == sorted(places)
    assert "<code>0-3 (4+5) 6-11</code>" in text
    assert "2.86 [2.76, 2.96] nats a token" in text
    assert "480 block evaluations" in text
    assert "8 × 256, 0.25 of the positions scored" in text
    assert "<code>rho</code>" in text
    assert "ρ<sub>l</sub>" in text
    assert "66, controls included" in text
    assert "The other 46 and every number" in text
    assert "KL(p<sub>unchanged</sub> ‖ p<sub>changed</sub>)" in text
    section = text[text.index('id="merge_cost"') : text.index('id="rho"')]
    assert "<code>kl</code>" in section
    assert "<code>state_distance</code>" not in section
    assert 'id="changes"' not in page(small(sample()))
    assert "Not shown: Ablations are measured by state_distance alone" in page(VARIANTS["ablated_headless"]())


def test_one_schedule_has_a_section_without_figures():
    text = page(small(one_schedule()))
    assert text.count("<img") == 1
    assert "All schedules, cheapest first" in text


def test_hostile_schedules_stay_text():
    text = page(small(hostile_ablations()))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "\u202e" not in text
    assert not re.search(r"(src|href|srcset)=\"(?!data:|#)", text)
    assert "<script" not in hostile_ablations()._repr_html_()


def test_a_frame_without_its_merging_is_enough():
    report = replace(ablated(headless(), head=False), merging={})
    assert "Merging" in said(report)
    assert drawn(report) == ["merge_cost"]
    assert "8 sequences" in page(small(report))
