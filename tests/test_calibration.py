"""The calibration: what holds, what a broken estimator makes of it, the rewrites, the ranks, and what is written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from depth_by_hand import lab

from depthprobe.ablations import staging
from depthprobe.depth import dependence, participation, passages, published
from depthprobe.depth.jacobians import Jacobians
from depthprobe.depth.paths import Path as IdentityPath
from depthprobe.errors import UsageError
from depthprobe.lab import LabForCausalLM, exact, rewrites
from depthprobe.lab.checks import VARIANTS, Row, gate_rows, ordered, ranked, read_rows

ROOT = Path(__file__).resolve().parents[1]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration", ROOT / "analyses" / "calibration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calibration = script()


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return list(calibration.table(list(VARIANTS)))


def failed(rows: list[Row]) -> set[tuple[str, str, str]]:
    return {(row.name, row.variant, row.network) for row in rows if row.passed is False}


# --- the table of exact answers --------------------------------------------------------------------------------------


def test_what_holds(table: list[Row]) -> None:
    assert {row.name for row in table} == set(VARIANTS)
    wrong = {name for name, _, _ in failed(table)}
    assert wrong == {
        "cosine_crossing", "lens_kl_depth", "lens_overlap_depth", "depth_score", "path_elasticity_raw", "path_spectrum"
    }  # fmt: skip
    for name in ("path_elasticity_raw", "path_spectrum"):
        assert {network for n, _, network in failed(table) if n == name} == {"10 branches that only rescale the stream"}


def test_what_the_gate_does_not_ask_for_is_shown() -> None:
    """A chain that is written with skips counts half in the raw form if it shrinks what it reads, not in general."""
    rows = {(row.network.split(",")[0], row.name): row for row in calibration.beyond(["path_elasticity_raw", "path_elasticity"])}  # fmt: skip # noqa: E501
    for word, raw in (("contractive", 2.5), ("expansive", 4.75)):
        chain = f"a chain of 5 {word} f"
        assert rows[chain, "path_elasticity_raw"].measured == pytest.approx(raw, abs=1e-3)
        assert rows[chain, "path_elasticity_raw"].passed is False
        assert rows[chain, "path_elasticity"].passed is True
    assert rows["5 hidden branches", "path_elasticity_raw"].passed is False
    assert rows["5 hidden branches", "path_elasticity"].passed is True
    assert gate_rows(rows.values())[-1][2:5] == ("not judged",) * 3


def _shifted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every writer's change in the next one's place."""

    def readers(*args: Any) -> Any:
        for reader, found, base in original(*args):
            yield reader, [*found[1:], found[0]], base

    return readers


def _dropped(original: Callable[..., Any]) -> Callable[..., Any]:
    """The embedding is no writer."""

    def readers(*args: Any) -> Any:
        for reader, found, base in original(*args):
            yield reader, [torch.zeros_like(base), *found[1:]], base

    return readers


def _one_off(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tape, index: original(self, tape, min(index + 1, len(self.units) - 1))


Break = tuple[Any, str, Callable[[Any], Any]]
# Half of what went through branches is not counted, but carried on.
DROPPED: list[Break] = [
    (passages.Pulled, "total", lambda f: property(lambda self: self.identity + sum(self.through))),
    (passages.Pulled, "gone", lambda f: property(lambda self: 0.5 * sum(self.through))),
]
DIMMED: list[Break] = [(passages.RanStep, "_skip", lambda f: lambda self, g: 0.9 * f(self, g))]
ONE_OFF: list[Break] = [(Jacobians, "at", _one_off)]
BREAKS: dict[tuple[str, str], list[Break]] = {
    ("stages", "one count too low"): [(staging, "stages_at", lambda f: lambda *a: f(*a) - 1)],
    ("stages", "neighbours are never merged"): [
        (staging, "_partitions", lambda f: lambda n: iter([])),
        (staging, "_changes", lambda f: lambda g: {k: v for k, v in f(g).items() if k[0] == "drop"}),
    ],
    ("dependence", "a skip where there is none"): [
        (dependence, "block_skips", lambda f: lambda *a: (dict.fromkeys(f(*a)[0], 1), []))
    ],
    ("dependence", "writers one off"): [(dependence, "_readers", _shifted)],
    ("dependence", "the embedding is no writer"): [(dependence, "_readers", _dropped)],
    ("dependence", "nothing survives"): [(IdentityPath, "carry", lambda f: lambda self, v: torch.zeros_like(v))],
    ("participation", "without the first unit"): [(participation, "writers", lambda f: lambda costs: f(costs[:, 1:]))],
    ("cosine_crossing", "one too low"): [(published, "last_crossing", lambda f: lambda *a: f(*a) - 1)],
    ("lens_kl_depth", "states one off"): [
        (published, "_lens", lambda f: lambda *a: tuple(np.roll(v, 1) for v in f(*a)))
    ],
    ("lens_overlap_depth", "states one off"): [
        (published, "_lens", lambda f: lambda *a: tuple(np.roll(v, -1) for v in f(*a)))
    ],
    ("depth_score", "units from 0"): [(published, "centre_of_mass", lambda f: lambda m: f(m) - 1)],
    ("path_elasticity_raw", "a dropped term"): DROPPED,
    ("path_elasticity_raw", "the wrong identity path"): DIMMED,
    ("path_elasticity_raw", "units one off"): ONE_OFF,
    ("path_elasticity", "no gauge"): [
        (Jacobians, "traces", lambda f: lambda *a: [tuple(0 * one for one in step) for step in f(*a)])
    ],
    ("path_elasticity", "a dropped term"): DROPPED,
    ("path_elasticity", "the wrong identity path"): DIMMED,
    ("path_spectrum", "a dropped term"): DROPPED,
    ("path_spectrum", "the wrong identity path"): DIMMED,
    ("path_spectrum", "units one off"): ONE_OFF,
}


def test_every_estimator_is_broken() -> None:
    assert {name for name, _ in BREAKS} == set(VARIANTS)


@pytest.mark.parametrize(("name", "how"), BREAKS)
def test_what_is_broken_is_noticed(name: str, how: str, table: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, change in BREAKS[name, how]:
        monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    monkeypatch.setattr(calibration, "MANY", replace(calibration.MANY, probes=8))
    before = {key for key in failed(table) if key[0] == name}
    assert failed(list(calibration.table([name]))) - before


# --- rewrites --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewritten() -> list[Row]:
    names = ["dependence", "participation", "path_elasticity_raw", "path_elasticity"]
    return list(calibration.rewritten_nets(names))


def test_what_keeps_the_function_keeps_the_depth(rewritten: list[Row]) -> None:
    assert len({row.network for row in rewritten}) == 9
    by = {(row.name, row.variant) for row in rewritten if row.passed is False}
    assert by == {("dependence", ""), ("participation", "")}
    squares = {row.network.split(": ")[1] for row in rewritten if row.name == "dependence" and not row.passed}
    assert squares == {"a branch in two halves"}
    writers = {row.network.split(": ")[1] for row in rewritten if row.name == "participation" and not row.passed}
    assert writers == {"a branch in two halves", "the stream times 4 behind block 1"}


def test_an_identity_path_without_its_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdentityPath, "carry", lambda self, v: v)
    wrong = {network.split(": ")[1] for _, variant, network in failed(list(calibration.rewritten_nets(["dependence"]))) if variant}  # fmt: skip # noqa: E501
    assert wrong == {"the stream times 4 behind block 1"}


def test_a_network_that_computes_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="changes the logits"):
        calibration.same(exact.wired(), exact.wired(normed=True), exact.inputs())


def pre(**config: Any) -> LabForCausalLM:
    return lab(blocks=4, placement="pre", **config)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda model: rewrites.with_gain(model, 1, 4.0),
        lambda model: rewrites.with_zero_blocks(model, 4, 2),
        lambda model: rewrites.with_zero_blocks(model, 2, 2),
        lambda model: rewrites.in_another_unit(model, 5.0),
    ],
    ids=["gain", "zero blocks at the end", "in the middle", "unit"],
)
def test_rewrites_of_a_lab_model(rewrite: Callable[[LabForCausalLM], LabForCausalLM]) -> None:
    model, inputs = pre(), torch.arange(48).reshape(4, 12) % 50
    changed = rewrite(model)
    calibration.same(model, changed, inputs)
    assert len(changed.model.blocks) == changed.config.num_hidden_layers
    names = ["dependence", "path_elasticity_raw"]
    before, after = (
        calibration.measure(anatomy, corpus, names, calibration.DepthSettings())
        for _, corpus, anatomy in (calibration.prepare(m, inputs, device="cpu") for m in (model, changed))
    )
    assert before["dependence", "first power"].value != pytest.approx(4, abs=0.1)
    rows = list(calibration.compared("lab", before, after))
    assert len(rows) == 3
    assert not failed(rows)


def test_rewrites_are_of_pre_ln_models() -> None:
    for model in (lab(placement="post"), pre(parallel_pairs="blocks")):
        with pytest.raises(UsageError, match="a pre-LN model of plain blocks"):
            rewrites.with_gain(model, 0, 2.0)


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks() -> None:
    need = np.array([1.0, 1, 2, 2, 3, 3, 4, 4])
    rho, low, high = ranked(need, need**3, 200)
    assert (rho, high) == (pytest.approx(1), pytest.approx(1))
    assert low == pytest.approx(1)
    assert ranked(need, -need, 200)[0] == pytest.approx(-1)
    assert ranked(need, np.ones(8), 200) == (0, 0, 0)
    rho, low, high = ranked(need, np.array([2.0, 1, 1, 2, 2, 1, 2, 1]), 200)
    assert low < 0 < high
    # By hand: ranks of need 1.5 1.5 3.5 3.5, of the values 1 2 3 4
    x, y = np.array([-1.0, -1, 1, 1]), np.array([-1.5, -0.5, 0.5, 1.5])
    assert ranked(need[:4], np.arange(4.0), 200)[0] == pytest.approx(x @ y / np.sqrt(x @ x * (y @ y)))


def test_order_within_lines() -> None:
    lines = ["a", "a", "a", "b", "b", "c"]
    need = np.array([1.0, 2, 2, 1, 3, 2])
    # a: two pairs, both right; b: one, wrong; c: none; between lines nothing is compared
    value, pairs, chance = ordered(need, np.array([1.0, 2, 3, 9, 8, 0]), lines)
    assert (value, pairs) == (pytest.approx((2 - 1) / 3), 3)
    # a scores 2, 0 or −2, b 1 or −1, all alike: 2 + 1, 2 − 1 and 0 + 1 are as good as 2 − 1, three of six
    assert chance == pytest.approx(3 / 6)
    assert ordered(need, need + 0.1 * np.arange(6), lines) == (1, 3, pytest.approx(1 / 6))
    assert ordered(need, np.ones(6), lines) == (0, 3, 1)
    nothing = ordered(need[:1], need[:1], ["a"])
    assert np.isnan(nothing[0])
    assert nothing[1:] == (0, 1)


def test_the_chance_is_that_of_all_orders() -> None:
    """Against dealing at random."""
    rng = np.random.default_rng(0)
    need, lines = np.array([1.0, 2, 2, 1, 2, 3, 4]), ["a"] * 3 + ["b"] * 4
    values = np.array([0.3, 0.5, 0.2, 1, 3, 2, 4])
    value, _, chance = ordered(need, values, lines)
    hits = 0
    for _ in range(1000):
        dealt = np.concatenate([rng.permutation(values[:3]), rng.permutation(values[3:])])
        hits += ordered(need, dealt, lines)[0] >= value - 1e-12
    assert hits / 1000 == pytest.approx(chance, abs=0.05)


def test_ranks_of_given_models() -> None:
    def model(network: str, need: float, value: float) -> Row:
        return Row("tasks", network, "stages", "block", "1%", need, value, value, value, None, None, "")

    few = [model(f"chase-{k}/{place}", k, k) for k in (1, 2, 3) for place in ("pre", "post")]
    judged = {row.network: row.passed for row in calibration.ranks(few) if row.passed is not None}
    assert judged == {"minimal, together": True}
    deep = [model(f"{row.network}-deep", row.expected, -row.measured) for row in few]
    rows = {row.network: row for row in calibration.ranks([*few, *deep])}
    assert {network: row.passed for network, row in rows.items() if row.passed is not None} == {
        "minimal, together": True,
        "deep, within a task and placement": False,
    }
    assert rows["deep, pre"].measured == pytest.approx(-1)
    assert rows["deep, within a task and placement"].measured == -1
    assert rows["minimal, within a task and placement"].measured == 1


def test_tasks_are_judged_by_small_and_by_deeper_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "ranked", lambda *a: ranked(*a, resamples=200))
    for task in ("chase-1", "chase-2"):
        (tmp_path / task).symlink_to(ROOT / "data" / "known-depth" / task)
    rows = list(calibration.tasks(["cosine_crossing", "lens_kl_depth"], tmp_path, 8))
    single = [row for row in rows if "/" in row.network]
    assert {row.network for row in single} >= {"chase-1/pre", "chase-1/post", "chase-2/post"}
    assert {(row.network, row.expected) for row in single if row.network.endswith("/pre")} == {
        ("chase-1/pre", 1), ("chase-2/pre", 2)
    }  # fmt: skip
    judged = {row.network for row in rows if row.passed is not None}
    deep = any("deep" in row.network for row in single)
    assert judged == {"minimal, together"} | ({"deep, within a task and placement"} if deep else set())
    assert {row.network for row in rows} >= {"minimal, pre", "minimal, post", "minimal, together"}


# --- what is written -------------------------------------------------------------------------------------------------


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, gate = tmp_path / "calibration.csv", tmp_path / "gate.csv"
    to = ["--results", str(results), "--gate", str(gate)]
    assert calibration.main(["--parts", "table", "--names", "participation", *to]) == 0
    assert "passed a chain of 5 equal blocks: participation expected 5, measured 5 " in capsys.readouterr().out
    assert calibration.main(["--parts", "table", "--names", "cosine_crossing", *to]) == 0
    assert "FAILED 5 equal branches read x_0: cosine_crossing" in capsys.readouterr().out
    rows = read_rows(results)
    assert {row.name for row in rows} == {"participation", "cosine_crossing"}
    assert rows[0] == Row("table", "5 equal branches read x_0", "participation", "block", "", 5.0, 5.0, 5.0, 5.0, 1e-3, True, "")  # fmt: skip # noqa: E501
    lines = {row[0]: row for row in gate_rows(rows)}
    assert lines["participation"][2:5] == ("passed", "not judged", "not judged")
    assert lines["cosine_crossing"][2] == "failed"
    assert "table: 5 equal branches read x_0, expected 1, measured 0" in lines["cosine_crossing"][5]
    assert len(gate.read_text().splitlines()) == 1 + sum(len(variants) for variants in VARIANTS.values())


def test_what_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration.main(["--parts", "tables"]) == 2
    assert "--parts tables" in capsys.readouterr().err
    assert calibration.main(["--names", "depth"]) == 2
