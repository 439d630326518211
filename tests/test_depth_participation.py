"""Participation: exact answers, the arithmetic of shares, and what it is without a head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from by_hand import corpus_of, opened, swept
from depth_by_hand import PLACEMENTS, lab
from families import build, ids
from test_staging import INPUTS, identity
from torch import Tensor, nn

from depthprobe.ablations.schedule import skip
from depthprobe.depth.base import Estimate
from depthprobe.depth.effects import run_skips
from depthprobe.depth.participation import participation, writers
from depthprobe.lab.exact import Net, chain, halved, lengthened, parallel, staged


def measure(model: nn.Module, inputs: Tensor = INPUTS, unit: str = "block") -> Estimate:
    return participation(opened(model, inputs), corpus_of(inputs), unit)


def value(model: nn.Module) -> float:
    return measure(model).value("participation").value


def alike(count: int, gain: float = 1.0) -> Net:
    """Equal branches, each of that gain."""
    return parallel(count, count * gain)


class TestExactAnswers:
    @pytest.mark.parametrize("count", [1, 3, 6])
    def test_equal_branches_that_read_x_0(self, count: int) -> None:
        assert value(alike(count)) == pytest.approx(count, abs=1e-3)

    @pytest.mark.parametrize("count", [2, 5])
    def test_a_chain_of_equal_blocks(self, count: int) -> None:
        assert value(chain(count, alike=True)) == pytest.approx(count, abs=1e-3)

    @pytest.mark.parametrize(("count", "each"), [(2, 2), (3, 2), (2, 3)])
    def test_stages_of_parallel_branches(self, count: int, each: int) -> None:
        assert value(staged(count, each, bent=False)) == pytest.approx(count * each, abs=1e-3)

    def test_blocks_that_do_nothing(self) -> None:
        row = measure(identity(3)).value("participation")
        assert (row.value, row.ci_low, row.ci_high) == (0, 0, 0)

    @pytest.mark.parametrize("make", [lambda: alike(3), lambda: staged(2, 2, bent=False)])
    def test_blocks_of_nothing_appended_change_nothing(self, make: Callable[[], Net]) -> None:
        assert value(lengthened(make(), 0, 4)) == pytest.approx(value(make()), abs=1e-3)

    def test_a_branch_in_two_halves(self) -> None:
        """L · 2^(1/L) where a half costs half; the KL of a small branch is a square, so each half costs a quarter."""
        for count in (1, 2, 5):
            halves = [[1.0] * (count - 1) + [0.5, 0.5]]
            assert writers(np.array(halves))[0] == pytest.approx(count * 2 ** (1 / count))
        model = halved(alike(3, gain=0.02), 2)
        assert value(model) == pytest.approx(float(writers(np.array([[1, 1, 0.25, 0.25]]))[0]), abs=1e-2)


class TestShares:
    def test_rows(self) -> None:
        costs = np.array([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        np.testing.assert_allclose(writers(costs), [2, 1, 0])

    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    @pytest.mark.parametrize("name", ["pre", "post", "branch", "sandwich"])
    def test_of_the_sweep(self, name: str, unit: str) -> None:
        model = lab(**PLACEMENTS[name])
        parts = ("",) if unit == "block" else ("a", "m")
        kl = swept(model, INPUTS, [skip(3, [i], part) for i in range(3) for part in parts]).effects["kl"]
        share = kl.mean(axis=0) / kl.mean(axis=0).sum()
        found = measure(model, unit=unit)
        row = found.value("participation")
        assert row.value == pytest.approx(float(np.exp(-(share * np.log(share)).sum())), rel=1e-3)
        assert row.of == len(share)
        assert row.ci_low < row.ci_high
        np.testing.assert_allclose(found.curves["shares"]["share"], share, rtol=1e-3)
        np.testing.assert_allclose(found.per_sequence[""], kl, rtol=1e-3)

    def test_given_runs_are_used(self) -> None:
        anatomy, corpus = opened(lab(), INPUTS), corpus_of(INPUTS)
        skips = run_skips(anatomy, corpus)
        found = participation(anatomy, corpus, skips=skips)
        assert found.value("participation").value == measure(lab()).value("participation").value
        assert found.cost_forward == skips.evaluations

    def test_without_a_head_it_is_of_the_last_state(self) -> None:
        row = measure(build("bert", headless=True), ids(4, 12)).value("participation")
        assert "state_distance" in row.note
        assert 1 < row.value <= 3

    def test_a_unit_that_is_left_out_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from depthprobe.depth import participation as module

        monkeypatch.setattr(module, "writers", lambda costs: writers(costs[:, 1:]))
        assert abs(value(alike(3)) - 3) > 0.5
