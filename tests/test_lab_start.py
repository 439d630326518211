"""How a lab model starts: the weights that each initialisation draws, and the growth of the stream that follows.

What theory says of the growth, with width d, L blocks, Xavier's weights and x_0 of unit variance. The matrix with which
a branch writes has mean 0 and is independent of everything before it, so E⟨u, s⟩ = 0 and E‖s + u‖² = E‖s‖² + E‖u‖².

- An MLP reads y with ‖y‖² = σ²d. Its inner units are √(0.4) σ Z, Z normal, since Var W = 2 / (d + 4d); 4d of them are
  summed with the same variance: E‖u‖² = 1.6 d E[gelu(√0.4 σ Z)²].
- An attention with weights a writes E‖u‖² = ‖Σ_j a_j y_j‖², between 0 and the largest ‖y_j‖².
- pre: σ = 1 everywhere, so updates do not grow with the stream: ‖x_l‖² = ‖x_0‖² + Σ ‖u‖², and ‖x_l‖ ~ √l.
- branch, sandwich: a norm writes ‖u‖² = d, so ‖x_l‖² = ‖x_0‖² + 2 l d exactly.
- post, deepnorm: a norm writes the stream: ‖x_l‖² = d for l ≥ 1.
- none: σ grows with the stream, so that it grows by a factor a block: at least 1 + 1.6 · 0.4 / 4 = 1.16, from the MLP
  of small inputs, where gelu(h) ≈ h / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.errors import UsageError
from depthprobe.lab.admin import admin_profile
from depthprobe.lab.config import LabConfig
from depthprobe.lab.initialise import deepnorm_alpha, deepnorm_beta
from depthprobe.lab.model import LabForCausalLM

BLOCKS, WIDTH, TOKENS, SEEDS = 12, 64, 48, 8
SIZES: dict[str, Any] = {"num_hidden_layers": BLOCKS, "hidden_size": WIDTH, "max_position_embeddings": TOKENS}
IDS = torch.randint(256, (4, TOKENS), generator=torch.Generator().manual_seed(0))
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """Mean squares over tokens and dimensions, a row a seed.

    `stream` has x_0 … x_L; `attention` and `mlp` what each block's branch writes, before a norm on it; `read` is what
    the MLP was given, and `expected` what theory makes of it.
    """

    stream: Array
    attention: Array
    mlp: Array
    expected: Array


def gelu_energy(variance: Tensor) -> Tensor:
    """E[gelu(h)²] for h normal with each of these variances, by quadrature."""
    z = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    chance = torch.exp(-z.square() / 2)
    energy = F.gelu(variance.double().sqrt()[:, None] * z).square()
    return (energy * chance).sum(dim=1) / chance.sum()


@cache
def growth(placement: str) -> Growth:
    rows: list[list[list[float]]] = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = LabForCausalLM(LabConfig(**SIZES, placement=placement)).model
        stream: list[float] = []
        attention: list[float] = []
        mlp: list[float] = []
        expected: list[float] = []

        def enter(module: Any, args: Any, stream: list[float] = stream) -> None:
            stream.append(float(args[0].square().mean()))

        def attended(module: Any, args: Any, output: Any, kept: list[float] = attention) -> None:
            kept.append(float(output[0].square().mean()))

        def thought(module: Any, args: Any, output: Any, kept: Any = mlp, theory: Any = expected) -> None:
            kept.append(float(output.square().mean()))
            sizes = args[0].square().mean(dim=-1).flatten()
            theory.append(float(1.6 * gelu_energy(0.4 * sizes).mean()))

        for block in model.blocks:
            block.register_forward_pre_hook(enter)
            block.attention.register_forward_hook(attended)
            block.mlp.register_forward_hook(thought)
        with torch.no_grad():
            last = model.blocks[-1]
            last.register_forward_hook(lambda module, args, output, kept=stream: kept.append(output.square().mean()))
            model(IDS)
        rows.append([[float(value) for value in values] for values in (stream, attention, mlp, expected)])
    return Growth(*(np.array([row[k] for row in rows]) for k in range(4)))


class TestGrowth:
    @pytest.mark.parametrize("placement", ["pre", "post", "branch", "sandwich", "deepnorm", "none"])
    def test_starts_at_unit_variance(self, placement: str) -> None:
        assert growth(placement).stream[:, 0] == pytest.approx(1, abs=0.08)

    @pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "none"])
    def test_the_mlp_writes_what_theory_says(self, placement: str) -> None:
        seen = growth(placement)
        errors = np.log(seen.mlp / seen.expected).mean(axis=0)
        assert errors.mean() == pytest.approx(0, abs=0.05)
        assert np.all(np.abs(errors) < 0.25)  # where tokens have become alike, one block's units are a small sample
        if placement != "none":
            assert seen.expected == pytest.approx(0.2328, rel=0.01)  # whatever the block

    def test_pre_adds_up_uncorrelated_updates(self) -> None:
        seen = growth("pre")
        sums = seen.stream[:, :1] + np.cumsum(seen.attention + seen.mlp, axis=1)
        cross = (seen.stream[:, 1:] - sums) / (seen.stream[:, 1:] - seen.stream[:, :1])
        assert cross.mean(axis=0)[-1] == pytest.approx(0, abs=0.15)
        mean = seen.stream.mean(axis=0)
        blocks = np.arange(1, BLOCKS + 1)
        assert np.all(mean[1:] > 1 + 0.2 * blocks)
        assert np.all(mean[1:] < 1.1 * (1 + 1.2328 * blocks))
        power = np.polyfit(np.log(blocks), np.log(mean[1:] - mean[0]), 1)[0]
        # Of ‖x_l‖² − ‖x_0‖²: 1 for equal updates; attention writes more where tokens have become alike.
        assert 0.95 < power < 1.4
        assert np.all(seen.attention.mean(axis=0) < 1)

    @pytest.mark.parametrize("placement", ["branch", "sandwich"])
    def test_norms_on_the_branch_add_two_units_a_block(self, placement: str) -> None:
        mean = growth(placement).stream.mean(axis=0)
        assert mean == pytest.approx(1 + 2 * np.arange(BLOCKS + 1), rel=0.08)

    @pytest.mark.parametrize("placement", ["post", "deepnorm"])
    def test_norms_on_the_stream_keep_it(self, placement: str) -> None:
        assert growth(placement).stream[:, 1:] == pytest.approx(1, abs=1e-3)

    def test_nothing_holds_the_stream_without_norms(self) -> None:
        logs = np.log(growth("none").stream).mean(axis=0)
        factors = np.exp(np.diff(logs))
        assert np.all(factors > 1.16)
        assert logs[-1] > math.log(1000)
        # Where the gelu has become a relu, 1 + 1.6 · 0.4 / 2; attention that has become sharp doubles what is there.
        assert np.exp((logs[-1] - logs[-5]) / 4) == pytest.approx(2 * 1.32, rel=0.15)

    def test_deepnorm_starts_with_small_branches(self) -> None:
        alpha, beta = deepnorm_alpha(BLOCKS), deepnorm_beta(BLOCKS)
        seen = growth("deepnorm")
        energy = float(1.6 * beta**2 * gelu_energy(torch.tensor([0.4 * beta**2])))
        assert seen.mlp.mean(axis=0) == pytest.approx(energy, rel=0.12)
        assert np.all(seen.attention.mean(axis=0) < beta**4)
        assert np.all(seen.mlp / alpha**2 < 0.01)


def matrices(**options: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = LabForCausalLM(LabConfig(vocab_size=500, **{**SIZES, "num_hidden_layers": 4, **options}))
    return model, list(model.model.blocks)


def spread(weight: Tensor) -> float:
    return float(weight.detach().std())


class TestWeights:
    def test_xavier(self) -> None:
        model, blocks = matrices()
        for block in blocks:
            # Each of the three by itself: as one matrix, they would get 2 / (d + 3d).
            for part in block.attention.qkv.weight.chunk(3):
                assert float(part.detach().abs().max()) == pytest.approx(math.sqrt(6 / (2 * WIDTH)), rel=0.01)
                assert spread(part) == pytest.approx(WIDTH**-0.5, rel=0.05)
            assert spread(block.attention.output.weight) == pytest.approx(WIDTH**-0.5, rel=0.05)
            for linear in (block.mlp.inner, block.mlp.outer):
                assert spread(linear.weight) == pytest.approx(math.sqrt(2 / (5 * WIDTH)), rel=0.05)
            for linear in (block.attention.qkv, block.attention.output, block.mlp.inner, block.mlp.outer):
                assert not linear.bias.any()
        assert spread(model.lm_head.weight) == pytest.approx(math.sqrt(2 / (500 + WIDTH)), rel=0.05)
        assert spread(model.model.token_embedding.weight) == pytest.approx(0.5**0.5, rel=0.05)
        assert spread(model.model.position_embedding.weight) == pytest.approx(0.5**0.5, rel=0.05)

    def test_gpt2(self) -> None:
        model, blocks = matrices(initialisation="gpt2")
        for block in blocks:
            assert spread(block.attention.qkv.weight) == pytest.approx(0.02, rel=0.05)
            assert spread(block.mlp.inner.weight) == pytest.approx(0.02, rel=0.05)
            for linear in (block.attention.output, block.mlp.outer):
                assert spread(linear.weight) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        for weight in (model.lm_head.weight, model.model.token_embedding.weight):
            assert spread(weight) == pytest.approx(0.02, rel=0.05)

    def test_deepnorm(self) -> None:
        assert deepnorm_alpha(18) == pytest.approx(36**0.25)  # of the paper's table: 18 layers of a decoder alone
        assert deepnorm_beta(18) == pytest.approx(144**-0.25)
        _, blocks = matrices(placement="deepnorm")
        beta = 32**-0.25
        for block in blocks:
            query, key, value = block.attention.qkv.weight.chunk(3)
            for weight, gain in [(query, 1), (key, 1), (value, beta), (block.attention.output.weight, beta)]:
                assert spread(weight) == pytest.approx(gain * WIDTH**-0.5, rel=0.05)
            for linear in (block.mlp.inner, block.mlp.outer):
                assert spread(linear.weight) == pytest.approx(beta * math.sqrt(2 / (5 * WIDTH)), rel=0.05)
            assert block.mlp_skip.alpha == pytest.approx(8**0.25)

    def test_a_tied_table_suits_the_head(self) -> None:
        model, _ = matrices(tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.token_embedding.weight
        assert spread(model.lm_head.weight) == pytest.approx(WIDTH**-0.5, rel=0.05)

    def test_norms_start_as_ones_and_seeds_decide(self) -> None:
        (first, _), (again, _) = matrices(placement="sandwich"), matrices(placement="sandwich")
        for (name, weight), other in zip(first.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(weight, other)
            if "norm" in name:
                assert torch.all(weight == (1 if name.endswith("weight") else 0))

    def test_layernorm_scaling_divides_what_a_norm_hands_on(self) -> None:
        _, blocks = matrices(layernorm_scaling=True)
        x = torch.randn(2, 3, WIDTH)
        for index, block in enumerate(blocks):
            for skip in (block.attention_skip, block.mlp_skip):
                assert torch.allclose(skip.read(x), F.layer_norm(x, (WIDTH,)) / math.sqrt(index + 1), atol=1e-6)


class TestAdmin:
    def model(self) -> Any:
        return matrices(placement="post", initialisation="admin")[0]

    def test_factors_are_those_of_the_variances(self) -> None:
        model = self.model().train()
        ids = IDS % 500
        found = admin_profile(model, ids)
        assert model.training
        assert all(weight.requires_grad for weight in model.parameters())
        with torch.no_grad():
            x = model.model.token_embedding(ids) + model.model.position_embedding.weight[:TOKENS]
            # ω_1 = 1, ω_{i+1}² = Var[x_0] + Σ_{j ≤ i} Var[F_j], the stream being normalised from there on
            total, wanted = float(x.var()), [1.0]
            for block in model.model.blocks:
                for unit, skip in [("attention", block.attention_skip), ("mlp", block.mlp_skip)]:
                    assert torch.all(skip.gain.weight == skip.gain.weight[0])
                    assert float(skip.gain.weight[0]) == pytest.approx(wanted[-1], rel=1e-3)
                    u = block.attention(x, None, None)[0] if unit == "attention" else block.mlp(x)
                    x = F.layer_norm(skip.gain.weight * x + u, (WIDTH,))
                    total += float(u.var())
                    wanted.append(math.sqrt(total))
        assert found == pytest.approx(wanted[:-1], rel=1e-3)
        assert len(found) == 8
        assert sorted(found) == list(found)
        assert torch.allclose(model.model(ids).last_hidden_state, x, atol=1e-4)

    def test_needs_factors(self) -> None:
        with pytest.raises(UsageError, match="without Admin's factors"):
            admin_profile(matrices(placement="post")[0], IDS)

    def test_pairs_have_one_factor_a_sum(self) -> None:
        model = matrices(placement="post", initialisation="admin", parallel_pairs="sublayers")[0]
        assert len(admin_profile(model, IDS)) == 4
