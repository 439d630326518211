"""What a report says of gradients: the finding, the figure, the table of weights, and that it survives the disk."""

import io
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_samples import bare, headless, hostile_gradients, one_block, sample, sloped

from depthprobe.report import Report, figures
from depthprobe.report.findings import findings
from depthprobe.report.gradient_tables import facts, weight_table
from depthprobe.report.html import page


def said(report: Report) -> str:
    return next(f"{finding.text} {finding.more}" for finding in findings(report) if finding.topic == "Gradients")


def test_the_finding_compares_bottom_and_top() -> None:
    text = said(sloped())
    assert text.startswith(
        "The loss's gradient is smaller at x_1 than at x_12: × 0.245 [0.225, 0.265] a token; a random"
    )
    assert "0.00490 at x_1, 0.0200 at x_12; the 0.0863 at x_0 depends on the embedding's scale too" in text
    assert "Position 0 is left out and holds 75% of the squared gradient at x_1" in text
    assert "4 sequences: fewer than 32" in text
    assert "10 random initialisations" in said(sloped(fresh=10))
    assert "fewer than" not in said(sloped(sequences=40))
    random = said(sloped(headless(), cotangents=("random",)))
    assert random.startswith("A random gradient is smaller at x_1 than at x_6")
    assert "median token" not in random
    alone = said(sloped(one_block(), sequences=1))
    assert "not told apart at x_0 from at x_1: × 0.880 a token" in alone
    assert "leaves no interval" in alone
    assert not any(finding.topic == "Gradients" for finding in findings(sample()))


def test_the_table_has_a_line_for_each_kind() -> None:
    table = weight_table(sloped())
    assert table is not None
    assert (table.first, table.last) == (0, 11)
    name, first, middle, last, ratio, together = table.kinds[1]
    assert (name, first, last, ratio, together) == ("mlp.part1.weight", "2.00", "5.71", "0.350", "0.350")
    assert float(middle) == pytest.approx(2 * (1.1**5 + 1.1**6) / 2, rel=1e-2)
    assert dict(table.outside) == {"embed.weight": "3.00 [2.85, 3.15]", "norm.weight": "0.100 [0.0950, 0.105]"}
    assert weight_table(sloped(cotangents=("random",))) is None
    many = weight_table(sloped(kinds=30))
    assert many is not None
    assert (len(many.kinds), many.left_out) == (24, 6)
    assert ("model", "random initialisations, seeds 0–2") in facts(sloped(fresh=3))


def test_a_weight_that_some_blocks_lack_is_not_put_under_others() -> None:
    """A mixture of experts whose first block is a plain MLP: each has kinds that the other lacks."""
    report = sloped()
    layers, kind = report.layers, report.layers["unit"].str.startswith("mlp.part")
    dense = kind & (layers["unit"] == "mlp.part0.weight") & (layers["layer"] > 0)
    experts = kind & (layers["unit"] == "mlp.part1.weight") & (layers["layer"] == 0)
    table = weight_table(replace(report, layers=layers[~dense & ~experts]))
    assert table is not None
    assert (table.first, table.last) == (0, 11)
    cells = {name: cells for name, *cells in table.kinds}
    assert cells["mlp.part0.weight"] == ["1.00", "1.00", "–", "–", "–"]
    assert (cells["mlp.part1.weight"][0], cells["mlp.part1.weight"][2:]) == ("–", ["5.71", "–", "–"])
    assert "–" not in cells["mlp.part2.weight"]


@pytest.mark.parametrize(
    "report",
    [
        sloped(),
        sloped(headless(), cotangents=("random",)),
        sloped(cotangents=("loss",), fresh=3),
        sloped(one_block(), sequences=1),
    ],
    ids=["both", "random", "loss", "one block"],
)
def test_the_figure_has_ink(report: Report) -> None:
    assert "gradients" in figures.available(report)
    image = np.asarray(Image.open(io.BytesIO(figures.render(report, "gradients"))).convert("L"))
    assert 0.005 < (image < 250).mean() < 0.9
    assert (image[:, [0, -1]] == 255).all()
    assert "gradient_norm" in figures.alt_text(report, "gradients")


@pytest.mark.parametrize("report", [hostile_gradients(), sloped(headless(), cotangents=("random",))], ids=["a", "b"])
def test_the_page_has_its_sections(report: Report) -> None:
    html = page(report)
    assert ('id="weights"' in html) == ("loss" in report.gradients["cotangents"])
    anchors = set(re.findall(r'href="#([^"]+)"', html))
    assert {"gradients", "gradient-facts"} <= anchors
    assert anchors <= set(re.findall(r'id="([^"]+)"', html))
    assert "<script>alert" not in html


def test_a_report_without_gradients_has_no_such_section() -> None:
    assert "gradient-facts" not in page(bare())


def test_a_gradient_of_nothing_is_drawn() -> None:
    """The median at x_L of a masked model, 15 % of whose positions are read, is 0: no place on a logarithmic axis."""
    report = sloped()
    rows = report.layers["metric"].eq("gradient_norm_median") & report.layers["layer"].eq(12)
    report.layers.loc[rows, ["value", "ci_low", "ci_high"]] = 0.0
    figures.render(report, "gradients")
    report.layers.loc[report.layers["metric"].str.startswith("gradient"), ["value", "ci_low", "ci_high"]] = 0.0
    figures.render(report, "gradients")


def test_it_survives_json() -> None:
    report = sloped()
    again = Report.from_json(report.to_json())
    assert again.gradients == report.gradients
    pd.testing.assert_frame_equal(again.layers, report.layers)
    old = sample().to_json().replace('"gradients"', '"of_another_time"')
    assert Report.from_json(old).gradients == {}
