"""Models beyond the list: of one's own, refused with a reason, overwriting their input, not finite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as T
from families import LENGTH, SIZES, SPECIAL, VOCAB, build, ids, shake
from test_families import block_by_block, distance, opened
from torch import Tensor, nn

import depthprobe
from depthprobe.ablations.schedule import parse
from depthprobe.ablations.units import Units
from depthprobe.errors import AnatomyError, DepthprobeError, NonFiniteError, UsageError, VerificationError


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

    def test_keys_and_values_that_blocks_share_beside_the_stream(self) -> None:
        """Gemma 4's small models: later blocks read those of an earlier one, from a dictionary that all are handed."""
        model = gemma4(num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
        self.refused(model, "differs", "shared keys and values", kind=VerificationError)

    def test_no_block_list_at_all(self) -> None:
        self.refused(nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)), "no residual stream")


def gemma4(**options: object) -> nn.Module:
    """Two kinds of attention by turns, and a factor on the stream after each block, a buffer."""
    config = T.Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=16, num_global_key_value_heads=1, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, **{"hidden_size_per_layer_input": 0} | options,
    )  # fmt: skip
    return T.Gemma4ForCausalLM(config)


class TestFactorsOnTheStream:
    def test_are_found_and_said(self) -> None:
        model = shake(gemma4())
        for layer, factor in zip(model.model.layers, (0.5, 0.93, 1.0, 0.09), strict=True):
            layer.layer_scalar.fill_(factor)
        anatomy = opened(model)
        found = [block.branches[-1].skip_scale for block in anatomy.blocks]
        np.testing.assert_allclose(found, [0.5, 0.93, 1.0, 0.09], rtol=1e-5)
        assert [block.scales_stream for block in anatomy.blocks] == [True, True, False, True]
        assert any("3 of 4 blocks multiply the stream itself (by 0.09 to 0.93)" in note for note in anatomy.notes)
        units = Units(anatomy)
        units.check(parse("0 1 2a 2m 3"))
        units.check(parse("0 1m 2 3"))  # c(x + m): block 1 without its attention
        for schedule in ("0 1a 1m 2 3", "0 (1a+1m) 2 3"):
            with pytest.raises(UsageError, match="sublayers of block 1 apart, but its skip has a factor"):
                units.check(parse(schedule))
        assert not any("multiply" in note for note in opened(shake(gemma4())).notes)

    def test_near_1_in_half_precision(self) -> None:
        model = shake(gemma4()).to(torch.bfloat16)
        model.model.layers[1].layer_scalar.fill_(0.93)
        anatomy = opened(model)
        assert all(len(block.branches) == 2 for block in anatomy.blocks)
        assert [block.branches[-1].skip_scale for block in anatomy.blocks] == [1, pytest.approx(0.93, rel=5e-3), 1, 1]


def test_a_mixer_that_is_an_mlp() -> None:
    """Nemotron-H calls every sublayer so; its blocks have one each."""
    config = T.NemotronHConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, hybrid_override_pattern="M-*-", num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
        chunk_size=8, num_hidden_layers=4,
    )  # fmt: skip
    blocks = opened(shake(T.NemotronHForCausalLM(config))).blocks
    assert [[branch.unit for branch in block.branches] for block in blocks] == [["attention"], ["mlp"]] * 2


@pytest.mark.parametrize("layers", [2, 3])
def test_a_table_of_positions_that_the_first_block_makes_is_said(layers: int) -> None:
    torch.manual_seed(0)
    config = T.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4)
    anatomy = opened(shake(T.T5EncoderModel(config)).eval())
    assert anatomy.stream.blocks.carried_unchanged
    assert any("where the first block is skipped or moved, others lack it" in note for note in anatomy.notes)


class TestUnknownFamilies:
    def test_blocks_without_branches_give_block_rows_and_a_note(self) -> None:
        torch.manual_seed(0)
        model = shake(Embedded([Gated() for _ in range(3)]))
        report = depthprobe.analyze(model, data=ids(4, 24), device="cpu", gradient_tokens=0)
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


def overflow(model: nn.Module) -> nn.Module:
    """Block 1's MLP writes about 10⁵: float16 ends at 65,504."""
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    return model


class TestNotFinite:
    def test_the_block_and_the_dtype_are_named(self) -> None:
        with pytest.raises(NonFiniteError) as caught:
            depthprobe.analyze(overflow(build("llama", "sdpa")).half(), data=ids(4, 20), device="cpu")
        message = str(caught.value)
        assert "block 1" in message
        assert "float16" in message
        assert "--dtype float32" in message
        assert "\n" not in message

    def test_float32_of_the_same_model_is_fine(self) -> None:
        depthprobe.analyze(overflow(build("llama")), data=ids(4, 20), device="cpu")

    def test_a_damaged_weight(self) -> None:
        model = build("llama")
        with torch.no_grad():
            model.model.layers[2].self_attn.o_proj.weight[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="block 2"):
            depthprobe.analyze(model, data=ids(4, 20), device="cpu")

    def test_in_a_later_batch_than_the_one_that_was_verified(self) -> None:
        """One rare token, in the last sequence only, is too large for the second block."""
        torch.manual_seed(0)
        model = Cubes().half()
        with torch.no_grad():
            model.embed.weight[90] = 200
        inputs = ids(8, 20, vocab=80)
        inputs[7, 5] = 90
        with pytest.raises(NonFiniteError, match=r"block 1 .*float16.*sequence 7, position 5"):
            depthprobe.analyze(model, data=inputs, batch_size=3, device="cpu")


class Cube(nn.Module):
    """x + g x³: of 100, a million."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * x * x * x


class Cubes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.blocks = nn.ModuleList([Cube(1e-4), Cube(0.1), Cube(0.1)])

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) * 0.5
        for block in self.blocks:
            x = block(x)
        return self.head(x)
