"""Every family: what is found in it is what its code says, checked by hooks that the tests place by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as T
from families import EMBEDDED, FAMILIES, IDS, LENGTH, SIZES, SPECIAL, VOCAB, build, ids, shake
from torch import Tensor, nn

import depthprobe
from depthprobe.branches import Reader
from depthprobe.checkpoint import Checkpoint
from depthprobe.errors import AnatomyError, DepthprobeError, VerificationError
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
        report = depthprobe.analyze(model, data=ids(4, 24), device="cpu")
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
        depthprobe.analyze(model, data=ids(4, 24), device="cpu")
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


class Embedded(nn.Module):
    """Ids in, logits out, with blocks of the test's choice in between."""

    def __init__(self, blocks: list[nn.Module], between: Callable[[Tensor, int], Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.between = between

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for index, block in enumerate(self.blocks):
            x = block(x if self.between is None else self.between(x, index))
        return self.head(x)


class Bump(nn.Module):
    """x + tanh(Ax), whose one branch is named like an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class InPlace(Bump):
    """The same, written into the state that it was given."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.mlp(x)
        return x


class Gated(nn.Module):
    """x · gate(x) + f(x): a stream, but no branch that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.f = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x)) + self.f(x)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(VOCAB, 32), nn.ModuleList([Bump()]), nn.Linear(32, VOCAB)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(x)


class HyperConnected(nn.Module):
    """Four streams, `[batch, tokens, 4, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.blocks = nn.ModuleList([Bump() for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)[:, :, None].expand(-1, -1, 4, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=2))


class Noisy(Bump):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.randn(x.shape)


class Remembering(Bump):
    """Gives another answer every time it is asked: a cache that grows on replay."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class SkipsOver(Embedded):
    """The tail reads the first block's output beside the last one's: the last state alone is not the model."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = first = self.blocks[0](self.embed(inputs))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + first)


DEBERTA = {
    **{**SIZES, **LENGTH, "pad_token_id": 0, "intermediate_size": 64, "position_buckets": 8},
    **{"relative_attention": True, "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"]},
}


class TestRefused:
    def refused(self, model: nn.Module, *words: str, kind: type[DepthprobeError] = AnatomyError) -> None:
        with pytest.raises(DepthprobeError) as caught:
            depthprobe.analyze(shake(model), data=ids(4, 24), device="cpu")
        message = str(caught.value)
        assert isinstance(caught.value, kind), message
        assert "\n" not in message
        assert all(word in message for word in words), message

    def test_albert_which_calls_one_block_again_and_again(self) -> None:
        config = T.AlbertConfig(**SIZES, **LENGTH, intermediate_size=64, embedding_size=16, pad_token_id=0)
        self.refused(T.AlbertForMaskedLM(config), "3 times")

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_deberta_whose_convolution_changes_the_stream(self) -> None:
        config = T.DebertaV2Config(**DEBERTA, conv_kernel_size=3, conv_act="gelu")
        self.refused(T.DebertaV2ForMaskedLM(config), "changed between blocks 0 and 1")

    def test_encoder_decoders(self) -> None:
        config = T.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
        )
        self.refused(T.T5ForConditionalGeneration(config), "encoder", "decoder", kind=DepthprobeError)

    def test_several_streams(self) -> None:
        self.refused(HyperConnected(), "more than one residual stream")

    def test_a_recurrent_block(self) -> None:
        self.refused(Looped(), "4 times")

    def test_a_stream_that_is_changed_between_blocks(self) -> None:
        self.refused(Embedded([Bump() for _ in range(3)], lambda x, i: x * 1.001 if i == 2 else x), "blocks 1 and 2")

    def test_a_changed_stream_beside_a_smaller_sound_one(self) -> None:
        model = Embedded([Bump() for _ in range(6)], lambda x, i: x * 1.001 if i == 2 else x)
        model.head = nn.Sequential(Bump(), nn.Linear(32, 32))
        self.refused(model, "blocks 1 and 2")

    @pytest.mark.parametrize("block", [Noisy, Remembering])
    def test_blocks_that_do_not_reproduce(self, block: type[nn.Module]) -> None:
        self.refused(Embedded([block() for _ in range(3)]), "differs", kind=VerificationError)

    def test_a_tail_that_reads_more_than_the_last_state(self) -> None:
        self.refused(SkipsOver([Bump() for _ in range(3)]), "differs", kind=VerificationError)

    def test_no_block_list_at_all(self) -> None:
        self.refused(nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)), "no residual stream")


class TestUnknownFamilies:
    def test_blocks_without_branches_give_block_rows_and_a_note(self) -> None:
        torch.manual_seed(0)
        model = shake(Embedded([Gated() for _ in range(3)]))
        report = depthprobe.analyze(model, data=ids(4, 24), device="cpu")
        assert set(report.layers["unit"]) == {"block"}
        assert any("whole blocks" in note for note in report.anatomy["notes"])
        assert all(block["attention"] is block["mlp"] is None for block in report.anatomy["blocks"])
        assert [check["name"] for check in report.verification if check["level"] == "model"] == ["blocks"]
        ratio = report.layers.query("metric == 'update_ratio'")
        assert list(ratio["layer"]) == [0, 1, 2]

    def test_a_family_of_ones_own_is_found_by_looking(self) -> None:
        torch.manual_seed(0)
        model = shake(Embedded([Bump() for _ in range(4)]))
        anatomy = opened(model)
        assert [[(b.unit, b.placement) for b in block.branches] for block in anatomy.blocks] == [[("mlp", "none")]] * 4
        assert anatomy.objective == "causal"

    def test_blocks_that_overwrite_their_input(self) -> None:
        """The state from before a block must survive the block: all numbers are those of blocks that leave it alone."""
        torch.manual_seed(0)
        clean, dirty = (shake(Embedded([kind() for _ in range(4)])) for kind in (Bump, InPlace))
        dirty.load_state_dict(clean.state_dict())
        one, other = (depthprobe.analyze(model, data=ids(6, 24), device="cpu").layers for model in (clean, dirty))
        one, other = (table[table["unit"] == "block"].reset_index(drop=True) for table in (one, other))
        assert (one["value"] > 0.01).any()
        pd.testing.assert_frame_equal(one, other, rtol=1e-5, atol=1e-6)

    def test_a_transformers_model_beyond_the_list(self) -> None:
        config = T.StableLmConfig(**SIZES, **LENGTH, **SPECIAL, intermediate_size=64, num_key_value_heads=2)
        anatomy = opened(shake(T.StableLmForCausalLM(config)))
        assert {b.placement for block in anatomy.blocks for b in block.branches} == {"pre"}


class TestTorchEncoder:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
    def test_either_norm_and_either_order_of_axes(self, norm_first: bool, batch_first: bool) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=norm_first, batch_first=batch_first)
        model = shake(nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32)))
        states = torch.randn(5, 21, 32)
        anatomy = opened(model, states)
        placement = "pre" if norm_first else "post"
        for block in anatomy.blocks:
            assert [(b.unit, b.placement) for b in block.branches] == [("attention", placement), ("mlp", placement)]
        assert all(check.passed for check in anatomy.checks)
        with torch.no_grad():
            own = model(states) if batch_first else model(states.transpose(0, 1)).transpose(0, 1)
        assert distance(block_by_block(anatomy, states), own) <= 5e-4

        report = depthprobe.analyze(model, data=states, device="cpu")
        x, norms = states, []
        with torch.no_grad():
            for block in model.layers:
                norms.append(float(x[:, 1:].norm(dim=-1).mean()))
                x = block(x) if batch_first else block(x.transpose(0, 1)).transpose(0, 1)
        norms.append(float(x[:, 1:].norm(dim=-1).mean()))
        found = report.layers.query("metric == 'residual_norm'")["value"].to_numpy()
        assert found == pytest.approx(norms, rel=1e-4)


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
