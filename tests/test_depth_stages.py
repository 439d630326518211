"""Stages as an estimator: the search's own answers, blocks and sublayers, and networks of known depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened, swept
from depth_by_hand import lab
from families import build, ids
from test_staging import INPUTS, Net, chain, identity, parallel, staged
from torch import Tensor, nn

from depthprobe.ablations.schedule import parse
from depthprobe.ablations.staging import find_stages
from depthprobe.depth import finished
from depthprobe.depth import stages as module
from depthprobe.depth.base import DepthSettings, Estimate
from depthprobe.depth.stages import stages
from depthprobe.errors import UsageError

ZERO = (1e-4,)  # stands for κ → 0


def measure(model: nn.Module, inputs: Tensor = INPUTS, unit: str = "block", **options: object) -> Estimate:
    return stages(opened(model, inputs), corpus_of(inputs), unit, **options)


class TestBlocks:
    @pytest.mark.parametrize(
        ("model", "depth"),
        [(parallel(4), 1), (chain(4), 4), (identity(3), 0), (staged(2, 2), 2), (staged(3, 2), 3)],
        ids=["parallel", "chain", "identity", "two stages", "three stages"],
    )
    def test_exact_answers(self, model: nn.Module, depth: int) -> None:
        row = measure(model, kappas=ZERO).value("stages", "0.01%")
        assert row.value == pytest.approx(depth, abs=1e-2)
        assert row.unit == "block"

    def test_branches_that_only_rescale_the_stream(self) -> None:
        class Rescale(nn.Module):
            def __init__(self, gain: float) -> None:
                super().__init__()
                self.gain = nn.Parameter(torch.tensor(gain))

            def forward(self, x: Tensor) -> Tensor:
                return x + self.gain * nn.functional.rms_norm(x, x.shape[-1:])

        class Normed(Net):
            def forward(self, inputs: Tensor) -> Tensor:
                x = self.embed(inputs)
                for block in self.blocks:
                    x = block(x)
                return self.head(nn.functional.rms_norm(x, x.shape[-1:]))

        row = measure(Normed([Rescale(gain) for gain in (0.5, 1.0, -0.3)], 2), kappas=ZERO).value("stages", "0.01%")
        assert row.value == pytest.approx(0, abs=1e-2)

    def test_rows_are_those_of_the_search(self) -> None:
        anatomy, corpus = opened(build("gpt2"), ids(8, 16)), corpus_of(ids(8, 16))
        found, want = stages(anatomy, corpus), find_stages(anatomy, corpus)
        assert [row.variant for row in found.rows] == ["1%", "3%", "10%"]
        for row, interval in zip(found.rows, want.depth.values(), strict=True):
            assert (row.value, row.ci_low, row.ci_high, row.of) == (interval.value, interval.low, interval.high, 3)
        assert list(found.curves["stages"]["stages"]) == [3, 2, 1, 0]
        assert found.cost_forward > 2

    def test_the_interval_rests_on_the_documents_that_score(self) -> None:
        """Document 0 chooses, 1 and 2 score; a run that goes on knows it, too."""
        inputs = ids(8, 16)
        corpus = replace(corpus_of(inputs), documents=np.array([0, 0, 1, 0, 1, 0, 2, 2]))
        found = stages(opened(build("gpt2"), inputs), corpus)
        assert {row.clusters for row in found.rows} == {2}
        assert finished._estimate(finished._plain(found)).rows == found.rows

    def test_post_ln_names_how_units_were_combined(self) -> None:
        row = measure(lab(placement="post")).value("stages", "3%")
        assert row.note in ("combined by branch-sum", "combined by attention-first")

    def test_settings_reach_the_sweep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def spy(*args: object, **options: object):  # type: ignore[no-untyped-def]
            seen.append(options["settings"])
            return find_stages(*args, **options)

        monkeypatch.setattr(module, "find_stages", spy)
        measure(identity(2), settings=DepthSettings(seed=3, batch_size=2, memory=1 << 20))
        assert (seen[0].seed, seen[0].batch_size, seen[0].memory) == (3, 2, 1 << 20)


class TestSublayers:
    @pytest.mark.parametrize("placement", ["pre", "branch", "sandwich", "none", "post"])
    def test_the_whole_model_costs_nothing_and_every_point_is_what_the_sweep_says(self, placement: str) -> None:
        model = lab(blocks=2, placement=placement)
        found = measure(model, unit="sublayer")
        table = found.curves["stages"]
        assert found.rows[0].of == 4
        assert list(table["stages"]) == [4, 3, 2, 1, 0]
        assert table["schedule"].iloc[0] == "0a 0m 1a 1m"
        assert table["relative_kl"].iloc[0] == pytest.approx(0, abs=1e-6)
        some = table[(table["stages"] < 4) & (table["stages"] > 0)]
        schedules = [parse(text, way) for text, way in zip(some["schedule"], some["combine"], strict=True)]
        want = swept(model, INPUTS[1::2], schedules).effects["kl"].mean(axis=0)
        np.testing.assert_allclose(some["kl"], want, rtol=1e-3, atol=1e-6)

    def test_attentions_that_add_nothing_take_no_stage(self) -> None:
        model = lab(blocks=3)
        with torch.no_grad():
            for block in model.model.blocks[1:]:
                block.attention.output.weight.zero_()
                block.attention.output.bias.zero_()
        row = measure(model, unit="sublayer", kappas=ZERO).value("stages", "0.01%")
        assert row.of == 6
        assert 3 < row.value <= 4 + 1e-3

    def test_two_that_read_the_same_state_start_as_one_stage(self) -> None:
        table = measure(build("neox"), ids(4, 12), "sublayer").curves["stages"]
        assert table["schedule"].iloc[0] == "(0a+0m) (1a+1m) (2a+2m)"
        assert table["relative_kl"].iloc[0] == pytest.approx(0, abs=1e-6)

    def test_of_blocks_whose_branches_are_not_known(self) -> None:
        with pytest.raises(UsageError, match="not found in block 0"):
            measure(parallel(2), unit="sublayer")

    def test_attention_first_is_for_blocks(self) -> None:
        anatomy = opened(lab(placement="post"), INPUTS)
        from depthprobe.depth.base import units_of

        with pytest.raises(UsageError, match="stages of sublayers"):
            find_stages(anatomy, corpus_of(INPUTS), combine="attention-first", units=units_of(anatomy, "sublayer"))


class TestRefusals:
    def test_a_model_without_a_head(self) -> None:
        inputs = ids(4, 12)
        with pytest.raises(UsageError, match="no next-token head"):
            measure(build("bert", headless=True), inputs)

    def test_one_sequence(self) -> None:
        with pytest.raises(UsageError, match="at least 2 sequences"):
            measure(lab(), INPUTS[:1])


def test_a_wrong_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were stages read one count too low, a chain would not need all of its blocks."""
    from depthprobe.ablations import staging

    original = staging.stages_at
    monkeypatch.setattr(staging, "stages_at", lambda kappa, counts, relative: original(kappa, counts, relative) - 1)
    row = measure(chain(3), kappas=ZERO).value("stages", "0.01%")
    assert row.value != pytest.approx(3, abs=0.5)
