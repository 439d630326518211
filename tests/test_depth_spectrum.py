"""The gradient split by the number of branches passed: against every path written out, and where it is known."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened
from families import ids
from paths_by_hand import Paths, block_units, gradient, lab_start, lab_sums, lab_tail, matrices, sublayer_units
from torch import Tensor, nn

from depthprobe import Checkpoint
from depthprobe.depth import passages
from depthprobe.depth.path_elasticity_raw import path_elasticity_raw
from depthprobe.depth.path_spectrum import path_spectrum
from depthprobe.lab import LabConfig, LabForCausalLM
from depthprobe.prepare import prepare

IDS = ids(2, 6, vocab=20)
WIDTH = 32


def lab(placement: str, blocks: int) -> LabForCausalLM:
    torch.manual_seed(1)
    config = LabConfig(
        vocab_size=20, max_position_embeddings=8, hidden_size=8, num_hidden_layers=blocks, num_attention_heads=2,
        placement=placement,
    )  # fmt: skip
    return LabForCausalLM(config).eval().double()


def lab_paths(model: LabForCausalLM, unit: str) -> Paths:
    paths, sums = Paths(skip=1), lab_sums(model)
    for row in IDS:
        pairs, last = matrices((sublayer_units if unit == "sublayer" else block_units)(sums), lab_start(model, row))
        paths.add(pairs, gradient(lab_tail(model, row), last))
    return paths


@pytest.mark.parametrize(
    ("placement", "unit", "blocks"),
    [
        ("pre", "block", 4),
        ("pre", "sublayer", 5),
        ("post", "block", 4),
        ("post", "sublayer", 4),
        ("branch", "sublayer", 3),
        ("sandwich", "sublayer", 3),
        ("sandwich", "block", 3),
    ],
)
def test_every_part_is_that_of_all_paths(placement: str, unit: str, blocks: int) -> None:
    """Up to the 2^10 paths of ten sublayers."""
    model = lab(placement, blocks)
    found, paths = path_spectrum(opened(model, IDS), corpus_of(IDS), unit), lab_paths(model, unit)
    k = np.arange(len(paths.energies))
    spectrum = found.curves["spectrum"]
    assert list(spectrum["k"]) == list(k)
    np.testing.assert_allclose(spectrum["energy"], paths.energies, rtol=1e-9)
    mean = (k * paths.energies).sum() / paths.energies[1:].sum()
    assert found.value("path_spectrum").value == pytest.approx(mean, rel=1e-9)
    assert found.value("path_cross").value == pytest.approx(paths.square / paths.energies.sum(), rel=1e-9)
    assert found.value("path_spectrum").of == (blocks if unit == "block" else 2 * blocks)
    assert spectrum["share"].sum() == pytest.approx(1)


def test_a_wrong_identity_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab("post", 3)
    expected = lab_paths(model, "block")
    monkeypatch.setattr(passages.RanUnit, "identity", lambda self, cotangent, gauge=None: cotangent)
    found = path_spectrum(opened(model, IDS), corpus_of(IDS))
    assert abs(found.curves["spectrum"]["energy"][0] / expected.energies[0] - 1) > 0.05


class Scales(nn.Module):
    """x + a x."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * x


class Net(nn.Module):
    def __init__(self, gains: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scales(gain) for gain in gains])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def scaled(gains: list[float]) -> tuple[np.ndarray, dict[str, tuple[float, str]]]:
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = path_spectrum(opened(Net(gains).double(), x), corpus_of(x))
    return found.curves["spectrum"]["share"].to_numpy(), {row.name: (row.value, row.note) for row in found.rows}


def test_parts_that_add_up() -> None:
    """(1 + a)^N: g_k is the binomial coefficient times a^k, and all parts have one direction."""
    share, rows = scaled([0.5] * 6)
    sizes = np.array([comb(6, k) * 0.5**k for k in range(7)])
    assert share == pytest.approx(sizes**2 / (sizes**2).sum(), rel=1e-9)
    assert rows["path_cross"] == (pytest.approx(sizes.sum() ** 2 / (sizes**2).sum(), rel=1e-9), "")


def test_parts_that_cancel_are_said_to() -> None:
    _, rows = scaled([-0.4] * 10)
    assert rows["path_cross"][0] < 1e-2
    assert "means nothing" in rows["path_spectrum"][1]


def test_blocks_that_do_nothing() -> None:
    share, rows = scaled([0.0] * 4)
    assert list(share) == [1, 0, 0, 0, 0]
    assert rows["path_spectrum"][0] == 0
    assert rows["path_cross"][0] == 1


def test_the_elasticity_is_the_mean_of_k_over_products_with_the_whole() -> None:
    """(1 + a)^N again: E = N a / (1 + a), D⁺ is the mean over squares; the two are not the same."""
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    anatomy = opened(Net([0.5] * 6).double(), x)
    raw = path_elasticity_raw(anatomy, corpus_of(x))
    assert raw.rows[0].value == pytest.approx(6 * 0.5 / 1.5, rel=1e-9)
    assert raw.rows[1].value == pytest.approx(1.5**-6, rel=1e-9)
    squares = np.array([comb(6, k) * 0.5**k for k in range(7)]) ** 2
    mean = (np.arange(7) * squares).sum() / squares[1:].sum()
    assert path_spectrum(anatomy, corpus_of(x)).rows[0].value == pytest.approx(mean, rel=1e-9)
    assert abs(mean - 2) > 0.02


@pytest.mark.real
def test_a_real_model(smollm2: Checkpoint) -> None:
    """SmolLM2-135M: the parts cancel, and less of the depth is counted the later one starts."""
    _, corpus, anatomy = prepare(smollm2, tokens=32, seq_len=32)
    rows = {row.name: row for row in path_spectrum(anatomy, corpus).rows}
    assert rows["path_cross"].value < 1e-4
    assert "means nothing" in rows["path_spectrum"].note
    raw = path_elasticity_raw(anatomy, corpus)
    values = [
        raw.value("path_elasticity_raw", v).value for v in ("", "from block 12", "from block 20", "from block 24")
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] > 4 > 2 > values[-1]
