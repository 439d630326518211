"""Values and intervals, against scipy's bootstrap, textbook formulas and simulated coverage."""

from __future__ import annotations

import numpy as np
import pytest
from families import analyze, build, ids
from numpy.typing import NDArray
from scipy import stats

from depthprobe.corpus import Corpus
from depthprobe.estimate import PerSequence, Resampler, jackknife

Floats = NDArray[np.float64]
KEY = ("residual_norm", "block", 0)


def sample(sequences: int, columns: int = 1, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).gamma(2.0, 1.0, size=(sequences, columns))


class TestBootstrap:
    @pytest.mark.parametrize("sequences", [12, 40, 200])
    def test_agrees_with_scipy(self, sequences: int) -> None:
        x = sample(sequences)
        value, low, high = Resampler(sequences, resamples=20_000).intervals(x)
        theirs = stats.bootstrap(
            (x[:, 0],), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
        ).confidence_interval
        spread = theirs.high - theirs.low
        assert value[0] == pytest.approx(x.mean())
        assert low[0] == pytest.approx(theirs.low, abs=0.03 * spread)
        assert high[0] == pytest.approx(theirs.high, abs=0.03 * spread)

    def test_of_a_function_of_several_means_agrees_with_scipy(self) -> None:
        x = sample(60, columns=2)
        mine = Resampler(60, resamples=20_000).function(x, lambda m: m[:, 0] / m[:, 1])
        theirs = stats.bootstrap(
            (x[:, 0], x[:, 1]),
            lambda a, b, axis: a.mean(axis=axis) / b.mean(axis=axis),
            paired=True,
            n_resamples=20_000,
            method="percentile",
            rng=np.random.default_rng(1),
        ).confidence_interval
        spread = theirs.high - theirs.low
        assert mine.value == pytest.approx(x[:, 0].mean() / x[:, 1].mean())
        assert mine.low == pytest.approx(theirs.low, abs=0.04 * spread)
        assert mine.high == pytest.approx(theirs.high, abs=0.04 * spread)

    def test_all_columns_share_their_resamples(self) -> None:
        x = sample(30)
        value, low, high = Resampler(30).intervals(np.hstack([x, 2 * x, x + 5]))
        for bound in (value, low, high):
            assert bound[1] == pytest.approx(2 * bound[0])
            assert bound[2] == pytest.approx(bound[0] + 5)

    def test_shrinks_with_the_root_of_the_sequences(self) -> None:
        widths = []
        for sequences in (50, 800):
            _, low, high = Resampler(sequences).intervals(sample(sequences, columns=20))
            widths.append((high - low).mean())
        assert widths[0] / widths[1] == pytest.approx(4, rel=0.2)

    def test_equal_sequences_leave_no_doubt(self) -> None:
        value, low, high = Resampler(10).intervals(np.full((10, 1), 3.0))
        assert (value[0], low[0], high[0]) == (3.0, 3.0, 3.0)

    def test_one_sequence_leaves_nothing_to_resample(self) -> None:
        value, low, high = Resampler(1).intervals(np.array([[2.0]]))
        assert value[0] == 2.0
        assert np.isnan([low[0], high[0]]).all()
        assert np.isnan(Resampler(1).function(np.array([[2.0]]), lambda m: m[:, 0]).low)

    def test_the_same_seed_gives_the_same_interval(self) -> None:
        x = sample(20)
        assert Resampler(20, seed=3).intervals(x)[1] == Resampler(20, seed=3).intervals(x)[1]
        assert Resampler(20, seed=3).intervals(x)[1] != Resampler(20, seed=4).intervals(x)[1]


class TestDocuments:
    def test_sequences_of_one_document_are_no_independent_ones(self) -> None:
        """Ten documents of ten alike sequences: ten observations, so √10 wider than a hundred."""
        x = np.repeat(sample(10, seed=2), 10, axis=0)
        documents = np.repeat(np.arange(10), 10) * 7 + 3
        _, low, high = Resampler(100, documents).intervals(x)
        _, naive_low, naive_high = Resampler(100).intervals(x)
        assert (high - low)[0] / (naive_high - naive_low)[0] == pytest.approx(np.sqrt(10), rel=0.15)
        _, ten_low, ten_high = Resampler(10, seed=1).intervals(x[::10])
        assert (high - low)[0] == pytest.approx((ten_high - ten_low)[0], rel=0.1)

    def test_unequal_documents_are_weighed_by_their_sequences(self) -> None:
        x = np.array([[0.0]] * 9 + [[1.0]])
        replicates = Resampler(10, np.array([0] * 9 + [1])).replicates(x)[:, 0]
        # Two documents, drawn twice with replacement: 0 and 0, 0 and 1, 1 and 1.
        assert set(np.round(replicates, 9)) == {0.0, 0.1, 1.0}
        assert np.mean(np.isclose(replicates, 0.1)) == pytest.approx(0.5, abs=0.05)

    def test_a_single_document_falls_back_to_its_sequences(self) -> None:
        x = sample(20)
        alone, none = Resampler(20, np.zeros(20, dtype=np.int64)), Resampler(20)
        assert alone.intervals(x)[1] == none.intervals(x)[1]

    def test_reach_the_report(self) -> None:
        """Eight documents that differ from each other, four equal sequences each."""
        model, rows = build("llama"), ids(8, 24).repeat_interleave(4, dim=0)
        corpora = (Corpus(rows, documents, "made", "0", "as it is") for documents in (None, np.repeat(np.arange(8), 4)))
        naive, clustered = (
            analyze(model, data=corpus, interaction=False, lens_positions=0, device="cpu").layers for corpus in corpora
        )
        rows_of = [t[t["metric"] == "update_ratio"] for t in (naive, clustered)]
        widths = [(t["ci_high"] - t["ci_low"]).mean() for t in rows_of]
        assert widths[1] / widths[0] == pytest.approx(2, rel=0.25)


class TestMissingValues:
    def test_have_no_weight(self) -> None:
        x = sample(40)
        gaps = np.full((80, 1), np.nan)
        gaps[::2] = x
        value, low, high = Resampler(80, resamples=20_000).intervals(gaps)
        goal, goal_low, goal_high = Resampler(40, resamples=20_000).intervals(x)
        assert value[0] == pytest.approx(goal[0])
        assert low[0] == pytest.approx(goal_low[0], abs=0.1 * (goal_high - goal_low)[0])
        assert high[0] == pytest.approx(goal_high[0], abs=0.1 * (goal_high - goal_low)[0])

    def test_of_one_column_leave_the_others_alone(self) -> None:
        x = sample(40, columns=2)
        gaps = x.copy()
        gaps[::3, 1] = np.nan
        assert Resampler(40).intervals(gaps)[1][0] == Resampler(40).intervals(x)[1][0]

    def test_a_resample_without_any_value_is_left_out(self) -> None:
        x = np.full((6, 1), np.nan)
        x[2] = 4.0
        value, low, high = Resampler(6).intervals(x)
        assert (value[0], low[0], high[0]) == (4.0, 4.0, 4.0)


class TestPerSequence:
    def test_places_values_by_sequence_whatever_the_batches(self) -> None:
        x = sample(10)[:, 0]
        one, other = PerSequence(10), PerSequence(10)
        one.add(KEY, np.arange(10), x)
        for batch in (np.array([7, 2]), np.array([0, 9, 5]), np.array([1, 3, 4, 6, 8])):
            other.add(KEY, batch, x[batch])
        np.testing.assert_array_equal(one.column(KEY), other.column(KEY))

    def test_two_processes_merge_to_one(self) -> None:
        x = sample(10)[:, 0]
        whole, left, right = PerSequence(10), PerSequence(10), PerSequence(10)
        whole.add(KEY, np.arange(10), x)
        left.add(KEY, np.arange(0, 10, 2), x[::2])
        right.add(KEY, np.arange(1, 10, 2), x[1::2])
        right.add(("update_norm", "mlp", 3), np.array([1]), np.array([5.0]))
        left.merge(right)
        np.testing.assert_array_equal(left.column(KEY), whole.column(KEY))
        assert left.column(("update_norm", "mlp", 3))[1] == 5.0
        assert np.isnan(left.column(("update_norm", "mlp", 3))).sum() == 9
        assert left.column(KEY).dtype == np.float64


class TestJackknife:
    def test_of_the_mean_is_students_interval(self) -> None:
        x = sample(10)[:, 0]
        interval = jackknife(float(x.mean()), np.array([np.delete(x, k).mean() for k in range(10)]))
        low, high = stats.t.interval(0.95, 9, loc=x.mean(), scale=stats.sem(x))
        assert (interval.value, interval.low, interval.high) == pytest.approx((x.mean(), low, high))

    def test_of_one_group_knows_nothing(self) -> None:
        interval = jackknife(2.0, np.array([]))
        assert interval.value == 2.0
        assert np.isnan([interval.low, interval.high]).all()


class TestCoverage:
    """The truth lies inside a 95 % interval about 95 times in a hundred; 400 trials have a spread of 1.1 points."""

    TRIALS = 400

    def covered(self, low: Floats, high: Floats, truth: float) -> float:
        return float(np.mean((low <= truth) & (truth <= high)))

    def test_over_sequences(self) -> None:
        _, low, high = Resampler(60).intervals(sample(60, columns=self.TRIALS, seed=5))
        assert 0.90 <= self.covered(low, high, truth=2.0) <= 0.98

    def test_over_documents(self) -> None:
        """Clustered sequences: the clustered interval covers, one over sequences does not."""
        rng = np.random.default_rng(6)
        documents = np.repeat(np.arange(50), 6)
        x = rng.normal(size=(50, self.TRIALS))[documents] + rng.normal(size=(300, self.TRIALS))
        clustered, naive = Resampler(300, documents).intervals(x), Resampler(300).intervals(x)
        assert 0.90 <= self.covered(*clustered[1:], truth=0.0) <= 0.98
        assert self.covered(*naive[1:], truth=0.0) < 0.75

    def test_of_the_jackknife(self) -> None:
        found = []
        for column in sample(100, columns=self.TRIALS, seed=7).T:
            groups = np.arange(100) % 10
            interval = jackknife(
                float(np.log(column.mean())), np.array([np.log(column[groups != g].mean()) for g in range(10)])
            )
            found.append(interval.low <= np.log(2.0) <= interval.high)
        assert 0.91 <= np.mean(found) <= 0.985
