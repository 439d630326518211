"""The effect of a unit on later ones: evaluated by hand, the sweep's own costs, later tokens, and the exact answers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import corpus_of, opened, swept
from depth_by_hand import PLACEMENTS, Hand, lab, readout, units
from families import build, ids
from test_staging import INPUTS, Net, Reads, identity, parallel
from torch import Tensor, nn

from depthprobe.ablation import default_schedules
from depthprobe.ablations.later import reason_against
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import parse, skip
from depthprobe.depth.base import DepthSettings
from depthprobe.depth.effects import ALL, LATER, Skips, effects, run_skips
from depthprobe.errors import UsageError
from depthprobe.estimate import Resampler
from depthprobe.lab import LabForCausalLM
from depthprobe.probes.base import key_rng


def skips(model: nn.Module, inputs: Tensor = INPUTS, unit: str = "block", later: bool = True, **settings: int) -> Skips:
    return run_skips(opened(model, inputs), corpus_of(inputs), unit, DepthSettings(**settings), later=later)


def matrix(found: Skips, kind: str, statistic: str = "mean") -> np.ndarray:
    """Skipped unit × later unit, NaN elsewhere."""
    made = np.full((found.count, found.count), np.nan)
    made[np.triu_indices(found.count, k=1)] = found.changes[kind, statistic].mean(axis=0)
    return made


def by_hand(
    model: LabForCausalLM, made: list[Hand], last: Tensor, skipped: int, where: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Without a unit at the positions `where`: relative changes per token, of probabilities, and the KL per token."""
    with torch.no_grad():
        after = made[skipped + 1].reads if skipped + 1 < len(made) else last
        x = torch.where(where[..., None], made[skipped].reads, after)
        changes = []
        for hand in made[skipped + 1 :]:
            base = hand.write(hand.reads)
            changes.append((hand.write(x) - base).norm(dim=-1) / base.norm(dim=-1))
            x = hand.step(x)
        p, q = (readout(model, state).double().log_softmax(-1)[:, :-1] for state in (last, x))
        return changes, (q.exp() - p.exp()).norm(dim=-1), (p.exp() * (p - q)).sum(-1)


def cuts(inputs: Tensor) -> Tensor:
    low, high = inputs.shape[1] // 4, 3 * inputs.shape[1] // 4
    return torch.tensor([int(key_rng(0, s, 1 << 25).integers(low, high + 1)) for s in range(len(inputs))])


class TestByHand:
    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    @pytest.mark.parametrize("name", ["pre", "post", "sandwich", "admin"])
    def test_every_number(self, name: str, unit: str) -> None:
        model = lab(**PLACEMENTS[name])
        found = skips(model, unit=unit)
        with torch.no_grad():
            made, last = units(model, unit, INPUTS)
        everywhere = torch.ones_like(INPUTS, dtype=torch.bool)
        after = torch.arange(INPUTS.shape[1]) >= cuts(INPUTS)[:, None]
        for skipped in range(found.count):
            for kind, where, keep in ((ALL, everywhere, everywhere), (LATER, ~after, after)):
                keep = keep & (torch.arange(INPUTS.shape[1]) >= 1)
                changes, away, kl = by_hand(model, made, last, skipped, where)
                for later, change in enumerate(changes, start=skipped + 1):
                    rows = [values[some] for values, some in zip(change, keep, strict=True)]
                    mean = float(torch.stack([values.mean() for values in rows]).mean())
                    high = float(torch.stack([values.quantile(0.95) for values in rows]).mean())
                    assert matrix(found, kind)[skipped, later] == pytest.approx(mean, rel=1e-3, abs=1e-5)
                    assert matrix(found, kind, "p95")[skipped, later] == pytest.approx(high, rel=1e-3, abs=1e-5)
                counted = everywhere[:, :-1] if kind == ALL else after[:, :-1]
                output = torch.stack([a[some].mean() for a, some in zip(away, counted, strict=True)])
                np.testing.assert_allclose(found.output[kind][:, skipped], output, rtol=1e-3, atol=1e-6)
                if kind == ALL:
                    np.testing.assert_allclose(found.cost[1][:, skipped], kl.mean(dim=1), rtol=1e-3, atol=1e-6)


class TestSweep:
    """What a skip costs is what the sweep says."""

    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    @pytest.mark.parametrize("name", ["gpt2", "neox", "opt-post", "scores"])
    def test_the_same_cost(self, name: str, unit: str) -> None:
        if name == "scores":
            model, inputs = lab(residual_attention=True), INPUTS
        else:
            model, inputs = build(name), ids(3, 12)
        found = skips(model, inputs, unit, later=False)
        blocks = 3
        schedules = [skip(blocks, [i]) for i in range(blocks)]
        if unit == "sublayer":
            # Without the attention what is left of a block is its MLP, on the block's own input.
            schedules = [skip(blocks, [i], part) for i in range(blocks) for part in ("a", "m")]
        want = swept(model, inputs, schedules)
        assert found.cost[0] == "kl"
        np.testing.assert_allclose(found.cost[1], want.effects["kl"], rtol=1e-3, atol=1e-7)

    def test_without_a_head(self) -> None:
        model = build("bert", headless=True)
        inputs = ids(3, 12)
        found = skips(model, inputs)
        want = swept(model, inputs, [parse("1-2"), parse("0 2"), parse("0-1")])
        assert found.cost[0] == "state_distance"
        np.testing.assert_allclose(found.cost[1], want.effects["state_distance"], rtol=1e-4, atol=1e-7)
        assert list(found.output) == [ALL]
        assert any("no position of this model is later" in note for note in found.notes)


class TestExact:
    def test_branches_that_read_x_0_change_nothing(self) -> None:
        found = skips(parallel(4))
        for kind in (ALL, LATER):
            assert np.nanmax(matrix(found, kind)) < 1e-6  # rounding of f(x) − x
            assert np.nanmax(matrix(found, kind, "p95")) < 1e-6
        assert (found.output[ALL] > 0.01).all()

    def test_only_the_next_stage_reads(self) -> None:
        found = matrix(skips(Net([Reads(k, k, k + 1) for k in range(3)], 4)), ALL)
        assert found[0, 1] > 0.05
        assert found[0, 2] > 0.005  # through the one in between
        independent = matrix(skips(Net([Reads(0, 0, 1), Reads(1, 0, 2), Reads(2, 1, 3)], 4)), ALL)
        assert independent[1, 2] == 0
        assert independent[0, 1] == 0
        assert independent[0, 2] > 0.05

    def test_blocks_that_do_nothing(self) -> None:
        found = skips(identity(3))
        assert all((values == 0).all() for values in (*found.changes.values(), *found.output.values(), found.cost[1]))

    def test_positions_that_cannot_look_back_feel_nothing_later(self) -> None:
        """Reads works on each position alone, so a skip at earlier ones is not felt."""
        found = skips(Net([Reads(k, k, k + 1) for k in range(3)], 4))
        assert np.nanmax(matrix(found, LATER)) == 0
        assert (found.output[LATER] == 0).all()
        assert np.nanmax(matrix(skips(lab()), LATER)) > 0.01

    def test_the_last_unit_is_not_felt_later(self) -> None:
        assert (skips(lab()).output[LATER][:, -1] == 0).all()


class TestTable:
    def test_frames(self) -> None:
        model = lab()
        found = effects(opened(model, INPUTS), corpus_of(INPUTS))
        assert found.rows == []
        table = found.curves["effects"]
        assert list(table.columns) == ["skipped", "unit", "tokens", "statistic", "value", "ci_low", "ci_high"]
        assert len(table) == 3 * 2 * 2
        assert (table["skipped"] < table["unit"]).all()
        assert (table["ci_low"] <= table["value"]).all()
        assert (table["value"] <= table["ci_high"]).all()
        mean, high = (
            table[table["statistic"] == statistic].reset_index(drop=True)["value"] for statistic in ("mean", "p95")
        )
        assert (high > mean).all()
        assert list(found.curves["output"].columns) == ["skipped", "tokens", "value", "ci_low", "ci_high"]

    def test_cost_and_progress(self) -> None:
        seen: list[tuple[int, int]] = []
        model = lab(blocks=4)
        found = run_skips(
            opened(model, INPUTS),
            corpus_of(INPUTS),
            settings=DepthSettings(batch_size=4),
            progress=lambda done, of: seen.append((done, of)),
        )
        assert seen == [(done, 8) for done in range(1, 9)]
        assert found.evaluations == pytest.approx((4 + 2 * (3 + 2 + 1)) / 4)
        assert found.readouts == 1 + 8

    def test_batches_change_nothing(self) -> None:
        one, whole = (skips(lab(placement="post"), batch_size=size) for size in (1, 6))
        for key, values in one.changes.items():
            np.testing.assert_allclose(values, whole.changes[key], rtol=1e-4, atol=1e-6)
        for kind, values in one.output.items():
            np.testing.assert_allclose(values, whole.output[kind], rtol=1e-4, atol=1e-6)

    def test_runs_of_another_unit_are_refused(self) -> None:
        model = lab()
        found = skips(model)
        with pytest.raises(UsageError, match="of unit block"):
            effects(opened(model, INPUTS), corpus_of(INPUTS), "sublayer", skips=found)

    def test_runs_of_other_sequences_of_the_same_text_are_refused(self) -> None:
        anatomy, corpus = opened(lab(), INPUTS), corpus_of(INPUTS)
        one, other = corpus.take(slice(0, 3)), corpus.take(slice(3, 6))
        found = run_skips(anatomy, one)
        assert len(effects(anatomy, one, skips=found).curves["effects"]) > 0
        with pytest.raises(UsageError, match="the same sequences"):
            effects(anatomy, other, skips=found)

    def test_the_first_positions_are_not_among_the_later_ones(self) -> None:
        """All but the last position left out, the mean is that position's; the predictions count as before."""
        one, many = skips(lab(), skip_first=15), skips(lab())
        for kind in (ALL, LATER):
            assert (one.changes[kind, "mean"] > 0).all()
            np.testing.assert_allclose(one.changes[kind, "mean"], one.changes[kind, "p95"], rtol=1e-9)
            np.testing.assert_array_equal(one.output[kind], many.output[kind])

    def test_scores_cannot_be_skipped_at_some_tokens(self) -> None:
        found = skips(lab(residual_attention=True))
        assert list(found.output) == [ALL]
        assert any("attention scores" in note for note in found.notes)

    def test_a_wrong_state_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Were the skip to leave the state after the unit, nothing would change; the numbers by hand do."""
        from depthprobe.depth import effects as module

        original = module._without

        def wrong(walk, taken, skipped, where):  # type: ignore[no-untyped-def]
            return original(walk, taken, min(skipped + 1, len(walk) - 1), where)

        monkeypatch.setattr(module, "_without", wrong)
        model = lab()
        want = swept(model, INPUTS, [skip(3, [i]) for i in range(3)]).effects["kl"]
        try:
            found = skips(model).cost[1]
        except (IndexError, ValueError):
            return
        assert not np.allclose(found, want, rtol=1e-2)


def test_curves_are_frames() -> None:
    found = effects(opened(lab(blocks=1), INPUTS), corpus_of(INPUTS))
    assert isinstance(found.curves["effects"], pd.DataFrame)
    assert len(found.curves["effects"]) == 0


@pytest.mark.parametrize("placement", ["pre", "branch", "sandwich", "none"])
def test_a_sweep_gives_the_same_matrix_without_another_run(placement: str) -> None:
    """The runs that `analyze` makes anyway, against those of `effects`."""
    inputs = ids(5, 12, vocab=50)
    anatomy, corpus = opened(lab(blocks=4, placement=placement), inputs), corpus_of(inputs)
    schedules = default_schedules(4, controls=False)
    plain = sweep(anatomy, corpus, schedules, SweepSettings())
    watched = sweep(anatomy, corpus, schedules, SweepSettings(batch_size=2), skip_first=1)
    assert watched.evaluations / 3 == plain.evaluations  # the same in each of three batches
    assert watched.later is not None
    mine = watched.later.frame(Resampler(corpus.sequences))
    theirs = effects(anatomy, corpus).curves["effects"]
    theirs = theirs[theirs["tokens"] == "all tokens"].reset_index(drop=True)
    columns = ["skipped", "unit", "tokens", "statistic"]
    pd.testing.assert_frame_equal(mine[columns], theirs[columns], check_dtype=False)
    for column in ("value", "ci_low", "ci_high"):
        assert mine[column].to_numpy() == pytest.approx(theirs[column].to_numpy(), rel=1e-5)


def test_where_a_sweep_cannot_tell() -> None:
    inputs = ids(3, 12, vocab=50)
    for model, words in (
        (lab(placement="post"), "identity path"),
        (lab(placement="deepnorm"), "identity path"),
        (lab(placement="pre").to(torch.bfloat16), "half precision"),
        (lab(placement="pre", blocks=1), "one block"),
    ):
        anatomy = opened(model, inputs)
        assert words in reason_against(anatomy, 12, 1)
        assert sweep(anatomy, corpus_of(inputs), [parse("0")], SweepSettings(), skip_first=1).later is None
    assert "no position" in reason_against(opened(lab(placement="pre"), inputs), 12, 12)
