"""Gradients against plain autograd through the untouched model, finite differences, and chains with known ones."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from families import DEPTH, IDS, build, ids
from gradient_models import BLOCKS, Chain, Times, column, losses, realformer, small
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

import depthprobe
from depthprobe.ablations.effects import Scored
from depthprobe.cotangents import Cotangents
from depthprobe.gradient import gradients

WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3} | {f"w{i}": i for i in range(4, 96)}


def tokenizer() -> PreTrainedTokenizerFast:
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(WORDS, "[PAD]")), **names)


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
