"""Through how many branches the gradient came: networks whose answer is known on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import corpus_of, opened
from families import ids
from torch import Tensor, nn

from depthprobe.depth import jacobians as under_test
from depthprobe.depth.base import DepthSettings, Estimate
from depthprobe.depth.path_elasticity import path_elasticity
from depthprobe.depth.path_elasticity_raw import path_elasticity_raw
from depthprobe.errors import GradientError, UsageError
from depthprobe.lab import LabConfig, LabForCausalLM


class Adds(nn.Module):
    """x + u(x); there is a parameter because a model has some."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.update, self.gain = update, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.update(x)


class Replaces(Adds):
    """f(x), without a skip."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.update(x)


class Post(nn.Module):
    """N(x + F(x))."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.norm = Calls(update), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(x))


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WIDTH = 48
HALF = WIDTH // 2


def states(sequences: int = 4, tokens: int = 8) -> Tensor:
    return torch.randn(sequences, tokens, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def square(seed: int, size: int = WIDTH, gain: float = 1.0) -> Tensor:
    """A random matrix that keeps the norm of a random vector times the gain."""
    made = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return gain * made / size**0.5


def turn(seed: int, size: int = WIDTH) -> Tensor:
    """A rotation by 90° in random planes: x is orthogonal to its image."""
    basis = torch.linalg.qr(square(seed, size))[0]
    quarter = torch.zeros(size, size, dtype=torch.float64)
    quarter[::2, 1::2], quarter[1::2, ::2] = torch.eye(size // 2), -torch.eye(size // 2)
    return basis @ quarter @ basis.T


def apply(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ matrix.T


def bend(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(x @ matrix.T)


def up(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Reads the first half of the stream, writes to the second."""
    return lambda x: torch.cat([0 * x[..., :HALF], x[..., :HALF] @ matrix.T], dim=-1)


def down(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Reads the second half of the stream, writes to the first."""
    return lambda x: torch.cat([x[..., HALF:] @ matrix.T, 0 * x[..., HALF:]], dim=-1)


def both(blocks: list[nn.Module], probes: int = 64, x: Tensor | None = None) -> tuple[Estimate, Estimate]:
    """Raw, and in the gauge."""
    inputs = states() if x is None else x
    anatomy = opened(Net(blocks).double(), inputs)
    settings = DepthSettings(probes=probes)
    corpus = corpus_of(inputs)
    return path_elasticity_raw(anatomy, corpus, "block", settings), path_elasticity(anatomy, corpus, "block", settings)


def values(blocks: list[nn.Module], **options: Any) -> list[float]:
    return [one.rows[0].value for one in both(blocks, **options)]


class TestKnownAnswers:
    def test_every_branch_reads_the_first_state(self) -> None:
        raw, gauge = both([Adds(up(square(seed, HALF))) for seed in range(6)])
        assert raw.rows[0].value == pytest.approx(1 - raw.rows[1].value, rel=1e-9)
        assert gauge.rows[0].value == pytest.approx(raw.rows[0].value, abs=0.03)
        assert gauge.rows[1].value == pytest.approx(raw.rows[1].value, abs=0.03)
        assert 0.1 < raw.rows[0].value < 0.9
        assert [row.variant for row in raw.rows[:2]] == ["random"] * 2

    def test_a_chain_without_skips(self) -> None:
        turns = [Replaces(apply(turn(seed))) for seed in range(5)]
        assert values(turns) == pytest.approx([5, 5], rel=1e-9)
        bent = [Replaces(bend(square(seed, gain=2))) for seed in range(5)]
        assert values(bent) == pytest.approx([5, 5], rel=0.03)

    def test_a_chain_written_with_skips(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """x + (f(x) − x), f' = 0.02 I + r R: taken as it is written, half of the way bypasses the branch."""
        gain, way = 0.02, (0.04 - 0.02**2) ** 0.5
        blocks: list[nn.Module] = [
            Adds(apply((gain - 1) * torch.eye(WIDTH, dtype=torch.float64) + way * turn(seed))) for seed in range(6)
        ]
        monkeypatch.setattr(under_test, "block_skips", lambda *_: (dict.fromkeys(range(6), 1), []))
        raw, gauge = values(blocks)
        assert raw == pytest.approx(3, rel=1e-9)
        assert gauge == pytest.approx(6 * (1 - gain**2 / 0.04), rel=1e-3)

    def test_blocks_that_do_nothing(self) -> None:
        assert values([Adds(torch.zeros_like) for _ in range(5)]) == [0, 0]
        raw, gauge = both([Adds(torch.zeros_like) for _ in range(5)])
        assert [raw.rows[1].value, gauge.rows[1].value] == [1, 1]

    def test_stages_of_parallel_branches(self) -> None:
        three = [[turn(10 * stage + branch) for branch in range(3)] for stage in range(4)]
        assert values([Replaces(apply(sum(stage))) for stage in three]) == pytest.approx([4, 4], rel=1e-9)

    def test_blocks_that_do_nothing_can_be_appended(self) -> None:
        blocks: list[nn.Module] = [Adds(apply(square(seed))) for seed in range(4)]
        assert values([*blocks, *[Adds(torch.zeros_like) for _ in range(3)]]) == pytest.approx(values(blocks), rel=1e-9)

    def test_a_branch_can_be_split(self) -> None:
        """Each reads one half of the stream and writes to the other, so that its own copy sees nothing of it."""
        updates = [(up, down)[seed % 2](square(seed, HALF, 1.5)) for seed in range(4)]
        halves = [Adds(lambda x, u=u: u(x) / 2) for u in updates for _ in range(2)]
        whole, split = (both(blocks) for blocks in ([Adds(u) for u in updates], halves))
        assert split[0].rows[0].value == pytest.approx(whole[0].rows[0].value, rel=1e-9)
        assert split[1].rows[0].value == pytest.approx(whole[1].rows[0].value, rel=0.02)
        assert whole[0].rows[0].value > 1.5

    def test_branches_that_only_rescale(self) -> None:
        """A pre-LN net of 30 blocks whose branches are the norm alone: H_31 − 1 raw.

        Nothing is left in the gauge but what a norm takes away: two of the stream's directions, a share of 2 / width.
        """
        norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        raw, gauge = values([Adds(norm) for _ in range(30)], probes=2)
        harmonic = sum(1 / k for k in range(2, 32))
        assert raw == pytest.approx(harmonic, rel=0.05)
        assert gauge == pytest.approx(2 / WIDTH * harmonic, abs=0.02)

    def test_a_gain_on_the_stream(self) -> None:
        """The stream times 4 behind block 1, and all later branches with it, what they read divided by it."""
        updates = [bend(square(seed)) for seed in range(5)]
        plain: list[nn.Module] = [Adds(u) for u in updates]

        def scaled(x: Tensor) -> Tensor:
            return 4 * (x + updates[1](x)) - x

        moved = [plain[0], Adds(scaled), *(Adds(lambda x, u=u: 4 * u(x / 4)) for u in updates[2:])]
        before, after = values(plain), values(moved)
        assert after[1] == pytest.approx(before[1], rel=1e-9)
        assert abs(after[0] - before[0]) > 0.2

    def test_a_pre_ln_model_in_another_unit(self) -> None:
        """x_0 and all branches times 5: the norms see the same, and so does every Jacobian."""
        norm, reads = (
            nn.LayerNorm(WIDTH, eps=1e-30, elementwise_affine=False),
            [apply(square(seed)) for seed in range(4)],
        )

        def blocks(unit: float) -> list[nn.Module]:
            return [Adds(lambda x, read=read: unit * read(norm(x))) for read in reads]

        assert values(blocks(5.0), probes=2, x=5 * states()) == pytest.approx(values(blocks(1.0), probes=2), rel=1e-9)


class TestInitialisation:
    """What a random network scores, raw: facts about initialisations, not about depth used."""

    def test_linear(self) -> None:
        raw, _ = values([Adds(apply(square(seed, gain=0.7))) for seed in range(8)], probes=1)
        assert raw == pytest.approx(8 * 0.49 / 1.49, rel=0.1)

    def test_pre_ln(self) -> None:
        norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        reads = [apply(square(seed)) for seed in range(12)]
        raw, _ = values([Adds(lambda x, read=read: read(norm(x))) for read in reads], probes=1)
        assert raw == pytest.approx(sum(1 / k for k in range(2, 14)), rel=0.1)

    def test_post_ln(self) -> None:
        raw, gauge = both([Post(apply(square(seed))) for seed in range(12)], probes=1)
        assert raw.rows[0].value == pytest.approx(6, rel=0.1)
        assert gauge.rows[0].value == pytest.approx(6, rel=0.1)


# --- what is refused -------------------------------------------------------------------------------------------------


def lab(**options: Any) -> LabForCausalLM:
    config = LabConfig(
        vocab_size=20, max_position_embeddings=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, **options
    )
    return LabForCausalLM(config).eval()


def test_what_is_refused() -> None:
    words = ids(2, 6, vocab=20)
    with pytest.raises(UsageError, match="hand on more"):
        path_elasticity_raw(opened(lab(residual_attention=True), words), corpus_of(words))
    with pytest.raises(UsageError, match="no position"):
        path_elasticity_raw(opened(lab(), words), corpus_of(words), settings=DepthSettings(skip_first=5))
    net = opened(Net([Adds(torch.tanh), Adds(torch.tanh)]).double(), states())
    with pytest.raises(UsageError, match="not found"):
        path_elasticity(net, corpus_of(states()), "sublayer")


def test_an_output_that_depends_on_nothing() -> None:
    stuck = opened(Net([Adds(torch.tanh), Adds(lambda x: -x)]).double(), states())
    with pytest.raises(GradientError, match="is 0"):
        path_elasticity_raw(stuck, corpus_of(states()))
    cut = opened(Net([Adds(torch.tanh), Replaces(lambda x: x.detach())]).double(), states())
    with pytest.raises(GradientError, match="derivative"):
        path_elasticity_raw(cut, corpus_of(states()))
