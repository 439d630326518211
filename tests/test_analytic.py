"""Networks whose every number is known on paper."""

from __future__ import annotations

import math
from collections.abc import Callable

import families
import numpy as np
import pytest
import torch
from families import FAMILIES, build, ids
from torch import Tensor, nn

from depthprobe import Report

WIDTH = 32


class Block(nn.Module):
    """x + u(x); the parameter is there because a model has some."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.update, self.gain = update, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.update(x)


class Net(nn.Module):
    """Float states through a list of blocks, and nothing else."""

    def __init__(self, updates: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(update) for update in updates])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def states(sequences: int = 12, tokens: int = 20, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(sequences, tokens, width, generator=torch.Generator().manual_seed(seed))


def analyze(updates: list[Callable[[Tensor], Tensor]], x: Tensor | None = None, **options: object) -> Report:
    return families.analyze(Net(updates), states() if x is None else x, **options)


def column(report: Report, metric: str) -> np.ndarray:
    rows = report.layers.query("metric == @metric and unit == 'block'").sort_values("layer")
    assert len(rows), f"no rows of {metric}"
    return rows["value"].to_numpy()


def pair(report: Report, metric: str) -> dict[tuple[int, int], float]:
    rows = report.pairs[report.pairs["metric"] == metric]
    return {(int(i), int(j)): float(v) for i, j, v in zip(rows["i"], rows["j"], rows["value"], strict=True)}


def basis(index: int) -> Tensor:
    return torch.eye(WIDTH)[index]


class TestIdentity:
    def test_every_number(self) -> None:
        report = analyze([torch.zeros_like] * 4)
        norm = float(states()[:, 1:].norm(dim=-1).mean())
        assert column(report, "residual_norm") == pytest.approx([norm] * 5, rel=1e-6)
        assert column(report, "residual_rms") == pytest.approx([norm / math.sqrt(WIDTH)] * 5, rel=1e-6)
        for metric in ("update_norm", "update_ratio", "update_ratio_median", "update_share", "update_energy_share"):
            assert (column(report, metric) == 0).all(), metric
        for metric in ("cosine_adjacent", "cosine_adjacent_centred", "cosine_adjacent_standardised", "cka_adjacent"):
            assert column(report, metric) == pytest.approx([1] * 4, abs=1e-6), metric
        assert column(report, "block_influence") == pytest.approx([0] * 4, abs=1e-12)
        assert list(pair(report, "angular_distance").values()) == pytest.approx([0] * 10, abs=3e-4)
        assert list(pair(report, "cosine").values()) == pytest.approx([1] * 10, abs=1e-6)
        assert column(report, "interaction_error") == pytest.approx([0] * 3)
        assert report.growth["growth_rate"]["value"] == pytest.approx(1)
        assert report.growth["cross_share"] is None
        assert report.growth["update_growth_rate"] is None


class TestGrowth:
    BLOCKS = 24

    def start(self) -> Tensor:
        """A small x_0 along one axis."""
        return 1e-3 * basis(0).expand(6, 10, WIDTH).contiguous()

    def test_a_stream_that_shrinks_has_no_share_of_growth(self) -> None:
        """Its updates point against it, and 2 Σ⟨Δ, x⟩ over a loss of norm would be above 1."""
        report = analyze([lambda x: -0.2 * x + 0.3 * basis(1)] * 4, states() * 10)
        parts = report.growth["decomposition"]
        assert parts[-1]["stream"] < parts[0]["stream"]
        assert report.growth["cross_share"] is None

    def test_nor_has_one_that_may_do_either(self) -> None:
        """Half of the sequences grow, and the others shrink."""
        start = states()
        start[:, 0, 0] = torch.tensor([1.0, -1.0]).repeat(len(start))[: len(start)]
        report = analyze([lambda x: 0.1 * x[:, :1, :1].sign() * x] * 2, start)
        assert report.growth["growth_rate"]["value"] == pytest.approx(1, abs=0.05)
        assert report.growth["cross_share"] is None

    def test_orthogonal_updates_of_equal_size(self) -> None:
        report = analyze([lambda x, l=l: basis(l + 1).expand_as(x) for l in range(self.BLOCKS)], self.start())
        assert column(report, "residual_norm")[1:] == pytest.approx(np.sqrt(np.arange(1, self.BLOCKS + 1)), rel=1e-5)
        assert column(report, "update_norm") == pytest.approx([1] * self.BLOCKS)
        assert column(report, "update_alignment") == pytest.approx([0] * self.BLOCKS, abs=1e-6)
        assert column(report, "update_cosine_next") == pytest.approx([0] * (self.BLOCKS - 1), abs=1e-6)
        assert report.growth["cross_share"]["value"] == pytest.approx(0, abs=1e-6)
        assert report.growth["growth_power"]["value"] == pytest.approx(0.5, abs=1e-4)
        assert report.growth["r2_power"] == pytest.approx(1, abs=1e-6)
        assert report.growth["update_growth_rate"]["value"] == pytest.approx(1, abs=1e-6)
        angles = pair(report, "angular_distance")
        assert angles[4, 16] == pytest.approx(math.acos(math.sqrt(4 / 16)) / math.pi, abs=1e-5)

    def test_aligned_updates(self) -> None:
        report = analyze([lambda x: basis(0).expand_as(x)] * self.BLOCKS, self.start())
        assert column(report, "update_alignment") == pytest.approx([1] * self.BLOCKS, abs=1e-6)
        assert column(report, "update_cosine_next") == pytest.approx([1] * (self.BLOCKS - 1), abs=1e-6)
        assert report.growth["growth_power"]["value"] == pytest.approx(1, abs=2e-3)
        # 2 Σ l / L² = 1 − 1/L with x_0 at 0.
        assert report.growth["cross_share"]["value"] == pytest.approx(1 - 1 / self.BLOCKS, abs=2e-3)

    def test_a_constant_gain(self) -> None:
        report = analyze([lambda x: 0.045 * x] * self.BLOCKS)
        assert report.growth["growth_rate"]["value"] == pytest.approx(1.045, abs=1e-6)
        assert report.growth["growth_rate"]["ci_low"] == pytest.approx(1.045, abs=1e-6)
        assert report.growth["growth_rate"]["ci_high"] == pytest.approx(1.045, abs=1e-6)
        assert report.growth["update_growth_rate"]["value"] == pytest.approx(1.045, abs=1e-6)
        assert report.growth["r2_rate"] == pytest.approx(1, abs=1e-9)
        assert column(report, "update_ratio") == pytest.approx([0.045] * self.BLOCKS, rel=1e-5)
        assert column(report, "update_share") == pytest.approx([0.045 / 1.045] * self.BLOCKS, rel=1e-5)
        assert column(report, "update_energy_share") == pytest.approx([(0.045 / 1.045) ** 2] * self.BLOCKS, rel=1e-5)

    @pytest.mark.parametrize("name", ["llama", "bert", "gemma3", "neox"])
    def test_the_decomposition_adds_up(self, name: str) -> None:
        assert name in FAMILIES
        report = families.analyze(build(name), data=ids(5, 24), device="cpu")
        parts = report.growth["decomposition"]
        assert [part["layer"] for part in parts] == [0, 1, 2, 3]
        for part in parts:
            assert part["start"] + part["updates"] + part["cross"] == pytest.approx(part["stream"], rel=1e-5)
        assert parts[0]["updates"] == parts[0]["cross"] == 0
        gained = parts[-1]["stream"] - parts[0]["stream"]
        share = report.growth["cross_share"]
        assert (share is None) == (gained < 0)
        assert share is None or share["value"] == pytest.approx(parts[-1]["cross"] / gained, rel=1e-6)


class TestDirection:
    def test_erasing(self) -> None:
        report = analyze([lambda x: -0.5 * x] * 3)
        assert column(report, "update_alignment") == pytest.approx([-1] * 3, abs=1e-6)
        assert column(report, "update_share") == pytest.approx([-1] * 3, rel=1e-5)
        assert column(report, "update_energy_share") == pytest.approx([1] * 3, rel=1e-5)
        assert column(report, "cosine_adjacent") == pytest.approx([1] * 3, abs=1e-6)
        assert column(report, "update_cosine_next") == pytest.approx([1] * 2, abs=1e-6)
        # The decomposition of a stream that only shrinks: all of the loss is cross terms beyond the updates' own.
        start, end = (column(report, "residual_norm")[k] for k in (0, -1))
        assert end == pytest.approx(start / 8, rel=1e-5)

    def test_a_taken_back_update(self) -> None:
        report = analyze([lambda x: basis(0).expand_as(x), lambda x: -basis(0).expand_as(x)])
        assert column(report, "update_cosine_next") == pytest.approx([-1], abs=1e-5)
        assert pair(report, "angular_distance")[0, 2] == pytest.approx(0, abs=3e-4)

    def test_rotation_by_a_known_angle(self) -> None:
        theta, blocks = math.pi / 7, 6
        turn = torch.tensor([[math.cos(theta), math.sin(theta)], [-math.sin(theta), math.cos(theta)]])
        rotation = torch.block_diag(*[turn] * (WIDTH // 2))
        report = analyze([lambda x: x @ rotation - x] * blocks)
        for (i, j), angle in pair(report, "angular_distance").items():
            assert angle == pytest.approx((j - i) * theta / math.pi, abs=1e-5), (i, j)
        for (i, j), value in pair(report, "cosine").items():
            assert value == pytest.approx(math.cos((j - i) * theta), abs=1e-5), (i, j)
        assert len(pair(report, "cosine")) == (blocks + 1) * blocks // 2
        assert column(report, "cosine_adjacent") == pytest.approx([math.cos(theta)] * blocks, abs=1e-5)
        assert column(report, "block_influence") == pytest.approx([1 - math.cos(theta)] * blocks, abs=1e-5)
        assert column(report, "update_ratio") == pytest.approx([2 * math.sin(theta / 2)] * blocks, abs=1e-5)
        assert column(report, "cka_adjacent") == pytest.approx([1] * blocks, abs=1e-5)
        assert report.growth["growth_rate"]["value"] == pytest.approx(1, abs=1e-6)

    def test_a_tiny_rotation_is_not_lost_to_rounding(self) -> None:
        theta = 1e-4
        turn = torch.tensor([[0.0, theta], [-theta, 0.0]])
        generator = torch.block_diag(*[turn] * (WIDTH // 2))
        report = analyze([lambda x: x @ generator] * 2)
        assert pair(report, "angular_distance")[0, 1] == pytest.approx(math.atan(theta) / math.pi, rel=2e-3)
        assert column(report, "block_influence") == pytest.approx([1 - math.cos(math.atan(theta))] * 2, rel=2e-2)


class TestInteraction:
    def matrices(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(WIDTH // 2, WIDTH // 2, generator=generator) for _ in range(4)]

    def test_blocks_that_read_what_none_writes_do_not_interact(self) -> None:
        def update(matrix: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda x: nn.functional.pad(torch.tanh(x[..., : WIDTH // 2] @ matrix), (WIDTH // 2, 0))

        report = analyze([update(matrix) for matrix in self.matrices()])
        assert column(report, "interaction_error") == pytest.approx([0] * 3, abs=1e-6)
        assert column(report, "interaction_cosine") == pytest.approx([1] * 3, abs=1e-6)
        assert (column(report, "interaction_error_control") > 0.05).all()

    def test_a_block_that_reads_only_its_predecessor(self) -> None:
        """Block 0 writes where nothing was, block 1 reads just that: without it, it does nothing."""
        half = WIDTH // 2
        x = torch.cat([states(width=half), torch.zeros(12, 20, half)], dim=-1)
        report = analyze(
            [
                lambda x: nn.functional.pad(torch.tanh(x[..., :half]), (half, 0)),
                lambda x: nn.functional.pad(x[..., half:] ** 2, (0, half)),
            ],
            x,
        )
        assert column(report, "interaction_error") == pytest.approx([1], abs=1e-6)
        assert column(report, "interaction_cosine") == pytest.approx([0], abs=1e-6)

    def test_a_linear_reader(self) -> None:
        """F_1 = g x: F_1(x_1) − F_1(x_0) = g Δ_0, so the error is ‖Δ_0‖ / ‖x_1‖, here 0.5 / 1.5 for every token."""
        report = analyze([lambda x: 0.5 * x, lambda x: 0.3 * x])
        assert column(report, "interaction_error") == pytest.approx([1 / 3], rel=1e-5)
        # Its control has the same norm, and for a reader that is a multiple of the identity nothing but it counts.
        assert column(report, "interaction_error_control") == pytest.approx([1 / 3], rel=1e-4)

    def test_can_be_left_out(self) -> None:
        report = analyze([lambda x: 0.5 * x] * 3, interaction=False)
        assert not report.layers["metric"].str.startswith("interaction").any()


class TestLinearity:
    def test_linear_blocks_are_linear(self) -> None:
        matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)) / math.sqrt(WIDTH)
        report = analyze([lambda x: x @ matrix, lambda x: 0.3 - 0.5 * (x @ matrix)], states(20, 30))
        assert column(report, "linearity") == pytest.approx([1, 1], abs=1e-3)
        assert column(report, "linearity_update") == pytest.approx([1, 1], abs=1e-3)

    def test_an_even_function_is_not(self) -> None:
        """For symmetric inputs |x| has no linear part; held out, a map that was fitted to noise is below 0."""
        report = analyze([lambda x: x.abs()], states(20, 60))
        assert -0.2 < column(report, "linearity_update")[0] < 0.01
        # var x = 1, var |x| = 1 − 2/π: the share of x in x + |x|.
        assert column(report, "linearity")[0] == pytest.approx(1 / (2 - 2 / math.pi), abs=0.05)

    def test_is_refused_on_too_few_tokens(self) -> None:
        report = analyze([lambda x: 0.5 * x], states(8, 12))
        assert not report.layers["metric"].str.startswith("linearity").any()
        assert any("linearity was left out" in note for note in report.notes)

    def test_centring_takes_away_what_all_tokens_share(self) -> None:
        """A large common vector makes the plain cosine 1; the centred one sees the sign flip of all the rest."""
        shared = 1000 * basis(3)
        report = analyze([lambda x: 2 * (shared - x)], states(20, 60) + shared)
        assert column(report, "cosine_adjacent")[0] > 0.99
        assert column(report, "cosine_adjacent_centred")[0] == pytest.approx(-1, abs=1e-4)

    def test_standardising_takes_away_what_is_large(self) -> None:
        """One dimension carries the norm and stays; the other 31 are replaced."""
        large = torch.ones(WIDTH)
        large[0] = 1000
        x = states(20, 60) * large
        report = analyze([lambda x: torch.cat([torch.zeros_like(x[..., :1]), -2 * x[..., 1:]], dim=-1)], x)
        assert column(report, "cosine_adjacent_centred")[0] > 0.9
        goal = (x / large)[:, 1:]
        signs = torch.cat([torch.ones(1), -torch.ones(WIDTH - 1)])
        expected = float(nn.functional.cosine_similarity(goal, goal * signs, dim=-1).mean())
        assert column(report, "cosine_adjacent_standardised")[0] == pytest.approx(expected, abs=0.01)
