"""What depthprobe finds in the lab's models: every placement, with every option that could hide it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from by_hand import opened

import depthprobe
from depthprobe.branches import Reader
from depthprobe.lab.admin import admin_profile
from depthprobe.lab.config import NORMS, PLACEMENTS, LabConfig
from depthprobe.lab.model import LabForCausalLM, LabForMaskedLM
from depthprobe.report.tables import anatomy_rows
from depthprobe.verify import Anatomy

VOCAB, WIDTH, DEPTH, HEADS, TOKENS = 40, 16, 4, 2, 10
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
}
IDS = torch.randint(VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def build(**options: Any) -> Any:
    """A tiny model, none of whose weights is accidentally 0 or 1."""
    torch.manual_seed(0)
    config = LabConfig(**{**SMALL, **options})
    model = LabForCausalLM(config) if config.causal else LabForMaskedLM(config)
    if config.initialisation == "admin":
        admin_profile(model, IDS)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape)
    return model


def placements(anatomy: Anatomy) -> set[tuple[str, str, bool]]:
    return {(branch.unit, branch.placement, branch.parallel) for block in anatomy.blocks for branch in block.branches}


def both(placement: str) -> set[tuple[str, str, bool]]:
    return {("attention", placement, False), ("mlp", placement, False)}


def proven(anatomy: Anatomy) -> bool:
    return all(check.passed for check in anatomy.checks) and len(anatomy.checks) == 3


class TestPlacement:
    @pytest.mark.parametrize(
        ("placement", "residual", "qk_norm", "scaling"),
        [
            options
            for options in product(PLACEMENTS, (False, True), (False, True), (False, True))
            if not options[3] or options[0] in ("pre", "sandwich")
        ],
    )
    def test_is_the_one_that_was_built(self, placement: str, residual: bool, qk_norm: bool, scaling: bool) -> None:
        model = build(
            placement=placement, residual_attention=residual, qk_norm=qk_norm, layernorm_scaling=scaling, norm_eps=1e-6
        )
        anatomy = opened(model, IDS)
        assert proven(anatomy)
        assert placements(anatomy) == both("post" if placement == "deepnorm" else placement)
        for block in anatomy.blocks:
            for branch in block.branches:
                assert branch.scale == 1
                assert branch.skip_scale == pytest.approx((2 * DEPTH) ** 0.25 if placement == "deepnorm" else 1)
        assert anatomy.causal
        assert anatomy.objective == "causal"
        assert ("hands on" in " ".join(anatomy.notes)) == residual

    @pytest.mark.parametrize(("norm", "placement"), list(product(NORMS, ("pre", "post", "branch", "sandwich"))))
    def test_of_every_norm(self, norm: str, placement: str) -> None:
        model = build(norm=norm, placement=placement, causal=False).train()
        for _ in range(5):
            model(IDS)  # BatchNorm's running statistics
        anatomy = opened(model, IDS)
        assert placements(anatomy) == both(placement)
        assert not anatomy.causal
        assert anatomy.objective == "masked"
        # A final norm over positions reads them together: no lens that picks positions.
        together = norm == "instancenorm" and placement != "post"
        assert anatomy.reads_positions_apart == (not together)
        assert proven(anatomy) == (not together)

    def test_what_a_branch_is_added_to_under_deepnorm(self) -> None:
        model = build(placement="deepnorm")
        anatomy, alpha = opened(model, IDS), (2 * DEPTH) ** 0.25
        with torch.no_grad(), Reader(anatomy.stream, anatomy.blocks) as reader:
            entry = anatomy.stream.enter(IDS)
            visit = reader.visit(entry, 0, entry.x)
            block = model.model.blocks[0]
            s, u = visit.branches["attention"]
            assert torch.allclose(s, alpha * entry.x, rtol=1e-4)
            middle = block.attention_skip.norm_after(s + u)
            s, u = visit.branches["mlp"]
            assert torch.allclose(s, alpha * middle, rtol=1e-4, atol=1e-5)
            assert torch.allclose(block.mlp_skip.norm_after(s + u), visit.z, atol=1e-5)

    @pytest.mark.parametrize("shaken", [True, False])
    def test_learned_factors_of_admin(self, shaken: bool) -> None:
        model = build(placement="post", initialisation="admin")
        if not shaken:
            torch.manual_seed(0)
            model = LabForCausalLM(model.config)
            admin_profile(model, IDS)
        anatomy = opened(model, IDS)
        assert proven(anatomy)
        assert placements(anatomy) == both("post")
        with torch.no_grad(), Reader(anatomy.stream, anatomy.blocks) as reader:
            entry = anatomy.stream.enter(IDS)
            x = entry.x
            for index, block in enumerate(model.model.blocks):
                visit = reader.visit(entry, index, x)
                omega = block.attention_skip.gain.weight
                assert torch.allclose(visit.branches["attention"][0], omega * x, rtol=1e-4, atol=1e-5)
                middle = block.attention_skip.norm_after(sum(visit.branches["attention"]))
                assert torch.allclose(visit.branches["mlp"][0], block.mlp_skip.gain.weight * middle, atol=1e-4)
                assert torch.allclose(block.mlp_skip.norm_after(sum(visit.branches["mlp"])), visit.z, atol=1e-4)
                x = visit.z

    def test_scales_and_factors_are_stated(self) -> None:
        for options, words in [
            ({"placement": "deepnorm"}, "post (attention), stream × 1.68"),
            ({"placement": "post", "initialisation": "admin"}, "post (attention), stream × a learned factor a dimen"),
        ]:
            found = depthprobe.inspect(build(**options))
            assert [row["attention"].startswith(words) for row in anatomy_rows(found["anatomy"])] == [True]

    @pytest.mark.parametrize("way", ["blocks", "sublayers"])
    @pytest.mark.parametrize("placement", PLACEMENTS)
    def test_pairs_are_blocks(self, placement: str, way: str) -> None:
        anatomy = opened(build(placement=placement, parallel_pairs=way), IDS)
        assert len(anatomy.stream) == DEPTH // 2
        assert all(not block.branches for block in anatomy.blocks)
        assert [check.passed for check in anatomy.checks] == [True, True]
        assert anatomy.stream.checkpoint.notes[-1].startswith("Each block of this report is a pair of the lab's")

    def test_the_report_says_how_it_was_built(self) -> None:
        model = build(layernorm_scaling=True, residual_attention=True, qk_norm=True)
        found = depthprobe.inspect(model)
        note = found["model"]["notes"][-1]
        assert "placement pre, layernorm, initialisation xavier, norms before branches times 1/√(l + 1)" in note
        assert "residual attention, QK-norm" in note
        assert any("the block before it in the schedule" in note for note in found["anatomy"]["notes"])
