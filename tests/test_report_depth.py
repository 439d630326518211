"""What a report says of effective depth: only what passes the gate on the first screen, all else with its reason."""

import io
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image
from report_samples import HOSTILE, bare, one_block, sample
from rich.console import Console

from depthprobe.report import Report, figures
from depthprobe.report.depth_panels import DEPTH_PANELS
from depthprobe.report.depth_tables import costs, curve_of, depth_facts, depth_finding, depth_lines, disagreements
from depthprobe.report.html import page
from depthprobe.report.panels import LIGHT
from depthprobe.report.schema import DEPTH_COLUMNS
from depthprobe.report.screen import show, show_depth

DOES = {"stages": "Counts stages.", "dependence": "Counts readers in a row.", "participation": "Counts writers."}


def deepened(
    report: Report | None = None,
    passing: tuple[tuple[str, str, float], ...] = (),
    failing: tuple[tuple[str, str, float], ...] = (("participation", "", 9.0),),
    reason: str = "failed its calibration (it moved)",
    sequences: int = 16,
    controls: bool = True,
) -> Report:
    """A report with estimates (name, variant, value), intervals of ± 0.5, controls at half of the value."""
    report = report or sample()
    of, rows, gate, held = report.model["blocks"], [], [], []
    for passed, estimates in ((False, failing), (True, passing)):
        for name, variant, value in estimates:
            why = "above both" if passed else reason
            note = "" if passed else f"gate: {reason}"
            rows.append((name, "block", variant, value, value - 0.5, value + 0.5, of, passed, note))
            gate.append({"name": name, "variant": variant, "passed": passed, "reason": why})
            for control in ("random-init", "random-tokens") if controls else ():
                ends = {"value": value / 2, "ci_low": value / 2 - 0.1, "ci_high": value / 2 + 0.1, "of": of}
                held.append({"control": control, "name": name, "unit": "block", "variant": variant, **ends})
    names = list(dict.fromkeys(row[0] for row in rows))
    estimators = [
        {"name": name, "metrics": [{"name": name, "does": DOES.get(name, "Counts."), "misses": "Misses."}],
         "forward": 12.5, "backward": 0.0, "seconds": 1.5, "reason": ""}
        for name in names
    ]  # fmt: skip
    estimators.append({"name": "lens", "metrics": [], "forward": None, "backward": None, "seconds": 0.1,
                       "reason": "no head"})  # fmt: skip
    stage_rows = [[n, 0.5 / n**2, 0.4 / n**2, 0.6 / n**2] for n in range(of, 0, -1)]
    curves = {
        "stages/stages": {
            "columns": ["stages", "relative_kl", "relative_kl_ci_low", "relative_kl_ci_high"], "rows": stage_rows,
        },
        "effects/effects": {
            "columns": ["skipped", "unit", "tokens", "statistic", "value", "ci_low", "ci_high"],
            "rows": [[s, t, kind, "mean", 1 / (t - s), 0.1, 0.9]
                     for s in range(of) for t in range(s + 1, of) for kind in ("all tokens", "later tokens")],
        },
        "dependence/profile": {
            "columns": ["reader", "d", "ci_low", "ci_high", "variant"],
            "rows": [[t, t / 2, t / 2 - 0.1, t / 2 + 0.1, ""] for t in range(1, of + 2)],
        },
        "crossing/thresholds": {
            "columns": ["name", "variant", "threshold", "value", "ci_low", "ci_high"],
            "rows": [["cosine_crossing", "", t / 10, t, t - 1, t + 1] for t in range(5)],
        },
    }  # fmt: skip
    deep = {
        "unit": "block", "estimators": estimators, "gate": gate, "controls": held, "curves": curves,
        "sequences": sequences, "tokens": 128, "corpus": report.corpus["name"], "sha256": report.corpus["sha256"],
        "skip_first": 1, "seconds": 12.0, "notes": ["stages was left out: no head."],
    }  # fmt: skip
    table = pd.DataFrame(rows, columns=list(DEPTH_COLUMNS)).astype(DEPTH_COLUMNS)
    return replace(report, depth=table, deep=deep)


def said(report: Report) -> str:
    found = depth_finding(report)
    assert found is not None
    return f"{found.text} {found.more}"


def test_only_what_passes_is_said() -> None:
    report = deepened(passing=(("dependence", "first power", 4.0),))
    assert said(report).startswith(
        "Of 12 blocks, the estimates that pass the gate count 4.00 [3.50, 4.50] by dependence, first power "
        "(random weights 2.00, random tokens 2.00)."
    )
    assert "participation" not in said(report)
    assert "16 sequences: fewer than 32" in said(report)
    assert "fewer than" not in said(deepened(passing=(("dependence", "", 4.0),), sequences=32))


def test_that_none_passes_is_said_too() -> None:
    text = said(deepened())
    assert text.startswith("No estimate of effective depth passes the gate on this model.")
    assert "9.00" not in text
    near = said(deepened(reason="not above random-init: 9 (8 to 10) against 9.5 (9 to 10)"))
    assert "participation is not above random-init" in near
    told = depth_finding(deepened(reason="not above random-init: 9 (8 to 10) against 9.5 (9 to 10)"))
    assert told is not None
    assert "participation is not above random-init" in str(told.short)  # on a terminal too
    assert depth_finding(sample()) is None


def test_estimates_that_disagree_are_told_apart() -> None:
    apart = deepened(passing=(("dependence", "", 4.0), ("stages", "3%", 8.0)))
    assert "dependence and stages, 3% disagree beyond their intervals" in said(apart)
    assert "counts readers in a row" in said(apart)
    assert disagreements(deepened(passing=(("dependence", "", 4.0), ("stages", "3%", 4.6)))) == []
    same = deepened(passing=(("stages", "1%", 8.0), ("stages", "3%", 4.0)))
    assert disagreements(same) == []  # two points of one curve
    assert disagreements(deepened(failing=(("dependence", "", 2.0),), passing=(("stages", "3%", 8.0),))) == []


def test_lines_have_the_controls_and_those_that_pass_come_first() -> None:
    first, second = depth_lines(deepened(passing=(("dependence", "", 4.0),)))
    assert (first.name, first.value, first.passed) == ("dependence", "4.00 [3.50, 4.50]", True)
    assert first.controls == ("2.00 [1.90, 2.10]", "2.00 [1.90, 2.10]")
    assert (second.name, second.passed, second.reason) == ("participation", False, "failed its calibration (it moved)")
    assert depth_lines(deepened(controls=False))[0].controls == ()
    facts = dict(depth_facts(deepened()))
    assert facts["controls"] == "random weights, random tokens"
    assert facts["counted"] == "blocks, 12 in all"
    assert dict(depth_facts(deepened(controls=False)))["controls"] == "none"
    assert costs(deepened())[-1][2] == "left out: no head"
    assert curve_of(deepened(), "nothing").empty


@pytest.mark.parametrize(
    "report",
    [
        deepened(),
        deepened(passing=(("dependence", "", 4.0), ("stages", "3%", 8.0))),
        deepened(one_block(), failing=(("participation", "", 1.0),)),
        deepened(bare(), controls=False),
    ],
    ids=["none", "two", "one block", "bare"],
)
@pytest.mark.parametrize("name", ["depth", "stages", "effects", "depth_profile", "thresholds"])
def test_every_figure_is_drawn(report: Report, name: str) -> None:
    if name == "effects" and report.model["blocks"] == 1:
        assert name not in figures.available(report)  # a single block affects no other
        return
    assert name in figures.available(report)
    image = Image.open(io.BytesIO(figures.render(report, name)))
    assert image.width == 1200
    assert figures.alt_text(report, name)


def test_no_estimate_lies_outside_of_its_figure() -> None:
    axes = Figure().subplots()
    found = deepened(failing=(("path_elasticity_raw", "", -2.7), ("path_spectrum", "", 40.0), ("stages", "3%", 5.0)))
    found.depth.loc[2, "ci_low"] = 5.25  # a bootstrap's interval may leave its value out
    panel = next(panel for panel in DEPTH_PANELS if panel.name == "depth")
    panel.draw(found, [axes], LIGHT)
    low, high = axes.get_xlim()
    assert low < -3.2
    assert high > 40.5
    bars = [path.vertices[:, 0].tolist() for lines in axes.collections for path in lines.get_paths()]
    assert bars == [[-3.2, -2.2], [39.5, 40.5], [5.25, 5.5]]


def test_the_page_shows_values_controls_and_reasons() -> None:
    text = page(deepened(passing=(("dependence", "", 4.0),)))
    assert 'id="depth-estimates"' in text
    assert "✓ passes" in text
    assert "failed its calibration (it moved)" in text
    assert "random weights" in text
    assert "stages was left out: no head." in text
    assert 'id="depth-estimates"' not in page(sample())


def test_hostile_words_are_escaped() -> None:
    report = deepened(reason=HOSTILE.replace("\udc80", ""))
    assert "<script>alert" not in page(report)


def test_the_terminal_has_a_line_each() -> None:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    report = deepened(passing=(("dependence", "", 4.0),))
    show_depth(report, console)
    show(report, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "passes" in printed
    assert "Of 12 blocks" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_it_survives_the_disk() -> None:
    report = deepened(passing=(("dependence", "", 4.0),))
    again = Report.from_json(report.to_json())
    pd.testing.assert_frame_equal(again.depth, report.depth)
    assert again.deep == report.deep
    assert page(again) == page(report)
    assert depth_finding(again) == depth_finding(report)
