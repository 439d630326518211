"""Published definitions: exact arithmetic, agreement with the other probes, thresholds, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened
from depth_by_hand import PLACEMENTS, lab, readout, units
from families import analyze, build, ids
from test_depth_participation import alike
from test_staging import INPUTS, Net, identity
from torch import nn

from depthprobe.depth import published
from depthprobe.depth.base import DepthSettings, Estimate
from depthprobe.depth.effects import run_skips
from depthprobe.depth.published import (
    cosine_crossing,
    depth_score,
    first_above,
    first_below,
    last_crossing,
    lens_depths,
)
from depthprobe.errors import UsageError
from depthprobe.lab.exact import chain, lengthened


def crossing(model: nn.Module, unit: str = "block") -> Estimate:
    return cosine_crossing(opened(model, INPUTS), corpus_of(INPUTS), unit)


def lens(model: nn.Module, unit: str = "block", positions: int = 1024) -> Estimate:
    return lens_depths(opened(model, INPUTS), corpus_of(INPUTS), unit, positions=positions)


def score(model: nn.Module, unit: str = "block") -> Estimate:
    return depth_score(opened(model, INPUTS), corpus_of(INPUTS), unit)


class TestReading:
    def test_the_last_crossing(self) -> None:
        rows = np.array(
            [
                [-0.1, 0.1, 0.2, 0.3],  # after one unit
                [-0.1, 0.1, -0.2, 0.3],  # twice: the last one counts
                [-0.1, -0.1, -0.2, 0.0],  # 0 is not negative
                [0.1, 0.1, 0.2, 0.3],  # never below
                [-0.1, -0.1, -0.2, -0.3],  # never above
                [0.1, 0.2, -0.1, -0.2],  # down only
            ]
        )
        np.testing.assert_array_equal(last_crossing(rows, 0.0), [1, 3, 3, 0, 4, 0])
        np.testing.assert_array_equal(last_crossing(rows[:1], 0.15), [2])

    def test_first_below_a_share_of_the_largest(self) -> None:
        rows = np.array([[5.0, 10.0, 2.0, 0.9, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.05, 1.0, 1.0, 1.0, 0.0]])
        np.testing.assert_array_equal(first_below(rows, 0.1), [3, 0, 0])
        np.testing.assert_array_equal(first_below(rows, 0.6), [0, 0, 0])

    def test_first_above(self) -> None:
        rows = np.array([[0.1, 0.2, 0.21, 1.0], [0.3, 0.1, 0.1, 1.0]])
        np.testing.assert_array_equal(first_above(rows, 0.2), [2, 0])
        np.testing.assert_array_equal(first_above(rows, 1.0), [3, 3])

    def test_the_centre_of_mass(self) -> None:
        rows = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 1.0]])
        np.testing.assert_allclose(published.centre_of_mass(rows), [2, 3, 0, 1.5])


class TestCrossing:
    @pytest.mark.parametrize("name", ["pre", "post", "sandwich"])
    def test_cosines_are_those_of_the_other_probe(self, name: str) -> None:
        model = lab(**PLACEMENTS[name])
        rows = analyze(model, INPUTS, lens_positions=0, interaction=False).layers.query("metric == 'update_alignment'")
        whole, parts = crossing(model), crossing(model, "sublayer")
        by_unit = {unit: rows[rows["unit"] == unit]["value"].to_numpy() for unit in ("block", "attention", "mlp")}
        np.testing.assert_allclose(whole.per_sequence[""].mean(axis=0), by_unit["block"], atol=1e-5)
        mean = np.mean(list(by_unit.values()), axis=0)
        np.testing.assert_allclose(whole.per_sequence["mean of units"].mean(axis=0), mean, atol=1e-5)
        both = np.stack([by_unit["attention"], by_unit["mlp"]], axis=1).flatten()
        np.testing.assert_allclose(parts.per_sequence[""].mean(axis=0), both, atol=1e-5)
        assert whole.value("cosine_crossing").value == last_crossing(by_unit["block"][None], 0.0)[0]
        assert [row.of for row in (*whole.rows, *parts.rows)] == [3, 3, 6]

    def test_signs_that_are_known(self) -> None:
        class Times(nn.Module):
            def __init__(self, factor: float) -> None:
                super().__init__()
                self.factor = nn.Parameter(torch.tensor(factor))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.factor * x

        def made(*factors: float) -> Net:
            return Net([Times(factor) for factor in factors], 2)

        assert crossing(made(-0.5, -0.3, 0.2, 0.1)).value("cosine_crossing").value == 2
        never = crossing(made(0.5, 0.3)).value("cosine_crossing")
        assert (never.value, never.note) == (0, "no crossing from negative")
        always = crossing(made(-0.5, -0.3)).value("cosine_crossing")
        assert (always.value, always.note) == (2, "no crossing: all cosines are negative")

    def test_thresholds(self) -> None:
        found = crossing(lab())
        table = found.curves["thresholds"].query("variant == ''")
        at_zero = table[np.isclose(table["threshold"], 0)]["value"].iloc[0]
        assert at_zero == found.value("cosine_crossing").value
        assert len(table) == len(published.COSINES)


class TestLens:
    def test_the_curve_is_that_of_the_other_lens(self) -> None:
        model = lab()
        rows = analyze(model, INPUTS, lens_positions=10_000, interaction=False).layers.query("metric == 'lens_kl'")
        found = lens(model, positions=10_000)
        np.testing.assert_allclose(found.per_sequence["kl"].mean(axis=0), rows["value"], rtol=1e-4, atol=1e-6)
        few, same = lens(model, positions=30), analyze(model, INPUTS, lens_positions=30, interaction=False)
        want = same.layers.query("metric == 'lens_kl'")["value"]
        np.testing.assert_allclose(np.nanmean(few.per_sequence["kl"], axis=0), want, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    @pytest.mark.parametrize("name", ["pre", "post"])
    def test_overlap_by_hand(self, name: str, unit: str) -> None:
        model = lab(**PLACEMENTS[name])
        with torch.no_grad():
            made, last = units(model, unit, INPUTS)
            tops = [readout(model, x)[:, :-1].topk(5).indices for x in (*(hand.reads for hand in made), last)]
        last_top = tops[-1].view(-1, 5).tolist()
        want = [
            np.mean([len({*a} & {*b}) / 5 for a, b in zip(top.view(-1, 5).tolist(), last_top, strict=True)])
            for top in tops
        ]
        found = lens(model, unit)
        np.testing.assert_allclose(found.per_sequence["overlap"].mean(axis=0), want, atol=1e-6)
        assert found.value("lens_overlap_depth").value == first_above(np.array([want]), 0.2)[0]
        kl = found.per_sequence["kl"].mean(axis=0)
        assert found.value("lens_kl_depth").value == first_below(kl[None], 0.1)[0]
        assert found.value("lens_kl_depth").of == len(made)

    def test_blocks_that_do_nothing(self) -> None:
        found = lens(identity(3))
        assert found.value("lens_kl_depth").value == found.value("lens_overlap_depth").value == 0

    def test_appended_blocks_of_nothing_change_nothing(self) -> None:
        model, more = alike(2), lengthened(alike(2), 2, 3)
        for name in ("lens_kl_depth", "lens_overlap_depth"):
            assert lens(more).value(name).value == lens(model).value(name).value

    def test_thresholds(self) -> None:
        found = lens(lab(blocks=4))
        table = found.curves["thresholds"]
        for name, default in (("lens_kl_depth", 0.1), ("lens_overlap_depth", 0.2)):
            some = table[table["name"] == name]
            assert some[np.isclose(some["threshold"], default)]["value"].iloc[0] == found.value(name).value
            steps = np.diff(some["value"])
            assert (steps <= 0).all() if name == "lens_kl_depth" else (steps >= 0).all()

    def test_fewer_positions_than_sequences(self) -> None:
        found = lens(lab(), positions=2)
        assert np.isnan(found.per_sequence["kl"]).all(axis=1).sum() == 4
        assert np.isfinite(found.value("lens_kl_depth").value)

    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = lens(lab()).per_sequence["kl"]
        monkeypatch.setattr(published, "LENS_BYTES", 4 * 50 * 4)
        np.testing.assert_allclose(lens(lab()).per_sequence["kl"], whole, rtol=1e-5, atol=1e-7)

    def test_a_model_without_a_head_is_refused(self) -> None:
        inputs = ids(3, 12)
        with pytest.raises(UsageError, match="through the head"):
            lens_depths(opened(build("bert", headless=True), inputs), corpus_of(inputs))

    def test_a_shifted_curve_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = published._lens
        monkeypatch.setattr(published, "_lens", lambda *args: tuple(np.roll(v, 1) for v in original(*args)))
        model = lab()
        want = analyze(model, INPUTS, lens_positions=10_000, interaction=False).layers.query("metric == 'lens_kl'")
        assert not np.allclose(lens(model, positions=10_000).per_sequence["kl"].mean(axis=0), want["value"], rtol=1e-2)


class TestScore:
    @pytest.mark.parametrize("count", [1, 4])
    def test_equal_use_scores_the_middle_whatever_the_order(self, count: int) -> None:
        assert score(alike(count)).value("depth_score").value == pytest.approx((count + 1) / 2, abs=1e-3)
        assert score(chain(count, alike=True)).value("depth_score").value == pytest.approx((count + 1) / 2, abs=1e-3)

    def test_blocks_that_do_nothing(self) -> None:
        assert {row.value for row in score(identity(3)).rows} == {0}

    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    def test_from_the_runs(self, unit: str) -> None:
        anatomy, corpus = opened(lab(placement="post"), INPUTS), corpus_of(INPUTS)
        skips = run_skips(anatomy, corpus, unit)
        found = depth_score(anatomy, corpus, unit, skips=skips)
        assert [row.variant for row in found.rows] == ["", "later tokens", "updates", "updates, later tokens"]
        count = skips.count
        effect = skips.output["all tokens"].mean(axis=0)
        places = np.arange(1, count + 1)
        assert found.value("depth_score").value == pytest.approx((places * effect).sum() / effect.sum())
        matrix = np.zeros((count, count))
        matrix[np.triu_indices(count, k=1)] = skips.changes["later tokens", "mean"].mean(axis=0)
        mean = np.array([matrix[s, s + 1 :].mean() if s + 1 < count else 0 for s in range(count)])
        row = found.value("depth_score", "updates, later tokens")
        assert row.value == pytest.approx((places * mean).sum() / mean.sum())
        assert row.ci_low <= row.value <= row.ci_high

    def test_without_a_head(self) -> None:
        inputs = ids(3, 12)
        found = depth_score(opened(build("bert", headless=True), inputs), corpus_of(inputs))
        assert "last state" in found.value("depth_score").note
        assert found.value("depth_score", "updates").note == ""


def test_a_batch_size_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="batch size"):
        cosine_crossing(opened(lab(), INPUTS), corpus_of(INPUTS), settings=DepthSettings(batch_size=0))
