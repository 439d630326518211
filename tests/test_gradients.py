"""Gradients against plain autograd through the untouched model, finite differences, and chains with known ones."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from families import DEPTH, IDS, build, ids
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

import depthprobe
from depthprobe.ablations.effects import Scored
from depthprobe.cotangents import Cotangents
from depthprobe.errors import GradientError, NonFiniteError, UsageError
from depthprobe.gradient import GradientSettings, gradients, run_gradients
from depthprobe.lab.config import LabConfig
from depthprobe.lab.model import LabForCausalLM
from depthprobe.prepare import prepare

BLOCKS = {
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "opt-post": "model.decoder.layers",
    "neox": "gpt_neox.layers",
    "mixtral": "model.layers",
    "gemma3": "model.layers",
    "bert": "bert.encoder.layer",
    "realformer": "model.blocks",
}
WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3} | {f"w{i}": i for i in range(4, 96)}


def tokenizer() -> PreTrainedTokenizerFast:
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(WORDS, "[PAD]")), **names)


def column(table: pd.DataFrame, metric: str, unit: str = "block") -> np.ndarray:
    rows = table[(table["metric"] == metric) & (table["unit"] == unit)].sort_values("layer")
    return rows["value"].to_numpy()


def realformer() -> nn.Module:
    """Each block hands its attention scores on to the next, beside the stream."""
    torch.manual_seed(0)
    config = LabConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=DEPTH, num_attention_heads=4, residual_attention=True
    )
    return LabForCausalLM(config).eval()


@contextmanager
def watched(model: nn.Module, path: str) -> Iterator[list[torch.Tensor]]:
    """The states that the blocks of a running model read, and what the last one writes, each with its gradient."""
    states: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> None:
        tensor.retain_grad()
        states.append(tensor)

    layers = model.get_submodule(path)
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in layers
    ]
    handles.append(layers[-1].register_forward_hook(lambda _, __, out: keep(out if torch.is_tensor(out) else out[0])))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def losses(model: nn.Module, inputs: torch.Tensor, scored: Scored | None) -> torch.Tensor:
    """ℓ of each sequence of a batch, `[batch]`, from the model's own logits."""
    log_p = model(input_ids=inputs).logits.log_softmax(-1)
    if scored is None:
        return -log_p[:, :-1].gather(-1, inputs[:, 1:, None])[..., 0].mean(dim=1)
    rows = torch.arange(len(inputs))[:, None]
    return -log_p[rows, scored.positions].gather(-1, scored.targets[..., None])[..., 0].mean(dim=1)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_gradient_is_that_of_the_untouched_model(name: str) -> None:
    """In one batch here, one by one there: the size of a batch changes no number."""
    model, masked = realformer() if name == "realformer" else build(name), name == "bert"
    exact = 1e-4 if name == "mixtral" else 1e-8  # its experts run in float32 at most
    model = model if name == "mixtral" else model.double()
    scored, inputs = None, IDS
    if masked:
        scored, inputs = Scored.masked(IDS, np.arange(3), (0, 1, 2, 3), 3, seed=0)
    found = gradients(depthprobe.load(model, tokenizer=tokenizer() if masked else None), IDS)

    plain = copy.deepcopy(model).requires_grad_()
    with watched(plain, BLOCKS[name]) as states:
        value = losses(plain, inputs, scored)
        value.sum().backward()
    assert len(states) == DEPTH + 1
    norms = torch.stack([state.grad.norm(dim=-1) for state in states])  # [states, batch, tokens]
    counted = norms[..., 1:] if masked else norms[..., 1:-1]
    share = norms[..., 0].square() / norms.square().sum(dim=-1)
    expected = {
        "gradient_norm": counted.mean(dim=(1, 2)),
        "gradient_norm_median": counted.quantile(0.5, dim=-1).mean(dim=-1),
        "gradient_first_share": share.mean(dim=-1),
    }
    for metric, values in expected.items():
        np.testing.assert_allclose(column(found.table, metric), values.numpy(), rtol=exact, err_msg=metric)
    assert found.summary["loss"]["value"] == pytest.approx(value.mean().item(), rel=exact)
    assert found.summary["ratio"]["value"] == pytest.approx(float(counted[1].mean() / counted[-1].mean()), rel=exact)

    each: dict[str, list[torch.Tensor]] = {weight: [] for weight, _ in plain.named_parameters()}
    for s in range(len(IDS)):
        plain.zero_grad()
        one = (
            None if scored is None else Scored(*(t[s : s + 1] for t in (scored.positions, scored.targets, scored.ids)))
        )
        losses(plain, inputs[s : s + 1], one).sum().backward()
        for weight, parameter in plain.named_parameters():
            if parameter.grad is not None:
                each[weight].append(parameter.grad.clone())
    rows = found.table.set_index(["metric", "layer", "unit"])["value"]
    seen = set()
    for weight, parts in each.items():
        layer, unit = place(weight, BLOCKS[name], rows.index)
        if not parts:
            assert ("weight_gradient_norm", layer, unit) not in rows
            continue
        seen |= {(metric, layer, unit) for metric in ("weight_gradient_norm", "weight_gradient_norm_pooled")}
        mean = float(torch.stack([part.norm() for part in parts]).sum() / len(IDS))
        assert rows["weight_gradient_norm", layer, unit] == pytest.approx(mean, rel=exact), weight
        pooled = float(torch.stack(parts).sum(dim=0).norm() / len(IDS))
        assert rows["weight_gradient_norm_pooled", layer, unit] == pytest.approx(pooled, rel=exact), weight
    assert seen == {key for key in rows.index if key[0].startswith("weight")}


def place(weight: str, blocks: str, index: pd.Index) -> tuple[int, str]:
    """Layer and unit of a weight by its name in the model: within a block, before the first one, or after the last."""
    if weight.startswith(f"{blocks}."):
        layer, unit = weight.removeprefix(f"{blocks}.").split(".", 1)
        return int(layer), unit
    return (-1 if "embed" in weight or weight.startswith(("transformer.wte", "transformer.wpe")) else DEPTH), weight


def test_a_random_gradient_is_that_of_the_untouched_stack() -> None:
    model = build("gpt2").double()
    found = gradients(model, IDS, cotangent="random")
    assert set(found.table["metric"]) == {
        "gradient_norm_random", "gradient_norm_random_median", "gradient_first_share_random"
    }  # fmt: skip
    drawn = [Cotangents(("random",), (), 0).random(20, 32, s) for s in range(3)]
    v = torch.cat([one for one in drawn if one is not None])
    assert torch.allclose(v.norm(dim=-1), torch.ones(3, 20, dtype=torch.float64))
    assert (v[0] * v[1]).sum(dim=-1).abs().max() < 0.9  # each sequence has its own
    with watched(model, "transformer.h") as states:
        model(input_ids=IDS)
        states[-1].backward(v)
    norms = torch.stack([state.grad.norm(dim=-1) for state in states])[..., 1:]
    np.testing.assert_allclose(column(found.table, "gradient_norm_random"), norms.mean(dim=(1, 2)).numpy(), rtol=1e-9)
    assert column(found.table, "gradient_norm_random")[-1] == pytest.approx(1)
    model.zero_grad()


def small(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 20, **sizes}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.4)).eval()


def test_finite_differences_of_the_loss() -> None:
    """Each number of one token's state is moved up and down, in float64, and the model's own loss is watched."""
    model, inputs, step = small().double(), ids(1, 6, vocab=20), 1e-5
    found = gradients(model, inputs, skip_first=2, weights=False)

    def loss(layer: int, move: torch.Tensor) -> float:
        def pushed(_: nn.Module, args: tuple) -> tuple:
            return (args[0] + move, *args[1:])

        after = model.transformer.ln_f if layer == 2 else model.transformer.h[layer]
        handle = after.register_forward_pre_hook(pushed)
        with torch.no_grad():
            value = losses(model, inputs, None).item()
        handle.remove()
        return value

    for layer in range(3):
        norms = []
        for token in (2, 3, 4):  # the first two are left out, the last has no target
            slopes = []
            for d in range(8):
                move = torch.zeros(1, 6, 8, dtype=torch.float64)
                move[0, token, d] = step
                slopes.append((loss(layer, move) - loss(layer, -move)) / (2 * step))
            norms.append(np.linalg.norm(slopes))
        assert column(found.table, "gradient_norm")[layer] == pytest.approx(np.mean(norms), rel=1e-6)
        assert column(found.table, "gradient_norm_median")[layer] == pytest.approx(np.median(norms), rel=1e-6)


class Times(nn.Module):
    """A block that multiplies, x → g x; its gradient by g is ⟨x, ∂ℓ/∂(g x)⟩."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x


class Chain(nn.Module):
    """Embedding, blocks that multiply, and a head, all of one's own."""

    def __init__(self, gains: list[float], tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6)
        self.blocks = nn.ModuleList([Times(gain) for gain in gains])
        self.head = nn.Linear(6, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("tied", [False, True])
def test_a_chain_multiplies_its_gradients(tied: bool) -> None:
    gains = [0.5, 3.0, 2.0, 0.1]
    model, inputs = Chain(gains, tied), ids(2, 9, vocab=20)
    table = gradients(model, inputs).table
    above = np.cumprod([1.0, *gains[::-1]])[::-1]  # what the blocks above x_l multiply by
    np.testing.assert_allclose(column(table, "gradient_norm_random"), above, rtol=1e-5)
    at_top = column(table, "gradient_norm")
    np.testing.assert_allclose(at_top, above * at_top[-1], rtol=1e-5)
    # by hand: ∂ℓ/∂logits = (p - onehot) / 8
    with torch.no_grad():
        x = model.embed(inputs)
        top = x * above[0].item()
        logits = model.head(top)
        delta = logits[:, :-1].softmax(-1) - nn.functional.one_hot(inputs[:, 1:], 20)
        by_state = delta @ model.head.weight / 8
        assert at_top[-1] == pytest.approx(by_state[:, 1:].norm(dim=-1).mean().item(), rel=1e-5)
        by_gain = [(by_state * top[:, :-1]).sum(dim=(1, 2)) / gain for gain in gains]
        by_head = delta.transpose(1, 2) @ top[:, :-1] / 8
        one_hot = nn.functional.one_hot(inputs[:, :-1], 20).float()
        by_embed = one_hot.transpose(1, 2) @ (by_state * above[0].item())
    each = torch.stack([g.abs().mean() for g in by_gain]).numpy()
    np.testing.assert_allclose(column(table, "weight_gradient_norm", "gain"), each, rtol=1e-4)
    rows = table[table["metric"] == "weight_gradient_norm"].set_index("unit")
    if tied:
        assert set(rows.index) == {"gain", "embed.weight"}
        both = (by_head + by_embed).norm(dim=(1, 2)).mean().item()
        assert rows.loc["embed.weight", "value"] == pytest.approx(both, rel=1e-4)
        assert rows.loc["embed.weight", "layer"] == -1
    else:
        assert rows.loc["head.weight", "value"] == pytest.approx(by_head.norm(dim=(1, 2)).mean().item(), rel=1e-4)
        assert rows.loc["embed.weight", "value"] == pytest.approx(by_embed.norm(dim=(1, 2)).mean().item(), rel=1e-4)
        assert dict(rows["layer"].drop("gain")) == {"head.weight": 4, "embed.weight": -1}


class Beside(Chain):
    """Every block is handed a table that is computed outside the blocks, from weights."""

    def __init__(self) -> None:
        super().__init__([0.5, 2.0])
        self.table = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, beside = self.embed(ids), self.table * 2
        for block in self.blocks:
            x = block(x, beside)
        return self.head(x)


class Shifted(Times):
    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.gain * x + beside


def test_weights_that_reach_blocks_by_another_way_are_counted_whole() -> None:
    model = Beside()
    model.blocks = nn.ModuleList([Shifted(0.5), Shifted(2.0)])
    shared = nn.Parameter(torch.tensor(1.5))
    model.blocks[0].gain = model.blocks[1].gain = shared
    inputs = ids(1, 9, vocab=20)
    rows = gradients(model, inputs).table.set_index(["metric", "unit"])["value"]["weight_gradient_norm"]
    log_p = model(inputs).log_softmax(-1)
    (-log_p[:, :-1].gather(-1, inputs[:, 1:, None]).mean()).backward()
    for name, parameter in model.named_parameters():
        unit = name.removeprefix("blocks.0.")
        assert rows[unit] == pytest.approx(parameter.grad.norm().item(), rel=1e-5), name


# --- what it leaves, and what it does not depend on ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_is_left_as_it_was(dtype: torch.dtype) -> None:
    model = build("gpt2").to(dtype)
    model.transformer.h[1].requires_grad_(False)
    model.transformer.h[0].ln_1.float()  # some keep their norms in float32
    checkpoint = depthprobe.load(model)
    marked = model.transformer.h[2].ln_1.weight
    marked.grad = torch.ones_like(marked)
    before = {name: (p.requires_grad, p.dtype, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    corpus, anatomy = prepare(checkpoint, IDS)[1:]
    found = run_gradients(anatomy, corpus, GradientSettings())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    for name, p in model.named_parameters():
        flag, kind, place, value = before[name]
        assert (p.requires_grad, p.dtype) == (flag, kind), name
        assert torch.equal(p, value), name
        assert p.data_ptr() == place, name
        assert p.grad is None or p is marked, name
    assert torch.equal(marked.grad, torch.ones_like(marked))
    said = [note for note in found.summary["notes"] if "float32" in note]
    assert len(said) == (dtype != torch.float32)
    # in half precision the weights are those, and all else is float32
    whole = gradients(copy.deepcopy(model).float(), IDS)
    if dtype != torch.float32:
        pd.testing.assert_frame_equal(found.table, whole.table, rtol=1e-4)


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = build("gpt2").to(torch.bfloat16).requires_grad_(False)
    checkpoint = depthprobe.load(model)
    _, corpus, anatomy = prepare(checkpoint, IDS)
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"x_3"):
        run_gradients(anatomy, corpus, GradientSettings())
    assert not any(p.requires_grad or p.dtype != torch.bfloat16 for p in model.parameters())


def test_a_sequence_has_its_gradients_whatever_stands_beside_it() -> None:
    model = build("llama")
    whole = gradients(model, IDS, cotangent="loss").table
    parts = [gradients(model, IDS[s : s + 1], cotangent="loss").table for s in range(3)]
    own = ~whole["metric"].str.contains("pooled")
    mean = np.mean([part["value"] for part in parts], axis=0)
    np.testing.assert_allclose(whole["value"][own], mean[own], rtol=1e-5)
    assert whole["n"].eq(3).all()
    assert parts[0]["ci_low"].isna().all()


@pytest.mark.parametrize("name", ["neox", "realformer"])
def test_without_room_for_the_graph_blocks_run_again(name: str) -> None:
    model = realformer() if name == "realformer" else build(name)
    _, corpus, anatomy = prepare(model, IDS)
    calls = []
    handle = model.get_submodule(f"{BLOCKS[name]}.1.attention").register_forward_hook(lambda *_: calls.append(1))
    kept = run_gradients(anatomy, corpus, GradientSettings())
    once = len(calls)
    again = run_gradients(anatomy, corpus, GradientSettings(memory=1))
    handle.remove()
    assert (once, len(calls) - once) == (3, 6)
    pooled = kept.table["metric"] == "weight_gradient_norm_pooled"
    pd.testing.assert_frame_equal(kept.table[~pooled], again.table)
    assert any("--memory" in note for note in again.summary["notes"])


def test_pooled_intervals_are_a_jackknife() -> None:
    model = Chain([0.5, 2.0])
    inputs = ids(4, 9, vocab=20)
    row = (
        gradients(model, inputs).table.set_index(["metric", "unit"]).loc[("weight_gradient_norm_pooled", "head.weight")]
    )
    parts = []
    for sequence in inputs:
        loss = nn.functional.cross_entropy(model(sequence[None])[0, :-1], sequence[1:])
        parts.append(torch.autograd.grad(loss, model.head.weight)[0])
    total = sum(parts)
    out = np.array([(total - part).norm().item() / 3 for part in parts])
    reach = 3.182446 * np.sqrt(3 / 4 * np.sum((out - out.mean()) ** 2))
    assert row["value"] == pytest.approx(total.norm().item() / 4, rel=1e-5)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((row["value"] - reach, row["value"] + reach), rel=1e-4)
    alone = gradients(model, inputs[:1]).table.set_index("metric").loc["weight_gradient_norm_pooled"]
    assert alone["ci_low"].isna().all()


def test_random_draws_are_keyed() -> None:
    model = build("gpt2")
    first, again, other = (gradients(model, IDS, cotangent="random", seed=seed).table for seed in (0, 0, 1))
    pd.testing.assert_frame_equal(first, again)
    assert not np.allclose(
        column(first, "gradient_norm_random")[0], column(other, "gradient_norm_random")[0], rtol=1e-6
    )


# --- models without a loss, and what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_without_a_head_only_random_gradients(name: str) -> None:
    model = build(name, headless=True)
    found = gradients(model, IDS)
    assert set(found.table["metric"]) == {
        "gradient_norm_random", "gradient_norm_random_median", "gradient_first_share_random"
    }  # fmt: skip
    assert any("no language-model head" in note for note in found.summary["notes"])
    assert found.summary["ratio"] is None
    assert found.summary["loss"] is None
    with pytest.raises(UsageError, match="no language-model head"):
        gradients(model, IDS, cotangent="loss")


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_torch_encoder_on_states(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=norm_first, batch_first=False)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    states = torch.randn(3, 7, 16)
    found = gradients(model, states)
    norms = column(found.table, "gradient_norm_random")
    assert len(norms) == 5
    assert norms[-1] == pytest.approx(1, rel=1e-5)
    assert found.summary["ratio_random"]["value"] == pytest.approx(norms[1], rel=1e-5)


class Adds(nn.Module):
    """x + tanh(Ax), in place if asked."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.map, self.in_place = nn.Linear(6, 6), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_place:
            return x + self.map(x).tanh()
        x += self.map(x).tanh()
        return x


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_blocks_that_write_into_their_input(memory: int) -> None:
    """Even where autograd needs what is overwritten: the numbers are those of blocks that leave it alone."""
    tables = []
    for in_place in (False, True):
        model = Chain([])
        model.blocks = nn.ModuleList([Adds(in_place) for _ in range(3)])
        _, corpus, anatomy = prepare(model, ids(3, 9, vocab=20))
        assert anatomy.stream.copies_input == in_place
        tables.append(run_gradients(anatomy, corpus, GradientSettings(memory=memory)).table)
    pd.testing.assert_frame_equal(*tables, rtol=1e-5)


class Steps(Times):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * x).detach()


def test_what_has_no_derivative_is_an_error_in_one_line() -> None:
    model = Chain([1.0, 2.0])
    model.blocks = nn.ModuleList([Steps(1.0), Steps(2.0)])
    with pytest.raises(GradientError, match="cannot be differentiated"):
        gradients(model, ids(2, 9, vocab=20))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cotangent": "lose"}, "loss, random or both"),
        ({"skip_first": -1}, "skip-first"),
        ({"skip_first": 19}, "no position"),
        ({"seed": -1}, "seed"),
        ({"fresh": -1}, "fresh"),
    ],
)
def test_wrong_requests(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        gradients(build("gpt2"), IDS, **options)


# --- fresh initialisations -------------------------------------------------------------------------------------------


def test_fresh_models_are_seeded_and_of_the_same_configuration() -> None:
    model = small(n_layer=3)
    inputs = ids(2, 12, vocab=20)
    before = torch.get_rng_state()
    first, again, other = (gradients(model, inputs, fresh=1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    pd.testing.assert_frame_equal(first.table, again.table)
    assert first.summary["fresh"] == [3]
    trained = gradients(model, inputs).table
    assert list(trained["unit"]) == list(first.table["unit"])
    assert not np.allclose(first.table["value"], other.table["value"])
    assert not np.allclose(first.table["value"], trained["value"])

    two = gradients(model, inputs, fresh=2, seed=3)
    loss = ~two.table["metric"].str.contains("random")  # the random vectors hang on the seed as well
    mean = (first.table["value"] + other.table["value"])[loss] / 2
    np.testing.assert_allclose(two.table["value"][loss], mean, rtol=1e-6)
    assert two.table["n"].eq(4).all()
    assert two.table["ci_low"].notna().all()
    low, high = sorted((first.summary["ratio"]["value"], other.summary["ratio"]["value"]))
    assert low <= two.summary["ratio"]["ci_low"] <= two.summary["ratio"]["ci_high"] <= high


def test_a_fresh_model_needs_a_configuration() -> None:
    with pytest.raises(UsageError, match="Chain"):
        gradients(Chain([1.0, 2.0]), ids(2, 9, vocab=20), fresh=1)


def test_post_ln_gradients_fall_towards_the_input_and_pre_ln_ones_do_not() -> None:
    """Xiong et al. 2020, at initialisation with Xavier's spread; 12 blocks of OPT, either way."""
    from transformers import OPTConfig, OPTForCausalLM

    falls = {}
    for pre in (True, False):
        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=128, num_hidden_layers=12, num_attention_heads=2,
            max_position_embeddings=64, word_embed_proj_dim=32, do_layer_norm_before=pre, init_std=0.18, pad_token_id=0,
        )  # fmt: skip
        found = gradients(OPTForCausalLM(config).eval(), ids(2, 32), fresh=3)
        falls[pre] = found.summary["ratio_median"]
    assert falls[False]["ci_high"] < 0.5
    assert falls[True]["ci_low"] > 1
