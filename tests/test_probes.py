"""Each probe against a direct computation of what it says it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import corpus_of
from families import analyze, build, ids
from numpy.typing import NDArray
from scipy import stats
from sklearn.linear_model import Ridge
from sklearn.model_selection import PredefinedSplit
from torch import Tensor, nn

from depthprobe.errors import NonFiniteError
from depthprobe.estimate import PerSequence
from depthprobe.measure import Measured, Settings, measure
from depthprobe.prepare import prepare
from depthprobe.probes import Batch
from depthprobe.probes.base import key_rng, mean_tokens, median_tokens
from depthprobe.probes.interaction import foreign_state
from depthprobe.probes.kept import Pooled, analyze_kept, rounding_floors
from depthprobe.probes.pooled import fitted
from depthprobe.probes.similarity import KeptStates

Floats = NDArray[np.float64]


def kept_of(*states: Tensor) -> KeptStates:
    """A sample that holds exactly these states, `[sequences, positions, width]` each."""
    sequences, positions, _ = states[0].shape
    kept = KeptStates(sequences, positions + 1, 1, sequences * positions, seed=0)
    assert (len(kept.slots), kept.each) == (sequences, positions)
    kept.states = list(states)
    return kept


def pooled(*states: Tensor) -> tuple[dict[str, Pooled], PerSequence, list[str]]:
    means = PerSequence(len(states[0]))
    values, notes = analyze_kept(kept_of(*states), means)
    return {one.metric: one for one in values if one.layer == 0}, means, notes


def states(sequences: int = 20, positions: int = 15, width: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two related states with means, unequal dimensions and sequences that differ from each other."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, positions, width, generator=g) * torch.linspace(0.3, 3, width) + 2
    x = x + torch.randn(sequences, 1, width, generator=g)
    matrix = torch.randn(width, width, generator=g) / width**0.5
    return x, x + torch.tanh(x @ matrix) + 0.3 * (x @ matrix) - 1


def gram_hsic(x: Floats, y: Floats) -> float:
    """Song et al. 2012, equation 5, with the n × n Gram matrices written out."""
    n = len(x)
    k, l = x @ x.T, y @ y.T
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    one = np.ones(n)
    cross = one @ k @ one * (one @ l @ one) / ((n - 1) * (n - 2))
    return float((np.trace(k @ l) + cross - 2 / (n - 2) * one @ k @ l @ one) / (n * (n - 3)))


def gram_cka(x: Tensor, y: Tensor) -> float:
    a, b = (t.flatten(0, 1).double().numpy() for t in (x, y))
    return gram_hsic(a, b) / np.sqrt(gram_hsic(a, a) * gram_hsic(b, b))


class TestCKA:
    def test_is_that_of_the_gram_matrices(self) -> None:
        x, y = states()
        assert pooled(x, y)[0]["cka_adjacent"].interval.value == pytest.approx(gram_cka(x, y), rel=1e-4)

    def test_is_not_biased_upwards_by_few_tokens(self) -> None:
        """Independent states: the biased CKA of 300 tokens in 40 dimensions is above 0.1."""
        g = torch.Generator().manual_seed(3)
        x, y = (torch.randn(20, 15, 40, generator=g) for _ in range(2))
        a, b = (t.flatten(0, 1) - t.flatten(0, 1).mean(0) for t in (x, y))
        biased = float((a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm()))
        assert biased > 0.1
        assert abs(pooled(x, y)[0]["cka_adjacent"].interval.value) < 0.02

    def test_is_blind_to_rotation_scale_and_offset(self) -> None:
        x, y = states()
        turn = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(4))).Q
        one, other = (pooled(x, t)[0]["cka_adjacent"].interval.value for t in (y, 7 * (y @ turn) + 3))
        assert one == pytest.approx(other, rel=1e-4)

    def test_interval_is_the_jackknife_over_ten_groups_of_sequences(self) -> None:
        x, y = states()
        groups = np.arange(20) % 10
        left_out = np.array([gram_cka(x[groups != g], y[groups != g]) for g in range(10)])
        error = np.sqrt(0.9 * np.sum((left_out - left_out.mean()) ** 2))
        interval = pooled(x, y)[0]["cka_adjacent"].interval
        reach = stats.t.ppf(0.975, 9) * error
        assert interval.high - interval.value == pytest.approx(reach, rel=1e-2)
        assert interval.value - interval.low == pytest.approx(reach, rel=1e-2)

    def test_a_state_that_does_not_vary_is_left_out_with_a_note(self) -> None:
        x, _ = states()
        found, _, notes = pooled(x, torch.ones_like(x))
        assert "cka_adjacent" not in found
        assert any("cka_adjacent" in note for note in notes)


class TestLinearity:
    def by_hand(self, x: Tensor, y: Tensor) -> float:
        """Five folds of whole sequences; what is left of the held-out square sum around the fitted mean."""
        a, b = (t.flatten(0, 1).double().numpy() for t in (x, y))
        fold = np.repeat(np.arange(len(x)) % 10 % 5, x.shape[1])
        wrong = total = 0.0
        for fit, held in PredefinedSplit(fold).split():
            strength = 1e-4 * np.mean(np.sum((a[fit] - a[fit].mean(0)) ** 2, axis=0))
            guess = Ridge(alpha=strength).fit(a[fit], b[fit]).predict(a[held])
            wrong += np.sum((b[held] - guess) ** 2)
            total += np.sum((b[held] - b[fit].mean(0)) ** 2)
        return float(1 - wrong / total)

    def test_is_the_held_out_r2_of_a_ridge_map(self) -> None:
        x, y = states()
        found = pooled(x, y)[0]
        assert found["linearity"].interval.value == pytest.approx(self.by_hand(x, y), abs=1e-4)
        assert found["linearity_update"].interval.value == pytest.approx(self.by_hand(x, y - x), abs=1e-4)
        assert found["linearity"].interval.value > found["linearity_update"].interval.value + 0.05

    def test_of_noise_is_not_above_zero(self) -> None:
        """In-sample it would be width / tokens = 0.13 here."""
        g = torch.Generator().manual_seed(5)
        x = torch.randn(20, 15, 40, generator=g)
        found = pooled(x, x + torch.randn(20, 15, 40, generator=g))[0]
        assert found["linearity_update"].interval.value < 0

    def test_does_not_depend_on_the_unit_of_either_state(self) -> None:
        x, y = states()
        one, other = (pooled(a, b)[0]["linearity"].interval for a, b in ((x, y), (100 * x, 0.01 * y)))
        assert one.value == pytest.approx(other.value, abs=1e-5)

    @pytest.mark.parametrize(("sequences", "present"), [(20, True), (7, False)])
    def test_needs_four_tokens_a_dimension(self, sequences: int, present: bool) -> None:
        found, _, notes = pooled(*states(sequences, positions=10, width=20))
        assert ("linearity" in found) is present
        assert any("linearity was left out" in note for note in notes) is not present


class TestCentredCosines:
    def test_by_hand(self) -> None:
        x, y = states()
        means = pooled(x, y)[1]
        a, b = (t.double().numpy() for t in (x, y))
        a, b = (t - t.mean(axis=(0, 1)) for t in (a, b))
        for metric, scale in (("centred", False), ("standardised", True)):
            p, q = (t / t.std(axis=(0, 1)) if scale else t for t in (a, b))
            cosines = (p * q).sum(-1) / np.sqrt((p * p).sum(-1) * (q * q).sum(-1))
            found = means.column((f"cosine_adjacent_{metric}", "block", 0))
            np.testing.assert_allclose(found, cosines.mean(axis=1), rtol=1e-5)


class TestForeignState:
    SEQUENCES, SKIP = np.array([4, 9, 2]), 1

    def batch(self, sequences: NDArray[np.int64], seed: int = 0) -> Batch:
        return Batch(None, None, sequences, self.SKIP, seed)  # type: ignore[arg-type]

    def pair(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(6)
        x = torch.randn(3, 12, 16, generator=g)
        return x, x + 0.4 * torch.randn(3, 12, 16, generator=g) + 0.2 * x

    def test_has_the_norm_and_the_angle_of_the_true_update(self) -> None:
        x, z = self.pair()
        true, foreign = z - x, z - foreign_state(self.batch(self.SEQUENCES), 0, x, z)
        torch.testing.assert_close(foreign.norm(dim=-1), true.norm(dim=-1), rtol=1e-5, atol=0)
        cosine = nn.functional.cosine_similarity
        torch.testing.assert_close(cosine(foreign, z, dim=-1), cosine(true, z, dim=-1), rtol=1e-4, atol=1e-6)
        assert cosine(foreign, true, dim=-1).abs().max() < 0.99

    def test_points_where_another_token_of_the_sequence_points(self) -> None:
        x, z = self.pair()
        true, foreign = (z - x).double(), (z - foreign_state(self.batch(self.SEQUENCES), 0, x, z)).double()
        for row in range(3):
            donors = []
            for token in range(self.SKIP, 12):
                unit = z[row, token].double() / z[row, token].double().norm()
                across = foreign[row, token] - (foreign[row, token] @ unit) * unit
                candidates = true[row] - (true[row] @ unit)[:, None] * unit
                cosines = candidates @ across / (candidates.norm(dim=1) * across.norm())
                assert cosines.max() > 1 - 1e-6
                donors.append(int(cosines.argmax()))
                assert donors[-1] != token
                assert donors[-1] >= self.SKIP
            assert len(set(donors)) == len(donors)

    def test_draws_are_keyed_by_seed_sequence_and_layer(self) -> None:
        g = torch.Generator().manual_seed(7)
        x = torch.randn(3, 40, 16, generator=g)
        z = x + torch.randn(3, 40, 16, generator=g)
        whole = foreign_state(self.batch(self.SEQUENCES), 0, x, z)
        alone = foreign_state(self.batch(self.SEQUENCES[[1]]), 0, x[[1]], z[[1]])
        torch.testing.assert_close(alone[0], whole[1])
        others = [
            foreign_state(self.batch(self.SEQUENCES, seed=1), 0, x, z),
            foreign_state(self.batch(self.SEQUENCES), 1, x, z),
            foreign_state(self.batch(self.SEQUENCES + 1), 0, x, z),
        ]
        assert not any(torch.allclose(whole, other) for other in others)
        assert key_rng(0, 1, 2).random() == key_rng(0, 1, 2).random()
        assert len({key_rng(*key).random() for key in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0))}) == 4


class TestWhatIsNotFinite:
    """A change that overflows is an error, and no sequence that was not measured."""

    @pytest.mark.parametrize("times", [2, 3])
    def test_interaction(self, times: int) -> None:
        """The second block is run as it is, then without the first one's update, then on the control's state."""
        model, inputs = build("llama"), ids(6, 20)
        _, corpus, anatomy = prepare(model, inputs, device="cpu")
        seen: list[int] = []

        def overflow(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            seen.append(1)
            return out * torch.inf if len(seen) == times else out

        hook = anatomy.stream.blocks.modules[1].mlp.register_forward_hook(overflow)
        with pytest.raises(NonFiniteError, match=r"block 1's update without that of block 0 .*float32, sequence 0"):
            measure(anatomy, corpus, Settings(lens_positions=0))
        hook.remove()

    def test_lens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, corpus, anatomy = prepare(build("llama"), ids(6, 20), device="cpu")
        kind, plain, seen = type(anatomy.stream), anatomy.stream.readout, []

        def overflow(stream: Any, *given: Any) -> Tensor:
            seen.append(1)  # x_3 comes first, x_0 last
            return plain(*given) * (torch.nan if len(seen) == 4 else 1)

        monkeypatch.setattr(kind, "readout", overflow)
        with pytest.raises(NonFiniteError, match=r"the logit lens reads from x_0 \(lens_kl\)"):
            measure(anatomy, corpus, Settings(interaction=False, lens_positions=12))


class TestCounts:
    def test_pooled_metrics_say_on_how_many_sequences_they_rest(self) -> None:
        """The sample has 16 positions of each at least, and so not all of many sequences."""
        report = analyze(build("llama"), data=ids(40, 20), device="cpu")
        kept = KeptStates(40, 20, 1, 64, seed=0)
        assert len(kept.slots) == 4
        values = report.layers.set_index("metric")["n"]
        assert set(values["cka_adjacent"]) == {40}
        x, y = states(sequences=20)
        found = pooled(x, y)[0]
        assert {"cka_adjacent", "linearity", "linearity_update"} <= found.keys()
        assert {one.n for one in found.values()} == {20}

    def test_no_interval_goes_beyond_1(self) -> None:
        x, _ = states()
        found = pooled(x, x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))[0]
        assert all(one.interval.high <= 1 for one in found.values())
        assert found["cka_adjacent"].interval.value > 0.999

    def test_the_smallest_fold_decides_whether_there_are_enough_tokens(self) -> None:
        """Six sequences in five folds: one of them leaves out two."""
        assert fitted((0, 10, 20, 30, 40, 50, 60)) == 40
        assert fitted((0, 30, 40, 50, 60, 70)) == 40
        x, y = states(sequences=6, positions=11, width=12)  # 4/5 of 66 tokens are 52, and four sequences have 44
        assert "linearity" not in pooled(x, y)[0]
        assert "the sample has 44" in pooled(x, y)[2][0]
        x, y = states(sequences=6, positions=12, width=12)
        assert "linearity" in pooled(x, y)[0]


class TestReductions:
    def test_leave_the_first_positions_out(self) -> None:
        values = torch.tensor([[1000.0, 1, 2, 3, 10], [0, 4, 4, 4, 8]], dtype=torch.float64)
        assert mean_tokens(values, 1).tolist() == [4, 5]
        assert median_tokens(values, 1).tolist() == [2.5, 4]
        assert mean_tokens(values, 0).tolist() == [203.2, 4]


class TestLens:
    def test_one_position_a_sequence_is_one_of_its_positions(self) -> None:
        """The budget's position is the same for all layers, and its loss is the direct readout's."""
        model, inputs = build("llama"), ids(6, 20)
        _, corpus, anatomy = prepare(model, inputs, device="cpu")
        means = measure(anatomy, corpus, Settings(lens_positions=6, interaction=False)).means
        with torch.no_grad():
            hidden: list[Tensor] = []
            handles = [b.register_forward_hook(lambda _, __, out: hidden.append(out)) for b in model.model.layers]
            model(input_ids=inputs, use_cache=False)
            logits = [model.lm_head(model.model.norm(h)) for h in hidden]
        for handle in handles:
            handle.remove()
        direct = torch.stack(
            [nn.functional.cross_entropy(l[:, :-1].transpose(1, 2), inputs[:, 1:], reduction="none") for l in logits]
        )
        found = np.stack([means.column(("lens_loss", "block", layer)) for layer in (1, 2, 3)])
        chosen = []
        for sequence in range(6):
            off = (direct[:, sequence].double() - torch.from_numpy(found[:, sequence])[:, None]).abs().amax(dim=0)
            assert off.min() < 1e-5
            chosen.append(int(off.argmin()))
        assert len(set(chosen)) > 1

    def test_ends_where_the_model_does(self) -> None:
        report = analyze(build("bert"), data=ids(4, 20), device="cpu")
        last = report.layers.query("layer == 3").set_index("metric")["value"]
        assert last["lens_kl"] == 0
        assert last["lens_top1"] == 1
        assert "lens_loss" not in set(report.layers["metric"])
        assert any("lens_loss was left out" in note for note in report.notes)

    def test_can_be_left_out(self) -> None:
        report = analyze(build("llama"), data=ids(4, 20), lens_positions=0, device="cpu")
        assert not report.layers["metric"].str.startswith("lens").any()


@pytest.mark.parametrize(("documents", "known"), [([0, 0, 0, 0], None), ([0, 0, 1, 1], 2)])
def test_sequences_of_one_document_are_what_intervals_rest_on(documents: list[int], known: int | None) -> None:
    corpus = replace(corpus_of(ids(4, 20)), documents=np.array(documents))
    report = analyze(build("llama"), data=corpus, lens_positions=0, device="cpu")
    assert report.corpus["documents"] == known
    assert any(f"rest on {known or 4} {'document' if known else 'sequence'}s;" in note for note in report.notes)


def measured(model: nn.Module, inputs: Tensor, **settings: int) -> Measured:
    _, corpus, anatomy = prepare(model, inputs, tokens=inputs.numel(), device="cpu")
    return measure(anatomy, corpus, Settings(**settings))


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_floors_are_the_metric_between_a_state_and_its_rounding(self, dtype: torch.dtype) -> None:
        x = torch.randn(16, 20, 64, generator=torch.Generator().manual_seed(8)) * torch.linspace(0.1, 4, 64)
        rounded = x.to(dtype)
        a, b = x.double(), rounded.double()
        ratio = (a - b).norm(dim=-1) / b.norm(dim=-1)
        cosine = nn.functional.cosine_similarity(a, b, dim=-1)
        floors = rounding_floors(kept_of(rounded, rounded), seed=0)
        assert floors["update_ratio"] == pytest.approx(float(ratio.mean()), rel=0.2)
        assert floors["update_norm"] == pytest.approx(float((a - b).norm(dim=-1).mean()), rel=0.2)
        assert floors["block_influence"] == pytest.approx(float((1 - cosine).mean()), rel=0.3)
        assert floors["angular_distance"] == pytest.approx(float(cosine.acos().mean() / torch.pi), rel=0.2)
        assert floors["update_ratio"] < torch.finfo(dtype).eps

    def test_full_precision_has_none(self) -> None:
        assert analyze(build("llama"), data=ids(4, 20), device="cpu").resolution == {}

    def test_the_cost_names_it_where_it_is_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hint = "--dtype bfloat16 is faster"
        _, corpus, full = prepare(build("llama"), ids(4, 20), device="cpu")
        _, _, half = prepare(build("llama").to(torch.bfloat16), ids(4, 20), device="cpu")
        for width, found, wanted in ((0, ["AMX"], True), (0, [], False), (1, ["AMX"], False)):
            monkeypatch.setattr("depthprobe.measure.FASTER", full.stream.blocks.width + width)
            monkeypatch.setattr("depthprobe.measure.bfloat16_instructions", lambda found=found: found)
            assert (hint in Settings().cost(full, corpus)) == wanted
            assert hint not in Settings().cost(half, corpus)

    @pytest.mark.parametrize("name", ["llama", "bert", "granite", "neox"])
    def test_bfloat16_gives_nearly_the_numbers_of_float32(self, name: str) -> None:
        half = build(name, "sdpa").to(torch.bfloat16)
        full = build(name, "sdpa")
        full.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
        inputs = ids(8, 24)
        low, high = (analyze(model, data=inputs, device="cpu") for model in (half, full))
        assert low.model["dtype"] == "bfloat16"
        assert low.resolution
        assert all(check["passed"] for check in low.verification)
        keys = ["layer", "unit", "metric"]
        both = low.layers.merge(high.layers, on=keys, suffixes=("", "_full"))
        assert len(both) == len(low.layers) == len(high.layers)
        for metric, tolerance in {
            "residual_norm": 0.02,
            "update_norm": 0.03,
            "update_ratio": 0.03,
            "cosine_adjacent": 0.02,
            "interaction_error": 0.05,
            "lens_loss": 0.05,
        }.items():
            rows = both[both["metric"] == metric]
            if metric != "lens_loss" or name != "bert":
                assert rows["value"].to_numpy() == pytest.approx(rows["value_full"].to_numpy(), rel=tolerance), metric
