import io
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from report_samples import VARIANTS, bare, half, headless, one_block, sample

from depthprobe.report import figures
from depthprobe.report.panels import DARK, LIGHT, PANELS


@pytest.mark.parametrize("name", ["sample", "headless", "blocks_only", "one_block", "half"])
def test_every_figure_of_every_model_has_ink(name):
    report = VARIANTS[name]()
    for figure in figures.available(report):
        image = np.asarray(Image.open(io.BytesIO(figures.render(report, figure))).convert("L"))
        assert image.shape[1] == 1200
        assert 0.005 < (image < 250).mean() < 0.9
        assert (image[:, [0, -1]] == 255).all(), f"{figure} runs out of the picture"
        assert (image[[0, -1]] == 255).all(), f"{figure} runs out of the picture"


def test_what_is_available():
    assert figures.available(sample()) == [panel.name for panel in PANELS]
    assert figures.available(bare()) == ["growth"]
    assert "lens" not in figures.available(headless())
    assert "interaction" not in figures.available(one_block())
    assert figures.reason_missing(headless(), "lens").startswith("The logit lens was left out")
    assert figures.reason_missing(sample(), "lens") is None


def test_global_state_is_untouched():
    before = dict(mpl.rcParams)
    figures.render(sample(), "growth")
    assert dict(mpl.rcParams) == before


def test_dark_is_dark_and_light_is_light():
    for theme, low, high in ((LIGHT, 200, 256), (DARK, 0, 60)):
        image = Image.open(io.BytesIO(figures.render(sample(), "update_ratio", "png", theme))).convert("L")
        assert low <= np.median(np.asarray(image)) < high


def test_rounding_is_shaded():
    plain, shaded = (
        np.asarray(Image.open(io.BytesIO(figures.render(r, "interaction"))).convert("L")) for r in (sample(), half())
    )
    assert (shaded < 240).mean() > (plain < 240).mean() + 0.1


def test_a_shaded_floor_leaves_a_wide_axis_readable():
    """It is drawn on a linear axis from 0, which is nowhere on a log one."""
    report = half()
    layers = report.layers.copy()
    first = (layers["metric"] == "update_ratio") & (layers["layer"] == 0)
    layers.loc[first, ["value", "ci_low", "ci_high"]] *= 50
    ax = Figure().subplots()
    next(panel for panel in PANELS if panel.name == "update_ratio").draw(replace(report, layers=layers), [ax], LIGHT)
    low, high = ax.get_ylim()
    assert ax.get_yscale() == "log"
    assert 0.01 < low < high


def test_svg_is_reproducible_and_has_no_date():
    first = figures.render(sample(), "growth", "svg")
    assert first == figures.render(sample(), "growth", "svg")
    assert b"<dc:date>" not in first


def test_alt_texts_say_what_is_there():
    assert "residual_norm from 10.0 at layer 0 to 39.0 at layer 12" in figures.alt_text(sample(), "growth")
    assert "update_ratio of mlp" in figures.alt_text(sample(), "update_ratio")
    assert "largest" in figures.alt_text(sample(), "angular_distance")
    assert "cross" in figures.alt_text(sample(), "decomposition")
