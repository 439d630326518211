"""Dependence: the exact answers of networks of known depth, an evaluation by hand for every placement, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened
from depth_by_hand import PLACEMENTS, changes, lab, start
from test_staging import INPUTS, PART, Net, Nothing, Reads, chain, identity, parallel
from test_staging import staged as staged_over
from torch import Tensor, nn

from depthprobe.depth import dependence as module
from depthprobe.depth.base import DepthSettings, Estimate, batches, bytes_of_sequence
from depthprobe.depth.dependence import dependence, depth_of_weights
from depthprobe.depth.paths import Path, Walk
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.lab import LabForCausalLM

VARIANTS = ("", "first power")


def measure(model: nn.Module, inputs: Tensor = INPUTS, unit: str = "block", **settings: object) -> Estimate:
    return dependence(opened(model, inputs), corpus_of(inputs), unit, DepthSettings(**settings))


def depth(model: nn.Module, variant: str = "") -> float:
    return measure(model).value("dependence", variant).value


def weight(found: Estimate, writer: int, reader: int, column: str = "w") -> float:
    table = found.curves["weights"]
    return float(table.query("writer == @writer and reader == @reader")[column].iloc[0])


class TestExactAnswers:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_every_branch_reads_x_0(self, count: int, variant: str) -> None:
        model = bare(Net([Reads(i, 0, 1) for i in range(count)], 2, seen=[1]))
        assert depth(model, variant) == pytest.approx(1, abs=1e-3)

    @pytest.mark.parametrize(("variant", "column"), [("", "w"), ("first power", "first_power")])
    def test_a_readout_that_sees_x_0_itself_takes_its_direct_share_off(self, variant: str, column: str) -> None:
        found = measure(parallel(4))
        share = weight(found, 0, 5, column)
        assert 0.1 < share < 0.9
        assert found.value("dependence", variant).value == pytest.approx(1 - share, abs=1e-3)

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_a_chain_without_skips(self, count: int, variant: str) -> None:
        found = measure(chain(count))
        assert found.value("dependence", variant).value == pytest.approx(count, abs=1e-3)
        assert found.curves["profile"]["d"].tolist() == pytest.approx([*range(1, count + 1), count] * 2)
        assert any("without a skip" in note for note in found.notes)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_blocks_that_do_nothing(self, variant: str) -> None:
        found = measure(identity(3)).value("dependence", variant)
        assert (found.value, found.ci_low, found.ci_high, found.of) == (0, 0, 0, 3)

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize(("stages", "each"), [(2, 2), (3, 2), (2, 3), (4, 1)])
    def test_stages_of_parallel_branches(self, stages: int, each: int, variant: str) -> None:
        assert depth(staged(stages, each), variant) == pytest.approx(stages, abs=1e-3)

    @pytest.mark.parametrize("make", [lambda: parallel(3), lambda: chain(4), lambda: staged(2, 2), lambda: mixed()])
    @pytest.mark.parametrize("appended", [1, 4])
    def test_blocks_of_nothing_appended_change_nothing(self, make: Callable[[], Net], appended: int) -> None:
        before, model = measure(make()), make()
        model.blocks.extend(Nothing() for _ in range(appended))
        after = measure(model)
        for variant in VARIANTS:
            old, new = (found.value("dependence", variant) for found in (before, after))
            assert new.of == old.of + appended
            assert new.value == pytest.approx(old.value, abs=1e-3)

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("split", [0, 1, 3])
    def test_a_branch_in_two_halves_where_all_paths_are_as_long(self, split: int, variant: str) -> None:
        assert depth(halved(staged(2, 2), split), variant) == pytest.approx(2, abs=1e-3)

    def test_a_branch_in_two_halves_elsewhere_weighs_half_in_squares_and_the_same_in_first_powers(self) -> None:
        # The head adds up two branches of depth 1 and 2. Each half of the deeper one changes half as much.
        before, after = measure(mixed()), measure(halved(mixed(), 2))
        squares, first = ([found.value("dependence", v).value for found in (before, after)] for v in VARIANTS)
        assert first[1] == pytest.approx(first[0], abs=1e-3)
        assert squares[1] < squares[0] - 0.05
        table = before.curves["weights"].query("reader == 4 and writer > 0")
        # One writer of depth 1 and one of depth 2; cut in two, the second weighs half: nearly so, as w is per token.
        w = float(table.query("writer == 3")["w"].iloc[0])
        assert squares[0] == pytest.approx(1 + w, abs=1e-3)
        assert squares[1] == pytest.approx(1 + (w / 2) / (1 - w / 2), abs=0.05)


def bare(model: Net) -> Net:
    """The embedding fills the first part of the stream alone, so that what reads others reads branches only."""
    with torch.no_grad():
        model.embed.weight[:, PART:] = 0
    return model


def staged(stages: int, each: int) -> Net:
    return bare(staged_over(stages, each))


def mixed() -> Net:
    """Branches 0 and 1 read x_0, branch 2 reads branch 0; the head sees branches 1 and 2, linearly."""
    return bare(Net([Reads(0, 0, 1), Reads(1, 0, 2), Reads(2, 1, 3)], 4, seen=[2, 3]))


def halved(model: Net, place: int) -> Net:
    """The same function with a branch in two copies of half its gain; what it reads is not what it writes."""
    whole: Reads = model.blocks[place]
    halves = [Reads(place, whole.reads, whole.writes, whole.gain / 2) for _ in range(2)]
    with torch.no_grad():
        before = model(INPUTS)
        model.blocks = nn.ModuleList([*model.blocks[:place], *halves, *model.blocks[place + 1 :]])
        torch.testing.assert_close(model(INPUTS), before)
    return model


class TestRewrites:
    """The function stays; so does its depth."""

    def test_the_stream_and_all_that_follows_times_a_factor(self) -> None:
        class Times(nn.Module):
            def __init__(self, block: nn.Module, factor: float) -> None:
                super().__init__()
                self.block, self.factor = block, factor

            def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
                return self.block(x, *args, **kwargs) * self.factor

        before, model = lab(placement="pre"), lab(placement="pre")
        model.model.blocks[1] = Times(model.model.blocks[1], 4.0)
        with torch.no_grad():
            for skip in (model.model.blocks[2].attention, model.model.blocks[2].mlp):
                last = skip.output if hasattr(skip, "output") else skip.outer
                for parameter in last.parameters():
                    parameter.mul_(4.0)
            torch.testing.assert_close(model(INPUTS).logits, before(INPUTS).logits, atol=1e-4, rtol=1e-4)
        a, b = measure(before), measure(model)
        for variant in VARIANTS:
            assert b.value("dependence", variant).value == pytest.approx(a.value("dependence", variant).value, abs=1e-3)

    def test_x_0_and_all_branches_times_a_factor(self) -> None:
        before, model = lab(placement="pre", norm_eps=1e-12), lab(placement="pre", norm_eps=1e-12)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embedding" in name or ".output." in name or ".outer." in name:
                    parameter.mul_(3.0)
            torch.testing.assert_close(model(INPUTS).logits, before(INPUTS).logits, atol=1e-4, rtol=1e-4)
        a, b = measure(before, unit="sublayer"), measure(model, unit="sublayer")
        for variant in VARIANTS:
            assert b.value("dependence", variant).value == pytest.approx(a.value("dependence", variant).value, abs=1e-3)


def depth_by_hand(changes: dict[tuple[int, int], Tensor], count: int, power: int) -> float:
    """Recursion over one reader after another, as the definition says it."""
    d = {0: 0.0}
    for reader in range(1, count + 2):
        parts = torch.stack([changes[writer, reader][:, 1:].double() ** power for writer in range(reader)])
        w = (parts / parts.sum(0)).mean(dim=(1, 2))
        d[reader] = (1.0 if reader <= count else 0.0) + float(sum(w[s] * d[s] for s in range(reader)))
    return d[count + 1]


class TestByHand:
    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    @pytest.mark.parametrize("name", list(PLACEMENTS))
    def test_every_placement(self, name: str, unit: str) -> None:
        model = lab(**PLACEMENTS[name])
        found, want = measure(model, unit=unit), changes(model, unit, INPUTS)
        count = 3 if unit == "block" else 6
        assert found.value("dependence").of == count
        for variant, power in (("", 2), ("first power", 1)):
            row = found.value("dependence", variant)
            assert row.value == pytest.approx(depth_by_hand(want, count, power), abs=2e-4)
            assert row.ci_low < row.value < row.ci_high
        for (writer, reader), change in want.items():
            parts = torch.stack([want[s, reader] for s in range(reader)])[:, :, 1:].square()
            share = float((change[:, 1:].square() / parts.sum(0)).mean())
            assert weight(found, writer, reader) == pytest.approx(share, abs=2e-4)


class TestBroken:
    """An estimator that is wrong in one place does not give the numbers by hand."""

    def off(self, model: LabForCausalLM) -> float:
        want = depth_by_hand(changes(model, "block", INPUTS), 3, 2)
        return abs(measure(model).value("dependence").value - want)

    def test_without_a_fault_it_agrees(self) -> None:
        assert self.off(lab(placement="post")) < 2e-4

    def test_a_wrong_identity_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "carry", lambda self, v: v)
        assert self.off(lab(placement="post")) > 1e-2

    def test_a_dropped_writer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        readers = module._readers

        def without(walk: Walk, inputs: Tensor):  # type: ignore[no-untyped-def]
            for reader, found, base in readers(walk, inputs):
                yield reader, [None, *found[1:]], base

        monkeypatch.setattr(module, "_readers", without)
        assert self.off(lab(placement="pre")) > 1e-2

    def test_writers_that_are_one_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        readers = module._readers

        def shifted(walk: Walk, inputs: Tensor):  # type: ignore[no-untyped-def]
            for reader, found, base in readers(walk, inputs):
                yield reader, [*found[1:], found[0]], base

        monkeypatch.setattr(module, "_readers", shifted)
        assert self.off(lab(placement="pre")) > 1e-2


class TestArithmetic:
    def test_depth_of_weights(self) -> None:
        # Reader 1 reads the embedding; 2 reads 1 by 0.5; the readout reads 0, 1 and 2.
        weights = np.array([[1.0, 0.5, 0.5, 0.2, 0.3, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
        np.testing.assert_allclose(depth_of_weights(weights, 2), [[1, 1.5, 0.3 + 0.75], [1, 1, 1]])

    def test_pairs_leave_the_embedding_out(self) -> None:
        model = lab(placement="pre")
        found, away = measure(model), changes(model, "block", INPUTS)
        table = found.curves["pairs"]
        assert list(table.columns) == ["i", "j", "metric", "value", "ci_low", "ci_high", "n"]
        assert [(i, j) for i, j in zip(table["i"], table["j"], strict=True)] == [
            (0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)
        ]  # fmt: skip
        with torch.no_grad():
            x1 = model.model.blocks[0](start(model, INPUTS))
            size = (model.model.blocks[1](x1) - x1).norm(dim=-1)
        want = float((away[1, 2] / size)[:, 1:].mean())
        assert table.query("i == 0 and j == 1")["value"].iloc[0] == pytest.approx(want, rel=1e-4)

    def test_batches_change_nothing(self) -> None:
        model = lab(placement="sandwich")
        one, all_at_once = (measure(model, batch_size=size) for size in (1, 6))
        for variant in VARIANTS:
            assert one.value("dependence", variant).value == pytest.approx(
                all_at_once.value("dependence", variant).value, rel=1e-5
            )
        np.testing.assert_allclose(one.per_sequence[""], all_at_once.per_sequence[""], atol=1e-5)
        assert one.per_sequence[""].shape == (6, 1 + 2 + 3 + 4)

    def test_one_sequence_has_no_interval(self) -> None:
        row = measure(lab(), INPUTS[:1]).value("dependence")
        assert np.isfinite(row.value)
        assert np.isnan([row.ci_low, row.ci_high]).all()

    def test_skipped_positions(self) -> None:
        model = lab()
        some, none = (measure(model, skip_first=k).value("dependence").value for k in (4, 0))
        assert some != pytest.approx(none, abs=1e-4)

    def test_progress_and_cost(self) -> None:
        seen: list[tuple[int, int]] = []
        model, inputs = lab(blocks=4), INPUTS
        settings = DepthSettings(batch_size=3)
        found = dependence(
            opened(model, inputs), corpus_of(inputs), "block", settings, lambda done, of: seen.append((done, of))
        )
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert found.cost_forward == pytest.approx((4 + 10) / 4)  # a run, and N (N + 1) / 2 changes


class TestRefusals:
    def test_scores_beside_the_stream(self) -> None:
        with pytest.raises(UsageError, match="beside it"):
            measure(lab(residual_attention=True))

    def test_sublayers_that_were_not_found(self) -> None:
        with pytest.raises(UsageError, match="not found in block 0"):
            measure(parallel(2), unit="sublayer")

    def test_an_unknown_unit(self) -> None:
        with pytest.raises(UsageError, match="--unit head"):
            measure(lab(), unit="head")

    def test_nothing_left_of_a_sequence(self) -> None:
        with pytest.raises(UsageError, match="leaves nothing"):
            measure(lab(), skip_first=16)

    def test_a_block_that_cannot_read_nothing(self) -> None:
        class Divides(Reads):
            def forward(self, x: Tensor) -> Tensor:
                return x + x / x.norm(dim=-1, keepdim=True)

        with pytest.raises(NonFiniteError, match="block 0"):
            measure(Net([Divides(0, 0, 1)], 2))

    def test_the_model_is_left_as_it_was(self) -> None:
        model = lab(placement="post")
        with torch.no_grad():
            before = model(INPUTS).logits
            measure(model, unit="sublayer")
            assert torch.equal(model(INPUTS).logits, before)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_half_precision_says_so() -> None:
    found = measure(lab(blocks=2).bfloat16())
    assert any("half precision" in note for note in found.notes)
    assert found.value("dependence").value == pytest.approx(measure(lab(blocks=2)).value("dependence").value, abs=0.1)


def test_batches_fit_into_the_memory() -> None:
    anatomy, corpus = opened(lab(), INPUTS), corpus_of(INPUTS)
    each = bytes_of_sequence(anatomy, corpus, states=10, logits=2)
    assert each == 4 * 16 * (10 * 16 + 2 * 50)
    sizes = [len(rows) for rows, _ in batches(anatomy, corpus, DepthSettings(memory=4 * each), each)]
    assert sizes == [4, 2]
    assert [len(rows) for rows, _ in batches(anatomy, corpus, DepthSettings(memory=1), each)] == [1] * 6
    assert [len(rows) for rows, _ in batches(anatomy, corpus, DepthSettings())] == [6]
