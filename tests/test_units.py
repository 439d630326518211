"""Every kind of schedule against a plain computation: one full forward a schedule, modules wrapped by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import BY_HAND, ByHand, deep, effects_by_hand, opened, swept
from families import FAMILIES, build, ids

from depthprobe import Checkpoint
from depthprobe.ablations.schedule import (
    Schedule,
    attention_first,
    merge,
    parallel_sublayers,
    parse,
    repeat,
    reverse,
    shuffle,
    skip,
    swap,
    unmodified,
)
from depthprobe.ablations.units import Units
from depthprobe.errors import UsageError

BLOCKS = 5
INPUTS = ids(3, 20)

WHOLE: dict[str, Schedule] = {
    "skip first": skip(BLOCKS, [0]),
    "skip last": skip(BLOCKS, [4]),
    "skip two": skip(BLOCKS, [1, 3]),
    "merge": merge(BLOCKS, [1, 2]),
    "merge span 3": merge(BLOCKS, [2, 3, 4]),
    "merge apart": merge(BLOCKS, [1, 3]),
    "merge twice": parse("(0+1) 2 (3+4)"),
    "mean": merge(BLOCKS, [1, 2], "mean"),
    "mean span 3": merge(BLOCKS, [0, 1, 2], "mean"),
    "weights": merge(BLOCKS, [1, 2], "weights"),
    "weights span 3": merge(BLOCKS, [2, 3, 4], "weights"),
    "swap": swap(BLOCKS, 0, 1),
    "swap far": swap(BLOCKS, 1, 4),
    "repeat": repeat(BLOCKS, 2),
    "repeat thrice": repeat(BLOCKS, 0, times=3),
    "reverse": reverse(BLOCKS, 1, 5),
    "shuffle": shuffle(BLOCKS, 0, 5, seed=3),
}
SUBLAYERS: dict[str, Schedule] = {
    "parallel": parallel_sublayers(BLOCKS, [0, 3]),
    "attention first": attention_first(BLOCKS, [1, 2]),
    "attention first of 3": attention_first(BLOCKS, [2, 3, 4]),
    "attention first, mean": attention_first(BLOCKS, [1, 2], "mean"),
    "skip attention": skip(BLOCKS, [1], "a"),
    "skip mlp": skip(BLOCKS, [2], "m"),
    "merge attention": merge(BLOCKS, [1, 2], part="a"),
    "merge mlp": merge(BLOCKS, [3, 4], part="m"),
    "mlp before attention": parse("0 1m 1a 2-4"),
    "sublayers of others": parse("0 1a 3m 2 (4a+0m) 1"),
}
POST = {
    "branch-sum attention first": attention_first(BLOCKS, [1, 2], "branch-sum"),
    "branch-sum attention first of the last": attention_first(BLOCKS, [3, 4], "branch-sum"),
    "branch-sum parallel": parse("0 (1a+1m) 2-4", "branch-sum"),
    "branch-sum ends with attention": parse("0 1a (1m+2a) 2m 3-4", "branch-sum"),
}
EVERY = {"llama": {}, "gemma3": {}, "neox": {}, "olmo2": {}, "opt-post": POST, "bert": POST, "bert-headless": POST}


class TestAgainstOneForwardEach:
    @pytest.mark.parametrize("name", list(EVERY))
    def test_every_kind(self, name: str) -> None:
        cases = WHOLE | SUBLAYERS | EVERY[name]
        model = deep(name, BLOCKS)
        found = swept(model, INPUTS, list(cases.values()))
        wanted = effects_by_hand(ByHand(model, BY_HAND[name], INPUTS), cases.values(), unmodified(BLOCKS))
        metrics = {"state_distance"} if "bert" in name else {"delta_loss", "kl", "top1_agreement", "state_distance"}
        assert set(found.effects) == metrics
        for metric in metrics:
            off = np.abs(found.effects[metric] - wanted[metric]).max(axis=0)
            bad = {case: float(error) for case, error in zip(cases, off, strict=True) if not error <= 1e-4}
            assert not bad, f"{name}, {metric}: {bad}"
        # A schedule that did nothing would agree with anything that does nothing.
        same = {"parallel"} if FAMILIES[name.removesuffix("-headless")].parallel else set()
        changed = dict(zip(cases, wanted["state_distance"].max(axis=0), strict=True))
        assert {case for case, distance in changed.items() if distance < 1e-3} == same
        distinct = {tuple(np.round(column, 6)) for column in wanted["state_distance"].T}
        assert len(distinct) == len(cases), "two cases are the same change"

    def test_gemma3_swaps_sliding_and_full_attention(self) -> None:
        """A block that took the mask of its new place would see more, or less, than its own."""
        model = deep("gemma3", BLOCKS)
        kinds = model.config.layer_types
        across = [i for i in range(BLOCKS - 1) if kinds[i] != kinds[i + 1]]
        assert len(across) >= 2
        made = [swap(BLOCKS, i, i + 1) for i in across]
        by_hand = ByHand(model, BY_HAND["gemma3"], INPUTS)
        wanted = effects_by_hand(by_hand, made, unmodified(BLOCKS))
        found = swept(model, INPUTS, made)
        np.testing.assert_allclose(found.effects["kl"], wanted["kl"], atol=1e-4)
        calls = by_hand.calls
        by_hand.calls = [calls[0]] * BLOCKS  # every block with the first one's mask: the test can tell
        other = effects_by_hand_unchecked(by_hand, made)
        assert (np.abs(other - wanted["state_distance"]) > 1e-3).any()


def effects_by_hand_unchecked(by_hand: ByHand, schedules: list[Schedule]) -> np.ndarray:
    last = by_hand.run(unmodified(BLOCKS))[1]
    ends = [by_hand.run(schedule)[1] for schedule in schedules]
    return np.stack([(1 - torch.cosine_similarity(end, last, dim=-1)).mean(dim=1).numpy() for end in ends], axis=1)


class TestExactly:
    @pytest.mark.parametrize("name", list(FAMILIES))
    def test_the_unmodified_schedule_gives_the_models_logits(self, name: str) -> None:
        model = build(name)
        anatomy = opened(model, INPUTS)
        with torch.no_grad():
            units, entry = Units(anatomy), anatomy.stream.enter(INPUTS)
            x = entry.x
            for stage in unmodified(len(anatomy.stream)).stages:
                x = units.stage(entry, stage, "sum", x, lambda unit, x=x: units.unit(entry, unit, x))
            keywords = {"use_cache": False} if FAMILIES[name].causal else {}
            assert torch.equal(anatomy.stream.readout(x, INPUTS), model(input_ids=INPUTS, **keywords).logits)

    @pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.parallel])
    def test_attention_then_mlp_is_the_block(self, name: str) -> None:
        model = build(name)
        found = swept(model, INPUTS, [parse("0 1a 1m 2"), parse("0a 0m 1a 1m 2a 2m"), parse("0-2")])
        assert found.effects["state_distance"].max() == 0
        if "kl" in found.effects:
            assert found.effects["kl"].max() == 0
            assert np.abs(found.effects["delta_loss"]).max() == 0
            assert found.effects["top1_agreement"].min() == 1

    @pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.parallel])
    def test_attention_beside_mlp_is_a_parallel_block(self, name: str) -> None:
        found = swept(build(name), INPUTS, [parse("0 (1a+1m) 2"), parse("0 1a 1m 2")])
        assert found.effects["kl"][:, 0].max() <= 1e-6
        assert found.effects["kl"][:, 1].min() > 1e-5

    def test_nothing_is_left_on_the_model(self) -> None:
        model = build("bert")
        before = {name: p.clone() for name, p in model.state_dict().items()}
        swept(model, INPUTS, [parse("0 (1a+2a) (1m+2m)", "branch-sum"), parse("(0+1) 2", "weights"), parse("0 1a 2")])
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert "forward" not in module.__dict__
        assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "made", "message"),
        [
            ("llama", parse("0 (1a+2a) (1m+2m)", "branch-sum"), "post-LN"),
            ("olmo2", parse("0 (1a+2a) (1m+2m)", "branch-sum"), "post-LN"),
            ("bert", parse("0 (1+2)", "branch-sum"), "whole blocks"),
            ("llama", parse("0-3"), "block 3"),
            ("llama", parse("0 1 (2+5)"), "block 5"),
            ("llama", parse("(0a+1a)", "weights"), "averaged weights"),
        ],
    )
    def test_are_one_line(self, name: str, made: Schedule, message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            Units(opened(build(name), INPUTS)).check(made)
        assert "\n" not in str(caught.value)


@pytest.mark.real
def test_smollm2(smollm2: Checkpoint) -> None:
    inputs = ids(1, 64, seed=1, vocab=smollm2.vocab_size or 0)
    made = [
        skip(30, [0]),
        skip(30, [11]),
        merge(30, [5, 6]),
        merge(30, [28, 29]),
        merge(30, [12, 14]),
        swap(30, 9, 10),
        attention_first(30, [20, 21]),
        skip(30, [7], "m"),
        merge(30, [16, 17, 18], "mean"),
    ]
    found = swept(smollm2, inputs, made)
    wanted = effects_by_hand(ByHand(smollm2.model, BY_HAND["llama"], inputs), made, unmodified(30))
    for metric in ("delta_loss", "kl", "top1_agreement", "state_distance"):
        np.testing.assert_allclose(found.effects[metric], wanted[metric], atol=1e-4, err_msg=metric)
