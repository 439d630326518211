"""What units read and write, what their skips let through, and whether a block has a skip at all."""

from __future__ import annotations

import pytest
import torch
from by_hand import corpus_of, opened
from depth_by_hand import PLACEMENTS, lab
from families import build, ids
from test_staging import INPUTS, chain, identity, parallel
from torch import Tensor, nn

from depthprobe.depth.paths import Frozen, Walk, block_skips
from depthprobe.errors import UsageError
from depthprobe.lab.norms import BatchNorm, InstanceNorm


class TestParts:
    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    @pytest.mark.parametrize("name", list(PLACEMENTS))
    def test_the_parts_add_up_to_the_state(self, name: str, unit: str) -> None:
        """With norms that add no constant, what is left of all writers is what a reader reads."""
        self.add_up(lab(bias=False, **PLACEMENTS[name]), unit, INPUTS)

    @pytest.mark.parametrize("name", ["gpt2", "neox", "gptj", "granite", "gemma3", "olmo2"])
    @pytest.mark.parametrize("unit", ["block", "sublayer"])
    def test_the_parts_add_up_in_other_families(self, name: str, unit: str) -> None:
        self.add_up(build(name), unit, ids(2, 12))

    def add_up(self, model: nn.Module, unit: str, inputs: Tensor) -> None:
        with torch.no_grad(), Walk(opened(model, inputs), unit) as walk:
            taken = walk.take(inputs)
            left = [taken.entry.x]
            before = left
            for index, x in enumerate(taken.reads):
                before = before if walk.joins(index) else left
                assert float((sum(before) - x).norm() / x.norm()) < 1e-5, f"unit {index}"
                left = [*(taken.paths[index].carry(c) for c in left), taken.writes[index]]
            assert float((sum(left) - taken.last).norm() / taken.last.norm()) < 1e-5


class TestFrozen:
    @pytest.mark.parametrize(
        "norm",
        [nn.LayerNorm(9), nn.LayerNorm(9, bias=False), nn.RMSNorm(9), BatchNorm(9), InstanceNorm(9, affine=True)],
    )
    def test_frozen_statistics(self, norm: nn.Module) -> None:
        torch.manual_seed(0)
        y, v = torch.randn(2, 7, 9) * 3 + 1, torch.randn(2, 7, 9)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.randn_like(parameter))
            if isinstance(norm, BatchNorm):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
            norm.eval()
            frozen = Frozen.of(norm, y)
            if isinstance(norm, BatchNorm):
                want = norm(y + v) - norm(y)
            else:
                axis = 1 if isinstance(norm, InstanceNorm) else -1
                mean = 0 if isinstance(norm, nn.RMSNorm) else v.mean(axis, keepdim=True)
                eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
                moment = y.square().mean(-1, keepdim=True)
                variance = moment if isinstance(norm, nn.RMSNorm) else y.var(axis, keepdim=True, unbiased=False)
                want = norm.weight * (v - mean) / (variance + eps).sqrt()
            torch.testing.assert_close(frozen(v), want, rtol=1e-4, atol=1e-4)

    def test_what_is_no_norm_is_refused(self) -> None:
        with pytest.raises(UsageError, match="Tanh"):
            Frozen.of(nn.Tanh(), torch.randn(2, 7, 9))


class TestSkips:
    def test_with_and_without(self) -> None:
        for model, want in ((chain(3), 0), (parallel(3), 1), (identity(3), 1)):
            found, notes = block_skips(opened(model, INPUTS), corpus_of(INPUTS))
            assert found == dict.fromkeys(range(3), want)
            assert len(notes) == 1
            assert ("without a skip" in notes[0]) == (want == 0)

    def test_known_branches_need_no_telling(self) -> None:
        assert block_skips(opened(lab(), INPUTS), corpus_of(INPUTS)) == ({}, [])

    def test_a_chain_written_as_a_residual_is_a_chain(self) -> None:
        class Written(nn.Module):
            def __init__(self, block: nn.Module) -> None:
                super().__init__()
                self.inner = block

            def forward(self, x: Tensor) -> Tensor:
                return x + (self.inner(x) - x)

        model = chain(3)
        model.blocks = nn.ModuleList(Written(block) for block in model.blocks)
        assert set(block_skips(opened(model, INPUTS), corpus_of(INPUTS))[0].values()) == {0}
