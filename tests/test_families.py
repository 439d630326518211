"""Every family: what is found in it is what its code says, checked by hooks that the tests place by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from families import EMBEDDED, FAMILIES, IDS, analyze, build, ids
from torch import Tensor, nn

import depthprobe
from depthprobe.branches import Reader
from depthprobe.checkpoint import Checkpoint
from depthprobe.errors import VerificationError
from depthprobe.verify import Anatomy, open_stream

STRUCTURES = ("gpt2", "llama", "gemma3", "olmo2", "neox", "opt-post", "bert", "granite")
LIST_OF = {
    "gpt2": "transformer.h",
    "neox": "gpt_neox.layers",
    "opt-post": "model.decoder.layers",
    "bert": "bert.encoder.layer",
}


def opened(model: nn.Module, inputs: Tensor = IDS) -> Anatomy:
    return open_stream(depthprobe.load(model, device="cpu"), inputs)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ of the worst sequence."""
    a, b = a.detach().double().flatten(1), b.detach().double().flatten(1)
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


def tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def own_output(model: nn.Module, inputs: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        output = model(input_ids=inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def block_by_block(anatomy: Anatomy, inputs: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        entry = anatomy.stream.enter(inputs)
        x = entry.x
        for index in range(len(anatomy.stream)):
            x = anatomy.stream.run(entry, index, x)
        return anatomy.stream.readout(x, inputs)


class TestEveryFamily:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_is_placed_as_its_code_says(self, name: str) -> None:
        family, anatomy = FAMILIES[name], opened(build(name))
        assert len(anatomy.blocks) == 3
        for block in anatomy.blocks:
            attention, mlp = block.branch("attention"), block.branch("mlp")
            assert attention is not None
            assert mlp is not None
            first_of_modernbert = name == "modernbert" and block.index == 0
            assert attention.placement == ("none" if first_of_modernbert else family.attention)
            assert mlp.placement == family.mlp
            assert attention.parallel == mlp.parallel == family.parallel
            assert attention.scale == pytest.approx(family.scale, rel=1e-6)
            assert mlp.scale == pytest.approx(family.scale, rel=1e-6)
            assert (attention.norm is not None) == (family.attention == "post")
        assert anatomy.causal == family.causal
        assert anatomy.objective == ("causal" if family.causal else "masked")
        assert anatomy.reads_positions_apart
        assert anatomy.notes == ()

    @pytest.mark.parametrize(
        ("name", "attention", "floor"),
        [(name, "eager", 5e-5) for name in FAMILIES] + [(name, "sdpa", 5e-4) for name in STRUCTURES],
    )
    def test_block_by_block_is_the_model(self, name: str, attention: str, floor: float) -> None:
        model = build(name, attention)
        inputs = ids(2, 33, seed=5)  # not the batch that the anatomy was found on
        with torch.no_grad():
            goal = own_output(model, inputs)
        anatomy = opened(model)
        assert distance(block_by_block(anatomy, inputs), goal) <= floor
        assert {check.floor for check in anatomy.checks} == {floor}
        assert all(check.passed for check in anatomy.checks)
        assert distance(own_output(model, inputs), goal) == 0  # and the model is as it was

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", STRUCTURES)
    def test_half_precision_hides_nothing(self, name: str, dtype: torch.dtype) -> None:
        family, anatomy = FAMILIES[name], opened(build(name).to(dtype))
        for block in anatomy.blocks:
            placements = [(b.unit, b.placement, b.parallel) for b in block.branches]
            assert placements == [
                ("attention", family.attention, family.parallel),
                ("mlp", family.mlp, family.parallel),
            ]
            assert [b.scale for b in block.branches] == pytest.approx([family.scale] * 2, rel=0.01)
        assert {check.floor for check in anatomy.checks} == {1e-2}
        assert all(check.passed for check in anatomy.checks)

    @pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "esm", "gpt2", "llama"])
    def test_without_a_head_the_last_state_is_verified(self, name: str) -> None:
        model = build(name, headless=True)
        anatomy = opened(model)
        assert anatomy.objective is None
        assert [check.name for check in anatomy.checks][:2] == ["blocks", "branches"]
        assert all(check.passed for check in anatomy.checks)
        assert distance(block_by_block(anatomy), own_output(model)) <= 5e-5
        report = analyze(model, data=ids(4, 24), device="cpu")
        assert not any(metric.startswith("lens") for metric in report.layers["metric"])
        assert any("lens" in note for note in report.notes)


@dataclass
class Own:
    """States and branches of one block, read by hooks that the test placed itself."""

    x: Tensor
    z: Tensor
    attention: tuple[Tensor, Tensor]
    mlp: tuple[Tensor, Tensor]
    rebuilt: Tensor


def by_hand(name: str, model: nn.Module) -> list[Own]:
    """Hooks on modules that are named here, from reading each family's code; no depthprobe."""
    blocks = model.get_submodule(LIST_OF.get(name, "model.layers"))
    modules = {
        "gpt2": ("attn", "mlp"),
        "llama": ("self_attn", "mlp"),
        "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "neox": ("attention", "mlp"),
        "opt-post": ("self_attn", "fc2"),
        "bert": ("attention.output.dense", "output.dense"),
        "granite": ("self_attn", "mlp"),
    }[name]
    norms = {
        "opt-post": ("self_attn_layer_norm", "final_layer_norm"),
        "bert": ("attention.output.LayerNorm", "output.LayerNorm"),
    }.get(name)
    seen: list[dict[str, Tensor]] = [{} for _ in blocks]
    handles = []
    for block, place in zip(blocks, seen, strict=True):

        def before(_: nn.Module, args: Any, kwargs: Any, place: dict[str, Tensor] = place) -> None:
            place["x"] = (args[0] if args else kwargs["hidden_states"]).clone()

        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        for key, path in {"z": "", "attention": modules[0], "mlp": modules[1]}.items():

            def after(_: nn.Module, __: Any, output: Any, key: str = key, place: dict[str, Tensor] = place) -> None:
                place[key] = tensor(output).clone()

            handles.append(block.get_submodule(path).register_forward_hook(after))
    with torch.no_grad():
        model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    found = []
    for block, place in zip(blocks, seen, strict=True):
        x, scale = place["x"], FAMILIES[name].scale
        a, m = place["attention"] * scale, place["mlp"].reshape(x.shape) * scale
        middle = x if name == "neox" else x + a
        if norms:
            middle = block.get_submodule(norms[0])(middle)
        rebuilt = middle + m + (a if name == "neox" else 0)
        if norms:
            rebuilt = block.get_submodule(norms[1])(rebuilt)
        found.append(Own(x, place["z"], (x, a), (middle, m), rebuilt))
    return found


class TestBranches:
    @pytest.mark.parametrize("name", STRUCTURES)
    def test_are_those_that_the_modules_compute(self, name: str) -> None:
        model = build(name)
        own = by_hand(name, model)
        for this, following in pairwise(own):
            assert torch.equal(this.z, following.x)
        anatomy = opened(model)
        with torch.no_grad(), Reader(anatomy.stream, anatomy.blocks) as reader:
            entry = anatomy.stream.enter(IDS)
            x = entry.x
            for index, block in enumerate(own):
                assert distance(block.rebuilt, block.z) <= 5e-5, "the test's own reading is right"
                visit = reader.visit(entry, index, x)
                assert distance(x, block.x) <= 1e-6
                assert distance(visit.z, block.z) <= 1e-6
                assert distance(visit.update, block.z - block.x) <= 1e-5
                assert set(visit.branches) == {"attention", "mlp"}
                for unit, (s, u) in visit.branches.items():
                    assert distance(s, getattr(block, unit)[0]) <= 1e-5, (unit, index)
                    assert distance(u, getattr(block, unit)[1]) <= 1e-5, (unit, index)
                x = visit.z

    def test_are_read_from_any_state(self) -> None:
        """A block far from where it stands still gives s + u = z: nothing of the first run is left over."""
        anatomy = opened(build("llama"))
        with torch.no_grad(), Reader(anatomy.stream, anatomy.blocks) as reader:
            entry = anatomy.stream.enter(IDS)
            x = entry.x + torch.randn(entry.x.shape, generator=torch.Generator().manual_seed(0))
            for index in (2, 0, 1):
                visit = reader.visit(entry, index, x)
                (s, a), (t, m) = visit.branches["attention"], visit.branches["mlp"]
                assert torch.equal(s, x)
                assert distance(x + a, t) <= 1e-6
                assert distance(t + m, visit.z) <= 1e-6
                assert distance(visit.update, a + m) <= 1e-5

    def test_leave_no_hooks_behind(self) -> None:
        model = build("falcon")
        analyze(model, data=ids(4, 24), device="cpu")
        for name, module in model.named_modules():
            assert not module._forward_hooks, name
            assert not module._forward_pre_hooks, name
            assert "forward" not in module.__dict__, name


class TestSlidingWindows:
    def test_a_block_keeps_its_own_mask_wherever_it_runs(self) -> None:
        """Gemma-3's block 0 looks 8 back, block 1 looks back all the way, also when each runs on its own."""
        anatomy = opened(build("gemma3"))
        with torch.no_grad():
            entry = anatomy.stream.enter(IDS)
            changed = entry.x.clone()
            changed[:, 0] += 1
            for index, reaches in ((2, False), (1, True), (0, False)):
                z, other = anatomy.stream.run(entry, index, entry.x), anatomy.stream.run(entry, index, changed)
                moved = (z - other).abs().amax(dim=(0, 2))
                assert moved[:8].min() > 0
                assert bool(moved[8:].max() > 0) == reaches


@pytest.mark.real
class TestRealModels:
    def test_smollm2(self, smollm2: Checkpoint) -> None:
        inputs = ids(2, 64, vocab=49_000)
        anatomy = open_stream(smollm2, inputs)
        assert len(anatomy.blocks) == 30
        assert {(b.unit, b.placement) for block in anatomy.blocks for b in block.branches} == {
            ("attention", "pre"),
            ("mlp", "pre"),
        }
        assert anatomy.objective == "causal"
        self.verified(smollm2, anatomy, inputs)

    def test_minilm(self, minilm: Checkpoint) -> None:
        inputs = ids(2, 64, vocab=30_000)
        anatomy = open_stream(minilm, inputs)
        assert len(anatomy.blocks) == 6
        assert {(b.unit, b.placement) for block in anatomy.blocks for b in block.branches} == {
            ("attention", "post"),
            ("mlp", "post"),
        }
        assert anatomy.objective is None
        assert not anatomy.causal
        self.verified(minilm, anatomy, inputs)

    @staticmethod
    def verified(checkpoint: Checkpoint, anatomy: Anatomy, inputs: Tensor) -> None:
        assert all(check.passed for check in anatomy.checks)
        assert all(len(block.branches) == 2 for block in anatomy.blocks)
        assert distance(block_by_block(anatomy, inputs), own_output(checkpoint.model, inputs)) <= 5e-4


def test_the_embedded_gpt2() -> None:
    checkpoint = depthprobe.load(EMBEDDED, device="cpu")
    inputs = ids(3, 40, vocab=checkpoint.vocab_size or 0)
    anatomy = open_stream(checkpoint, inputs)
    assert all([b.placement for b in block.branches] == ["pre", "pre"] for block in anatomy.blocks)
    TestRealModels.verified(checkpoint, anatomy, inputs)


class _Wrapped(nn.Module):
    """A model that is no transformers model, so that nobody tells it to keep no cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).logits


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_block_run_again_has_no_memory_of_its_last_run(name: str) -> None:
    """A cache among a block's arguments would hand it the keys of the state before."""
    plain, wrapped = build(name), _Wrapped(build(name))
    wrapped.inner.load_state_dict(plain.state_dict())
    few = {"device": "cpu", "gradient_tokens": 0, "depth_tokens": 0, "lens_positions": 0}
    one, other = (depthprobe.analyze(model, ids(4, 20), **few) for model in (plain, wrapped))
    errors = [report.layers.query("metric == 'interaction_error'")["value"].tolist() for report in (one, other)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)
    costs = [report.ablations.query("metric == 'state_distance'")["value"].tolist() for report in (one, other)]
    assert len(costs[0]) > 5
    assert costs[1] == pytest.approx(costs[0], rel=1e-4)


class _Stateful(nn.Module):
    """A block that adds something of the last state that it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.last: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        before, self.last = self.last, hidden_states
        kept = 0 if before is None or before.shape != hidden_states.shape else 0.5 * before
        return hidden_states + self.linear(hidden_states) + kept


def test_blocks_that_keep_something_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.blocks = nn.ModuleList(_Stateful(16) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embed(inputs)
            for block in self.blocks:
                block.last = None  # a forward pass of its own begins anew
                x = block(x)
            return x

    with pytest.raises(VerificationError, match="keep something from one run to the next"):
        analyze(Model(), data=torch.arange(48).view(4, 12), device="cpu")


def test_no_loss_of_a_model_that_sees_what_it_is_to_predict() -> None:
    class Bidirectional(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.inner, self.last = build("llama"), last

        def forward(self, input_ids: Tensor) -> Tensor:
            logits = self.inner(input_ids).logits
            return logits[:, -1:] if self.last else logits

    partial = open_stream(depthprobe.load(Bidirectional(last=True), device="cpu"), ids(4, 20))
    assert partial.objective is None
    assert "predictions at 1 of 20 positions" in " ".join(partial.notes)
    model = build("bert")
    seen = open_stream(replace(depthprobe.load(model, device="cpu"), objective="causal"), ids(4, 20))
    assert not seen.causal
    assert seen.objective is None
    assert "no loss is taken" in " ".join(seen.notes)
    assert open_stream(depthprobe.load(build("llama"), device="cpu"), ids(4, 20)).objective == "causal"


def test_a_position_of_huge_norm_hides_no_other() -> None:
    """In x_L of a bidirectional model the first position is 10,000 times the others: all together change by little."""
    model = build("bert")
    norm = model.bert.encoder.layer[-1].output.LayerNorm
    norm.register_forward_hook(lambda module, args, out: torch.cat([0 * out[:, :1] + 1e4, out[:, 1:]], dim=1))
    seen = open_stream(replace(depthprobe.load(model, device="cpu"), objective="causal"), ids(4, 20))
    assert not seen.causal
