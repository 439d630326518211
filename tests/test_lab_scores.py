"""RealFormer's attention scores, which blocks hand on beside the stream, under every kind of schedule."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import corpus_of, opened, swept
from torch import Tensor

from depthprobe.ablations.kinds import controls
from depthprobe.ablations.schedule import Schedule, Unit, merge, parse, repeat, reverse, skip, swap, unmodified
from depthprobe.ablations.sweep import Trie, run_batch
from depthprobe.ablations.units import Units
from depthprobe.branches import Reader
from depthprobe.lab.config import PLACEMENTS, LabConfig
from depthprobe.lab.model import LabForCausalLM
from depthprobe.measure import Settings, measure
from depthprobe.probes.base import Batch
from depthprobe.probes.interaction import foreign_state

VOCAB, WIDTH, DEPTH, HEADS, TOKENS = 40, 16, 4, 2, 10
SIZES: dict[str, Any] = {
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
    model = LabForCausalLM(LabConfig(**SIZES, **options))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape)
    return model


class Hand:
    """A separate evaluation with residual attention: every stage takes and gives (stream, scores)."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.blocks = list(model.model.blocks)

    def run(self, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """The last state and the logits."""
        x = F.embedding(IDS, self.model.model.token_embedding.weight)
        x = x + self.model.model.position_embedding.weight[:TOKENS]
        scores = torch.zeros(1)
        for stage in schedule.stages:
            x, scores = self.stage(stage, schedule.combine, x, scores)
        norm = self.model.model.final_norm
        return x, F.linear(x if norm is None else self.norm(norm, x), self.model.lm_head.weight)

    def stage(self, stage: Any, combine: str, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        if combine == "weights" and len(stage) > 1:
            return self.block(self.averaged([unit.layer for unit in stage]), x, scores)
        found = [self.unit(unit, x, scores) for unit in stage]
        after = [handed for unit, (_, _, handed) in zip(stage, found, strict=True) if unit.part != "m"]
        outputs = [z for z, _, _ in found]
        if len(stage) == 1:
            z = outputs[0]
        elif combine == "mean":
            z = torch.stack(outputs).mean(dim=0)
        elif combine == "branch-sum":
            last = self.blocks[stage[-1].layer]
            skip_ = last.mlp_skip if stage[-1].part == "m" else last.attention_skip
            z = self.norm(skip_.norm_after, x + sum(u for _, u, _ in found))
        else:
            z = x + sum(output - x for output in outputs)
        return z, after[-1] if after else scores

    def unit(self, unit: Unit, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = self.blocks[unit.layer]
        if not unit.part:
            z, scores = self.block(block, x, scores)
            return z, z - x, scores
        if unit.part == "a":
            return self.attention(block, x, scores)
        z, u = self.mlp(block, x)
        return z, u, scores

    def block(self, block: Any, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        z, _, scores = self.attention(block, x, scores)
        return self.mlp(block, z)[0], scores

    def attention(self, block: Any, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.before(block.attention_skip, x)
        qkv = F.linear(y, block.attention.qkv.weight, block.attention.qkv.bias)
        size = WIDTH // HEADS
        query, key, value = (t.unflatten(-1, (HEADS, size)).transpose(1, 2) for t in qkv.split(WIDTH, dim=-1))
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / size**0.5 + scores
        seen = scores + torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        mixed = torch.einsum("bhqk,bhkd->bqhd", seen.softmax(dim=-1), value).flatten(2)
        u = F.linear(mixed, block.attention.output.weight, block.attention.output.bias)
        return *self.after(block.attention_skip, x, u), scores

    def mlp(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.before(block.mlp_skip, x)
        inner = F.gelu(F.linear(y, block.mlp.inner.weight, block.mlp.inner.bias))
        return self.after(block.mlp_skip, x, F.linear(inner, block.mlp.outer.weight, block.mlp.outer.bias))

    def before(self, skip_: Any, x: Tensor) -> Tensor:
        return self.norm(skip_.norm_before, x) if self.config.placement in ("pre", "sandwich") else x

    def after(self, skip_: Any, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.placement in ("branch", "sandwich"):
            u = self.norm(skip_.norm_update, u)
        return (self.norm(skip_.norm_after, x + u) if self.config.placement == "post" else x + u), u

    @staticmethod
    def norm(module: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), module.weight, module.bias, module.eps)

    def averaged(self, layers: list[int]) -> Any:
        made = copy.deepcopy(self.blocks[layers[0]])
        states = [self.blocks[layer].state_dict() for layer in layers]
        made.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
        return made


SCHEDULES: dict[str, Schedule] = {
    "unmodified": unmodified(DEPTH),
    "swap": swap(DEPTH, 1, 2),
    "skip first": skip(DEPTH, [0]),
    "skip": skip(DEPTH, [2]),
    "skip last": skip(DEPTH, [3]),
    "merge": merge(DEPTH, [1, 2]),
    "merge the other way round": parse("0 (2+1) 3"),
    "merge all": merge(DEPTH, [0, 1, 2, 3]),
    "mean": merge(DEPTH, [1, 2], "mean"),
    "weights": merge(DEPTH, [1, 2], "weights"),
    "repeat": repeat(DEPTH, 2),
    "reverse": reverse(DEPTH, 0, 4),
    "sublayers": parse("0a 0m 1m 1a 2-3"),
    "skip attention": skip(DEPTH, [1], "a"),
    "skip mlp": skip(DEPTH, [1], "m"),
    "side by side": parse("0 (1a+1m) 2-3"),
    "side by side, mlp first": parse("0 (1m+1a) 2-3"),
    "attention first": parse("0 (1a+2a) (1m+2m) 3"),
    "sublayers of others": parse("0 1a 3m 2 (3a+0m) 1"),
}
POST = {
    "branch-sum": parse("0 (1a+2a) (1m+2m) 3", "branch-sum"),
    "branch-sum ends with attention": parse("0 1a (1m+2a) 2m 3", "branch-sum"),
}


class TestScoresUnderSchedules:
    @pytest.mark.parametrize("placement", ["pre", "post", "branch", "sandwich", "none"])
    def test_against_a_forward_by_hand(self, placement: str) -> None:
        cases = SCHEDULES | (POST if placement == "post" else {})
        model = build(placement=placement, residual_attention=True)
        with torch.no_grad():
            hand = Hand(model)
            last, logits = hand.run(unmodified(DEPTH))
            assert torch.allclose(logits, model(IDS).logits, atol=1e-4)
            p = logits[:, :-1].double().log_softmax(dim=-1)
            found = swept(model, IDS, list(cases.values()))
            for column, (name, schedule) in enumerate(cases.items()):
                end, changed = hand.run(schedule)
                distance = (1 - torch.cosine_similarity(end, last, dim=-1)).mean(dim=1)
                assert found.effects["state_distance"][:, column] == pytest.approx(distance.numpy(), abs=2e-5), name
                q = changed[:, :-1].double().log_softmax(dim=-1)
                kl = (p.exp() * (p - q)).sum(dim=-1).mean(dim=1)
                assert found.effects["kl"][:, column] == pytest.approx(kl.numpy(), abs=1e-4, rel=1e-3), name
                if name != "unmodified":
                    assert kl.min() > 1e-3, name

    def test_scores_matter_here(self) -> None:
        """The cases above would pass without any scores if these did not change what a schedule gives."""
        model = build(residual_attention=True)
        with torch.no_grad():
            hand = Hand(model)
            right, _ = hand.run(SCHEDULES["swap"])
            hand.block = lambda block, x, scores: Hand.block(hand, block, x, torch.zeros(1))  # type: ignore[method-assign]
            assert (hand.run(SCHEDULES["swap"])[0] - right).norm() / right.norm() > 0.01

    @pytest.mark.parametrize("way", ["blocks", "sublayers"])
    @pytest.mark.parametrize(
        ("placement", "residual", "initialisation"),
        [*((p, r, "xavier") for p in PLACEMENTS for r in (False, True)), ("post", True, "admin")],
    )
    def test_a_model_of_pairs_is_the_schedule_of_pairs(
        self, placement: str, residual: bool, initialisation: str, way: str
    ) -> None:
        options = {"placement": placement, "residual_attention": residual, "initialisation": initialisation}
        paired, plain = build(parallel_pairs=way, **options), build(**options)
        state = plain.state_dict()
        for name, value in paired.state_dict().items():
            parts = name.split(".")
            if parts[1] == "blocks":
                parts[2:4] = [str(2 * int(parts[2]) + (parts[3] == "second"))]
            state[".".join(parts)] = value
        plain.load_state_dict(state)
        post = placement in ("post", "deepnorm")
        text = "(0+1) (2+3)" if way == "blocks" else "(0a+1a) (0m+1m) (2a+3a) (2m+3m)"
        schedule = parse(text, "branch-sum" if post and way == "sublayers" else "sum")
        with torch.no_grad():
            anatomy = opened(plain, IDS)
            units, entry = Units(anatomy), anatomy.stream.enter(IDS)
            x = entry.x
            for stage in schedule.stages:
                x = units.stage(entry, stage, schedule.combine, x, lambda unit, x=x: units.unit(entry, unit, x))
            wanted = paired(IDS).logits
            assert torch.allclose(anatomy.stream.readout(x, IDS), wanted, rtol=1e-3, atol=1e-3)
            assert not torch.allclose(plain(IDS).logits, wanted, atol=0.1)

    def test_a_random_vector_leaves_the_scores_alone(self) -> None:
        anatomy = opened(build(residual_attention=True), IDS)
        made = controls(DEPTH)
        with torch.no_grad():
            effects, _ = run_batch(
                Units(anatomy),
                anatomy.stream.enter(IDS),
                Trie.of(made),
                lambda x: None,
                lambda layer, like: torch.zeros_like(like),
            )
        silent = [index for index, schedule in enumerate(made) if "~" in repr(schedule)]
        assert len(silent) == DEPTH - 1
        for index in silent:
            assert effects[index]["state_distance"] == pytest.approx(np.zeros(3), abs=1e-6)

    def test_interaction_hands_on_what_went_with_each_state(self) -> None:
        model = build(residual_attention=True)
        anatomy = opened(model, IDS)
        means = measure(anatomy, corpus_of(IDS), Settings(lens_positions=0, skip_first=1, seed=3)).means.values
        with torch.no_grad(), Reader(anatomy.stream, anatomy.blocks) as reader:
            hand, entry = Hand(model), anatomy.stream.enter(IDS)
            states = [(entry.x, torch.zeros(1))]
            for block in hand.blocks:
                states.append(hand.block(block, *states[-1]))
            for layer in range(DEPTH - 1):
                (x, before), (z, after) = states[layer], states[layer + 1]
                block = hand.blocks[layer + 1]
                foreign = foreign_state(Batch(reader, entry, np.arange(3), 1, 3), layer, x, z)
                true = hand.block(block, z, after)[0] - z
                for name, blind in [
                    ("interaction_error", hand.block(block, x, before)[0] - x),
                    ("interaction_error_control", hand.block(block, foreign, after)[0] - foreign),
                ]:
                    wanted = ((true - blind).norm(dim=-1) / true.norm(dim=-1))[:, 1:].mean(dim=1)
                    assert means[name, "block", layer] == pytest.approx(wanted.numpy(), rel=1e-3), name

    def test_a_state_without_its_scores_is_an_error(self) -> None:
        stream = opened(build(residual_attention=True), IDS).stream
        with torch.no_grad():
            entry = stream.enter(IDS)
            stranger = entry.x.clone()
            with pytest.raises(RuntimeError, match=r"Stream\.inherit"):
                stream.run(entry, 1, stranger)
            assert torch.equal(stream.run(entry, 1, stream.inherit(stranger, entry.x)), stream.run(entry, 1, entry.x))
        plain = opened(build(), IDS).stream
        with torch.no_grad():
            entry = plain.enter(IDS)
            assert torch.equal(plain.run(entry, 1, entry.x.clone()), plain.run(entry, 1, entry.x))
