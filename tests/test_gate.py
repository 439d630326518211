"""The gate: who may speak of a model, and the reasons of those who may not."""

from __future__ import annotations

import csv
import math
from importlib import resources
from pathlib import Path

import pytest

from depthprobe.depth import gate
from depthprobe.depth.gate import CONTROLS, FEWEST, Static, judge, static_gate
from depthprobe.estimate import Interval
from depthprobe.lab.checks import JUDGED, VARIANTS, gate_rows, gate_table, read_rows

RESULTS = Path(__file__).resolve().parents[1] / "data" / "results" / "calibration.csv"
MODEL, BELOW = Interval(5.0, 4.5, 5.5), Interval(2.0, 1.5, 2.5)
BOTH = dict.fromkeys(CONTROLS, BELOW)
ROWS = [
    Static("good", "", "passed", "passed", "passed", ""),
    Static("curve", "1%", "passed", "passed", "passed", ""),
    Static("curve", "3%", "failed", "passed", "passed", ""),
    Static("moves", "", "passed", "failed", "passed", "a gain on the stream: 6 to 5"),
    Static("untried", "", "passed", "passed", "not judged", ""),
]


@pytest.fixture(autouse=True)
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "static_gate", lambda: {(row.name, row.variant): row for row in ROWS})


def test_what_lies_above_both_controls_passes() -> None:
    verdict = judge("good", "", MODEL, BOTH)
    assert verdict.passed
    assert verdict.reason == "above random-init and random-tokens"


@pytest.mark.parametrize(
    ("name", "variant", "reason"),
    [
        ("new", "", "never calibrated"),
        ("curve", "5%", "never calibrated"),
        ("curve", "3%", "failed its calibration: known answers of networks"),
        ("moves", "", "failed its calibration: rewrites that keep the function"),
        ("untried", "", "order of models of known depth: not judged"),
    ],
)
def test_what_the_calibration_did_not_pass(name: str, variant: str, reason: str) -> None:
    verdict = judge(name, variant, MODEL, BOTH)
    assert not verdict.passed
    assert reason in verdict.reason


def test_variants() -> None:
    assert judge("curve", "1%", MODEL, BOTH).passed
    assert judge("good", "from block 12", MODEL, BOTH).passed
    assert not judge("moves", "from block 12", MODEL, BOTH).passed


@pytest.mark.parametrize(
    ("controls", "reason"),
    [
        ({}, "no control was run"),
        ({"random-init": BELOW}, "the control random-tokens was not run"),
        (BOTH | {"random-init": "no configuration"}, "random-init could not be made: no configuration"),
        (BOTH | {"random-tokens": Interval(4.0, 3.4, 4.5)}, "above random-tokens: 5.00 (4.50 to 5.50) against 4.00 "),
        (BOTH | {"random-tokens": Interval(4.0, 3.4, 4.6)}, "not above random-tokens"),
        (BOTH | {"random-init": Interval(2.0, math.nan, math.nan)}, "random-init has no interval: one sequence"),
        (BOTH | {"other": MODEL}, "not above other"),
    ],
)
def test_controls(controls: dict[str, Interval | str], reason: str) -> None:
    verdict = judge("good", "", MODEL, controls)
    assert not verdict.passed
    assert reason in verdict.reason


def test_a_model_without_an_interval() -> None:
    verdict = judge("good", "", Interval(5.0, math.nan, math.nan), BOTH)
    assert not verdict.passed
    assert "one sequence" in verdict.reason


def test_the_table_is_that_of_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = read_rows(RESULTS)
    text = resources.files("depthprobe.depth").joinpath("gate.csv").read_text(encoding="utf-8")
    head, *written = csv.reader(text.splitlines())
    assert tuple(head) == gate.COLUMNS
    assert [tuple(row) for row in written] == gate_rows(rows)
    for (name, variant), static in static_gate().items():
        assert variant in VARIANTS[name]
        for part, state in zip(JUDGED, (static.table, static.rewrites, static.tasks), strict=True):
            mine = [r.passed for r in rows if (r.part, r.name, r.variant) == (part, name, variant)]
            assert state == ("failed" if False in mine else "passed" if True in mine else "not judged")
        assert bool(static.reason) is not static.passed
    assert len(static_gate()) == sum(len(variants) for variants in VARIANTS.values())


def test_what_gives_the_known_answers_and_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration is an answer, and this is it: a change of it should be seen."""
    monkeypatch.undo()
    able = {key for key, row in static_gate().items() if row.table == row.rewrites == "passed"}
    assert able == {("dependence", "first power"), ("path_elasticity", "")}
    assert not judge("depth_score", "", MODEL, BOTH).passed


def test_an_interval_over_few() -> None:
    """Two documents leave a bootstrap almost nothing to vary."""
    assert judge("good", "", MODEL, BOTH, FEWEST).passed
    verdict = judge("good", "", MODEL, BOTH, FEWEST - 1)
    assert not verdict.passed
    assert "rests on 7 documents or sequences" in verdict.reason


def test_the_readme_shows_what_passed() -> None:
    readme = (RESULTS.parents[2] / "README.md").read_text()
    assert gate_table(read_rows(RESULTS)) in readme
